// RMS norm and rotary embedding of queries and keys, and the store of keys and values in the cache.
//   rows of a token are the heads of its queries, then keys, then values
//   f16 and bf16 of 128 and 256 channels: a warp is some rows of a token, of few tokens one, of many all, for it
//   computes the cosines and sines; a lane has 8 channels, and a rotation is an exchange between lanes others: a warp
//   is a row, a block kWarps rows of one token, which share cosines and sines bound by memory: reads and writes q and
//   k, reads v, writes both caches      source: Su et al. 2021, eq. 34
#include <algorithm>
#include <cstring>

#include "cpp/src/ops/rotary.h"
#include "cuda/device/convert.cuh"
#include "cuda/device/matrix_load.cuh"
#include "cuda/handles.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kMaxDim = 512, kMaxFrequencies = kMaxDim / 2;

// The RotaryTable as a kernel parameter: nothing of it lives on the device.
struct Frequencies {
  float inv_freq[kMaxFrequencies];
  std::uint8_t stream[kMaxFrequencies];
  int count;
  float attention_factor;
};

struct Rows {
  void* data;
  std::int64_t token_stride, head_stride;
};
struct Cache {
  void* data;
  std::int64_t block_stride, slot_stride, head_stride;
};

struct Params {
  Rows q, k, v;
  Cache k_cache, v_cache;
  const float *q_norm, *k_norm;
  float eps;
  const std::int64_t *positions, *slot_mapping;
  std::int64_t stream_stride;  // of positions; 0 with one stream
  int num_tokens, num_heads, num_kv_heads, head_dim, block_size;

  __host__ __device__ int num_rows() const { return num_heads + 2 * num_kv_heads; }
};

template <class T, int kVector>
struct alignas(sizeof(T) * kVector) Piece {
  T at[kVector];
};

// Lane l holds pieces l, l + 32, ... of a row, up to kDims channels in all.
template <class T, int kVector, int kDims>
struct LaneRow {
  static constexpr int kPieces = kDims / 32 / kVector;
  float value[kPieces][kVector];

  template <class F>
  __device__ static void each_piece(int dim, F&& f) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int channel = (static_cast<int>(threadIdx.x % 32) + 32 * i) * kVector;
      if (channel < dim) f(i, channel);
    }
  }
  __device__ void load(const T* row, int dim) {
    each_piece(dim, [&](int i, int channel) {
      const auto piece = *reinterpret_cast<const Piece<T, kVector>*>(row + channel);
#pragma unroll
      for (int j = 0; j < kVector; ++j) value[i][j] = to_float(piece.at[j]);
    });
  }
  template <class U>
  __device__ void store(U* row, int dim) const {
    each_piece(dim, [&](int i, int channel) {
      Piece<U, kVector> piece;
#pragma unroll
      for (int j = 0; j < kVector; ++j) piece.at[j] = from_float<U>(value[i][j]);
      *reinterpret_cast<Piece<U, kVector>*>(row + channel) = piece;
    });
  }
};

template <class C>
__device__ C* cache_row(const Cache& cache, std::int64_t slot, int head, int block_size) {
  return static_cast<C*>(cache.data) + slot / block_size * cache.block_stride + slot % block_size * cache.slot_stride +
         head * cache.head_stride;
}

