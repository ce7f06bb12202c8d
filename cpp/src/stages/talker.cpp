#include "cpp/src/stages/talker.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <set>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/models/weight_reader.h"
#include "cpp/src/ops/embedding.h"
#include "cpp/src/stages/stage_tensors.h"

namespace deltaic {

namespace {

// Two layers with SiLU between.
struct ResizeMlp {
  StageLinear first, second;
  bool is_set() const { return first.weight.is_set(); }
};

struct Request {
  TalkerRequest given;
  std::uint64_t seed = 0;
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_text_rows = 0;
  std::vector<float> frames;        // [num_frames, hidden_size]: embeddings of the codes, without the text
  std::vector<std::int32_t> codes;  // [num_frames, num_codebooks], and a row of the end of speech
};

TensorView view_of(std::span<const std::int32_t> ids) {
  return make_view(const_cast<std::int32_t*>(ids.data()), DType::i32, {static_cast<std::int64_t>(ids.size())});
}

std::uint64_t fresh_seed() {
  std::random_device entropy;
  return (std::uint64_t{entropy()} << 32) | entropy();
}

}  // namespace

struct Talker::Impl {
  Impl(const TalkerConfig& talker_config, const StoredTensors& tensors, int max_num_reqs, int num_threads,
       std::shared_ptr<StageEdge> codes)
      : config(talker_config),
        codes_edge(std::move(codes)),
        threads(num_threads),
        ctx{.device = {}, .stream = {}, .threads = &threads},
        checkpoint(Checkpoint::from_stored(tensors, "the talker")),
        predictor(config.predictor, part_of(tensors, "code_predictor."), ctx, max_num_reqs),
        hidden(DType::f32, {max_num_reqs, config.hidden_size}),
        first_code(DType::f32, {max_num_reqs, config.hidden_size}),
        sum(DType::f32, {max_num_reqs, config.hidden_size}),
        residual_codes(DType::i32, {max_num_reqs, config.predictor.num_codebooks - 1}) {
    ViewReader reader(checkpoint);
    codec_embedding = reader.matrix("codec_embedding.weight", config.vocab_size, config.hidden_size);
    if (config.text_vocab_size > 0)
      text_embedding = reader.matrix("text_embedding.weight", config.text_vocab_size, config.text_hidden_size);
    text_projection = read_mlp(reader, "text_projection");
    hidden_projection = read_mlp(reader, "hidden_projection");
  }

  ResizeMlp read_mlp(WeightReader& reader, const std::string& name) const {
    if (!reader.has(name + ".linear_fc1.weight")) return {};
    const auto layer = [&](const std::string& part, std::int64_t out, std::int64_t in) {
      return StageLinear{.weight = reader.matrix(name + part + ".weight", out, in),
                         .bias = reader.values(name + part + ".bias", {out})};
    };
    return {.first = layer(".linear_fc1", config.projection_size, config.text_hidden_size),
            .second = layer(".linear_fc2", config.hidden_size, config.projection_size)};
  }

  std::vector<float> project(const ResizeMlp& mlp, const char* name, std::span<const float> rows) const {
    DELTAIC_CHECK(mlp.is_set(), "the checkpoint has no ", name);
    const auto width = static_cast<std::size_t>(config.text_hidden_size);
    DELTAIC_CHECK(rows.size() % width == 0, rows.size(), " values are no rows of ", width);
    const auto count = static_cast<std::int64_t>(rows.size() / width);
    std::vector<float> inner(static_cast<std::size_t>(count * config.projection_size));
    std::vector<float> out(static_cast<std::size_t>(count * config.hidden_size));
    const TensorView x = make_view(const_cast<float*>(rows.data()), DType::f32, {count, config.text_hidden_size});
    const TensorView h = make_view(inner.data(), DType::f32, {count, config.projection_size});
    mlp.first.forward(ctx, x, h);
    for (float& value : inner) value = value / (1.0F + std::exp(-value));
    mlp.second.forward(ctx, h, make_view(out.data(), DType::f32, {count, config.hidden_size}));
    return out;
  }

