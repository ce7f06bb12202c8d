#include "cpp/src/stages/talker.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

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
  std::vector<std::int32_t> codes;  // [num_frames, num_codebooks]
  bool has_failed = false;
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
  Impl(const TalkerConfig& talker_config, const StoredTensors& tensors, int max_num_reqs, int num_threads)
      : config(talker_config),
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

  // The input at `position`, which must exist.
  void write_input(const Request& request, const std::string& req_id, std::int64_t position, float* out) const {
    const std::int64_t width = config.hidden_size;
    if (position < request.num_prompt_tokens) {
      std::copy_n(request.given.prompt.data() + position * width, width, out);
      return;
    }
    const std::int64_t frame = position - request.num_prompt_tokens;
    DELTAIC_CHECK(frame < num_frames(request), "request ", req_id, " has no input for position ", position, ": ",
                  request.num_prompt_tokens, " prompt rows and ", num_frames(request), " frames");
    const bool has_text = frame < request.num_text_rows;
    DELTAIC_CHECK(has_text || request.given.is_text_complete, "request ", req_id, " has ", request.num_text_rows,
                  " rows of text so far, frame ", frame, " needs one");
    const float* codes = request.frames.data() + frame * width;
    const float* text = has_text ? request.given.text.data() + frame * width : request.given.pad.data();
    for (std::int64_t i = 0; i < width; ++i) out[i] = codes[i] + text[i];
  }

  TalkerConfig config;
  ThreadPool threads;
  ops::Context ctx;
  Checkpoint checkpoint;
  ops::Weight codec_embedding, text_embedding;
  ResizeMlp text_projection, hidden_projection;
  CodePredictor predictor;
  std::map<std::string, Request> requests;
  std::int64_t num_predictor_calls = 0;

  Tensor hidden, first_code, sum, residual_codes;  // of the rows that make a frame
  std::vector<CodeRow> code_rows;
  std::vector<std::pair<Request*, std::int32_t>> makers;  // request and its first code
};

Talker::Talker(const TalkerConfig& config, const StoredTensors& tensors, int max_num_reqs, int num_threads)
    : impl_(std::make_unique<Impl>(config, tensors, max_num_reqs, num_threads)) {}
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
  for (const auto& [name, values] :
       {std::pair{"prompt", &request.prompt}, {"text", &request.text}, {"pad", &request.pad}})
    DELTAIC_CHECK(std::all_of(values->begin(), values->end(), [](float x) { return std::isfinite(x); }), "the ", name,
                  " of request ", req_id, " is not finite");
  validate(request.sampling);
  Request entry;
  entry.seed = request.seed ? *request.seed : fresh_seed();
  entry.num_prompt_tokens = static_cast<std::int64_t>(request.prompt.size() / width);
  entry.num_text_rows = static_cast<std::int64_t>(request.text.size() / width);
  entry.given = std::move(request);
  self.requests.emplace(req_id, std::move(entry));
}

void Talker::append_text(const std::string& req_id, std::span<const float> rows, bool is_last) {
  const auto width = static_cast<std::size_t>(impl_->config.hidden_size);
  Request& request = impl_->find(req_id);
  DELTAIC_CHECK(!request.given.is_text_complete, "the text of request ", req_id, " is complete");
  DELTAIC_CHECK(rows.size() % width == 0, "the text has ", rows.size(), " values, no rows of ", width);
  request.given.text.insert(request.given.text.end(), rows.begin(), rows.end());
  request.num_text_rows += static_cast<std::int64_t>(rows.size() / width);
  request.given.is_text_complete = is_last;
}

void Talker::remove_request(const std::string& req_id) { impl_->requests.erase(req_id); }

int Talker::num_ready_tokens(const std::string& req_id) const {
  const Request& request = impl_->find(req_id);
  if (request.given.is_text_complete) return -1;
  return static_cast<int>(request.num_prompt_tokens + request.num_text_rows);
}

