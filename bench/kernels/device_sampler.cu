// Times the device sampler on a vocabulary of 248,320 and checks its tokens against the CPU's.
//   bench_device_sampler [blocks a row]: device time of a launch in a graph, on logits that no cache holds and on the
//   same logits again; share of reading the logits once at 4.18 TB/s
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "bench/kernels/graph_timing.h"
#include "cpp/src/core/buffer.h"
#include "cpp/src/ops/sampler.h"
#include "cuda/check.h"
#include "cuda/ops/sampler_state.h"

using namespace deltaic;

namespace {

constexpr int kVocab = 248320;
constexpr Device kGpu{DeviceType::cuda, 0};

struct Case {
  const char* name;
  SamplingParams params;
  bool all_greedy = false;
  bool is_flat = false;
};

std::vector<Case> cases() {
  std::vector<Case> result;
  SamplingParams greedy, temperature, filtered, top_p, penalties, logprobs;
  greedy.temperature = 0.0F;
  filtered.temperature = 0.6F, filtered.top_k = 20, filtered.top_p = 0.95F;
  top_p.top_p = 0.95F;
  penalties.presence_penalty = 0.5F, penalties.frequency_penalty = 0.1F, penalties.repetition_penalty = 1.05F;
  penalties.temperature = 0.6F, penalties.top_k = 20, penalties.top_p = 0.95F;
  logprobs.temperature = 0.0F, logprobs.logprobs = 5;
  return {{"greedy", greedy, true},
          {"greedy, with slots", greedy},
          {"temperature", temperature},
          {"temperature, flat", temperature, false, true},
          {"top-k 20, top-p 0.95", filtered},
          {"top-p 0.95", top_p},
          {"top-p 0.95, flat", top_p, false, true},
          {"top-k, top-p, penalties", penalties},
          {"greedy, 5 logprobs", logprobs}};
}

// Like a language model's: most tokens far below a few; flat: all near each other.
std::vector<float> make_logits(std::size_t num_rows, bool is_flat) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<float> table(1 << 16);
  for (float& v : table) v = normal(rng);
  std::vector<float> logits(num_rows * kVocab);
  for (std::size_t i = 0; i < logits.size(); i += 64) {
    const std::size_t from = rng() % (table.size() - 64);
    for (std::size_t j = 0; j < 64; ++j) logits[i + j] = is_flat ? table[from + j] : 2.0F * table[from + j] - 6.0F;
  }
  for (std::size_t row = 0; !is_flat && row < num_rows; ++row)
    for (int i = 0; i < 60; ++i) logits[row * kVocab + rng() % kVocab] = 8.0F + 3.0F * normal(rng);
  return logits;
}

double median_us(cudaStream_t stream, int num_launches, const auto& launch) {
  return time_in_graph(stream, num_launches, launch).median_us;
}

