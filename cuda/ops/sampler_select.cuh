// Which tokens top-k, top-p and min_p leave, and the best ones in order.
//   a histogram of the distance to the largest logit, in bins of 1/32 of temperature, tells the bin in which the sought
//   token lies; the few tokens down to that bin are collected and sorted by one block
//   where they are too many to sort, the bin is cut finer, by key, until its tokens can be sorted; then all tokens are
//   compared with the key that was found
// Sums are integers, so results do not depend on the order of additions.
#pragma once

#include "cuda/ops/sampler_draw.cuh"

namespace deltaic::cuda::sampler_detail {

constexpr int kBinsPerUnit = 32;
// Everything that is kBins / kBinsPerUnit = 32 units of temperature below the best token or more: its noise cannot make
// up for that, and its weight is below 2e-14.
constexpr int kTailBin = kBins - 1;
// Rounding of the sums below; a bin more than needed does no harm.
constexpr double kShareSlack = 1e-7;

__device__ inline Weight fixed(double weight) { return static_cast<Weight>(weight * kWeightUnit + 0.5); }

// The tokens of a row that take part, and their histogram.
struct Candidates {
  float max_logit, scale;  // bins per unit of logit
  double temperature;
  float lowest;  // what is below does not take part

  __device__ Candidates(float max_logit_, float temperature_, float lowest_)
      : max_logit(max_logit_),
        scale(static_cast<float>(kBinsPerUnit) / temperature_),
        temperature(temperature_),
        lowest(lowest_) {}

  // Place of a logit in the histogram; never less where the logit is lower.
  __device__ float place_of(float logit) const {
    return fminf((max_logit - logit) * scale, static_cast<float>(kTailBin));
  }
  __device__ int bin_of(float logit) const { return static_cast<int>(place_of(logit)); }
  __device__ Weight weight_of(float logit) const {
    return fixed(exp((static_cast<double>(logit) - static_cast<double>(max_logit)) / temperature));
  }
};

// A weight in a bin is e^(-bin / 32) * (1 - residual / 32), residual in [0, 1): counts and sums of residuals give the
// weight of a bin. Residuals are in units such that their sum over a chunk fits.
__device__ inline float residual_units(int chunk_size) { return static_cast<float>(1U << min(__clz(chunk_size), 20)); }

// Fills total_count and total_weight of every block. The tail is left out.
__device__ inline void build_histogram(Shared& s, const Cluster& cluster, const Chunk& chunk, const Candidates& c) {
  for (int i = Chunk::thread(); i < kBins; i += kThreads) s.count[i] = 0, s.residual[i] = 0;
  __syncthreads();
  const float units = residual_units(chunk.largest);
  chunk.for_each<4>([&](int, float logit) {
    const float place = c.place_of(logit);
    const int bin = static_cast<int>(place);
    if (bin >= kTailBin || logit < c.lowest) return;
    const float y = (place - static_cast<float>(bin)) * (1.0F / kBinsPerUnit);
    const float residual = kBinsPerUnit * y * (1.0F - y * (0.5F - y * (1.0F / 6.0F)));
    atomicAdd(&s.count[bin], 1U);
    atomicAdd(&s.residual[bin], static_cast<std::uint32_t>(residual * units));
  });
  cluster.sync();
  const int per_block = (kBins + cluster.size - 1) / cluster.size;
  const int end = min(kBins, (cluster.rank + 1) * per_block);
  for (int bin = cluster.rank * per_block + Chunk::thread(); bin < end; bin += kThreads) {
    std::uint32_t count = 0;
    std::uint64_t residual = 0;
    for (int block = 0; block < cluster.size; ++block) {
      count += *cluster.at(&s.count[bin], block);
      residual += *cluster.at(&s.residual[bin], block);
    }
    Weight weight = 0;
    if (count > 0) {  // residuals were rounded down, by half a unit on average
      const double residuals = (static_cast<double>(residual) + 0.5 * count) / static_cast<double>(units);
      weight = fixed(exp(-static_cast<double>(bin) / kBinsPerUnit) * (count - residuals / kBinsPerUnit));
    }
    for (int block = 0; block < cluster.size; ++block) {
      *cluster.at(&s.total_count[bin], block) = count;
      *cluster.at(&s.total_weight[bin], block) = weight;
    }
  }
  cluster.sync();
}

// What is sought: the first token at which the count of tokens reaches `count`, or their share of `total` top_p.
struct Target {
  std::uint32_t count = ~0U;
  float top_p = 2.0F;  // 2: never
  Weight total = 0;