  std::vector<float> embed(const ops::Weight& table, const char* name, std::span<const std::int32_t> ids) const {
    DELTAIC_CHECK(table.is_set(), "the checkpoint has no ", name);
    for (const std::int32_t id : ids)
      DELTAIC_CHECK(0 <= id && id < table.out_features(), "id ", id, " is outside the ", table.out_features(),
                    " rows of ", name);
    const auto count = static_cast<std::int64_t>(ids.size());
    std::vector<float> rows(static_cast<std::size_t>(count * table.in_features()));
    ops::embedding(ctx, view_of(ids), table, make_view(rows.data(), DType::f32, {count, table.in_features()}));
    return rows;
  }

  Request& find(const std::string& req_id) {
    const auto found = requests.find(req_id);
    DELTAIC_CHECK(found != requests.end(), "the talker has no request ", req_id);
    return found->second;
  }

  std::int64_t num_frames(const Request& request) const {
    return static_cast<std::int64_t>(request.frames.size()) / config.hidden_size;
  }

  // Writes the input at `position`, or returns why there is none.
  std::optional<std::string> write_input(const Request& request, const std::string& req_id, std::int64_t position,
                                         float* out) const {
    const std::int64_t width = config.hidden_size;
    if (position < request.num_prompt_tokens) {
      std::copy_n(request.given.prompt.data() + position * width, width, out);
      return {};
    }
    const std::int64_t frame = position - request.num_prompt_tokens;
    if (frame >= num_frames(request))
      return detail::concat("request ", req_id, " has no input for position ", position, ": ",
                            request.num_prompt_tokens, " prompt rows and ", num_frames(request), " frames");
    const bool has_text = frame < request.num_text_rows;
    if (!has_text && !request.given.is_text_complete)
      return detail::concat("request ", req_id, " has ", request.num_text_rows, " rows of text so far, frame ", frame,
                            " needs one");
    const float* codes = request.frames.data() + frame * width;
    const float* text = has_text ? request.given.text.data() + frame * width : request.given.pad.data();
    for (std::int64_t i = 0; i < width; ++i) out[i] = codes[i] + text[i];
    return {};
  }

  void append_text(Request& request, std::span<const float> rows, bool is_last) const {
    request.given.text.insert(request.given.text.end(), rows.begin(), rows.end());
    request.num_text_rows += static_cast<std::int64_t>(rows.size()) / config.hidden_size;
    request.given.is_text_complete = is_last;
  }

  // Hands over the rows of codes from `begin` on.
  void hand_over(const std::string& req_id, Request& request, std::int64_t begin) const {
    const std::int64_t width = config.predictor.num_codebooks;
    const std::int64_t count = static_cast<std::int64_t>(request.codes.size()) / width - begin;
    if (codes_edge == nullptr || !codes_edge->is_open(req_id) || count <= 0) return;
    const TensorView rows = make_view(request.codes.data() + begin * width, DType::i32, {count, width});
    codes_edge->put_or_fail(req_id, kCodesKey, rows, begin);
  }

  TalkerConfig config;
  std::shared_ptr<StageEdge> codes_edge;
  ThreadPool threads;
  ops::Context ctx;
  Checkpoint checkpoint;
  ops::Weight codec_embedding, text_embedding;
  ResizeMlp text_projection, hidden_projection;
  CodePredictor predictor;
  std::map<std::string, Request> requests;
  std::set<std::string> changed;  // requests whose number of ready tokens is news
  std::int64_t num_predictor_calls = 0;