template <class T, class C, int kVector, int kDims>
__global__ void __launch_bounds__(kThreads)
    qk_norm_rope_kernel(const __grid_constant__ Params p, const __grid_constant__ Frequencies frequencies) {
  __shared__ float cosine[kMaxFrequencies], sine[kMaxFrequencies];
  __shared__ float rotated[kWarps][kDims];
  const int warp = threadIdx.x / 32, dim = p.head_dim;
  const int num_rows = p.num_rows(), blocks_per_token = (num_rows + kWarps - 1) / kWarps;
  const std::int64_t token = blockIdx.x / blocks_per_token;
  int head = static_cast<int>(blockIdx.x) % blocks_per_token * kWarps + warp;
  wait_for_previous_kernel();
  allow_next_kernel();

  const bool is_query = head < p.num_heads, is_key = !is_query && head < p.num_heads + p.num_kv_heads;
  const bool is_value = !is_query && !is_key && head < num_rows;
  if (is_key) head -= p.num_heads;
  if (is_value) head -= p.num_heads + p.num_kv_heads;
  const Rows& rows = is_query ? p.q : is_key ? p.k : p.v;
  T* row = static_cast<T*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
  LaneRow<T, kVector, kDims> x;
  if (is_query || is_key || is_value) x.load(row, dim);

  for (int j = threadIdx.x; j < frequencies.count; j += kThreads) {
    const std::int64_t position = p.positions[frequencies.stream[j] * p.stream_stride + token];
    float s, c;
    sincosf(static_cast<float>(position) * frequencies.inv_freq[j], &s, &c);
    cosine[j] = c * frequencies.attention_factor;
    sine[j] = s * frequencies.attention_factor;
  }
  __syncthreads();

  if (is_query || is_key) {
    float squares = 0.0F;
    x.each_piece(dim, [&](int i, int) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) squares += x.value[i][j] * x.value[i][j];
    });
    for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(~0U, squares, offset);
    const float scale = 1.0F / sqrtf(squares / static_cast<float>(dim) + p.eps);
    const float* weight = is_query ? p.q_norm : p.k_norm;
    x.each_piece(dim, [&](int i, int channel) {
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        rotated[warp][channel + j] = x.value[i][j] = x.value[i][j] * scale * weight[channel + j];
    });
    __syncwarp();
    x.each_piece(dim, [&](int i, int channel) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const int at = channel + j, half = frequencies.count;
        if (at < half)
          x.value[i][j] = x.value[i][j] * cosine[at] - rotated[warp][at + half] * sine[at];
        else if (at < 2 * half)
          x.value[i][j] = x.value[i][j] * cosine[at - half] + rotated[warp][at - half] * sine[at - half];
      }
    });
    x.store(row, dim);
  }
  if (!is_key && !is_value) return;
  const std::int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  x.store(cache_row<C>(is_key ? p.k_cache : p.v_cache, slot, head, p.block_size), dim);
}

