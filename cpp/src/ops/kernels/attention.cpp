// Attention of a few query rows over one partition of the keys, by an online softmax over tiles of keys.
//   scores: register tiles of 4 keys by up to kMaxTile rows, lanes along head_dim
//   values: the accumulators of up to kMaxTile rows times four vectors of head_dim stay in registers over a tile's keys
#include "cpp/src/ops/kernels/dot.h"

namespace deltaic::cpu::DELTAIC_ISA {
namespace {

constexpr int kTile = kAttentionTile;
constexpr float kMinusInfinity = -__builtin_inff();

struct Scratch {
  float p[kMaxAttentionRows][kTile];                               // scores, then weights
  float lanes[kMaxAttentionRows][kLanes];                          // sums of weights, a lane each
  const char *k_rows[kTile], *v_rows[kTile], *next_k_rows[kTile];  // of the tile's keys
  int visible[kMaxAttentionRows];                                  // keys of the tile that a row sees
};

DELTAIC_INLINE void prefetch(const char* from, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// The first tile of rows fetches the values of the keys meanwhile.
template <class K, int M>
void scores(const AttentionArgs& args, Scratch& s, int row, int num_keys, int64_t v_row_bytes) {
  if (num_keys < 1) return;
  const int quarter = (num_keys + 3) / 4;  // four streams of keys, as in linear
  for (int j = 0; j < quarter; ++j) {
    const char* k[4];
    for (int r = 0; r < 4; ++r) k[r] = s.k_rows[r * quarter + j < num_keys ? r * quarter + j : num_keys - 1];
    if (v_row_bytes > 0)
      for (int r = 0; r < 4 && r * quarter + j < num_keys; ++r) prefetch(s.v_rows[r * quarter + j], v_row_bytes);
    Vec4 sums[M];
    dot_tile<K, M>(k, args.q + row, args.head_dim, sums);
    for (int i = 0; i < M; ++i)
      for (int r = 0; r < 4 && r * quarter + j < num_keys; ++r) s.p[row + i][r * quarter + j] = sums[i][r] * args.scale;
  }
}

// acc[row, c : c + width] += sum over keys [begin, end) of p * v, in the order of the keys.
// The first tile of rows fetches the next keys meanwhile (k_bytes of an element; 0: not).
template <class V, int M, int N>
DELTAIC_INLINE void values_at(const AttentionArgs& args, const Scratch& s, int row, int begin, int end, int64_t c,
                              int k_bytes) {
  Vec acc[M][N];
  for (int i = 0; i < M; ++i)
    for (int n = 0; n < N; ++n) acc[i][n] = load(args.acc + (row + i) * args.head_dim + c + n * kLanes);
  for (int j = begin; j < end; ++j) {
    const char* from = s.v_rows[j] + c * V::kBytes;
    if (k_bytes > 0) prefetch(s.next_k_rows[j] + c * k_bytes, N * kLanes * k_bytes);
    Vec v[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) v[n] = load<V>(from + n * kLanes * V::kBytes);
#pragma GCC unroll 6
    for (int i = 0; i < M; ++i) {
      const Vec p = splat(s.p[row + i][j]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[i][n] = fma(p, v[n], acc[i][n]);
    }
  }
  for (int i = 0; i < M; ++i)
    for (int n = 0; n < N; ++n) store(args.acc + (row + i) * args.head_dim + c + n * kLanes, acc[i][n]);
}

template <class V, int M>
void values(const AttentionArgs& args, const Scratch& s, int row, int begin, int end, int k_bytes) {
  int64_t c = 0;
  for (; c + 4 * kLanes <= args.head_dim; c += 4 * kLanes) values_at<V, M, 4>(args, s, row, begin, end, c, k_bytes);
  for (; c + kLanes <= args.head_dim; c += kLanes) values_at<V, M, 1>(args, s, row, begin, end, c, k_bytes);
  if (c == args.head_dim) return;
  const int count = static_cast<int>(args.head_dim - c);
  for (int i = 0; i < M; ++i) {
    float* acc = args.acc + (row + i) * args.head_dim + c;
    Vec sum = load_partial(acc, count);
    for (int j = begin; j < end; ++j)
      sum = fma(splat(s.p[row + i][j]), load_partial<V>(s.v_rows[j] + c * V::kBytes, count), sum);
    store_partial(acc, sum, count);
  }
}

// Turns a row's scores into weights and rescales what it has summed so far when a larger score came.
void softmax_step(const AttentionArgs& args, Scratch& s, int row, bool is_first) {
  float* p = s.p[row];
  for (int j = s.visible[row]; j < kTile; ++j) p[j] = kMinusInfinity;
  float* acc = args.acc + static_cast<int64_t>(row) * args.head_dim;
  Vec largest = load(p);
  for (int j = kLanes; j < kTile; j += kLanes) largest = max(load(p + j), largest);
  float tile_max = max_lane(largest);
  Vec lanes{};
  if (is_first) {
    for_each_vec(args.head_dim, [&](int64_t c, int count) { store_some(acc + c, Vec{}, count); });
    args.max[row] = tile_max;
  } else {
    lanes = load(s.lanes[row]);
    if (tile_max > args.max[row]) {
      const Vec factor = exp(splat(args.max[row] - tile_max));
      lanes *= factor;
      for_each_vec(args.head_dim,
                   [&](int64_t c, int count) { store_some(acc + c, load_some(acc + c, count) * factor, count); });
      args.max[row] = tile_max;
    }
  }
  for (int j = 0; j < kTile; j += kLanes) {
    const Vec weight = exp(load(p + j) - args.max[row]);
    store(p + j, weight);
    lanes += weight;
  }
  store(s.lanes[row], lanes);
}

// f.template operator()<M>(row) over rows in tiles of nearly equal height.
template <class F>
DELTAIC_INLINE void for_each_tile(int begin, int end, F f) {
  const int rows = end - begin, num_tiles = (rows + kMaxTile - 1) / kMaxTile;
  for (int t = 0; t < num_tiles; ++t) {
    const int row = begin + rows * t / num_tiles, height = begin + rows * (t + 1) / num_tiles - row;
    switch (height) {
      case 1:
        f.template operator()<1>(row);
        break;
      case 2:
        f.template operator()<2>(row);
        break;
      case 3:
        f.template operator()<3>(row);
        break;
#if defined(__AVX512F__)
      case 4:
        f.template operator()<4>(row);
        break;
      case 5:
        f.template operator()<5>(row);
        break;
      case 6:
        f.template operator()<6>(row);
        break;
#endif
      default:
        __builtin_unreachable();
    }
  }
}

void find_rows(const AttentionArgs& args, int64_t key, int num_keys, const char** k_rows, const char** v_rows) {
  int64_t block_id = key / args.block_size, slot = key % args.block_size;
  for (int j = 0; j < num_keys; ++j) {
    const int64_t block = args.block_table[block_id];
    k_rows[j] = args.k_cache + block * args.k_block_bytes + slot * args.k_slot_bytes;
    v_rows[j] = args.v_cache + block * args.v_block_bytes + slot * args.v_slot_bytes;
    if (++slot == args.block_size) slot = 0, ++block_id;
  }
}

template <class K, class V>
void attention_of(const AttentionArgs& args) {
  Scratch s;
  const int64_t last_key = args.position[args.num_rows - 1];
  const int64_t partition_end = args.key_begin + kAttentionPartition;
  const int64_t end = last_key + 1 < partition_end ? last_key + 1 : partition_end;
  const auto keys_at = [&](int64_t key) { return static_cast<int>(end - key < kTile ? end - key : kTile); };
  const char* next_v_rows[kTile] = {};
  find_rows(args, args.key_begin, keys_at(args.key_begin), s.k_rows, s.v_rows);
  for (int64_t key = args.key_begin; key < end; key += kTile) {
    const int num_keys = keys_at(key), num_next = key + kTile < end ? keys_at(key + kTile) : 0;
    find_rows(args, key + kTile, num_next, s.next_k_rows, next_v_rows);
    int first = args.num_rows;  // rows from here on see a key of the tile: positions ascend
    while (first > 0 && args.position[first - 1] >= key) --first;
    for_each_tile(first, args.num_rows, [&]<int M>(int row) {
      scores<K, M>(args, s, row, num_keys, row == first ? args.head_dim * V::kBytes : 0);
    });
    for (int row = first; row < args.num_rows; ++row) {
      const int64_t seen = args.position[row] + 1 - key;
      s.visible[row] = static_cast<int>(seen < num_keys ? seen : num_keys);
      softmax_step(args, s, row, key == args.key_begin);
    }
    for_each_tile(first, args.num_rows, [&]<int M>(int row) {
      const int common = s.visible[row];  // the first row of a tile sees the fewest keys
      values<V, M>(args, s, row, 0, common, row == first && num_next == kTile ? K::kBytes : 0);
      for (int i = 1; i < M; ++i)
        if (s.visible[row + i] > common) values<V, 1>(args, s, row + i, common, s.visible[row + i], 0);
    });
    for (int j = 0; j < num_next; ++j) s.k_rows[j] = s.next_k_rows[j], s.v_rows[j] = next_v_rows[j];
  }
  for (int row = 0; row < args.num_rows; ++row)
    if (args.position[row] >= args.key_begin) args.sum[row] = sum(load(s.lanes[row]));
}

template <class K>
void attention_by_value(const AttentionArgs& args) {
  switch (args.v_type) {
    case Float::f32:
      return attention_of<K, F32>(args);
    case Float::f16:
      return attention_of<K, F16>(args);
    case Float::bf16:
      return attention_of<K, BF16>(args);
  }
}

}  // namespace

void attention(const AttentionArgs& args) {
  switch (args.k_type) {
    case Float::f32:
      return attention_by_value<F32>(args);
    case Float::f16:
      return attention_by_value<F16>(args);
    case Float::bf16:
      return attention_by_value<BF16>(args);
  }
}

void attention_merge(float* max, float* sum, float* acc, float other_max, float other_sum, const float* other_acc,
                     int64_t n) {
  const float new_max = *max > other_max ? *max : other_max;
  const Vec factor = exp(splat(*max - new_max)), other_factor = exp(splat(other_max - new_max));
  *max = new_max;
  *sum = *sum * factor[0] + other_sum * other_factor[0];
  for_each_vec(n, [&](int64_t i, int count) {
    store_some(acc + i, fma(load_some(acc + i, count), factor, load_some(other_acc + i, count) * other_factor), count);
  });
}

}  // namespace deltaic::cpu::DELTAIC_ISA
