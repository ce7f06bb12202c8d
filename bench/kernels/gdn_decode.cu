// Times gdn_decode in the shape of Qwen3.5-35B-A3B and checks it against float64.
//   bench_gdn_decode [SEQUENCES ...]: device time of a launch in a graph, every launch on other slots than the last;
//   share of a 4.18 TB/s copy
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "bench/kernels/graph_timing.h"
#include "cuda/check.h"
#include "cuda/device/convert.cuh"
#include "cuda/ops/gdn_decode.h"

using namespace deltaic;
using T = __nv_bfloat16;

namespace {

constexpr int kKeyHeads = 16, kValueHeads = 32, kDim = 128, kTaps = 4;
constexpr int kConvDim = 2 * kKeyHeads * kDim + kValueHeads * kDim;
constexpr int kRow = kConvDim + kValueHeads * kDim + 2 * kValueHeads;

template <class U>
U* upload(const std::vector<U>& host) {
  U* device = nullptr;
  cuda::check(cudaMalloc(&device, host.size() * sizeof(U)));
  cuda::check(cudaMemcpy(device, host.data(), host.size() * sizeof(U), cudaMemcpyHostToDevice));
  return device;
}
double silu(double x) { return x / (1 + std::exp(-x)); }

template <class State>
double run(int num_seqs) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  const auto randoms = [&](std::size_t n, float scale) {
    std::vector<float> v(n);
    for (auto& x : v) x = scale * normal(rng);
    return v;
  };
  const int num_slots = std::max(num_seqs * 2, 128);
  const auto conv_weight = randoms(kConvDim * kTaps, 0.5F), norm_weight = randoms(kDim, 1.0F),
             dt_bias = randoms(kValueHeads, 1.0F);
  auto a_log = randoms(kValueHeads, 1.0F);
  a_log.back() = std::log(16.0F);
  std::vector<T> proj(static_cast<std::size_t>(num_seqs) * kRow),
      conv(static_cast<std::size_t>(num_slots) * kConvDim * 3);
  for (auto& x : proj) x = __float2bfloat16(normal(rng));
  for (auto& x : conv) x = __float2bfloat16(normal(rng));
  const std::size_t slot_elements = static_cast<std::size_t>(kValueHeads) * kDim * kDim;
  constexpr bool kF32 = sizeof(State) == 4;
  std::vector<float> period(9973);
  for (std::size_t i = 0; i < period.size(); ++i)
    period[i] = static_cast<float>(static_cast<State>(0.1F * std::sin(static_cast<float>(i))));
  std::vector<State> temporal(slot_elements * num_slots);
  for (std::size_t i = 0; i < temporal.size(); ++i) temporal[i] = static_cast<State>(period[i % period.size()]);
  std::vector<std::int32_t> slots(num_slots);
  for (int i = 0; i < num_slots; ++i) slots[i] = i;
  std::shuffle(slots.begin(), slots.end(), rng);
  std::vector<std::uint8_t> initial(num_seqs, 1);
  if (num_seqs > 1) initial[1] = 0;

