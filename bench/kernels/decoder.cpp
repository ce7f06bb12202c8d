// Times the forward and the logits of whole models with dummy weights.
//   bench_decoder [MODEL [STEP [SIZE]]]: MODEL 0.8B, 4B or 35B-A3B, STEP decode or prefill, SIZE the batch, or tokens
//   of the prompt; what is left out: all
// decode: one token a sequence behind 1,024 others, device time of a graph; the bound is what must move (weights that a
// token uses, states read and written, keys and values) at 4.3 TB/s. prefill: one prompt, enqueued from the host.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <list>
#include <numeric>
#include <string>
#include <vector>

#include <deltaic/config.h>

#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/core/half.h"
#include "cpp/src/core/matmul.h"
#include "cpp/src/core/transfer.h"
#include "cpp/src/core/upload.h"
#include "cpp/src/models/decoder_weights.h"
#include "cpp/src/models/hybrid_decoder.h"
#include "cuda/check.h"

using namespace deltaic;

namespace {

constexpr Device kGpu{DeviceType::cuda, 0};
constexpr DType kDType = DType::bf16;
constexpr int kBlockSize = 16, kContext = 1024, kMaxBatch = 128, kMaxPrompt = 8192;
constexpr double kBytesPerSecond = 4.3e12;

struct Size {
  const char* name;
  int hidden, intermediate, layers, heads, kv_heads, value_heads, experts;
  bool tied;
};
constexpr Size kSizes[] = {{"0.8B", 1024, 3584, 24, 8, 2, 16, 0, true},
                           {"4B", 2560, 9216, 32, 16, 4, 32, 0, true},
                           {"35B-A3B", 2048, 512, 40, 16, 2, 32, 256, false}};

ModelConfig config_of(const Size& size) {
  const auto field = [](const char* name, int value) {
    return std::string("\"") + name + "\": " + std::to_string(value) + ", ";
  };
  std::string json = "{" + field("hidden_size", size.hidden) + field("intermediate_size", size.intermediate) +
                     field("num_hidden_layers", size.layers) + field("num_attention_heads", size.heads) +
                     field("num_key_value_heads", size.kv_heads) + field("linear_num_value_heads", size.value_heads) +
                     field("linear_num_key_heads", 16) + field("vocab_size", 248320) + field("head_dim", 256) +
                     field("linear_key_head_dim", 128) + field("linear_value_head_dim", 128) +
                     field("max_position_embeddings", 262144) + field("full_attention_interval", 4);
  if (size.experts > 0)
    json += field("num_experts", size.experts) + field("num_experts_per_tok", 8) +
            field("moe_intermediate_size", size.intermediate) +
            field("shared_expert_intermediate_size", size.intermediate);
  json += std::string("\"model_type\": \"") + (size.experts > 0 ? "qwen3_5_moe_text" : "qwen3_5_text") + "\", ";
  return parse_model_config(json + "\"partial_rotary_factor\": 0.25, \"rope_theta\": 10000000.0, " +
                            "\"tie_word_embeddings\": " + (size.tied ? "true}" : "false}"));
}

// One model with room for the largest batch and the longest prompt.
class Model {
 public:
  explicit Model(const Size& size) : config_(config_of(size)), matmul_(cuda::make_matmul(kGpu.index)) {
    const auto begin = std::chrono::steady_clock::now();
    weights_ = make_dummy_weights(config_, {.device = kGpu, .dtype = kDType}, 1);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    std::printf("%s: %.2f GB of weights, made in %.2f s\n", size.name, static_cast<double>(weights_->num_bytes) * 1e-9,
                seconds.count());
    decoder_ = std::make_unique<HybridDecoder>(config_, weights_, context(),
                                               DecoderLimits{.max_num_tokens = kMaxPrompt,
                                                             .max_num_seqs = kMaxBatch,
                                                             .max_model_len = kMaxPrompt,
                                                             .max_num_decodes = kMaxBatch});
    const std::int64_t num_blocks = std::int64_t{kMaxBatch} * (kContext / kBlockSize + 1);
    for (const LayerKind kind : config_.layer_kinds)
      if (kind == LayerKind::full_attention) {
        const TensorView k = random(kDType, {num_blocks, kBlockSize, config_.num_kv_heads, config_.head_dim});
        attention_.push_back({k, random(kDType, {num_blocks, kBlockSize, config_.num_kv_heads, config_.head_dim})});
      } else {
        const TensorView conv = random(kDType, {kMaxBatch, config_.conv_dim(), config_.linear_conv_kernel_dim - 1});
        state_.push_back({conv, random(DType::f32, {kMaxBatch, config_.linear_num_value_heads,
                                                    config_.linear_value_head_dim, config_.linear_key_head_dim})});
      }
    logits_ = random(DType::f32, {kMaxBatch, config_.vocab_size});
  }

