// Experts: the (token, j) pairs are sorted by expert, so that an expert's weights are read once for all its rows; tasks
// are blocks of rows of one expert's weights. Each pair has a row of scratch for its intermediate and for its output.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/kernels/isa.h"
#include "cpp/src/ops/kernels/work.h"
#include "cpp/src/ops/moe.h"

namespace deltaic::cpu {
namespace {

constexpr std::int64_t kWeightRows = 64;  // rows of an expert's weights in a task

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The k largest probabilities, best first; of equal ones the lower id. NaN counts as the smallest.
void choose(const std::vector<float>& p, bool renormalize, std::int64_t k, std::int32_t* ids, float* weights) {
  std::vector<std::int32_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  const auto rank = [&](std::int32_t id) { return std::isnan(p[id]) ? -1.0F : p[id]; };
  std::partial_sort(order.begin(), order.begin() + k, order.end(),
                    [&](std::int32_t a, std::int32_t b) { return rank(a) != rank(b) ? rank(a) > rank(b) : a < b; });
  float sum = 0.0F;
  for (std::int64_t j = 0; j < k; ++j) {
    ids[j] = order[j];
    weights[j] = p[order[j]];
    sum += weights[j];
  }
  if (!renormalize) return;
  for (std::int64_t j = 0; j < k; ++j) weights[j] /= sum;
}

// Rows [begin, end) of `order` belong to one expert.
struct Group {
  std::int32_t expert;
  std::int64_t begin, end;
};

struct Groups {
  std::vector<std::int32_t> token;  // [num_pairs] of the pairs in the order of their experts
  std::vector<std::int64_t> row;    // [num_pairs] where pair t * k + j stands in that order
  std::vector<Group> groups;
};

Groups group_by_expert(const TensorView& expert_ids, std::int64_t num_experts) {
  const std::int32_t* ids = expert_ids.as<std::int32_t>();
  const std::int64_t num_pairs = expert_ids.numel(), k = expert_ids.shape[1];
  std::vector<std::int64_t> next(static_cast<std::size_t>(num_experts) + 1, 0);
  for (std::int64_t i = 0; i < num_pairs; ++i) {
    DELTAIC_CHECK(0 <= ids[i] && ids[i] < num_experts, "moe_experts: expert ", ids[i], " of ", num_experts);
    ++next[ids[i] + 1];
  }
  Groups result{
      .token = std::vector<std::int32_t>(num_pairs), .row = std::vector<std::int64_t>(num_pairs), .groups = {}};
  for (std::int64_t e = 0; e < num_experts; ++e) {
    if (next[e + 1] > 0) result.groups.push_back({static_cast<std::int32_t>(e), next[e], next[e] + next[e + 1]});
    next[e + 1] += next[e];
  }
  for (std::int64_t i = 0; i < num_pairs; ++i) {
    const std::int64_t row = next[ids[i]]++;
    result.row[i] = row;
    result.token[row] = static_cast<std::int32_t>(i / k);
  }
  return result;
}

LinearArgs block_of(const ops::Weight& weight, std::int64_t row, std::int64_t num_rows) {
  const TensorView& w = weight.view;
  LinearArgs args{};
  args.w = static_cast<const char*>(w.data) + row * w.stride[0] * static_cast<std::int64_t>(size_of(w.dtype));
  args.w_stride = w.stride[0];
  args.w_type = float_type(w.dtype);
  args.n = num_rows;
  args.k = w.shape[1];
  return args;
}

}  // namespace

void moe_router(ThreadPool& threads, TensorView logits, TensorView shared_logits, bool renormalize,
                TensorView expert_ids, TensorView weights) {
  const Kernels& kernel = kernels();
  const std::int64_t num_experts = logits.shape[1], num_columns = expert_ids.shape[1];
  const bool has_shared = shared_logits.data != nullptr;
  const std::int64_t k = num_columns - (has_shared ? 1 : 0);
  threads.parallel_for(logits.shape[0], grain_of(32 * num_experts), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> p(static_cast<std::size_t>(num_experts));
    for (std::int64_t t = begin; t < end; ++t) {
      std::copy_n(logits.as<float>() + t * logits.stride[0], num_experts, p.begin());
      kernel.softmax(num_experts, p.data());
      std::int32_t* ids = expert_ids.as<std::int32_t>() + t * num_columns;
      float* chosen = weights.as<float>() + t * num_columns;
      choose(p, renormalize, k, ids, chosen);
      if (!has_shared) continue;
      ids[k] = static_cast<std::int32_t>(num_experts);
      chosen[k] = 1.0F / (1.0F + std::exp(-shared_logits.as<float>()[t * shared_logits.stride[0]]));
    }
  });
}