  const Device device{DeviceType::cuda, 0};
  auto *d_proj = upload(proj), *d_conv = upload(conv);
  auto *d_cw = upload(conv_weight), *d_nw = upload(norm_weight), *d_dt = upload(dt_bias), *d_al = upload(a_log);
  auto* d_t = upload(temporal);
  auto* d_slots = upload(slots);
  auto* d_init = upload(initial);
  auto* d_out = upload(std::vector<T>(static_cast<std::size_t>(num_seqs) * kValueHeads * kDim, __float2bfloat16(NAN)));
  cuda::GdnDecodeArgs args{
      .shape = {kKeyHeads, kValueHeads, kDim, kDim, kTaps},
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
      .proj = make_view(d_proj, DType::bf16, {num_seqs, kRow}, device),
      .conv_weight = make_view(d_cw, DType::f32, {kConvDim, kTaps}, device),
      .A_log = make_view(d_al, DType::f32, {kValueHeads}, device),
      .dt_bias = make_view(d_dt, DType::f32, {kValueHeads}, device),
      .norm_weight = make_view(d_nw, DType::f32, {kDim}, device),
      .state_indices = make_view(d_slots, DType::i32, {num_seqs}, device),
      .has_initial_state = make_view(d_init, DType::u8, {num_seqs}, device),
      .conv_state = make_view(d_conv, DType::bf16, {num_slots, kConvDim, 3}, device),
      .temporal = make_view(d_t, kF32 ? DType::f32 : DType::bf16, {num_slots, kValueHeads, kDim, kDim}, device),
      .workspace = {},
      .out = make_view(d_out, DType::bf16, {num_seqs, kValueHeads, kDim}, device)};
  const auto num_bytes = static_cast<std::int64_t>(cuda::gdn_decode_workspace_bytes(args.shape, num_seqs));
  void* d_workspace = nullptr;
  cuda::check(cudaMalloc(&d_workspace, static_cast<std::size_t>(num_bytes)));
  args.workspace = make_view(d_workspace, DType::u8, {num_bytes}, device);
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream));
  cuda::gdn_decode({stream}, args);
  cuda::check(cudaStreamSynchronize(stream));
  std::vector<T> out(static_cast<std::size_t>(num_seqs) * kValueHeads * kDim), conv_after(conv.size());
  std::vector<State> temporal_after(temporal.size());
  cuda::check(cudaMemcpy(out.data(), d_out, out.size() * 2, cudaMemcpyDeviceToHost));
  cuda::check(cudaMemcpy(conv_after.data(), d_conv, conv.size() * 2, cudaMemcpyDeviceToHost));
  cuda::check(cudaMemcpy(temporal_after.data(), d_t, temporal.size() * sizeof(State), cudaMemcpyDeviceToHost));

  double worst = 0.0, worst_state = 0.0;
  bool conv_wrong = false;
  for (int seq = 0; seq < std::min(num_seqs, 3); ++seq) {
    const T* row = proj.data() + static_cast<std::size_t>(seq) * kRow;
    const std::size_t slot = slots[seq];
    std::vector<double> m(kConvDim);
    for (int c = 0; c < kConvDim; ++c) {
      double sum = conv_weight[c * 4 + 3] * static_cast<double>(__bfloat162float(row[c]));
      for (int i = 0; i < 3; ++i)
        if (initial[seq])
          sum += conv_weight[c * 4 + i] * static_cast<double>(__bfloat162float(conv[(slot * kConvDim + c) * 3 + i]));
      m[c] = silu(sum);
      const float want1 = initial[seq] ? __bfloat162float(conv[(slot * kConvDim + c) * 3 + 2]) : 0.0F;
      conv_wrong |= __bfloat162float(conv_after[(slot * kConvDim + c) * 3 + 2]) != __bfloat162float(row[c]) ||
                    __bfloat162float(conv_after[(slot * kConvDim + c) * 3 + 1]) != want1;
    }
    for (int h = 0; h < kValueHeads; ++h) {
      const int g = h / 2;
      double qq = 0, kk = 0, oo = 0;
      for (int i = 0; i < kDim; ++i) qq += m[g * kDim + i] * m[g * kDim + i], kk += std::pow(m[2048 + g * kDim + i], 2);
      const double a = __bfloat162float(row[args.layout.a + h]) + static_cast<double>(dt_bias[h]);
      const double decay = std::exp(-std::exp(static_cast<double>(a_log[h])) * (a > 20 ? a : std::log1p(std::exp(a))));
      const double beta = 1 / (1 + std::exp(-static_cast<double>(__bfloat162float(row[args.layout.b + h]))));
      std::vector<double> o(kDim);
      for (int r = 0; r < kDim; ++r) {
        const std::size_t base = slot * slot_elements + (static_cast<std::size_t>(h) * kDim + r) * kDim;
        double sk = 0;
        for (int i = 0; i < kDim; ++i)
          sk += (initial[seq] ? static_cast<float>(temporal[base + i]) : 0.0F) * decay * m[2048 + g * kDim + i] /
                std::sqrt(kk + 1e-6);
        const double u = beta * (m[4096 + h * kDim + r] - sk);
        for (int i = 0; i < kDim; ++i) {
          const double s = (initial[seq] ? static_cast<float>(temporal[base + i]) : 0.0F) * decay +
                           u * m[2048 + g * kDim + i] / std::sqrt(kk + 1e-6);
          o[r] += s * m[g * kDim + i] / std::sqrt(qq + 1e-6) / std::sqrt(128.0);
          worst_state = std::max(worst_state, std::abs(s - static_cast<float>(temporal_after[base + i])));
        }
        oo += o[r] * o[r];
      }
      for (int r = 0; r < kDim; ++r) {
        const double z = __bfloat162float(row[args.layout.z + h * kDim + r]);
        const double want = o[r] / std::sqrt(oo / kDim + 1e-6) * norm_weight[r] * silu(z);
        const double got = __bfloat162float(out[(static_cast<std::size_t>(seq) * kValueHeads + h) * kDim + r]);
        worst = std::max(worst, std::isfinite(got) ? std::abs(got - want) / (std::abs(want) + 0.1) : 1e9);
      }
    }
  }

  const double us = time_in_graph(stream, 32, [&](int i) {
                      args.state_indices.data = d_slots + (i * num_seqs) % (num_slots - num_seqs + 1);
                      cuda::gdn_decode({stream}, args);
                    }).median_us;
  const double bytes = 2.0 * num_seqs * (slot_elements * sizeof(State) + kConvDim * 3 * 2);
  const double state_limit = kF32 ? 1e-4 : 0x1p-8;
  std::printf("gdn_decode %s %3d seqs  %8.2f us  %6.0f GB/s  %5.1f %%  error %.4f state %.2e%s\n",
              kF32 ? "f32 " : "bf16", num_seqs, us, bytes / us * 1e-3, bytes / us * 1e-3 / 4180 * 100, worst,
              worst_state, worst > 0.02 || worst_state > state_limit || conv_wrong ? "  WRONG" : "");
  for (void* p : {static_cast<void*>(d_proj), static_cast<void*>(d_conv), static_cast<void*>(d_cw),
                  static_cast<void*>(d_t), static_cast<void*>(d_out), d_workspace})
    cudaFree(p);
  return std::max(worst, worst_state / state_limit * 0.02 + (conv_wrong ? 1 : 0));
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::atoi(argv[i]));
  if (sizes.empty()) sizes = {1, 2, 4, 8, 16, 32, 64, 128};
  bool wrong = false;
  for (const int n : sizes) wrong |= run<float>(n) > 0.02;
  for (const int n : sizes) wrong |= run<__nv_bfloat16>(n) > 0.02;
  return wrong;
}