  // Milliseconds of a step of `batch` decodes.
  double decode_ms(int batch) {
    prepare(batch, 1, kContext);
    enqueue(batch);
    stream_.wait();
    check_logits(batch);
    const cuda::Graph graph(stream_, [&] { enqueue(batch); });
    return median_ms(20, [&] { graph.launch(stream_); });
  }
  double prefill_ms(int num_tokens) {
    prepare(1, num_tokens, 0);
    enqueue(1);
    stream_.wait();
    check_logits(1);
    return median_ms(7, [&] { enqueue(1); });
  }

  // Of decode_ms, with experts chosen evenly.
  double bound_ms(int batch) const {
    double bytes = static_cast<double>(weights_->num_bytes);
    if (!config_.tie_word_embeddings) bytes -= static_cast<double>(weights_->embedding.view.num_bytes());
    if (config_.num_experts > 0) {
      const double expert = 3.0 * 2.0 * config_.hidden_size * config_.moe_intermediate_size;
      const double unused =
          config_.num_experts *
          std::pow(1.0 - static_cast<double>(config_.num_experts_per_token) / config_.num_experts, batch);
      bytes -= config_.num_layers * unused * expert;
    }
    const double kv = 2.0 * 2.0 * kContext * config_.num_kv_heads * config_.head_dim;
    const double state =
        2.0 * 4.0 * config_.linear_num_value_heads * config_.linear_value_head_dim * config_.linear_key_head_dim;
    bytes += batch * (kv * static_cast<double>(attention_.size()) + state * static_cast<double>(state_.size()));
    return bytes / kBytesPerSecond * 1e3;
  }

 private:
  ops::Context context() const {
    return {.device = kGpu, .stream = {stream_.handle()}, .threads = nullptr, .matmul = matmul_.get()};
  }

  TensorView random(DType dtype, std::initializer_list<std::int64_t> shape) {
    const TensorView& view = memory_.emplace_back(dtype, shape, kGpu).view();
    cuda::fill_uniform(view, memory_.size(), 0.0F, 0.5F);
    return view;
  }
  template <class T>
  TensorView placed(const std::vector<T>& values, DType dtype) {
    const TensorView& view = step_.emplace_back(dtype, std::array{std::int64_t(values.size())}, kGpu).view();
    cuda::copy_and_wait(view.data, values.data(), view.num_bytes());
    return view;
  }

