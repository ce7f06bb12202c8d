// RMS norm and rotary embedding of queries and keys, and the store of keys and values in the cache.
//   a warp is a head of a token (queries, then keys, then values), a block kWarps heads of one token, which share
//   cosines and sines; a row is read once, in 16-byte pieces where it is aligned
//   bound by memory: reads and writes q and k, reads v, writes both caches      source: Su et al. 2021, eq. 34
#include <cstring>

#include "cpp/src/ops/rotary.h"
#include "cuda/device/convert.cuh"
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
  int num_heads, num_kv_heads, head_dim, block_size, blocks_per_token;
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
  const std::int64_t token = blockIdx.x / p.blocks_per_token;
  int head = static_cast<int>(blockIdx.x % p.blocks_per_token) * kWarps + warp;
  wait_for_previous_kernel();
  allow_next_kernel();

  const int num_rows = p.num_heads + 2 * p.num_kv_heads;
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
                      .num_heads = num_heads,
                      .num_kv_heads = num_kv_heads,
                      .head_dim = static_cast<int>(args.q.shape[2]),
                      .block_size = static_cast<int>(args.k_cache.shape[1]),
                      .blocks_per_token = (num_heads + 2 * num_kv_heads + kWarps - 1) / kWarps};
  DELTAIC_CHECK(params.head_dim <= kMaxDim, "qk_norm_rope: head_dim is ", params.head_dim, ", the most is ", kMaxDim);
  const Frequencies frequencies = frequencies_of(*args.rotary, has_streams);
  const DependentLaunch launch{.grid = dim3(static_cast<unsigned>(args.q.shape[0] * params.blocks_per_token)),
                               .block = dim3(kThreads),
                               .stream = native(stream)};
  visit_float(args.q.dtype, [&]<class T>(T) {
    visit_float(args.k_cache.dtype, [&]<class C>(C) {
      constexpr int kVector = 16 / sizeof(T);
      if (!takes_pieces(args, kVector))
        launch(qk_norm_rope_kernel<T, C, 1, kMaxDim>, params, frequencies);
      else if (params.head_dim <= 256)  // with fewer registers
        launch(qk_norm_rope_kernel<T, C, kVector, 256>, params, frequencies);
      else
        launch(qk_norm_rope_kernel<T, C, kVector, kMaxDim>, params, frequencies);
    });
  });
}

}  // namespace deltaic::cuda
