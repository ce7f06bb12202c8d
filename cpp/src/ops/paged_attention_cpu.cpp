// One task is a request's key/value head and up to kMaxAttentionRows of its query rows (token by token, the heads of a
// group together), so that a tile of keys serves all of them. Keys are summed partition by partition and the partitions
// merged in order: by one task, or, when there are few tasks and long contexts, by many of them.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/kernels/isa.h"
#include "cpp/src/ops/paged_attention.h"

namespace deltaic::cpu {
namespace {

struct Task {
  std::int64_t request = 0, kv_head = 0;
  std::int64_t first_row = 0, num_rows = 0;  // row r is token r / group, head r % group of the kv head
  std::int64_t partition = 0, num_partitions = 0;
  std::int64_t scratch = 0;  // of its partial sums, in rows
};

// Partial sums of one task, with room for the largest head.
struct Partial {
  float *max, *sum, *acc;
};

class Attention {
 public:
  Attention(ThreadPool& threads, const ops::PagedAttentionArgs& args)
      : threads_(threads),
        args_(args),
        kernel_(kernels()),
        head_dim_(args.q.shape[2]),
        num_kv_heads_(args.k_cache.shape[2]),
        group_(args.q.shape[1] / num_kv_heads_) {
    DELTAIC_CHECK(head_dim_ <= kMaxHeadDim, "paged_attention: head_dim is ", head_dim_, ", the most is ", kMaxHeadDim);
    make_tasks();
  }

  void run() {
    const auto num_tasks = static_cast<std::int64_t>(tasks_.size());
    if (num_tasks >= 4 * threads_.num_threads() || max_partitions_ < 2) {
      threads_.parallel_for(num_tasks, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) run_whole(tasks_[static_cast<std::size_t>(i)]);
      });
    } else {
      run_split();
    }
  }

 private:
  std::int64_t query_begin(std::int64_t request) const { return args_.query_start_loc.as<std::int32_t>()[request]; }
  std::int64_t seq_len(std::int64_t request) const { return args_.seq_lens.as<std::int32_t>()[request]; }
  std::int64_t position(const Task& task, std::int64_t row) const {
    const std::int64_t query_len = query_begin(task.request + 1) - query_begin(task.request);
    return seq_len(task.request) - query_len + (task.first_row + row) / group_;
  }

  void make_tasks() {
    for (std::int64_t i = 0; i < args_.block_table.shape[0]; ++i) {
      const std::int64_t query_len = query_begin(i + 1) - query_begin(i);
      if (query_len == 0) continue;
      check_request(i, query_len);
      for (std::int64_t h = 0; h < num_kv_heads_; ++h)
        for (std::int64_t row = 0; row < query_len * group_; row += kMaxAttentionRows) {
          Task task;
          task.request = i, task.kv_head = h, task.first_row = row;
          task.num_rows = std::min<std::int64_t>(kMaxAttentionRows, query_len * group_ - row);
          task.num_partitions = position(task, task.num_rows - 1) / kAttentionPartition + 1;
          max_partitions_ = std::max(max_partitions_, task.num_partitions);
          tasks_.push_back(task);
        }
    }
  }

  void check_request(std::int64_t i, std::int64_t query_len) const {
    const std::int64_t block_size = args_.k_cache.shape[1], num_blocks = (seq_len(i) + block_size - 1) / block_size;
    DELTAIC_CHECK(0 < query_len && query_len <= seq_len(i), "paged_attention: request ", i, " has ", query_len,
                  " new tokens and seq_len ", seq_len(i));
    DELTAIC_CHECK(query_begin(i) >= 0 && query_begin(i + 1) <= args_.q.shape[0], "paged_attention: request ", i,
                  " has tokens ", query_begin(i), " to ", query_begin(i + 1), ", q has ", args_.q.shape[0]);
    DELTAIC_CHECK(num_blocks <= args_.block_table.shape[1], "paged_attention: request ", i, " has ", num_blocks,
                  " blocks, a row of the block table ", args_.block_table.shape[1]);
    const std::int32_t* blocks = args_.block_table.as<std::int32_t>() + i * args_.block_table.stride[0];
    for (std::int64_t b = 0; b < num_blocks; ++b)
      DELTAIC_CHECK(0 <= blocks[b] && blocks[b] < args_.k_cache.shape[0], "paged_attention: request ", i, " has block ",
                    blocks[b], ", the cache has ", args_.k_cache.shape[0]);
  }