  // `batch` sequences with query_len tokens each behind num_computed others.
  void prepare(int batch, int query_len, int num_computed) {
    step_.clear();
    const int num_tokens = batch * query_len, row = (num_computed + query_len + kBlockSize - 1) / kBlockSize;
    std::vector<std::int32_t> ids, starts{0}, seq_lens(batch, num_computed + query_len), table(batch * row),
        slots(batch), rows;
    std::vector<std::int64_t> positions, slot_mapping;
    std::iota(table.begin(), table.end(), 0);
    std::iota(slots.begin(), slots.end(), 0);
    for (int i = 0; i < batch; ++i) {
      for (int j = 0; j < query_len; ++j) {
        ids.push_back(static_cast<std::int32_t>((i * 7919 + j * 104729 + 11) % config_.vocab_size));
        positions.push_back(num_computed + j);
        slot_mapping.push_back(std::int64_t{i} * row * kBlockSize + num_computed + j);
      }
      starts.push_back((i + 1) * query_len);
      rows.push_back((i + 1) * query_len - 1);
    }
    const bool is_decode = query_len == 1;
    const TensorView query_start_loc = placed(starts, DType::i32);
    rows_ = placed(rows, DType::i32);
    inputs_ = {.input_ids = placed(ids, DType::i32),
               .positions = placed(positions, DType::i64).reshape({1, num_tokens}),
               .query_start_loc = query_start_loc,
               .seq_lens = placed(seq_lens, DType::i32),
               .block_table = placed(table, DType::i32).reshape({batch, row}),
               .slot_mapping = placed(slot_mapping, DType::i64),
               .gdn = {.query_start_loc = query_start_loc,
                       .state_indices = placed(slots, DType::i32),
                       .has_initial_state = placed(std::vector<std::uint8_t>(batch, is_decode), DType::u8),
                       .num_decodes = is_decode ? batch : 0},
               .num_decodes = is_decode ? batch : 0,
               .max_query_len = query_len,
               .max_seq_len = num_computed + query_len};
  }
  void enqueue(int batch) {
    const TensorView hidden = decoder_->forward(inputs_, {.attention = attention_, .state = state_});
    decoder_->compute_logits(hidden, rows_, logits_.slice(0, batch));
  }

  void check_logits(int batch) const {
    std::vector<float> logits(static_cast<std::size_t>(batch) * config_.vocab_size);
    cuda::copy_and_wait(logits.data(), logits_.data, logits.size() * sizeof(float));
    const bool is_good = std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); }) &&
                         *std::max_element(logits.begin(), logits.end()) > 0.1F;
    if (!is_good) std::printf("WRONG: logits are not finite, or all are small\n"), std::exit(1);
  }

  double median_ms(int count, const std::function<void()>& run) const {
    auto* stream = static_cast<cudaStream_t>(stream_.handle());
    cudaEvent_t begin = nullptr, end = nullptr;
    cuda::check(cudaEventCreate(&begin));
    cuda::check(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < count; ++i) {
      cuda::check(cudaEventRecord(begin, stream));
      run();
      cuda::check(cudaEventRecord(end, stream));
      cuda::check(cudaEventSynchronize(end));
      cuda::check(cudaEventElapsedTime(&times.emplace_back(), begin, end));
    }
    cuda::check(cudaEventDestroy(begin));
    cuda::check(cudaEventDestroy(end));
    std::nth_element(times.begin(), times.begin() + count / 2, times.end());
    return times[static_cast<std::size_t>(count) / 2];
  }

  ModelConfig config_;
  cuda::Stream stream_;
  std::shared_ptr<cuda::Matmul> matmul_;
  std::shared_ptr<const DecoderWeights> weights_;
  std::unique_ptr<HybridDecoder> decoder_;
  std::list<Tensor> memory_, step_;
  std::vector<AttentionCacheViews> attention_;
  std::vector<StateCacheViews> state_;
  TensorView logits_, rows_;
  ForwardInputs inputs_;
};

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const auto is_wanted = [&](int index, const std::string& value) { return argc <= index || value == argv[index]; };
  for (const Size& size : kSizes) {
    if (!is_wanted(1, size.name)) continue;
    Model model(size);
    for (const int batch : {1, 4, 8, 16, 32, 128})
      if (is_wanted(2, "decode") && is_wanted(3, std::to_string(batch))) {
        const double ms = model.decode_ms(batch), bound = model.bound_ms(batch);
        std::printf("%-8s decode  batch %4d  %8.3f ms  bound %7.3f  %5.1f %%\n", size.name, batch, ms, bound,
                    100.0 * bound / ms);
      }
    for (const int num_tokens : {2048, kMaxPrompt})
      if (is_wanted(2, "prefill") && is_wanted(3, std::to_string(num_tokens)))
        std::printf("%-8s prefill tokens %4d  %8.2f ms\n", size.name, num_tokens, model.prefill_ms(num_tokens));
  }
}