  Tensor hidden, first_code, sum, residual_codes;  // of the rows that make a frame
  std::vector<CodeRow> code_rows;
  struct Maker {  // of a row of codes
    const StepRow* row;
    Request* request;
    std::int64_t frame;
  };
  std::vector<Maker> makers, ends;  // of frames, and of the end of speech
};

Talker::Talker(const TalkerConfig& config, const StoredTensors& tensors, int max_num_reqs, int max_num_tokens,
               int num_threads, std::shared_ptr<StageEdge> codes)
    : StageRunner(config.hidden_size, max_num_tokens),
      impl_(std::make_unique<Impl>(config, tensors, max_num_reqs, num_threads, std::move(codes))) {}
Talker::~Talker() = default;

void Talker::add_request(const std::string& req_id, TalkerRequest request) {
  Impl& self = *impl_;
  const auto width = static_cast<std::size_t>(self.config.hidden_size);
  DELTAIC_CHECK(!self.requests.contains(req_id), "request id ", req_id, " is in use");
  DELTAIC_CHECK(!request.prompt.empty(), "request ", req_id, " has no prompt");
  DELTAIC_CHECK(request.prompt.size() % width == 0, "the prompt has ", request.prompt.size(), " values, no rows of ",
                width);
  DELTAIC_CHECK(request.text.size() % width == 0, "the text has ", request.text.size(), " values, no rows of ", width);
  DELTAIC_CHECK(request.pad.size() == width, "pad has ", request.pad.size(), " values, wanted ", width);
  DELTAIC_CHECK(request.end.empty() || request.end.size() == width, "end has ", request.end.size(), " values, wanted ",
                width);
  for (const auto& [name, values] :
       {std::pair{"prompt", &request.prompt}, {"text", &request.text}, {"pad", &request.pad}, {"end", &request.end}})
    DELTAIC_CHECK(std::all_of(values->begin(), values->end(), [](float x) { return std::isfinite(x); }), "the ", name,
                  " of request ", req_id, " is not finite");
  validate(request.sampling);
  Request entry;
  entry.seed = request.seed ? *request.seed : fresh_seed();
  entry.num_prompt_tokens = static_cast<std::int64_t>(request.prompt.size() / width);
  entry.num_text_rows = static_cast<std::int64_t>(request.text.size() / width);
  entry.given = std::move(request);
  if (!entry.given.is_text_complete) self.changed.insert(req_id);
  self.requests.emplace(req_id, std::move(entry));
}

void Talker::append_text(const std::string& req_id, std::span<const float> rows, bool is_last) {
  const auto width = static_cast<std::size_t>(impl_->config.hidden_size);
  Request& request = impl_->find(req_id);
  DELTAIC_CHECK(!request.given.is_text_complete, "the text of request ", req_id, " is complete");
  DELTAIC_CHECK(rows.size() % width == 0, "the text has ", rows.size(), " values, no rows of ", width);
  impl_->append_text(request, rows, is_last);
  impl_->changed.insert(req_id);
}

std::vector<Delivery> Talker::take_text(StageEdge& text) {
  Impl& self = *impl_;
  std::vector<Delivery> rest;
  std::vector<std::pair<Request*, std::size_t>> takers;  // and how many values each takes
  std::vector<Request*> ended;
  std::vector<float> hidden;
  for (Delivery& delivery : text.take()) {
    const auto found = self.requests.find(delivery.id);
    const bool waits = found != self.requests.end() && !found->second.given.is_text_complete;
    if (!waits || (delivery.end && delivery.end->status != EndStatus::ok)) {
      rest.push_back(std::move(delivery));
      continue;
    }
    self.changed.insert(delivery.id);
    if (delivery.end) {
      ended.push_back(&found->second);
      continue;
    }
    const EdgeRows& rows = delivery.rows.at(kTextKey);
    const std::vector<std::int64_t> wanted{self.config.text_hidden_size};
    DELTAIC_CHECK(rows.dtype == DType::f32 && rows.row_shape == wanted, "rows of the thinker's hidden states are ",
                  rows.row_shape.at(0), " wide, wanted ", self.config.text_hidden_size);
    const std::int64_t begin = delivery.num_left * self.config.text_hidden_size;
    const std::int64_t end = rows.count * self.config.text_hidden_size;
    hidden.insert(hidden.end(), rows.as<float>() + begin, rows.as<float>() + end);
    takers.emplace_back(&found->second,
                        static_cast<std::size_t>((rows.count - delivery.num_left) * self.config.hidden_size));
  }
  const std::vector<float> projected = hidden.empty() ? hidden : project_hidden(hidden);
  std::size_t begin = 0;
  for (auto& [request, count] : takers) {
    self.append_text(*request, std::span(projected).subspan(begin, count), false);
    begin += count;
  }
  for (Request* request : ended) self.append_text(*request, request->given.end, true);
  return rest;
}

void Talker::hand_over(const std::string& req_id) {
  const auto found = impl_->requests.find(req_id);
  if (found != impl_->requests.end()) impl_->hand_over(req_id, found->second, 0);
}

void Talker::remove_request(const std::string& req_id) {
  impl_->requests.erase(req_id);
  impl_->changed.erase(req_id);
}

std::size_t Talker::num_requests() const { return impl_->requests.size(); }

std::map<std::string, int> Talker::take_ready_tokens() {
  std::map<std::string, int> ready;
  for (const std::string& req_id : impl_->changed) {
    const Request& request = impl_->find(req_id);
    const std::int64_t count = request.num_prompt_tokens + request.num_text_rows;
    ready[req_id] = request.given.is_text_complete ? -1 : static_cast<int>(count);
  }
  impl_->changed.clear();
  return ready;
}

std::vector<float> Talker::text_rows(std::span<const std::int32_t> text_ids) const {
  return project_text(impl_->embed(impl_->text_embedding, "text_embedding", text_ids));
}
std::vector<float> Talker::project_text(std::span<const float> embeddings) const {
  return impl_->project(impl_->text_projection, "text_projection", embeddings);
}
std::vector<float> Talker::project_hidden(std::span<const float> hidden) const {
  return impl_->project(impl_->hidden_projection, "hidden_projection", hidden);
}
std::vector<float> Talker::codec_rows(std::span<const std::int32_t> codec_ids) const {
  return impl_->embed(impl_->codec_embedding, "codec_embedding", codec_ids);
}

std::vector<float> Talker::frame_rows(std::span<const std::int32_t> codes) const {
  const auto num_codebooks = static_cast<std::size_t>(impl_->config.predictor.num_codebooks);
  DELTAIC_CHECK(codes.size() % num_codebooks == 0, codes.size(), " codes are no frames of ", num_codebooks);
  std::vector<float> rows;
  for (std::size_t book = 0; book < num_codebooks; ++book) {
    std::vector<std::int32_t> ids;
    for (std::size_t i = book; i < codes.size(); i += num_codebooks) {
      DELTAIC_CHECK(0 <= codes[i] && codes[i] < impl_->config.predictor.decoder.vocab_size, "code ", codes[i],
                    " is outside a codebook of ", impl_->config.predictor.decoder.vocab_size);
      ids.push_back(codes[i]);
    }
    const std::vector<float> part =
        book == 0 ? codec_rows(ids)
                  : impl_->embed(impl_->predictor.embedding(static_cast<int>(book) - 1), "codec_embedding", ids);
    if (book == 0)
      rows = part;
    else
      for (std::size_t i = 0; i < rows.size(); ++i) rows[i] += part[i];
  }
  return rows;
}

const TalkerConfig& Talker::config() const { return impl_->config; }
std::int64_t Talker::num_predictor_calls() const { return impl_->num_predictor_calls; }

std::optional<std::string> Talker::preprocess(std::span<const StepRow> rows, bool /*is_batched*/, TensorView /*ids*/,
                                              TensorView embeds) {
  float* out = embeds.as<float>();
  for (const StepRow& row : rows) {
    const auto found = impl_->requests.find(row.req_id);
    if (found == impl_->requests.end()) return detail::concat("the talker has no request ", row.req_id);
    for (int i = 0; i < row.num_tokens; ++i, out += impl_->config.hidden_size)
      if (auto why = impl_->write_input(found->second, row.req_id, row.num_computed_tokens + i, out)) return why;
  }
  return {};
}

void Talker::after_sample(const StepView& step, std::span<const std::int32_t> token_ids) {
  Impl& self = *impl_;
  const std::int64_t width = self.config.hidden_size;
  const int num_codebooks = self.config.predictor.num_codebooks;
  self.code_rows.clear(), self.makers.clear(), self.ends.clear();
  std::vector<std::int32_t> first_codes;
  for (std::size_t i = 0; i < step.rows.size(); ++i) {
    const StepRow& row = step.rows[i];
    if (token_ids[i] < 0 || has_failed(row.req_id)) continue;
    Request& request = self.find(row.req_id);
    // A token that was sampled and thrown away by a preemption is sampled again.
    const std::int64_t frame = row.seq_len() - request.num_prompt_tokens;
    DELTAIC_CHECK(0 <= frame && frame <= self.num_frames(request), "request ", row.req_id, " sampled frame ", frame,
                  ", it has ", self.num_frames(request));
    request.frames.resize(static_cast<std::size_t>(frame * width));
    request.codes.resize(static_cast<std::size_t>(frame * num_codebooks));
    if (token_ids[i] >= self.config.predictor.decoder.vocab_size) {  // a control token: codes of nothing behind it
      request.codes.push_back(token_ids[i]);
      request.codes.resize(static_cast<std::size_t>((frame + 1) * num_codebooks));
      self.ends.emplace_back(&row, &request, frame);
      continue;
    }
    const auto index = static_cast<std::int64_t>(self.makers.size());
    const float* last = step.hidden.as<float>() + (row.first_token + row.num_tokens - 1) * width;
    std::copy_n(last, width, self.hidden.as<float>() + index * width);
    self.code_rows.push_back(
        {.sampling = request.given.sampling, .seed = request.seed, .frame = static_cast<std::uint64_t>(frame)});
    self.makers.emplace_back(&row, &request, frame);
    first_codes.push_back(token_ids[i]);
  }
  if (!self.makers.empty()) make_frames(first_codes);
  // A full edge is given all rows when the request ends.
  if (self.codes_edge == nullptr || self.codes_edge->mode().is_full) return;
  for (const auto* group : {&self.makers, &self.ends})
    for (const auto& [row, request, frame] : *group) self.hand_over(row->req_id, *request, frame);
}

void Talker::make_frames(std::span<const std::int32_t> first_codes) {
  Impl& self = *impl_;
  const std::int64_t width = self.config.hidden_size;
  const int num_codebooks = self.config.predictor.num_codebooks;
  const auto count = static_cast<std::int64_t>(self.makers.size());
  const TensorView first = self.first_code.view().slice(0, count), sum = self.sum.view().slice(0, count),
                   residual = self.residual_codes.view().slice(0, count);
  ops::embedding(self.ctx, view_of(first_codes), self.codec_embedding, first);
  ++self.num_predictor_calls;
  const std::vector<bool> is_finite =
      self.predictor.predict(self.hidden.view().slice(0, count), first, self.code_rows, residual, sum);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto& [row, request, frame] = self.makers[static_cast<std::size_t>(i)];
    if (!is_finite[static_cast<std::size_t>(i)]) {  // its codes are no sound
      fail(row->req_id, "the residual codes' logits are not finite");
      continue;
    }
    request->frames.insert(request->frames.end(), sum.as<float>() + i * width, sum.as<float>() + (i + 1) * width);
    request->codes.push_back(first_codes[static_cast<std::size_t>(i)]);
    const std::int32_t* others = residual.as<std::int32_t>() + i * (num_codebooks - 1);
    request->codes.insert(request->codes.end(), others, others + num_codebooks - 1);
  }
}

}  // namespace deltaic
