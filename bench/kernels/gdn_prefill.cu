// Times the prefill of a GDN layer in the shape of Qwen3.5-35B-A3B and checks it against the rule token by token.
//   bench_gdn_prefill [TOKENS]: device time in a graph of the chunked rule alone, of its two kernels, of the
//   convolution, and of the whole between the projections
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "bench/kernels/graph_timing.h"
#include "cpp/src/ops/gdn_mixer.h"
#include "cuda/check.h"
#include "cuda/ops/gdn_prefill.h"

using namespace deltaic;

namespace {

constexpr int kKeyHeads = 16, kValueHeads = 32, kDim = 128, kTaps = 4;
constexpr int kConvDim = 2 * kKeyHeads * kDim + kValueHeads * kDim;
constexpr int kRow = kConvDim + kValueHeads * kDim + 2 * kValueHeads;
const Device kDevice{DeviceType::cuda, 0};

void* allocate(std::size_t num_bytes, int fill) {
  void* device = nullptr;
  cuda::check(cudaMalloc(&device, num_bytes));
  cuda::check(cudaMemset(device, fill, num_bytes));
  return device;
}
template <class U>
void* upload(const std::vector<U>& host) {
  void* device = allocate(host.size() * sizeof(U), 0);
  cuda::check(cudaMemcpy(device, host.data(), host.size() * sizeof(U), cudaMemcpyHostToDevice));
  return device;
}
template <class U>
std::vector<U> download(const void* device, std::size_t size) {
  std::vector<U> host(size);
  cuda::check(cudaMemcpy(host.data(), device, size * sizeof(U), cudaMemcpyDeviceToHost));
  return host;
}
std::vector<float> normals(std::size_t size, float scale, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(size);
  for (float& x : values) x = scale * normal(rng);
  return values;
}
std::uint16_t to_bf16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bf16(std::uint16_t x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

double median_us(cudaStream_t stream, const std::function<void()>& enqueue) {
  return time_in_graph(stream, 8, [&](int) { enqueue(); }).median_us;
}

// |a - b| / |b| over all elements.
struct Difference {
  double sum = 0, norm = 0;
  void add(double a, double b) { sum += std::isfinite(a) ? (a - b) * (a - b) : INFINITY, norm += b * b; }
  double relative() const { return std::sqrt(sum / norm); }
};

bool run(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> start{0}, slots;
  for (const std::int32_t length : lengths) start.push_back(start.back() + length), slots.push_back(slots.size());
  const std::int64_t num_tokens = start.back(), num_seqs = static_cast<std::int64_t>(lengths.size());
  const std::size_t state_size = static_cast<std::size_t>(num_seqs) * kValueHeads * kDim * kDim;
  std::vector<std::uint16_t> proj(static_cast<std::size_t>(num_tokens) * kRow);
  const auto pool = normals(1000003, 1.0F, 1);
  for (std::size_t i = 0; i < proj.size(); ++i) proj[i] = to_bf16(pool[i % pool.size()]);
  auto a_log = normals(kValueHeads, 1.0F, 2);
  a_log.back() = std::log(16.0F), a_log.front() = -6.0F;
  const auto initial = normals(state_size, 0.1F, 3);
  void* const temporal = upload(initial);
  const ops::GdnShape shape{kKeyHeads, kValueHeads, kDim, kDim, kTaps};
  const std::size_t workspace_bytes =
      cuda::gdn_mixer_workspace_bytes(shape, DType::bf16, num_tokens, num_seqs, /*num_verified=*/0);
  const ops::GdnMixerArgs args{
      .shape = shape,
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
      .proj = make_view(upload(proj), DType::bf16, {num_tokens, kRow}, kDevice),
      .conv_weight = make_view(upload(normals(kConvDim * kTaps, 0.5F, 4)), DType::f32, {kConvDim, kTaps}, kDevice),
      .A_log = make_view(upload(a_log), DType::f32, {kValueHeads}, kDevice),
      .dt_bias = make_view(upload(normals(kValueHeads, 1.0F, 5)), DType::f32, {kValueHeads}, kDevice),
      .norm_weight = make_view(upload(normals(kDim, 1.0F, 6)), DType::f32, {kDim}, kDevice),
      .sequences = {.query_start_loc = make_view(upload(start), DType::i32, {num_seqs + 1}, kDevice),
                    .state_indices = make_view(upload(slots), DType::i32, {num_seqs}, kDevice),
                    .has_initial_state = make_view(allocate(num_seqs, 1), DType::u8, {num_seqs}, kDevice)},
      .conv_state = make_view(allocate(num_seqs * kConvDim * 6, 0), DType::bf16, {num_seqs, kConvDim, 3}, kDevice),
      .temporal = make_view(temporal, DType::f32, {num_seqs, kValueHeads, kDim, kDim}, kDevice),
      .workspace =
          make_view(allocate(workspace_bytes, 0xff), DType::u8, {static_cast<std::int64_t>(workspace_bytes)}, kDevice),
      .out = make_view(allocate(num_tokens * kValueHeads * kDim * 2, 0xff), DType::bf16,
                       {num_tokens, kValueHeads, kDim}, kDevice)};
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream));
  const TensorView qkv =
      make_view(allocate(num_tokens * kConvDim * 2, 0xff), DType::bf16, {num_tokens, kConvDim}, kDevice);
  const auto convolve = [&] {
    cuda::causal_conv({stream}, shape, args.layout, args.proj, args.conv_weight, args.sequences, args.conv_state, qkv);
  };
  const cuda::GdnPrefillArgs prefill{.shape = shape,
                                     .layout = args.layout,
                                     .qkv = qkv,
                                     .proj = args.proj,
                                     .A_log = args.A_log,
                                     .dt_bias = args.dt_bias,
                                     .sequences = args.sequences,
                                     .temporal = args.temporal,
                                     .workspace = args.workspace,
                                     .out = args.out};
  const auto reset = [&] { cuda::check(cudaMemcpy(temporal, initial.data(), state_size * 4, cudaMemcpyHostToDevice)); };
  convolve();
  cuda::gdn_prefill({stream}, prefill);
  cuda::check(cudaStreamSynchronize(stream));
  const std::size_t out_size = static_cast<std::size_t>(args.out.numel());
  const auto out = download<std::uint16_t>(args.out.data, out_size);
  const auto state = download<float>(temporal, state_size);
  reset();
  cuda::gated_delta_rule({stream}, shape, args.layout, qkv, args.proj, args.A_log, args.dt_bias, args.sequences,
                         args.temporal, /*replay=*/{}, args.out);
  cuda::check(cudaStreamSynchronize(stream));
  const auto expected = download<std::uint16_t>(args.out.data, out_size);
  const auto expected_state = download<float>(temporal, state_size);
  Difference of_out, of_state;
  double worst_head = 0;
  for (std::size_t i = 0; i < out_size; ++i) of_out.add(from_bf16(out[i]), from_bf16(expected[i]));
  for (std::size_t head = 0; head < state_size / (kDim * kDim); ++head) {
    Difference of_head;
    for (std::size_t i = head * kDim * kDim; i < (head + 1) * kDim * kDim; ++i)
      of_head.add(state[i], expected_state[i]), of_state.add(state[i], expected_state[i]);
    worst_head = std::max(worst_head, of_head.relative());
  }
  const double limit = 0x1p-7;
  const bool wrong = !(of_out.relative() < limit && worst_head < limit);