  __device__ bool has_share() const { return top_p < 1.0F; }
  __device__ bool is_reached(const Sums& sums) const {
    return sums.count >= count ||
           (has_share() && static_cast<float>(static_cast<double>(sums.weight) / static_cast<double>(total)) >= top_p);
  }
  // The same for sums over bins, with their rounding.
  __device__ bool is_surely_reached(const Sums& sums) const {
    return sums.count >= count ||
           (has_share() && static_cast<double>(sums.weight) >=
                               (static_cast<double>(top_p) + kShareSlack) * static_cast<double>(total));
  }
};

// The first of kBins bins at whose end the target is reached, `before` counted in. Without one, bin is -1, count 0 and
// the rest about all bins. In every thread of the block.
__device__ inline Boundary find_boundary(Shared& s, const std::uint32_t* counts, const Weight* weights,
                                         const Sums& before, const Target& target) {
  const int first = 2 * Chunk::thread();
  Sums end = block_scan(s, {counts[first] + counts[first + 1], weights[first] + weights[first + 1]});
  end.count += before.count, end.weight += before.weight;
  s.scanned[threadIdx.x] = end;
  if (threadIdx.x == kThreads - 1) s.boundary = {-1, 0, end.count, end.weight};
  __syncthreads();
  const Sums begin = threadIdx.x == 0 ? before : s.scanned[threadIdx.x - 1];
  if (target.is_surely_reached(end) && !(threadIdx.x > 0 && target.is_surely_reached(begin))) {  // in one thread
    const Sums middle{begin.count + counts[first], begin.weight + weights[first]};
    if (target.is_surely_reached(middle))
      s.boundary = {first, counts[first], begin.count, begin.weight};
    else
      s.boundary = {first + 1, counts[first + 1], middle.count, middle.weight};
  }
  __syncthreads();
  const Boundary found = s.boundary;
  __syncthreads();
  return found;
}

// Collects the tokens that take(logit, id) names in the keys of block 0. num_keys of block 0 counts them, also where
// there are more than kCapacity; it must be 0 before, and known to be by all blocks. may_take(logit) is true where
// take() is true for that logit or a lower one. see() is shown every group. The keys are there behind the next barrier.
template <class MayTake, class Take, class See>
__device__ void collect(Shared& s, const Cluster& cluster, const Chunk& chunk, MayTake may_take, Take take, See see) {
  std::uint32_t* num_keys = cluster.at(&s.num_keys, 0);
  Key* keys = cluster.at(s.keys, 0);
  const unsigned lane = threadIdx.x % 32;
  chunk.for_each_group<4>([&](int first, float4 v) {
    see(v);
    if (!__any_sync(~0U, may_take(fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w))))) return;
    const float logits[4] = {v.x, v.y, v.z, v.w};
    for (int i = 0; i < 4; ++i) {
      const float logit = i == 0 ? logits[0] : i == 1 ? logits[1] : i == 2 ? logits[2] : logits[3];
      const int id = first + i;
      const bool is_taken = chunk.has(id) && take(logit, id);
      const unsigned taken = __ballot_sync(~0U, is_taken);
      if (taken == 0) continue;
      std::uint32_t at = 0;
      if (lane == 0) at = atomicAdd(num_keys, static_cast<std::uint32_t>(__popc(taken)));
      at = __shfl_sync(~0U, at, 0) + static_cast<std::uint32_t>(__popc(taken & ((1U << lane) - 1)));
      if (is_taken && at < kCapacity) keys[at] = key_of(logit, id);
    }
  });
}
template <class Take>
__device__ void collect_again(Shared& s, const Cluster& cluster, const Chunk& chunk, Take take) {
  if (cluster.rank == 0 && threadIdx.x == 0) s.num_keys = 0;
  cluster.sync();
  collect(s, cluster, chunk, [](float) { return true; }, take, [](float4) {});
  cluster.sync();
}

// A sum of weights e^((logit - largest) / temperature) in units of 2^-31.
class WeightSum {
 public:
  __device__ WeightSum(float max_logit, float temperature) : max_logit_(max_logit), factor_(kLog2E / temperature) {}
  __device__ void add(float4 v, float lowest) {
    add(v.x, lowest), add(v.y, lowest), add(v.z, lowest), add(v.w, lowest);
  }
  // Publishes the sum of the block, before a cluster barrier.
  __device__ void publish(Shared& s) {
    for (int offset = 16; offset > 0; offset /= 2) sum_ += __shfl_xor_sync(~0U, sum_, offset);
    if (threadIdx.x % 32 == 0) s.warp_total[threadIdx.x / 32] = sum_;
    __syncthreads();
    if (threadIdx.x != 0) return;
    s.block_total = 0;
    for (int warp = 0; warp < kWarps; ++warp) s.block_total += s.warp_total[warp];
  }
  // The sum of the row, behind it.
  __device__ static Weight of_row(Shared& s, const Cluster& cluster) {
    Weight total = 0;
    for (int block = 0; block < cluster.size; ++block) total += *cluster.at(&s.block_total, block);
    return total << 11;  // to kWeightUnit
  }

