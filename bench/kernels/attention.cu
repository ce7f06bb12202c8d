// Times qk_norm_rope and paged attention in the shape of Qwen3.5-35B-A3B: 16 query heads, 2 key/value heads of 256,
// bf16. Usage: bench_attention [block_size]. Decode prints GB/s of K and V and the share of the read bound, prefill
// TFLOP/s.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/kernels/graph_timing.h"
#include "cpp/src/core/buffer.h"
#include "cpp/src/core/transfer.h"
#include "cpp/src/ops/paged_attention.h"
#include "cpp/src/ops/rotary.h"
#include "cuda/check.h"
#include "cuda/launch.cuh"

namespace deltaic::bench {
namespace {

using cuda::check;

constexpr int kHeads = 16, kKvHeads = 2, kDim = 256;
constexpr double kReadBound = 4.3e12, kMatrixBound = 803e12;               // bytes and bf16 operations a second
constexpr std::int64_t kKeyBytes = std::int64_t{2} * kKvHeads * kDim * 2;  // K and V of a token
constexpr std::int64_t kRotatedBytes = std::int64_t{1} << 29;              // read before a cache line is read again
constexpr int kMaxSeqLen = 131072;
const Device kDevice{DeviceType::cuda, 0};

// Uniform in [-limit, limit).
__global__ void fill_kernel(__nv_bfloat16* values, std::int64_t size, std::uint64_t seed, float limit) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    std::uint64_t x = static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15ULL + seed;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    values[i] = __float2bfloat16(limit * (static_cast<float>((x ^ (x >> 31)) >> 40) / 8388608.0F - 1.0F));
  }
}

Tensor random(std::initializer_list<std::int64_t> shape, std::uint64_t seed, float limit) {
  Tensor tensor(DType::bf16, shape, kDevice);
  const cuda::Launch launch{.grid = dim3(1024), .block = dim3(256), .stream = nullptr};
  launch(fill_kernel, static_cast<__nv_bfloat16*>(tensor.view().data), tensor.view().numel(), seed, limit);
  return tensor;
}

template <class T>
Tensor upload(DType dtype, std::initializer_list<std::int64_t> shape, const std::vector<T>& values) {
  Tensor tensor(dtype, shape, kDevice);
  cuda::copy_and_wait(tensor.view().data, values.data(), values.size() * sizeof(T));
  return tensor;
}

std::vector<float> download(const Tensor& tensor) {
  std::vector<__nv_bfloat16> values(static_cast<std::size_t>(tensor.view().numel()));
  cuda::copy_and_wait(values.data(), tensor.view().data, values.size() * 2);
  return {values.begin(), values.end()};
}