  AttentionArgs kernel_args(const Task& task) const {
    AttentionArgs a{};
    a.num_rows = static_cast<int>(task.num_rows);
    a.head_dim = static_cast<int>(head_dim_);
    for (std::int64_t r = 0; r < task.num_rows; ++r) {
      const std::int64_t token = query_begin(task.request) + (task.first_row + r) / group_;
      const std::int64_t head = task.kv_head * group_ + (task.first_row + r) % group_;
      a.q[r] = args_.q.as<float>() + token * args_.q.stride[0] + head * args_.q.stride[1];
      a.position[r] = position(task, r);
    }
    a.scale = args_.scale;
    const auto cache = [&](const TensorView& view, const char*& base, Float& type, std::int64_t& block_bytes,
                           std::int64_t& slot_bytes) {
      const auto bytes = static_cast<std::int64_t>(size_of(view.dtype));
      base = static_cast<const char*>(view.data) + task.kv_head * view.stride[2] * bytes;
      type = float_type(view.dtype);
      block_bytes = view.stride[0] * bytes;
      slot_bytes = view.stride[1] * bytes;
    };
    cache(args_.k_cache, a.k_cache, a.k_type, a.k_block_bytes, a.k_slot_bytes);
    cache(args_.v_cache, a.v_cache, a.v_type, a.v_block_bytes, a.v_slot_bytes);
    a.block_table = args_.block_table.as<std::int32_t>() + task.request * args_.block_table.stride[0];
    a.block_size = args_.k_cache.shape[1];
    return a;
  }

  void run_partition(AttentionArgs& a, std::int64_t partition, const Partial& into) const {
    a.key_begin = partition * kAttentionPartition;
    a.max = into.max, a.sum = into.sum, a.acc = into.acc;
    kernel_.attention(a);
  }

  // Adds a partition to the running sums of the rows that see any of its keys.
  void merge(const Task& task, std::int64_t partition, const Partial& running, const Partial& next) const {
    for (std::int64_t r = 0; r < task.num_rows; ++r)
      if (position(task, r) >= partition * kAttentionPartition)
        kernel_.attention_merge(&running.max[r], &running.sum[r], running.acc + r * head_dim_, next.max[r], next.sum[r],
                                next.acc + r * head_dim_, head_dim_);
  }

  void finish(const Task& task, const Partial& running) const {
    for (std::int64_t r = 0; r < task.num_rows; ++r) {
      const std::int64_t token = query_begin(task.request) + (task.first_row + r) / group_;
      const std::int64_t head = task.kv_head * group_ + (task.first_row + r) % group_;
      float* out = args_.out.as<float>() + token * args_.out.stride[0] + head * args_.out.stride[1];
      const float* acc = running.acc + r * head_dim_;
      const float factor = 1.0F / running.sum[r];
      for (std::int64_t c = 0; c < head_dim_; ++c) out[c] = acc[c] * factor;
      if (args_.gate.data == nullptr) continue;
      const float* gate = args_.gate.as<float>() + token * args_.gate.stride[0] + head * args_.gate.stride[1];
      for (std::int64_t c = 0; c < head_dim_; ++c) out[c] *= 1.0F / (1.0F + std::exp(-gate[c]));
    }
  }

  struct Stack {
    std::array<float, kMaxAttentionRows> max, sum;
    alignas(64) std::array<float, kMaxAttentionRows * kMaxHeadDim> acc;
    Partial partial() { return {max.data(), sum.data(), acc.data()}; }
  };

  void run_whole(const Task& task) const {
    AttentionArgs a = kernel_args(task);
    Stack running, next;
    run_partition(a, 0, running.partial());
    for (std::int64_t p = 1; p < task.num_partitions; ++p) {
      run_partition(a, p, next.partial());
      merge(task, p, running.partial(), next.partial());
    }
    finish(task, running.partial());
  }

  // Every partition by itself, its sums kept in the pool's workspace; then the same merges in the same order.
  void run_split() {
    std::vector<Task> parts;
    std::int64_t num_rows = 0;
    for (Task& task : tasks_) {
      task.scratch = num_rows;
      for (std::int64_t p = 0; p < task.num_partitions; ++p, num_rows += task.num_rows) {
        parts.push_back(task);
        parts.back().partition = p;
        parts.back().scratch = num_rows;
      }
    }
    const std::int64_t floats_per_row = head_dim_ + 2;
    auto* memory =
        static_cast<float*>(threads_.workspace(static_cast<std::size_t>(num_rows * floats_per_row) * sizeof(float)));
    const auto partial_at = [&](std::int64_t row) {
      return Partial{memory + row, memory + num_rows + row, memory + 2 * num_rows + row * head_dim_};
    };
    threads_.parallel_for(static_cast<std::int64_t>(parts.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const Task& task = parts[static_cast<std::size_t>(i)];
        AttentionArgs a = kernel_args(task);
        run_partition(a, task.partition, partial_at(task.scratch));
      }
    });
    threads_.parallel_for(static_cast<std::int64_t>(tasks_.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const Task& task = tasks_[static_cast<std::size_t>(i)];
        const Partial running = partial_at(task.scratch);
        for (std::int64_t p = 1; p < task.num_partitions; ++p)
          merge(task, p, running, partial_at(task.scratch + p * task.num_rows));
        finish(task, running);
      }
    });
  }

  ThreadPool& threads_;
  const ops::PagedAttentionArgs& args_;
  const Kernels& kernel_;
  std::int64_t head_dim_, num_kv_heads_, group_;
  std::vector<Task> tasks_;
  std::int64_t max_partitions_ = 0;
};

}  // namespace

void paged_attention(ThreadPool& threads, const ops::PagedAttentionArgs& args) { Attention(threads, args).run(); }

}  // namespace deltaic::cpu
