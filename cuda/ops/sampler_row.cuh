// One row of the sampler, by all threads of its cluster.
#pragma once

#include "cuda/ops/sampler_process.cuh"
#include "cuda/ops/sampler_select.cuh"

namespace deltaic::cuda::sampler_detail {

// The largest key of a row, kNotFinite where it has a NaN or +inf. In every thread.
__device__ inline Key row_max(Shared& s, const Cluster& cluster, const Chunk& chunk, int turn) {
  ThreadMax max;
  chunk.for_each_group<8>([&](int id, float4 v) { max.offer(id, v); });
  return cluster_max(s, cluster, max.key(), turn);
}

// Draws among the tokens with logit >= lowest and key >= least. In every thread.
__device__ __noinline__ int draw_from(Shared& s, const Cluster& cluster, const Chunk& chunk, float max_logit,
                                      int position, float lowest, Key least) {
  const ops::SlotRecord& record = s.slot.record;
  const Scale scale(max_logit, record.temperature);
  WarpDraw draw(scale, record.seed, position);
  chunk.for_each_group<2>([&](int id, float4 v) {
    draw.offer(id, v, [&](float logit, int token) { return logit >= lowest && key_of(logit, token) >= least; });
  });
  return merge_cluster(s, cluster, draw.best(), scale);
}

// Draws among the first `count` keys of this block; the id in thread 0.
__device__ inline int draw_from_keys(Shared& s, int count, float max_logit, int position) {
  const ops::SlotRecord& record = s.slot.record;
  const Scale scale(max_logit, record.temperature);
  Draw best = no_draw();
  for (int first = 0; first < count; first += kThreads) {
    const int i = first + Chunk::thread();
    Draw mine = no_draw();
    if (i < count) {
      const int id = id_of(s.keys[i]);
      const std::uint32_t bits =
          ops::random_bits(record.seed, static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(id));
      mine = draw_of(logit_of(s.keys[i]), id, bits, scale);
    }
    merge_warp(best, mine, scale);
  }
  return merge_block(s, best, scale).id;
}

// The smallest float >= value.
__device__ inline float round_up(double value) { return __double2float_ru(value); }

// Draws among what top-k and top-p leave of the collected keys, in block 0, which alone calls it. The id in thread 0;
// -1 where top-p wants more tokens than were collected.
__device__ inline int draw_collected(Shared& s, const Candidates& c, const Collected& collected, int position) {
  const ops::SlotRecord& record = s.slot.record;
  auto count = static_cast<int>(collected.count);
  sort_keys(s, count);
  if (record.top_k > 0) count = min(count, record.top_k);
  if (record.top_p < 1.0F) {
    Target share{.top_p = record.top_p, .total = collected.total};
    if (record.top_k > 0) {
      keep_sorted(s, c, count, {}, {});
      share.total = s.kept_weight;
      __syncthreads();
    }
    keep_sorted(s, c, count, {}, share);
    const bool has_end = record.top_k > 0 || collected.is_all || share.is_reached({0, s.kept_weight});
    if (!has_end) return -1;
    count = static_cast<int>(s.num_kept);
  }
  return draw_from_keys(s, count, c.max_logit, position);
}

// Draws among what min_p, top-k and top-p leave; at least one of top-k and top-p is on. The id in thread 0 of block 0.
// row_keys are those of cluster_max(), and num_keys of block 0 is 0.
__device__ __noinline__ int draw_filtered(Shared& s, const Cluster& cluster, const Chunk& chunk, int position,
                                          float max_logit, float lowest) {
  const ops::SlotRecord& record = s.slot.record;
  const bool has_top_k = record.top_k > 0, has_top_p = record.top_p < 1.0F;
  const Candidates c(max_logit, record.temperature, lowest);
  Target target, share{.top_p = record.top_p};
  if (!has_top_k || record.top_k <= kMaxGroups / 2) {
    // The few best tokens are enough, nearly always.
    const Collected best = collect_best(s, cluster, chunk, max_logit, record.temperature,
                                        has_top_k ? record.top_k : kMaxGroups / 4, lowest, !has_top_k);
    share.total = best.total;
    if (best.count <= kCapacity && (!has_top_k || best.is_all || best.count >= record.top_k)) {
      int id = -1;
      if (cluster.rank == 0) id = draw_collected(s, c, best, position);
      if (has_top_k) return id;
      if (cluster.rank == 0 && threadIdx.x == 0) s.drawn_id = id;
      cluster.sync();
      id = *cluster.at(&s.drawn_id, 0);
      if (id >= 0) return id;
    }
  }

  build_histogram(s, cluster, chunk, c);
  if (has_top_k)
    target.count = static_cast<std::uint32_t>(record.top_k);
  else
    target = share;
  const Boundary found = find_boundary(s, s.total_count, s.total_weight, {}, target);
  Collected collected{found.count_before + found.count, found.bin < 0, share.total};
  if (collected.count <= kCapacity) {
    const int last_bin = found.bin >= 0 ? found.bin : kTailBin - 1;
    collect_again(s, cluster, chunk, [&](float logit, int) { return c.bin_of(logit) <= last_bin && logit >= lowest; });
    collected.is_all = true;  // as far as a draw is concerned
    return cluster.rank == 0 ? draw_collected(s, c, collected, position) : -1;
  }

  Key least = 0;
  bool has_end = found.bin >= 0;
  Boundary end = found;
  if (has_top_k) {
    share.total = found.weight_before;
    if (has_end) {
      const Cut cut = find_cut(s, cluster, chunk, c, found.bin, {found.count_before, found.weight_before}, target, 0);
      least = cut.key;
      share.total = cut.weight;
    }
    if (has_top_p) {
      const Boundary nearer = find_boundary(s, s.total_count, s.total_weight, {}, share);
      if (nearer.bin >= 0 && (!has_end || nearer.bin < end.bin)) has_end = true, end = nearer;
    }
  }
  if (has_top_p && has_end)
    least = find_cut(s, cluster, chunk, c, end.bin, {end.count_before, end.weight_before}, share, least).key;
  return draw_from(s, cluster, chunk, max_logit, position, lowest, least);
}

// How many raw logits are larger than that of the token; in thread 0 of block 0.
__device__ __noinline__ std::uint32_t count_above(Shared& s, const Cluster& cluster, const Chunk& chunk, float logit) {
  if (cluster.rank == 0 && threadIdx.x == 0) s.num_above = 0;
  cluster.sync();
  std::uint32_t count = 0;
  chunk.for_each<4>([&](int, float other) { count += other > logit ? 1U : 0U; });
  for (int offset = 16; offset > 0; offset /= 2) count += __shfl_xor_sync(~0U, count, offset);
  if (threadIdx.x % 32 == 0 && count > 0) atomicAdd(cluster.at(&s.num_above, 0), count);
  cluster.sync();
  return s.num_above;
}

// Writes the result of a row without a token: padding, or not finite.
__device__ inline void write_no_token(const SampleParams& p, std::int64_t row, bool finite) {
  p.token_ids[row] = 0;
  p.is_finite[row] = finite ? 1 : 0;
}

// Rows of padding are read like others, so that no read of a row has to wait for its slot.
__device__ inline void sample_greedy_row(Shared& s, const SampleParams& p, std::int64_t row) {
  const Cluster cluster;
  const std::int32_t slot = p.slots[row];
  const Chunk chunk(p.logits + row * p.row_stride, p.vocab_size, cluster);
  const Key max = row_max(s, cluster, chunk, 0);
  if (cluster.rank == 0 && threadIdx.x == 0) {
    write_no_token(p, row, slot < 0 || is_finite(max));
    if (slot >= 0 && is_finite(max)) p.token_ids[row] = id_of(max);
  }
  cluster.sync();  // others read what this block found
}

// Writes the best tokens of the raw logits; returns the log of the sum of e^logit. All blocks know that num_keys is 0
// before and behind it.
__device__ inline double write_best(Shared& s, const Cluster& cluster, const Chunk& chunk, const SampleParams& p,
                                    std::int64_t row, float max_logit) {
  const int count = min(s.slot.record.num_logprobs, p.num_logprobs);
  const double log_sum = best_in_order(s, cluster, chunk, max_logit, static_cast<std::uint32_t>(count));
  if (cluster.rank == 0) {
    const std::int64_t first = row * (1 + p.num_logprobs) + 1;
    for (int i = Chunk::thread(); i < count; i += kThreads) {
      p.logprob_token_ids[first + i] = id_of(s.keys[i]);
      p.logprobs[first + i] = static_cast<float>(static_cast<double>(logit_of(s.keys[i])) - log_sum);
    }
    __syncthreads();
    if (threadIdx.x == 0) s.num_keys = 0;
  }
  cluster.sync();
  return log_sum;
}

// Writes the token's own log probability and rank among the raw logits.
__device__ inline void write_own(Shared& s, const Cluster& cluster, const Chunk& raw, const SampleParams& p,
                                 std::int64_t row, int token_id, double log_sum) {
  const float logit = raw.row[token_id];
  const std::uint32_t above = count_above(s, cluster, raw, logit);
  if (cluster.rank != 0 || threadIdx.x != 0) return;
  const std::int64_t first = row * (1 + p.num_logprobs);
  p.logprob_token_ids[first] = token_id;
  p.logprobs[first] = static_cast<float>(static_cast<double>(logit) - log_sum);
  p.ranks[row] = static_cast<std::int32_t>(above) + 1;
}

// A token for a finite row. The id in thread 0 of block 0.
__device__ inline int choose(Shared& s, const Cluster& cluster, const Chunk& chunk, Key max, int position) {
  const ops::SlotRecord& record = s.slot.record;
  if (record.temperature == 0.0F) return id_of(max);
  const float max_logit = logit_of(max);
  const float lowest = record.has_min_p ? round_up(static_cast<double>(max_logit) + record.min_p_offset) : -infinity();
  if (record.top_k > 0 || record.top_p < 1.0F) return draw_filtered(s, cluster, chunk, position, max_logit, lowest);
  return draw_from(s, cluster, chunk, max_logit, position, lowest, 0);
}

__device__ inline void sample_row(Shared& s, const SampleParams& p, std::int64_t row) {
  static_assert(sizeof(SamplerSlot) % 4 == 0 && sizeof(SamplerSlot) / 4 <= kThreads);
  const Cluster cluster;
  const bool writes = cluster.rank == 0 && threadIdx.x == 0;
  const std::int32_t slot_id = p.slots[row];
  const int position = p.output_positions[row];
  const bool copies_slot = threadIdx.x < sizeof(SamplerSlot) / 4;
  std::uint32_t slot_word = 0;
  if (copies_slot && slot_id >= 0) slot_word = reinterpret_cast<const std::uint32_t*>(&p.table[slot_id])[threadIdx.x];
  if (writes) s.num_keys = 0;

  const Chunk chunk(p.logits + row * p.row_stride, p.vocab_size, cluster);
  Key max = row_max(s, cluster, chunk, 0);
  if (slot_id < 0) {
    if (writes) write_no_token(p, row, true);
    cluster.sync();  // others read what this block found
    return;
  }
  if (copies_slot) reinterpret_cast<std::uint32_t*>(&s.slot)[threadIdx.x] = slot_word;
  const bool has_context = p.num_context != nullptr;
  const Context context{has_context ? p.context_ids + row * p.max_context : nullptr,
                        has_context ? p.num_context[row] : 0};
  __syncthreads();
  if (context.count > 0 && threadIdx.x == 0 && s.slot.raw_logits != nullptr)
    s.slot.raw_logits += static_cast<std::int64_t>(context.count) * p.vocab_size;  // each row has its own
  __syncthreads();

  const bool processes = needs_processing(s.slot.record, position);
  const bool has_logprobs = p.num_logprobs >= 0 && s.slot.record.num_logprobs >= 0;
  double log_sum = 0;
  if (is_finite(max) && has_logprobs) log_sum = write_best(s, cluster, chunk, p, row, logit_of(max));
  if (is_finite(max) && processes) {
    process_logits(chunk, s.slot, context, position);
    max = row_max(s, cluster, chunk, 1);
  }
  if (is_finite(max)) {
    int token_id = choose(s, cluster, chunk, max, position);
    if (has_logprobs) {
      if (writes) s.token_id = token_id;
      cluster.sync();
      token_id = *cluster.at(&s.token_id, 0);
      Chunk raw = chunk;
      if (processes) {
        raw.row = s.slot.raw_logits;
        raw.is_aligned = reinterpret_cast<std::uintptr_t>(raw.row) % 16 == 0;
      }
      write_own(s, cluster, raw, p, row, token_id, log_sum);
    }
    if (writes) {
      p.token_ids[row] = token_id;
      p.is_finite[row] = 1;
      if (!has_context) add_token(s.slot, position, token_id);
    }
  } else if (writes) {
    write_no_token(p, row, false);
  }
  cluster.sync();  // others read what this block found
}

}  // namespace deltaic::cuda::sampler_detail
