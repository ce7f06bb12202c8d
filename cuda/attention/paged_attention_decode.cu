// Paged attention for few query tokens a request: keys split over blocks, partial sums combined by combine_splits.cu.
//   An item is a split of a request's keys, a key/value head and up to 8 * kColumns of its query rows (row r is token
//   r / group, head r % group). Blocks take items in turn. In a block one warp copies boxes of 16 keys and their values
//   into a ring; tile t of the split belongs to warp t % kWarps, which computes S^T = K Q^T and O^T += V^T P^T with
//   mma.m16n8k16: keys and channels are the rows, query rows the columns. The warps' sums are merged in order.
//   Which keys a split has depends on the request's seq_len alone.
//   bound by memory: reads K and V once      source: Milakov and Gimelshein 2018; Dao et al., Flash-Decoding 2023
#include <algorithm>
#include <type_traits>

#include "cuda/attention/decode_params.cuh"
#include "cuda/attention/decode_sums.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/tensor_copy.cuh"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kWarps = 4, kConsumers = 32 * kWarps, kThreads = kConsumers + 32;
constexpr int kRingBytes = 64 * 1024;
constexpr int kBlocksPerSm = 2;
constexpr int kMaxRequests = 1024;
constexpr float kLog2E = 1.4426950408889634F;

template <int kDim, int kColumns>
struct Layout {
  static constexpr int kBoxes = kDim / kBoxDims;             // of the keys of a tile
  static constexpr int kSlotBytes = 2 * kBoxes * kBoxBytes;  // keys, then values
  static constexpr int kSlots = kRingBytes / kSlotBytes;
  static constexpr int kMergeStride = kDim + 4;                          // floats
  static constexpr int kMerge = kRingBytes;                              // f32 [kWarps][8][kMergeStride]
  static constexpr int kStats = kMerge + kWarps * 8 * kMergeStride * 4;  // f32 [kWarps][8 * kColumns][2]
  static constexpr int kQueryBuffers = kColumns == 1 ? 2 : 1;            // what two blocks of a processor have room for
  static constexpr int kQueryBytes = 8 * kColumns * query_stride(kDim) * 2;
  static constexpr int kQuery = kStats + kWarps * 8 * kColumns * 2 * 4;  // [kQueryBuffers][8 * kColumns][query_stride]
  static constexpr int kBarriers = kQuery + kQueryBuffers * kQueryBytes;
  static constexpr int kFirstSplit = kBarriers + 2 * (kSlots + kQueryBuffers) * 8;  // i32 [num_reqs + 1]
  static int bytes(int num_reqs) { return kFirstSplit + 4 * (num_reqs + 1); }
};

// The producer arrives at full, the warps that read at empty.
struct Barriers {
  std::uint64_t *full, *empty, *query_full, *query_empty;

  template <class L>
  __device__ static Barriers in(char* shared) {
    auto* first = reinterpret_cast<std::uint64_t*>(shared + L::kBarriers);
    return {first, first + L::kSlots, first + 2 * L::kSlots, first + 2 * L::kSlots + L::kQueryBuffers};
  }
  template <class L>
  __device__ void init() const {
    for (int i = 0; i < L::kSlots; ++i) barrier_init(&full[i], 1), barrier_init(&empty[i], 1);
    for (int i = 0; i < L::kQueryBuffers; ++i) barrier_init(&query_full[i], 1), barrier_init(&query_empty[i], kWarps);
    fence_barrier_init();
  }
};

struct Item {
  int request, split, kv_head, first_row, num_rows;  // num_rows counts from first_row, and may be under 1
  int query_begin, group, key_begin, key_end, num_splits;
  int first_position;  // of query token 0

  __device__ int num_tiles() const { return (key_end - key_begin + kBoxKeys - 1) / kBoxKeys; }
  __device__ int token(int row) const { return query_begin + (first_row + row) / group; }
  __device__ int head(int row) const { return kv_head * group + (first_row + row) % group; }
  __device__ int position(int row) const { return first_position + (first_row + row) / group; }
};

__device__ Item item_at(const DecodeParams& p, const int* first_split, int index, int rows_per_tile) {
  Item item;
  item.first_row = index % p.num_row_tiles * rows_per_tile;
  index /= p.num_row_tiles;
  item.kv_head = index % p.base.num_kv_heads;
  index /= p.base.num_kv_heads;
  int low = 0, high = p.base.num_reqs;  // the last request whose first split is at most index
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first_split[middle] <= index ? low : high) = middle;
  }
  item.request = low;
  item.split = index - first_split[low];
  item.num_splits = first_split[low + 1] - first_split[low];
  const int seq_len = p.base.seq_lens[low], keys = ops::keys_per_split(seq_len);
  item.query_begin = p.base.query_start_loc[low];
  const int query_len = p.base.query_start_loc[low + 1] - item.query_begin;
  item.group = p.base.group;
  item.num_rows = min(query_len * item.group - item.first_row, rows_per_tile);
  item.first_position = seq_len - query_len;
  item.key_begin = item.split * keys;
  item.key_end = min(item.key_begin + keys, seq_len);
  return item;
}

