// Times gdn_verify in the shape of Qwen3.5-35B-A3B and checks it against gdn_decode, token by token.
//   bench_gdn_verify [--tokens 3] [--accepted 2] [SEQUENCES ...]: device time of a launch in a graph, every launch on
//   other slots than the last; share of a 4.18 TB/s copy. `accepted` tokens are replayed; beside it the time of
//   gdn_decode for one token a sequence
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "bench/kernels/graph_timing.h"
#include "cuda/check.h"
#include "cuda/device/convert.cuh"
#include "cuda/ops/gdn_verify.h"

using namespace deltaic;
using T = __nv_bfloat16;

namespace {

constexpr int kKeyHeads = 16, kValueHeads = 32, kDim = 128, kTaps = 4, kDrafts = 3;
constexpr ops::GdnShape kShape{kKeyHeads, kValueHeads, kDim, kDim, kTaps};
constexpr int kConvDim = kShape.conv_dim(), kRow = kConvDim + kValueHeads * kDim + 2 * kValueHeads;
constexpr std::size_t kSlotElements = static_cast<std::size_t>(kValueHeads) * kDim * kDim;
constexpr Device kDevice{DeviceType::cuda, 0};

// Device memory that is never given back: the program ends soon.
template <class U>
U* upload(const std::vector<U>& host) {
  U* device = nullptr;
  cuda::check(cudaMalloc(&device, host.size() * sizeof(U)));
  cuda::check(cudaMemcpy(device, host.data(), host.size() * sizeof(U), cudaMemcpyHostToDevice));
  return device;
}
template <class U>
std::vector<U> download(const U* device, std::size_t size) {
  std::vector<U> host(size);
  cuda::check(cudaMemcpy(host.data(), device, size * sizeof(U), cudaMemcpyDeviceToHost));
  return host;
}

std::mt19937 rng(3);
template <class U>
std::vector<U> randoms(std::size_t size, float scale) {
  std::normal_distribution<float> normal;
  std::vector<float> period(9973);
  for (float& value : period) value = scale * normal(rng);
  std::vector<U> values(size);
  for (std::size_t i = 0; i < size; ++i) values[i] = static_cast<U>(period[i * 7 % period.size()]);
  return values;
}

template <class State>
bool run(int num_seqs, int num_tokens, int num_accepted) {
  const int num_slots = std::max(2 * num_seqs, 128), n = num_seqs * num_tokens;
  std::vector<std::int32_t> slots(num_slots), starts(num_seqs + 1), accepted(num_seqs, num_accepted);
  for (int i = 0; i < num_slots; ++i) slots[i] = i;
  std::shuffle(slots.begin(), slots.end(), rng);
  for (int i = 0; i <= num_seqs; ++i) starts[i] = i * num_tokens;
  const std::vector<std::uint8_t> replayed(num_seqs, 2), from_slot(num_seqs, 1);
  const auto proj = randoms<T>(static_cast<std::size_t>(n) * kRow, 1.0F);
  auto* d_replayed = upload(replayed);
  auto* d_from_slot = upload(from_slot);
  auto* d_slots = upload(slots);
  auto* d_proj = upload(proj);
  const std::size_t conv_size = static_cast<std::size_t>(num_slots) * kConvDim * (kTaps - 1 + kDrafts);
  auto* d_conv = upload(randoms<T>(conv_size, 1.0F));
  auto* d_temporal = upload(randoms<State>(kSlotElements * num_slots, 0.1F));
  const std::size_t replay_size = static_cast<std::size_t>(num_slots) * (1 + kDrafts) * kShape.replay_size();
  auto* d_replay = upload(randoms<float>(replay_size, 0.1F));
  auto* d_out = upload(std::vector<T>(static_cast<std::size_t>(n) * kValueHeads * kDim));
  const auto state_type = sizeof(State) == 4 ? DType::f32 : DType::bf16;
  cuda::GdnVerifyArgs args{
      .layer = {.shape = kShape,
                .layout = {.q = 0,
                           .q_stride = kDim,
                           .k = kKeyHeads * kDim,
                           .k_stride = kDim,
                           .v = 2 * kKeyHeads * kDim,
                           .v_group_stride = 2 * kDim,
                           .z = kConvDim,
                           .z_group_stride = 2 * kDim,
                           .b = kConvDim + kValueHeads * kDim,
                           .b_group_stride = 2,
                           .a = kConvDim + kValueHeads * kDim + kValueHeads,
                           .a_group_stride = 2},
                .proj = make_view(d_proj, DType::bf16, {n, kRow}, kDevice),
                .conv_weight =
                    make_view(upload(randoms<float>(kConvDim * kTaps, 0.5F)), DType::f32, {kConvDim, kTaps}, kDevice),
                .A_log = make_view(upload(randoms<float>(kValueHeads, 1.0F)), DType::f32, {kValueHeads}, kDevice),
                .dt_bias = make_view(upload(randoms<float>(kValueHeads, 1.0F)), DType::f32, {kValueHeads}, kDevice),
                .norm_weight = make_view(upload(randoms<float>(kDim, 1.0F)), DType::f32, {kDim}, kDevice),
                .eps = 1e-6F,
                .state_indices = make_view(d_slots, DType::i32, {num_seqs}, kDevice),
                .has_initial_state = make_view(d_from_slot, DType::u8, {num_seqs}, kDevice),
                .conv_state = make_view(d_conv, DType::bf16, {num_slots, kConvDim, kTaps - 1 + kDrafts}, kDevice),
                .temporal = make_view(d_temporal, state_type, {num_slots, kValueHeads, kDim, kDim}, kDevice),
                .workspace = {},
                .out = make_view(d_out, DType::bf16, {n, kValueHeads, kDim}, kDevice)},
      .query_start_loc = make_view(upload(starts), DType::i32, {num_seqs + 1}, kDevice),
      .num_accepted = make_view(upload(accepted), DType::i32, {num_seqs}, kDevice),
      .num_draft_tokens = kDrafts,
      .snapshot_slots = {},
      .snapshot_offsets = {},
      .replay = make_view(d_replay, DType::f32, {num_slots, 1 + kDrafts, kShape.replay_size()}, kDevice)};
  const auto verify_bytes = static_cast<std::int64_t>(cuda::gdn_verify_workspace_bytes(kShape, num_seqs));
  args.layer.workspace = make_view(upload(std::vector<char>(verify_bytes)), DType::u8, {verify_bytes}, kDevice);
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream));

  // The same tokens one by one: first with gdn_verify, then, from the same states, with gdn_decode.
  const auto conv_before = download(d_conv, conv_size);
  const auto temporal_before = download(d_temporal, kSlotElements * num_slots);
  cuda::gdn_verify({stream}, args);
  cuda::check(cudaStreamSynchronize(stream));
  const auto together = download(d_out, static_cast<std::size_t>(n) * kValueHeads * kDim);
  cuda::check(cudaMemcpy(d_conv, conv_before.data(), conv_size * sizeof(T), cudaMemcpyHostToDevice));
  cuda::check(
      cudaMemcpy(d_temporal, temporal_before.data(), temporal_before.size() * sizeof(State), cudaMemcpyHostToDevice));
  cuda::GdnDecodeArgs decode = args.layer;
  decode.proj = make_view(d_proj, DType::bf16, {num_seqs, kRow}, kDevice);
  decode.out = make_view(d_out, DType::bf16, {num_seqs, kValueHeads, kDim}, kDevice);
  const auto num_bytes = static_cast<std::int64_t>(cuda::gdn_decode_workspace_bytes(kShape, num_seqs));
  decode.workspace = make_view(upload(std::vector<char>(num_bytes)), DType::u8, {num_bytes}, kDevice);
  double difference = 0.0, norm = 0.0;
  const std::size_t width = static_cast<std::size_t>(kValueHeads) * kDim;
  std::vector<T> alone(static_cast<std::size_t>(num_seqs) * width);
  for (int t = 0; t < num_tokens; ++t) {
    decode.proj.data = d_proj + static_cast<std::size_t>(t) * kRow;
    decode.proj.stride[0] = static_cast<std::int64_t>(num_tokens) * kRow;
    cuda::gdn_decode({stream}, decode);
    cuda::check(cudaStreamSynchronize(stream));
    alone = download(d_out, alone.size());
    for (int seq = 0; seq < num_seqs; ++seq)
      for (std::size_t i = 0; i < width; ++i) {
        const double a = __bfloat162float(alone[seq * width + i]);
        const double b = __bfloat162float(together[(static_cast<std::size_t>(seq) * num_tokens + t) * width + i]);
        difference += std::isfinite(b) ? (a - b) * (a - b) : INFINITY, norm += a * a;
      }
  }
  const double error = std::sqrt(difference / norm);

  args.layer.has_initial_state.data = d_replayed;
  const auto slots_of = [&](int i) { return d_slots + i * num_seqs % (num_slots - num_seqs + 1); };
  const double us = time_in_graph(stream, 32, [&](int i) {
                      args.layer.state_indices.data = slots_of(i);
                      cuda::gdn_verify({stream}, args);
                    }).median_us;
  decode.proj.data = d_proj, decode.proj.stride[0] = kRow;
  const double plain_us = time_in_graph(stream, 32, [&](int i) {
                            decode.state_indices.data = slots_of(i);
                            cuda::gdn_decode({stream}, decode);
                          }).median_us;
  const double rows = (num_accepted + num_tokens) * kShape.replay_size() * 4.0;
  const double conv = kConvDim * 2.0 * (kTaps - 1 + kTaps - 2 + num_tokens);
  const double bytes = num_seqs * (2.0 * kSlotElements * sizeof(State) + rows + conv);
  const bool is_wrong = error > (sizeof(State) == 4 ? 0.006 : 0.012);
  std::printf(
      "gdn_verify %s %3d seqs x %d tokens, %d replayed  %8.2f us  %6.0f GB/s  %5.1f %%  one token %8.2f us  error "
      "%.5f%s\n",
      sizeof(State) == 4 ? "f32 " : "bf16", num_seqs, num_tokens, num_accepted, us, bytes / us * 1e-3,
      bytes / us * 1e-3 / 4180 * 100, plain_us, error, is_wrong ? "  WRONG" : "");
  for (void* memory : {static_cast<void*>(d_proj), static_cast<void*>(d_conv), static_cast<void*>(d_temporal),
                       static_cast<void*>(d_replay), static_cast<void*>(d_out)})
    cuda::check(cudaFree(memory));
  return is_wrong;
}

}  // namespace

int main(int argc, char** argv) {
  int num_tokens = 3, num_accepted = 2;
  std::vector<int> sizes;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--tokens") == 0 && i + 1 < argc)
      num_tokens = std::atoi(argv[++i]);
    else if (std::strcmp(argv[i], "--accepted") == 0 && i + 1 < argc)
      num_accepted = std::atoi(argv[++i]);
    else
      sizes.push_back(std::atoi(argv[i]));
  }
  if (sizes.empty()) sizes = {1, 4, 16, 32};
  bool wrong = false;
  for (const int n : sizes) wrong |= run<float>(n, num_tokens, num_accepted);
  for (const int n : sizes) wrong |= run<T>(n, num_tokens, num_accepted);
  return wrong;
}