void moe_experts(ThreadPool& threads, TensorView x, const ops::ExpertWeights& experts, TensorView expert_ids,
                 TensorView weights, TensorView scratch, TensorView y) {
  const Kernels& kernel = kernels();
  const std::int64_t hidden = x.shape[1], intermediate = experts.gate[0].out_features(), k = expert_ids.shape[1];
  const std::int64_t num_pairs = expert_ids.numel();
  const Groups plan = group_by_expert(expert_ids, static_cast<std::int64_t>(experts.gate.size()));
  const auto num_groups = static_cast<std::int64_t>(plan.groups.size());
  float* const gate = static_cast<float*>(scratch.data);
  float* const up = gate + num_pairs * intermediate;
  float* const down = up + num_pairs * intermediate;

  const std::int64_t up_blocks = ceil_div(intermediate, kWeightRows);
  threads.parallel_for(num_groups * up_blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const Group& group = plan.groups[i / up_blocks];
      const std::int64_t row = i % up_blocks * kWeightRows, num_rows = std::min(kWeightRows, intermediate - row);
      const auto project = [&](const ops::Weight& weight, float* into) {
        LinearArgs args = block_of(weight, row, num_rows);
        args.x = x.as<float>(), args.x_stride = x.stride[0];
        args.x_rows = plan.token.data() + group.begin;
        args.m = group.end - group.begin;
        args.y = into + group.begin * intermediate + row, args.y_stride = intermediate;
        kernel.linear(args);
      };
      project(experts.gate[group.expert], gate);
      project(experts.up[group.expert], up);
      for (std::int64_t pair = group.begin; pair < group.end; ++pair) {
        float* values = gate + pair * intermediate + row;
        kernel.silu_mul(values, up + pair * intermediate + row, num_rows, values);
      }
    }
  });

  const std::int64_t down_blocks = ceil_div(hidden, kWeightRows);
  threads.parallel_for(num_groups * down_blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const Group& group = plan.groups[i / down_blocks];
      const std::int64_t row = i % down_blocks * kWeightRows;
      LinearArgs args = block_of(experts.down[group.expert], row, std::min(kWeightRows, hidden - row));
      args.x = gate + group.begin * intermediate, args.x_stride = intermediate;
      args.m = group.end - group.begin;
      args.y = down + group.begin * hidden + row, args.y_stride = hidden;
      kernel.linear(args);
    }
  });

  threads.parallel_for(x.shape[0], grain_of(k * hidden), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      for (std::int64_t j = 0; j < k; ++j)
        kernel.add_scaled(weights.as<float>()[t * k + j], down + plan.row[t * k + j] * hidden, hidden,
                          y.as<float>() + t * y.stride[0]);
  });
}

void add_sigmoid_scaled(ThreadPool& threads, TensorView gate, TensorView x, TensorView y) {
  const Kernels& kernel = kernels();
  const std::int64_t size = x.shape[1];
  threads.parallel_for(x.shape[0], grain_of(size), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const float factor = 1.0F / (1.0F + std::exp(-gate.as<float>()[t * gate.stride[0]]));
      kernel.add_scaled(factor, x.as<float>() + t * x.stride[0], size, y.as<float>() + t * y.stride[0]);
    }
  });
}

}  // namespace deltaic::cpu