// first_split[i] = splits of the requests before i, for i = 0 ... num_reqs. All threads of the block.
__device__ void count_splits(const DecodeParams& p, int* first_split) {
  __shared__ int warp_sums[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (int begin = 0; begin < p.base.num_reqs; begin += kThreads) {
    const int request = begin + static_cast<int>(threadIdx.x);
    int sum = request < p.base.num_reqs ? p.num_splits(request) : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0U, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int total = before;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) sum += warp_sums[w];
      total += warp_sums[w];
    }
    if (request < p.base.num_reqs) first_split[request + 1] = before + sum;
    before = total;
    __syncthreads();
  }
  if (threadIdx.x == 0) first_split[0] = 0;
  __syncthreads();
}

__device__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

template <class T>
__device__ void store_four(T* out, float4 value, const T* gate) {
  if (gate != nullptr) {
    const uint2 packed = *reinterpret_cast<const uint2*>(gate);
    const float2 low = unpack<T>(packed.x), high = unpack<T>(packed.y);
    value.x /= 1.0F + __expf(-low.x), value.y /= 1.0F + __expf(-low.y);
    value.z /= 1.0F + __expf(-high.x), value.w /= 1.0F + __expf(-high.y);
  }
  *reinterpret_cast<uint2*>(out) = make_uint2(pack<T>(value.x, value.y), pack<T>(value.z, value.w));
}

// Copies the query rows that an item has; what the others hold reaches no result. One warp; a lane a row.
template <class T, class L, int kDim>
__device__ void copy_queries(const DecodeParams& p, const Item& item, char* shared, const Barriers& barriers,
                             int count) {
  const int buffer = count % L::kQueryBuffers, round = count / L::kQueryBuffers, row = threadIdx.x % 32;
  if (round > 0) barrier_wait(&barriers.query_empty[buffer], (round - 1) & 1);
  if (row == 0) barrier_expect(&barriers.query_full[buffer], item.num_rows * kDim * 2);
  __syncwarp();
  if (row >= item.num_rows) return;
  const T* q = static_cast<const T*>(p.base.q.data) + item.token(row) * p.base.q.token_stride +
               item.head(row) * p.base.q.head_stride;
  bulk_load(shared + L::kQuery + buffer * L::kQueryBytes + row * query_stride(kDim) * 2, q, kDim * 2,
            &barriers.query_full[buffer]);
}

// Fills the ring with the tiles of all items of this block, before the previous kernel has ended where it does not
// write them; the queries of an item follow its first tiles. One warp; a lane a box.
template <class T, int kDim, int kColumns>
__device__ void copy_tiles(const KvMaps& maps, const DecodeParams& p, char* shared, const int* first_split) {
  using L = Layout<kDim, kColumns>;
  const auto barriers = Barriers::in<L>(shared);
  const int lane = threadIdx.x % 32;
  const CUtensorMap* map = lane < L::kBoxes ? &maps.k : &maps.v;
  const int channel = lane % L::kBoxes * kBoxDims;
  const int num_items = first_split[p.base.num_reqs] * p.base.num_kv_heads * p.num_row_tiles;
  int count = 0, item_count = 0;
  bool has_waited = false;
  const auto wait_once = [&] {
    if (has_waited) return;
    wait_for_previous_kernel();
    allow_next_kernel();
    has_waited = true;
  };
  for (int index = blockIdx.x; index < num_items; index += gridDim.x) {
    const Item item = item_at(p, first_split, index, 8 * kColumns);
    if (item.num_rows < 1) continue;
    const std::int32_t* blocks = p.base.block_table + item.request * p.base.table_stride;
    const int num_tiles = item.num_tiles();
    int block = blocks[item.key_begin / p.base.block_size];
    for (int tile = 0; tile < num_tiles; ++tile, ++count) {
      const int key = item.key_begin + tile * kBoxKeys, next_key = key + kBoxKeys;
      const int next_block = next_key < item.key_end ? blocks[next_key / p.base.block_size] : 0;
      const int slot = count % L::kSlots, round = count / L::kSlots;
      if (round > 0) barrier_wait(&barriers.empty[slot], (round - 1) & 1);
      if (next_key > item.first_position) wait_once();  // the previous kernel writes the new tokens' keys
      if (lane == 0) barrier_expect(&barriers.full[slot], L::kSlotBytes);
      __syncwarp();
      if (lane < 2 * L::kBoxes)
        tensor_load(shared + slot * L::kSlotBytes + lane * kBoxBytes, map, channel, item.kv_head,
                    key % p.base.block_size, block, &barriers.full[slot]);
      block = next_block;
      if (tile + 1 == min(num_tiles, L::kSlots)) {
        wait_once();
        copy_queries<T, L, kDim>(p, item, shared, barriers, item_count++);
      }
    }
  }
  wait_once();
}