int Talker::num_frames(const std::string& req_id) const {
  return static_cast<int>(impl_->num_frames(impl_->find(req_id)));
}

std::vector<std::int32_t> Talker::codes(const std::string& req_id, int begin) const {
  const Request& request = impl_->find(req_id);
  const std::int64_t first = std::int64_t{begin} * impl_->config.predictor.num_codebooks;
  DELTAIC_CHECK(begin >= 0 && first <= static_cast<std::int64_t>(request.codes.size()), "frame ", begin, " of request ",
                req_id, ", which has ", impl_->num_frames(request));
  return {request.codes.begin() + first, request.codes.end()};
}

bool Talker::has_failed(const std::string& req_id) const { return impl_->find(req_id).has_failed; }

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

void Talker::before_forward(const StepView& step) {
  const std::int64_t width = impl_->config.hidden_size;
  for (const StepRow& row : step.rows) {
    const Request& request = impl_->find(row.req_id);
    for (int i = 0; i < row.num_tokens; ++i)
      impl_->write_input(request, row.req_id, row.num_computed_tokens + i,
                         step.inputs_embeds.as<float>() + (row.first_token + i) * width);
  }
}

void Talker::after_sample(const StepView& step, std::span<const std::int32_t> token_ids) {
  Impl& self = *impl_;
  const std::int64_t width = self.config.hidden_size;
  const int num_codebooks = self.config.predictor.num_codebooks;
  self.code_rows.clear(), self.makers.clear();
  std::vector<std::int32_t> first_codes;
  for (std::size_t i = 0; i < step.rows.size(); ++i) {
    const StepRow& row = step.rows[i];
    if (token_ids[i] < 0) continue;
    Request& request = self.find(row.req_id);
    // A token that was sampled and thrown away by a preemption is sampled again.
    const std::int64_t frame = row.seq_len() - request.num_prompt_tokens;
    DELTAIC_CHECK(0 <= frame && frame <= self.num_frames(request), "request ", row.req_id, " sampled frame ", frame,
                  ", it has ", self.num_frames(request));
    request.frames.resize(static_cast<std::size_t>(frame * width));
    request.codes.resize(static_cast<std::size_t>(frame * num_codebooks));
    if (token_ids[i] >= self.config.predictor.decoder.vocab_size) continue;  // a control token makes no frame
    const auto index = static_cast<std::int64_t>(self.makers.size());
    const float* last = step.hidden.as<float>() + (row.first_token + row.num_tokens - 1) * width;
    std::copy_n(last, width, self.hidden.as<float>() + index * width);
    self.code_rows.push_back(
        {.sampling = request.given.sampling, .seed = request.seed, .frame = static_cast<std::uint64_t>(frame)});
    self.makers.emplace_back(&request, token_ids[i]);
    first_codes.push_back(token_ids[i]);
  }
  const auto count = static_cast<std::int64_t>(self.makers.size());
  if (count == 0) return;
  const TensorView first = self.first_code.view().slice(0, count), sum = self.sum.view().slice(0, count),
                   residual = self.residual_codes.view().slice(0, count);
  ops::embedding(self.ctx, view_of(first_codes), self.codec_embedding, first);
  ++self.num_predictor_calls;
  const std::vector<bool> is_finite =
      self.predictor.predict(self.hidden.view().slice(0, count), first, self.code_rows, residual, sum);
  for (std::int64_t i = 0; i < count; ++i) {
    auto& [request, code] = self.makers[static_cast<std::size_t>(i)];
    request->has_failed |= !is_finite[static_cast<std::size_t>(i)];
    request->frames.insert(request->frames.end(), sum.as<float>() + i * width, sum.as<float>() + (i + 1) * width);
    request->codes.push_back(code);
    const std::int32_t* others = residual.as<std::int32_t>() + i * (num_codebooks - 1);
    request->codes.insert(request->codes.end(), others, others + num_codebooks - 1);
  }
}

}  // namespace deltaic