constexpr int kAtOnce = 4;                 // loads of a lane that are under way together
constexpr std::int64_t kManyWarps = 4096;  // a warp takes one row while there are no more

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 3)
    qk_norm_rope_rows_kernel(const __grid_constant__ Params p, const __grid_constant__ Frequencies frequencies,
                             int rows_per_warp) {
  constexpr int kVector = 8, kLanes = kDim / kVector, kRowsAtOnce = 32 / kLanes;
  __shared__ float cosine[kWarps][kDim / 2], sine[kWarps][kDim / 2];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int place = lane % kLanes, num_rows = p.num_rows(), parts = (num_rows + rows_per_warp - 1) / rows_per_warp;
  const int number = static_cast<int>(blockIdx.x) * kWarps + warp, token = number / parts;
  if (token >= p.num_tokens) return;
  const int first = number % parts * rows_per_warp, end = min(first + rows_per_warp, num_rows);

  // No kernel just before this one writes positions, slots and weights.
  for (int j = lane; j < frequencies.count; j += 32) {
    const std::int64_t position = p.positions[frequencies.stream[j] * p.stream_stride + token];
    float s, c;
    sincosf(static_cast<float>(position) * frequencies.inv_freq[j], &s, &c);
    cosine[warp][j] = c * frequencies.attention_factor;
    sine[warp][j] = s * frequencies.attention_factor;
  }
  __syncwarp();
  const int half = frequencies.count / kVector;  // lanes
  const bool turns = place < 2 * half, is_left = place < half;
  const int partner = !turns ? lane : is_left ? lane + half : lane - half;
  float c[kVector], s[kVector], q_weight[kVector], k_weight[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const int at = (is_left ? place : place - half) * kVector + j;
    c[j] = turns ? cosine[warp][at] : 1.0F;
    s[j] = !turns ? 0.0F : is_left ? -sine[warp][at] : sine[warp][at];
    q_weight[j] = p.q_norm[place * kVector + j], k_weight[j] = p.k_norm[place * kVector + j];
  }
  const std::int64_t slot = p.slot_mapping[token];
  wait_for_previous_kernel();
  allow_next_kernel();

  const auto address_of = [&](int row) {
    const bool is_query = row < p.num_heads, is_key = !is_query && row < p.num_heads + p.num_kv_heads;
    if (!is_query) row -= p.num_heads;
    if (!is_query && !is_key) row -= p.num_kv_heads;
    const Rows& rows = is_query ? p.q : is_key ? p.k : p.v;
    return static_cast<T*>(rows.data) + token * rows.token_stride + row * rows.head_stride + place * kVector;
  };
  for (int begin = first; begin < end; begin += kAtOnce * kRowsAtOnce) {
    uint4 pieces[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      pieces[i] =
          *reinterpret_cast<const uint4*>(address_of(min(begin + i * kRowsAtOnce + lane / kLanes, num_rows - 1)));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = begin + i * kRowsAtOnce + lane / kLanes;
      const bool is_query = row < p.num_heads, is_value = row >= p.num_heads + p.num_kv_heads;
      const std::uint32_t words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
      float x[kVector], squares = 0.0F;
#pragma unroll
      for (int j = 0; j < kVector; j += 2) {
        const float2 two = unpack<T>(words[j / 2]);
        x[j] = two.x, x[j + 1] = two.y;
        squares += two.x * two.x + two.y * two.y;
      }
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) squares += __shfl_xor_sync(~0U, squares, mask);
      const float scale = 1.0F / sqrtf(squares / static_cast<float>(kDim) + p.eps);
#pragma unroll
      for (int j = 0; j < kVector; ++j) x[j] *= scale * (is_query ? q_weight[j] : k_weight[j]);
#pragma unroll
      for (int j = 0; j < kVector; ++j) x[j] = x[j] * c[j] + __shfl_sync(~0U, x[j], partner) * s[j];
      if (row >= end) continue;
      if (!is_value) {
        pieces[i] = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])};
        *reinterpret_cast<uint4*>(address_of(row)) = pieces[i];
      }
      if (is_query || slot < 0) continue;
      const int head = row - p.num_heads - (is_value ? p.num_kv_heads : 0);
      T* to = cache_row<T>(is_value ? p.v_cache : p.k_cache, slot, head, p.block_size);
      *reinterpret_cast<uint4*>(to + place * kVector) = pieces[i];
    }
  }
}

Frequencies frequencies_of(const ops::RotaryTable& table, bool has_streams) {
  Frequencies result{};
  DELTAIC_CHECK(table.inv_freq.size() <= kMaxFrequencies, "qk_norm_rope: rotary_dim is ", table.rotary_dim,
                ", the most is ", 2 * kMaxFrequencies);
  result.count = static_cast<int>(table.inv_freq.size());
  std::memcpy(result.inv_freq, table.inv_freq.data(), table.inv_freq.size() * sizeof(float));
  if (has_streams) std::memcpy(result.stream, table.stream.data(), table.stream.size());
  result.attention_factor = table.attention_factor;
  return result;
}

Rows rows_of(const TensorView& view) { return {view.data, view.stride[0], view.stride[1]}; }
Cache cache_of(const TensorView& view) { return {view.data, view.stride[0], view.stride[1], view.stride[2]}; }