// What a slot holds past the last key may be NaN, and 0 * NaN is not 0.
__device__ void clear_values(char* values, int num_boxes, int first_row) {
  const int lane = threadIdx.x % 32;
  for (int box = 0; box < num_boxes; ++box)
    for (int i = first_row * 8 + lane; i < kBoxKeys * 8; i += 32)
      reinterpret_cast<uint4*>(values + box * kBoxBytes)[i] = uint4{};
  fence_async_shared();
  __syncwarp();
}

// Merges the warps' sums of column n in order, and writes them out: the result where there is one split, else partials.
template <class T, int kDim, int kColumns>
__device__ void merge_and_store(const DecodeParams& p, const Item& item, const char* shared, int n) {
  using L = Layout<kDim, kColumns>;
  const auto* merge = reinterpret_cast<const float*>(shared + L::kMerge);
  const auto* stats = reinterpret_cast<const float*>(shared + L::kStats);
  constexpr int kRowThreads = kConsumers / 8;
  const int row = threadIdx.x / kRowThreads, unit = threadIdx.x % kRowThreads, item_row = 8 * n + row;
  if (item_row >= item.num_rows) return;
  float max = -INFINITY, sum = 0.0F, factor[kWarps];
  for (int w = 0; w < kWarps; ++w) max = fmaxf(max, stats[(w * 8 * kColumns + item_row) * 2]);
  const float base = max == -INFINITY ? 0.0F : max;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    factor[w] = exp2f(stats[(w * 8 * kColumns + item_row) * 2] - base);
    sum += stats[(w * 8 * kColumns + item_row) * 2 + 1] * factor[w];
  }
  const std::int64_t partial_row = p.partial_row(item.request, item.split, item.kv_head, item.first_row + item_row);
  const std::int64_t token = item.token(item_row), head = item.head(item_row);
#pragma unroll
  for (int channel = unit * 4; channel < kDim; channel += 4 * kRowThreads) {
    float4 total{};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const auto value = *reinterpret_cast<const float4*>(merge + (w * 8 + row) * L::kMergeStride + channel);
      total.x += value.x * factor[w], total.y += value.y * factor[w];
      total.z += value.z * factor[w], total.w += value.w * factor[w];
    }
    if (item.num_splits > 1) {
      *reinterpret_cast<float4*>(p.partial + partial_row * kDim + channel) = total;
    } else {
      const T* gate = static_cast<const T*>(p.base.gate.data);
      if (gate != nullptr) gate += token * p.base.gate.token_stride + head * p.base.gate.head_stride + channel;
      T* out = static_cast<T*>(p.base.out.data) + token * p.base.out.token_stride + head * p.base.out.head_stride;
      const float inverse = 1.0F / sum;
      store_four(out + channel, {total.x * inverse, total.y * inverse, total.z * inverse, total.w * inverse}, gate);
    }
  }
  if (item.num_splits > 1 && unit == 0) *reinterpret_cast<float2*>(p.stats + partial_row * 2) = make_float2(max, sum);
}