struct Stream {
  cudaStream_t handle = nullptr;
  Stream() { check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~Stream() { (void)cudaStreamDestroy(handle); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
};

double median_us(cudaStream_t stream, int num_launches, const std::function<void(int)>& launch) {
  return time_in_graph(stream, num_launches, launch).median_us;
}

void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

// Sets of num_reqs requests, each with blocks of its own, in one cache.
struct Setup {
  int num_reqs, query_len, seq_len, num_sets, columns;
  Tensor k, v, q, out, lens, start, table, workspace;
  std::int64_t block_size;

  Setup(int reqs, int queries, int keys, std::int64_t size, bool rotates)
      : num_reqs(reqs), query_len(queries), seq_len(keys), block_size(size) {
    const std::int64_t step = kKeyBytes * keys * reqs;
    num_sets = rotates ? static_cast<int>(std::clamp<std::int64_t>(kRotatedBytes / step, 2, 100)) : 1;
    columns = static_cast<int>((keys + size - 1) / size);
    const std::int64_t num_blocks = std::int64_t{columns} * reqs * num_sets;
    k = random({num_blocks, size, kKvHeads, kDim}, 1, 2.0F);
    v = random({num_blocks, size, kKvHeads, kDim}, 2, 1.0F);
    q = random({std::int64_t{reqs} * queries, kHeads, 2 * kDim}, 3, 2.0F);
    out = Tensor(DType::bf16, {std::int64_t{reqs} * queries, kHeads, kDim}, kDevice);
    std::vector<std::int32_t> blocks(static_cast<std::size_t>(num_blocks)), starts;
    for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<std::int32_t>(i);
    std::shuffle(blocks.begin(), blocks.end(), std::mt19937(5));
    for (int i = 0; i <= reqs; ++i) starts.push_back(i * queries);
    table = upload(DType::i32, {num_blocks}, blocks);
    lens = upload(DType::i32, {reqs}, std::vector<std::int32_t>(static_cast<std::size_t>(reqs), keys));
    start = upload(DType::i32, {reqs + 1}, starts);
    if (queries > 64) return;  // the prefill kernel alone
    const auto bytes = ops::paged_attention_workspace_bytes(reqs, queries, kMaxSeqLen, kHeads, kDim);
    workspace = Tensor(DType::u8, {static_cast<std::int64_t>(bytes)}, kDevice);
  }

  // With limits as a graph would have them.
  void run(cudaStream_t stream, int set, bool as_decode, const Tensor& to) const {
    TensorView heads = q.view(), blocks = table.view();
    heads.shape[2] = kDim;
    blocks = make_view(static_cast<std::int32_t*>(blocks.data) + std::int64_t{set} * num_reqs * columns, DType::i32,
                       {num_reqs, columns}, kDevice);
    ops::paged_attention({.device = kDevice, .stream = {stream}, .threads = nullptr},
                         {.q = heads,
                          .k_cache = k.view(),
                          .v_cache = v.view(),
                          .block_table = blocks,
                          .seq_lens = lens.view(),
                          .query_start_loc = start.view(),
                          .scale = 1.0F / 16.0F,
                          .out = to.view(),
                          .num_decodes = as_decode ? num_reqs : 0,
                          .max_decode_query_len = query_len,
                          .max_query_len = query_len,
                          .max_seq_len = kMaxSeqLen,
                          .workspace = workspace.view()});
  }

  // The decode and the prefill kernel must agree.
  void check_result(cudaStream_t stream) const {
    const Tensor other(DType::bf16, {std::int64_t{num_reqs} * query_len, kHeads, kDim}, kDevice);
    check(cudaMemset(out.view().data, 0xff, out.view().num_bytes()));
    check(cudaMemset(other.view().data, 0xff, other.view().num_bytes()));
    check(cudaDeviceSynchronize());
    run(stream, 0, true, out);
    run(stream, 0, false, other);
    check(cudaStreamSynchronize(stream));
    const auto a = download(out), b = download(other);
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < a.size(); ++i) error += (a[i] - b[i]) * (a[i] - b[i]), norm += b[i] * b[i];
    require(std::sqrt(error / norm) < 6e-3, "the kernels differ by " + std::to_string(std::sqrt(error / norm)));
  }
};

void bench_decode(cudaStream_t stream, int num_reqs, int query_len, int seq_len, std::int64_t block_size) {
  const Setup setup(num_reqs, query_len, seq_len, block_size, true);
  if (num_reqs < 100) setup.check_result(stream);
  const double us =
      median_us(stream, 2 * setup.num_sets, [&](int i) { setup.run(stream, i % setup.num_sets, true, setup.out); });
  const double bytes = static_cast<double>(kKeyBytes) * seq_len * num_reqs;
  std::printf("decode  %4d requests x %d tokens, %6d keys  %9.2f us  %5.0f GB/s  %5.1f %%\n", num_reqs, query_len,
              seq_len, us, bytes / us / 1e3, 100 * bytes / (us * 1e-6) / kReadBound);
}

void bench_prefill(cudaStream_t stream, int num_reqs, int query_len, int seq_len, std::int64_t block_size) {
  {
    const Setup small(2, 60, 700, block_size, false);
    small.check_result(stream);
  }
  const Setup setup(num_reqs, query_len, seq_len, block_size, false);
  const double us = median_us(stream, 4, [&](int) { setup.run(stream, 0, false, setup.out); });
  double keys = 0;
  for (int t = 0; t < query_len; ++t) keys += seq_len - query_len + t + 1;
  const double operations = 4.0 * kDim * kHeads * keys * num_reqs;
  std::printf("prefill %4d requests x %5d tokens, %6d keys  %9.2f us  %5.0f TFLOP/s  %5.1f %%\n", num_reqs, query_len,
              seq_len, us, operations / us / 1e6, 100 * operations / (us * 1e-6) / kMatrixBound);
}

void bench_qk_norm_rope(cudaStream_t stream, std::int64_t num_tokens) {
  ModelConfig model;
  model.head_dim = kDim, model.rotary_dim = 64, model.max_position_embeddings = 40960;
  const ops::RotaryTable table = ops::make_rotary_table(model);
  const int num_sets = static_cast<int>(std::clamp<std::int64_t>(40000 / num_tokens, 2, 100));
  const Tensor q = random({num_tokens * num_sets, kHeads, 2 * kDim}, 1, 1.0F);
  const Tensor kv = random({num_tokens * num_sets, 2 * kKvHeads, kDim}, 2, 1.0F);
  const Tensor k_cache = random({num_tokens * num_sets, 16, kKvHeads, kDim}, 3, 1.0F);
  const Tensor weight = upload(DType::f32, {kDim}, std::vector<float>(kDim, 1.0F));
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(num_tokens));
  for (std::int64_t t = 0; t < num_tokens; ++t) numbers[static_cast<std::size_t>(t)] = t;
  const Tensor positions = upload(DType::i64, {1, num_tokens}, numbers);
  const Tensor slots = upload(DType::i64, {num_tokens}, numbers);
  const double us = median_us(stream, 2 * num_sets, [&](int i) {
    TensorView heads = q.view().slice(i % num_sets * num_tokens, (i % num_sets + 1) * num_tokens);
    TensorView k = kv.view().slice(i % num_sets * num_tokens, (i % num_sets + 1) * num_tokens);
    heads.shape[2] = kDim, k.shape[1] = kKvHeads;
    TensorView v = k;
    v.data = static_cast<__nv_bfloat16*>(v.data) + kKvHeads * kDim;
    ops::qk_norm_rope({.device = kDevice, .stream = {stream}, .threads = nullptr}, {.q = heads,
                                                                                    .k = k,
                                                                                    .v = v,
                                                                                    .q_norm_weight = weight.view(),
                                                                                    .k_norm_weight = weight.view(),
                                                                                    .rotary = &table,
                                                                                    .positions = positions.view(),
                                                                                    .slot_mapping = slots.view(),
                                                                                    .k_cache = k_cache.view(),
                                                                                    .v_cache = k_cache.view()});
  });
  const double bytes = static_cast<double>(num_tokens) * kDim * 2 * (2 * kHeads + 3 * kKvHeads + 2 * kKvHeads);
  std::printf("qk_norm_rope %6ld tokens  %9.2f us  %5.0f GB/s\n", static_cast<long>(num_tokens), us, bytes / us / 1e3);
}

}  // namespace

int main(const std::vector<std::string>& arguments) {
  const std::int64_t block_size = arguments.empty() ? 16 : std::stoll(arguments[0]);
  const Stream stream;
  for (const std::int64_t num_tokens : {1, 32, 128, 8192}) bench_qk_norm_rope(stream.handle, num_tokens);
  for (const int seq_len : {1024, 8192})
    for (const int num_reqs : {1, 8, 32, 128}) bench_decode(stream.handle, num_reqs, 1, seq_len, block_size);
  bench_decode(stream.handle, 1, 1, 65536, block_size);
  for (const int query_len : {2, 4}) bench_decode(stream.handle, 32, query_len, 1024, block_size);
  bench_prefill(stream.handle, 1, 512, 512, block_size);
  bench_prefill(stream.handle, 1, 2048, 2048, block_size);
  bench_prefill(stream.handle, 1, 8192, 8192, block_size);
  bench_prefill(stream.handle, 1, 2048, 16384, block_size);
  bench_prefill(stream.handle, 8, 1024, 1024, block_size);
  return 0;
}

}  // namespace deltaic::bench

int main(int argc, char** argv) {
  try {
    return deltaic::bench::main({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_attention: %s\n", error.what());
    return 1;
  }
}