// Whether rows can be read and written in pieces of `elements`.
bool takes_pieces(const ops::QkNormRopeArgs& args, std::int64_t elements) {
  const auto fits = [&](const TensorView& view) {
    bool fit = reinterpret_cast<std::uintptr_t>(view.data) % (elements * size_of(view.dtype)) == 0;
    for (int i = 0; i + 1 < view.rank; ++i) fit = fit && view.stride[i] % elements == 0;
    return fit;
  };
  return args.q.shape[2] % elements == 0 && fits(args.q) && fits(args.k) && fits(args.v) && fits(args.k_cache) &&
         fits(args.v_cache);
}

}  // namespace

void qk_norm_rope(ops::Stream stream, const ops::QkNormRopeArgs& args) {
  const DeviceGuard guard(args.q.device.index);
  const auto num_heads = static_cast<int>(args.q.shape[1]), num_kv_heads = static_cast<int>(args.k.shape[1]);
  const bool has_streams = args.positions.shape[0] == 3;
  const Params params{.q = rows_of(args.q),
                      .k = rows_of(args.k),
                      .v = rows_of(args.v),
                      .k_cache = cache_of(args.k_cache),
                      .v_cache = cache_of(args.v_cache),
                      .q_norm = static_cast<const float*>(args.q_norm_weight.data),
                      .k_norm = static_cast<const float*>(args.k_norm_weight.data),
                      .eps = args.eps,
                      .positions = static_cast<const std::int64_t*>(args.positions.data),
                      .slot_mapping = static_cast<const std::int64_t*>(args.slot_mapping.data),
                      .stream_stride = has_streams ? args.positions.stride[0] : 0,
                      .num_tokens = static_cast<int>(args.q.shape[0]),
                      .num_heads = num_heads,
                      .num_kv_heads = num_kv_heads,
                      .head_dim = static_cast<int>(args.q.shape[2]),
                      .block_size = static_cast<int>(args.k_cache.shape[1])};
  DELTAIC_CHECK(params.head_dim <= kMaxDim, "qk_norm_rope: head_dim is ", params.head_dim, ", the most is ", kMaxDim);
  const Frequencies frequencies = frequencies_of(*args.rotary, has_streams);
  const auto launch = [&](std::int64_t num_blocks, auto kernel, auto... arguments) {
    const DependentLaunch blocks{
        .grid = dim3(static_cast<unsigned>(num_blocks)), .block = dim3(kThreads), .stream = native(stream)};
    blocks(kernel, params, frequencies, arguments...);
  };
  const int num_rows = params.num_rows();
  visit_float(args.q.dtype, [&]<class T>(T) {
    constexpr int kVector = 16 / sizeof(T);
    const bool takes = takes_pieces(args, kVector);
    if constexpr (sizeof(T) == 2)
      if (takes && args.k_cache.dtype == args.q.dtype && frequencies.count % kVector == 0 &&
          (params.head_dim == 128 || params.head_dim == 256)) {
        const int rows_per_warp = static_cast<int>(
            std::clamp<std::int64_t>(std::int64_t{params.num_tokens} * num_rows / kManyWarps, 1, num_rows));
        const std::int64_t num_warps =
            std::int64_t{params.num_tokens} * ((num_rows + rows_per_warp - 1) / rows_per_warp);
        return launch((num_warps + kWarps - 1) / kWarps,
                      params.head_dim == 128 ? qk_norm_rope_rows_kernel<T, 128> : qk_norm_rope_rows_kernel<T, 256>,
                      rows_per_warp);
      }
    const std::int64_t num_blocks = std::int64_t{params.num_tokens} * ((num_rows + kWarps - 1) / kWarps);
    visit_float(args.k_cache.dtype, [&]<class C>(C) {
      launch(num_blocks, !takes                   ? qk_norm_rope_kernel<T, C, 1, kMaxDim>
                         : params.head_dim <= 256 ? qk_norm_rope_kernel<T, C, kVector, 256>  // with fewer registers
                                                  : qk_norm_rope_kernel<T, C, kVector, kMaxDim>);
    });
  });
}

}  // namespace deltaic::cuda