template <class T, int kDim, int kColumns>
__device__ void compute_items(const DecodeParams& p, char* shared, const int* first_split) {
  using L = Layout<kDim, kColumns>;
  const auto barriers = Barriers::in<L>(shared);
  auto* merge = reinterpret_cast<float*>(shared + L::kMerge);
  auto* stats = reinterpret_cast<float*>(shared + L::kStats);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
  const float scale_log2 = p.base.scale * kLog2E;
  const int num_items = first_split[p.base.num_reqs] * p.base.num_kv_heads * p.num_row_tiles;
  WarpSums<T, kDim, kColumns> sums;
  int count = 0, item_count = 0;  // tiles of the items before, and these
  wait_for_previous_kernel();
  allow_next_kernel();
  for (int index = blockIdx.x; index < num_items; index += gridDim.x) {
    const Item item = item_at(p, first_split, index, 8 * kColumns);
    if (item.num_rows < 1) continue;
    const int buffer = item_count % L::kQueryBuffers;
    const std::uint32_t query = shared_address(shared + L::kQuery + buffer * L::kQueryBytes);
    barrier_wait(&barriers.query_full[buffer], item_count++ / L::kQueryBuffers & 1);
    sums.clear();
    int last[kColumns][2];
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = min(8 * n + 2 * q + h, item.num_rows - 1);
        last[n][h] = min(item.position(row), item.key_end - 1) - item.key_begin - warp * kBoxKeys;
      }
    for (int tile = warp; tile < item.num_tiles(); tile += kWarps) {
      const int slot = (count + tile) % L::kSlots, round = (count + tile) / L::kSlots;
      char* keys = shared + slot * L::kSlotBytes;
      char* values = keys + L::kBoxes * kBoxBytes;
      barrier_wait(&barriers.full[slot], round & 1);
      const int num_keys = item.key_end - item.key_begin - tile * kBoxKeys;
      if (num_keys < kBoxKeys) clear_values(values, L::kBoxes, num_keys);
      sums.add(shared_address(keys), shared_address(values), query, scale_log2, last);
      __syncwarp();
      if (lane == 0) barrier_arrive(&barriers.empty[slot]);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) last[n][0] -= kWarps * kBoxKeys, last[n][1] -= kWarps * kBoxKeys;
    }
    count += item.num_tiles();
    __syncwarp();
    if (lane == 0) barrier_arrive(&barriers.query_empty[buffer]);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = sums.sum[n][h];
        for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(~0U, sum, offset);
        float* at = stats + (warp * 8 * kColumns + 8 * n + 2 * q + h) * 2;
        if (g == 0) at[0] = sums.max[n][h], at[1] = sum;
      }
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          merge[(warp * 8 + 2 * q + c % 2) * L::kMergeStride + 16 * i + g + c / 2 * 8] = sums.acc[i][n][c];
      consumers_sync();
      merge_and_store<T, kDim, kColumns>(p, item, shared, n);
      consumers_sync();
    }
  }
}

template <class T, int kDim, int kColumns>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    decode_attention_kernel(const __grid_constant__ KvMaps maps, const __grid_constant__ DecodeParams p) {
#if __CUDA_ARCH__ >= 900
  using L = Layout<kDim, kColumns>;
  extern __shared__ __align__(1024) char shared[];
  auto* first_split = reinterpret_cast<int*>(shared + L::kFirstSplit);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&maps.k);
    prefetch_tensor_map(&maps.v);
    Barriers::in<L>(shared).template init<L>();
  }
  count_splits(p, first_split);  // its barriers publish the initialised ones, too
  if (threadIdx.x < kConsumers)
    compute_items<T, kDim, kColumns>(p, shared, first_split);
  else
    copy_tiles<T, kDim, kColumns>(maps, p, shared, first_split);
#else
  __trap();  // not built for this chip
#endif
}

template <class T, int kDim, int kColumns>
void launch_decode(cudaStream_t stream, const DecodeParams& params, const KvMaps& maps) {
  const AttentionParams& base = params.base;
  const auto kernel = decode_attention_kernel<T, kDim, kColumns>;
  const int bytes = Layout<kDim, kColumns>::bytes(base.num_reqs);
  int device = 0, num_sms = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const std::int64_t most_items =
      std::int64_t{base.num_reqs} * params.max_splits * base.num_kv_heads * params.num_row_tiles;
  const DependentLaunch launch{
      .grid = dim3(static_cast<unsigned>(std::min<std::int64_t>(most_items, kBlocksPerSm * num_sms))),
      .block = dim3(kThreads),
      .stream = stream,
      .shared_bytes = static_cast<std::size_t>(bytes)};
  launch(kernel, maps, params);
}

}  // namespace

void attention_decode(cudaStream_t stream, const AttentionParams& params, DType dtype, const KvMaps& maps,
                      float* partial) {
  DELTAIC_CHECK(params.num_reqs <= kMaxRequests, "paged_attention: ", params.num_reqs, " decodes, the most is ",
                kMaxRequests);
  const int rows = params.max_query_len * params.group;
  const int columns = rows <= 8 ? 1 : 2;
  DecodeParams decode{.base = params,
                      .num_row_tiles = (rows + 8 * columns - 1) / (8 * columns),
                      .max_splits = ops::max_splits(params.max_seq_len),
                      .partial = partial,
                      .stats = nullptr};
  decode.stats =
      partial + std::int64_t{params.num_reqs} * decode.max_splits * params.num_kv_heads * rows * params.head_dim;
  visit_half(dtype, [&]<class T>(T) {
    const auto with_dim = [&]<int kDim>(std::integral_constant<int, kDim>) {
      if (columns == 1)
        launch_decode<T, kDim, 1>(stream, decode, maps);
      else
        launch_decode<T, kDim, 2>(stream, decode, maps);
    };
    switch (params.head_dim) {
      case 64:
        return with_dim(std::integral_constant<int, 64>{});
      case 128:
        return with_dim(std::integral_constant<int, 128>{});
      default:
        return with_dim(std::integral_constant<int, 256>{});
    }
  });
  if (decode.max_splits > 1) combine_splits(stream, decode, dtype);
}

}  // namespace deltaic::cuda