 private:
  __device__ void add(float logit, float lowest) {
    const float weight = exp2f((logit - max_logit_) * factor_);
    sum_ += logit >= lowest ? __float2uint_rn(weight * 0x1p31F) : 0U;
  }
  float max_logit_, factor_;
  unsigned long long sum_ = 0;
};

// Sorts the first `count` keys of this block, the largest first.
__device__ inline void sort_keys(Shared& s, int count) {
  if (count <= kThreads / 4) {  // few: each finds its place; 4 threads a key
    const int mine = Chunk::thread() / 4;
    const Key key = mine < count ? s.keys[mine] : 0;
    int before = 0;
    for (int i = Chunk::thread() % 4; i < count; i += 4) before += s.keys[i] > key ? 1 : 0;
    before += __shfl_xor_sync(~0U, before, 1);
    before += __shfl_xor_sync(~0U, before, 2);
    __syncthreads();
    if (mine < count && Chunk::thread() % 4 == 0) s.keys[before] = key;
    __syncthreads();
    return;
  }
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + Chunk::thread(); i < size; i += kThreads) s.keys[i] = 0;
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      for (int i = Chunk::thread(); i < size / 2; i += kThreads) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const Key a = s.keys[low], b = s.keys[high];
        if ((a < b) == ((low & run) == 0)) s.keys[low] = b, s.keys[high] = a;
      }
      __syncthreads();
    }
  }
}

// How many of the first `count` sorted keys there are up to the one that reaches the target, all if none does, and what
// they weigh, `before` counted in; num_kept and kept_weight of this block, which alone calls it.
__device__ inline void keep_sorted(Shared& s, const Candidates& c, int count, const Sums& before,
                                   const Target& target) {
  const int first = 2 * Chunk::thread();
  Weight weights[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) weights[i] = first + i < count ? c.weight_of(logit_of(s.keys[first + i])) : 0;
  Sums end = block_scan(s, {0, weights[0] + weights[1]});
  if (threadIdx.x == 0) s.num_kept = static_cast<std::uint32_t>(count);
  __syncthreads();
  end.weight += before.weight;
  const Sums ends[2] = {{before.count + static_cast<std::uint32_t>(first) + 1, end.weight - weights[1]},
                        {before.count + static_cast<std::uint32_t>(first) + 2, end.weight}};
#pragma unroll
  for (int i = 1; i >= 0; --i)
    if (first + i < count && target.is_reached(ends[i]))
      atomicMin(&s.num_kept, static_cast<std::uint32_t>(first + i + 1));
  __syncthreads();
  const int last = static_cast<int>(s.num_kept) - 1;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (first + i == last) s.kept_weight = ends[i].weight, s.cut = s.keys[last];
  __syncthreads();
}

// The key of the last token that reaches the target, and what is weighed up to it.
struct Cut {
  Key key;
  Weight weight;
};