  const double conv_us = median_us(stream, convolve);
  const double rule_us = median_us(stream, [&] { cuda::gdn_prefill({stream}, prefill); });
  const double chunk_us = median_us(stream, [&] { cuda::prepare_gdn_chunks({stream}, prefill); });
  const double walk_us = median_us(stream, [&] { cuda::walk_gdn_chunks({stream}, prefill); });
  const double all_us = median_us(stream, [&] { cuda::gdn_mixer({stream}, args); });
  std::printf(
      "gdn_prefill %3lld x %6d tokens  rule %8.1f us (chunks %7.1f, walk %7.1f)  conv %6.1f  conv to norm %8.1f"
      "  error %.2e state %.2e (a head %.2e)%s\n",
      static_cast<long long>(num_seqs), lengths[0], rule_us, chunk_us, walk_us, conv_us, all_us, of_out.relative(),
      of_state.relative(), worst_head, wrong ? "  WRONG" : "");
  for (const TensorView& view :
       {args.proj, args.conv_weight, args.A_log, args.dt_bias, args.norm_weight, args.sequences.query_start_loc,
        args.sequences.state_indices, args.sequences.has_initial_state, args.conv_state, args.temporal, args.workspace,
        args.out, qkv})
    cuda::check(cudaFree(view.data));
  return !wrong;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) return run({std::atoi(argv[1])}) ? 0 : 1;
  bool right = true;
  for (const std::int32_t length : {65, 2048, 8192}) right &= run({length});
  right &= run({1000, 1, 64, 3000, 63, 2000});
  right &= run(std::vector<std::int32_t>(32, 256));
  return right ? 0 : 1;
}