// Returns how many tokens are wrong.
int run(const Case& c, int num_rows, int cluster, cudaStream_t stream, const std::vector<float>& host,
        const Buffer& device) {
  cuda::SamplerState state(kVocab, num_rows, {.device = kGpu, .stream = {stream}});
  std::mt19937 rng(2);
  std::vector<std::int32_t> prompt(1000), output(200);
  for (auto& id : prompt) id = static_cast<std::int32_t>(rng() % kVocab);
  for (auto& id : output) id = static_cast<std::int32_t>(rng() % 3000);
  for (int slot = 0; slot < num_rows; ++slot)
    state.set(slot, ops::pack_slot(c.params, kVocab, output, static_cast<std::uint64_t>(slot)), prompt, output);

  const int num_logprobs = c.params.logprobs.value_or(-1);
  Tensor slots(DType::i32, {num_rows}), positions(DType::i32, {num_rows});
  for (int i = 0; i < num_rows; ++i) slots.as<std::int32_t>()[i] = i, positions.as<std::int32_t>()[i] = 200;
  const Tensor d_slots(DType::i32, {num_rows}, kGpu), d_positions(DType::i32, {num_rows}, kGpu);
  const Tensor tokens(DType::i32, {num_rows}, kGpu), finite(DType::u8, {num_rows}, kGpu);
  const Tensor ids(DType::i32, {num_rows, 1 + std::max(num_logprobs, 0)}, kGpu), ranks(DType::i32, {num_rows}, kGpu);
  const Tensor logprobs(DType::f32, {num_rows, 1 + std::max(num_logprobs, 0)}, kGpu);
  cuda::check(cudaMemcpy(d_slots.view().data, slots.view().data, num_rows * 4, cudaMemcpyHostToDevice));
  cuda::check(cudaMemcpy(d_positions.view().data, positions.view().data, num_rows * 4, cudaMemcpyHostToDevice));
  const int num_buffers = std::max(1, 256 / num_rows);
  const auto launch = [&](int i) {
    float* rows = static_cast<float*>(device.data()) + static_cast<std::int64_t>(i % num_buffers) * num_rows * kVocab;
    state.sample({.logits = make_view(rows, DType::f32, {num_rows, kVocab}, kGpu),
                  .slots = d_slots.view(),
                  .output_positions = d_positions.view(),
                  .all_greedy = c.all_greedy,
                  .num_logprobs = num_logprobs,
                  .token_ids = tokens.view(),
                  .is_finite = finite.view(),
                  .logprob_token_ids = ids.view(),
                  .logprobs = logprobs.view(),
                  .ranks = ranks.view()},
                 cluster);
  };
  cuda::check(cudaMemcpy(device.data(), host.data(), host.size() * 4, cudaMemcpyHostToDevice));
  launch(0);
  std::vector<std::int32_t> got(static_cast<std::size_t>(num_rows));
  cuda::check(cudaStreamSynchronize(stream));
  cuda::check(cudaMemcpy(got.data(), tokens.view().data, got.size() * 4, cudaMemcpyDeviceToHost));
  int wrong = 0;
  for (int row = 0; row < std::min(num_rows, 4); ++row) {
    std::vector<float> copy(host.begin() + static_cast<std::ptrdiff_t>(row) * kVocab,
                            host.begin() + static_cast<std::ptrdiff_t>(row + 1) * kVocab);
    const ops::SamplerRow view{.logits = make_view(copy.data(), DType::f32, {kVocab}),
                               .params = &c.params,
                               .prompt_token_ids = prompt,
                               .output_token_ids = output,
                               .seed = static_cast<std::uint64_t>(row)};
    wrong += ops::sample({}, {&view, 1}).front().token_id != got[static_cast<std::size_t>(row)];
  }
  const double cold = median_us(stream, std::max(num_buffers, 16), launch);
  const double warm = median_us(stream, 64, [&](int) { launch(0); });
  const double bound = num_rows * (kVocab * 4.0) / 4.18e6;
  std::printf("%-24s %3d rows %2d blocks  %8.2f us %5.1f %%  in L2 %8.2f us  bound %6.2f us%s\n", c.name, num_rows,
              cluster, cold, bound / cold * 100, warm, bound, wrong > 0 ? "  WRONG" : "");
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::vector<int> clusters{0};
  if (argc > 1) {
    clusters.clear();
    for (int i = 1; i < argc; ++i) clusters.push_back(std::atoi(argv[i]));
  }
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream));
  const Buffer device(std::size_t{256} * kVocab * 4, kGpu);
  const std::vector<float> like_a_model = make_logits(256, false), flat = make_logits(256, true);
  int wrong = 0;
  for (const Case& c : cases())
    for (const int num_rows : {1, 8, 32, 128})
      for (const int cluster : clusters)
        wrong += run(c, num_rows, cluster, stream, c.is_flat ? flat : like_a_model, device);
  cuda::check(cudaStreamDestroy(stream));
  return wrong > 0;
}