// Finds it among the tokens of one bin with key >= least. In every thread of the cluster.
__device__ __noinline__ Cut find_cut(Shared& s, const Cluster& cluster, const Chunk& chunk, const Candidates& c,
                                     int bin, Sums before, const Target& target, Key least) {
  Key low = least, high = kNotFinite;
  const auto is_member = [&](float logit, int id) {
    if (c.bin_of(logit) != bin || logit < c.lowest) return false;
    const Key key = key_of(logit, id);
    return key >= low && key <= high;
  };
  while (true) {
    // The keys there really are, and how many.
    if (cluster.rank == 0 && threadIdx.x == 0) s.num_keys = 0;
    cluster.sync();
    Key least_key = kNotFinite, largest_key = 0;
    std::uint32_t count = 0;
    chunk.for_each<2>([&](int id, float logit) {
      if (!chunk.has(id) || !is_member(logit, id)) return;
      const Key key = key_of(logit, id);
      least_key = key < least_key ? key : least_key;
      largest_key = max_of(key, largest_key);
      ++count;
    });
    if (count > 0) atomicAdd(cluster.at(&s.num_keys, 0), count);
    high = cluster_max(s, cluster, largest_key, 0);
    count = *cluster.at(&s.num_keys, 0);
    low = ~cluster_max(s, cluster, ~least_key, 1);
    if (count <= kCapacity) break;

    const Key span = high - low;
    const int shift = max(0, 64 - __clzll(static_cast<long long>(span)) - 10);
    for (int i = Chunk::thread(); i < kBins; i += kThreads) s.count[i] = 0, s.keys[i] = 0;
    __syncthreads();
    // 64-bit atomics do not reach the shared memory of another block: each has its own sums.
    chunk.for_each<2>([&](int id, float logit) {
      if (!chunk.has(id) || !is_member(logit, id)) return;
      const auto part = static_cast<int>((high - key_of(logit, id)) >> shift);
      atomicAdd(&s.count[part], 1U);
      atomicAdd(&s.keys[part], c.weight_of(logit));
    });
    cluster.sync();
    if (cluster.rank == 0) {
      for (int i = Chunk::thread(); i < kBins; i += kThreads)
        for (int block = 1; block < cluster.size; ++block) {
          s.count[i] += *cluster.at(&s.count[i], block);
          s.keys[i] += *cluster.at(&s.keys[i], block);
        }
      __syncthreads();
      find_boundary(s, s.count, s.keys, before, target);
    }
    cluster.sync();
    const Boundary found = *cluster.at(&s.boundary, 0);
    cluster.sync();
    if (found.bin < 0) return {low, found.weight_before};
    before = {found.count_before, found.weight_before};
    high -= static_cast<Key>(found.bin) << shift;
    const Key last = high - ((Key{1} << shift) - 1);
    low = last > low && last <= high ? last : low;
  }
  collect_again(s, cluster, chunk, is_member);
  if (cluster.rank == 0) {
    const auto count = static_cast<int>(s.num_keys);
    sort_keys(s, count);
    keep_sorted(s, c, count, before, target);
  }
  cluster.sync();
  const Cut cut{*cluster.at(&s.cut, 0), *cluster.at(&s.kept_weight, 0)};
  cluster.sync();
  return cut;
}

// Collects at least the `count` best tokens that are not below `lowest`, if they are few enough: all with keys >=
// `least`.
struct Collected {
  std::uint32_t count;  // not all in the keys where there are more than kCapacity
  bool is_all;          // no other token takes part
  Weight total;         // of all tokens that take part, where asked for
};
// row_keys are those of cluster_max(); count <= kMaxGroups. num_keys of block 0 is 0.
__device__ inline Collected collect_best(Shared& s, const Cluster& cluster, const Chunk& chunk, float max_logit,
                                         float temperature, int count, float lowest, bool has_total) {
  // As many parts of the row have a token that is at least as good.
  const Key least = kth_of_groups(s, count);
  const float least_logit = least == 0 ? -infinity() : logit_of(least);
  WeightSum sum(max_logit, temperature);
  const auto may_take = [&](float logit) { return logit >= least_logit && logit >= lowest; };
  const auto take = [&](float logit, int id) { return logit >= lowest && key_of(logit, id) >= least; };
  if (has_total) {
    collect(s, cluster, chunk, may_take, take, [&](float4 v) { sum.add(v, lowest); });
    sum.publish(s);
  } else {
    collect(s, cluster, chunk, may_take, take, [](float4) {});
  }
  cluster.sync();
  return {*cluster.at(&s.num_keys, 0), lowest > least_logit, has_total ? WeightSum::of_row(s, cluster) : 0};
}

// Block 0 gets the `count` best tokens of the row in order in its keys; count <= kMaxGroups
// and the size of the vocabulary. Masked tokens come last, by id. Returns the log of the sum of e^logit. row_keys and
// num_keys as above.
__device__ __noinline__ double best_in_order(Shared& s, const Cluster& cluster, const Chunk& chunk, float max_logit,
                                             std::uint32_t count) {
  const Collected collected =
      collect_best(s, cluster, chunk, max_logit, 1.0F, max(static_cast<int>(count), 1), -infinity(), true);
  if (collected.count > kCapacity) {  // ties, or parts without a token
    const Candidates c(max_logit, 1.0F, -infinity());
    build_histogram(s, cluster, chunk, c);
    const Target target{.count = max(count, 1U)};
    const Boundary found = find_boundary(s, s.total_count, s.total_weight, {}, target);
    const int bin = found.bin >= 0 ? found.bin : kTailBin;
    const Cut cut = find_cut(s, cluster, chunk, c, bin, {found.count_before, found.weight_before}, target, Key{0});
    collect_again(s, cluster, chunk, [&](float logit, int id) { return key_of(logit, id) >= cut.key; });
  }
  if (cluster.rank == 0) sort_keys(s, static_cast<int>(s.num_keys));
  return static_cast<double>(max_logit) + log(static_cast<double>(collected.total) / kWeightUnit);
}

}  // namespace deltaic::cuda::sampler_detail
