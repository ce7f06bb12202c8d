#include "cpp/src/runner/input_batch.h"

#include <algorithm>
#include <cassert>
#include <functional>
#include <random>
#include <utility>

namespace deltaic {

namespace {

std::uint64_t fresh_entropy() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

}  // namespace

BatchRow make_batch_row(const NewRequestData& request) {
  BatchRow row;
  row.req_id = request.req_id;
  row.token_ids = request.prefill_token_ids.empty() ? request.prompt_token_ids : request.prefill_token_ids;
  row.num_prompt_tokens = static_cast<int>(request.prompt_token_ids.size());
  row.prefill_length = row.num_tokens();
  row.num_computed_tokens = request.num_computed_tokens;
  row.sampling_params = request.sampling_params;
  row.is_seeded = request.sampling_params.seed.has_value();
  row.seed = row.is_seeded ? static_cast<std::uint64_t>(*request.sampling_params.seed) : fresh_entropy();
  return row;
}

InputBatch::InputBatch(int max_num_reqs, std::span<const std::int64_t> row_strides)
    : rows_(static_cast<std::size_t>(max_num_reqs)), last_sampled_tokens_(static_cast<std::size_t>(max_num_reqs), 0) {
  for (const std::int64_t stride : row_strides) block_tables_.emplace_back(max_num_reqs, stride);
  index_.reserve(rows_.size());
  holes_.reserve(rows_.size());
  for (int slot = max_num_reqs; slot-- > 0;) free_slots_.push_back(slot);
}

std::vector<std::string> InputBatch::req_ids() const {
  std::vector<std::string> ids;
  ids.reserve(index_.size());
  for (int i = 0; i < num_reqs(); ++i) ids.push_back(row(i).req_id);
  return ids;
}

int InputBatch::find(const std::string& req_id) const {
  const auto found = index_.find(req_id);
  return found == index_.end() ? -1 : found->second;
}

int InputBatch::add(BatchRow new_row, std::span<const std::vector<int>> block_ids) {
  assert(find(new_row.req_id) < 0 && block_ids.size() == block_tables_.size());
  int target = end_;
  if (holes_.empty()) {
    ++end_;
  } else {
    std::pop_heap(holes_.begin(), holes_.end(), std::greater<>());
    target = holes_.back();
    holes_.pop_back();
  }
  assert(target < max_num_reqs());
  index_.emplace(new_row.req_id, target);
  new_row.forget_drafts();
  new_row.slot = free_slots_.back();
  free_slots_.pop_back();
  new_row.num_uploaded_blocks = 0;
  new_row.is_in_sampler = false;
  row(target) = std::move(new_row);
  last_sampled_tokens_[static_cast<std::size_t>(target)] = 0;
  for (std::size_t group = 0; group < block_tables_.size(); ++group)
    block_tables_[group].assign(target, block_ids[group]);
  return target;
}

BatchRow InputBatch::remove(int removed) {
  index_.erase(row(removed).req_id);
  holes_.push_back(removed);
  free_slots_.push_back(row(removed).slot);
  std::push_heap(holes_.begin(), holes_.end(), std::greater<>());
  for (BlockTable& table : block_tables_) table.clear(removed);
  last_sampled_tokens_[static_cast<std::size_t>(removed)] = 0;
  return std::exchange(row(removed), BatchRow{});
}

void InputBatch::condense() {
  while (!holes_.empty()) {
    while (end_ > 0 && row(end_ - 1).req_id.empty()) --end_;
    std::pop_heap(holes_.begin(), holes_.end(), std::greater<>());
    const int hole = holes_.back();
    holes_.pop_back();
    if (hole >= end_) continue;  // behind the last live row
    const int last = end_ - 1;
    index_[row(last).req_id] = hole;
    std::swap(row(hole), row(last));
    std::swap(last_sampled_tokens_[static_cast<std::size_t>(hole)],
              last_sampled_tokens_[static_cast<std::size_t>(last)]);
    for (BlockTable& table : block_tables_) table.swap(hole, last);
    --end_;
  }
}

void InputBatch::swap(int a, int b) {
  if (a == b) return;
  std::swap(row(a), row(b));
  std::swap(last_sampled_tokens_[static_cast<std::size_t>(a)], last_sampled_tokens_[static_cast<std::size_t>(b)]);
  for (BlockTable& table : block_tables_) table.swap(a, b);
  index_[row(a).req_id] = a;
  index_[row(b).req_id] = b;
}

void InputBatch::append_sampled_token(int to, std::int32_t token_id) {
  row(to).token_ids.push_back(token_id);
  last_sampled_tokens_[static_cast<std::size_t>(to)] = token_id;
}

SamplingMetadata InputBatch::make_sampling_metadata(int num_rows, int vocab_size) const {
  SamplingMetadata metadata;
  for (int i = 0; i < num_rows; ++i) {
    const BatchRow& request = row(i);
    const SamplingParams& params = request.sampling_params;
    const bool is_greedy = params.is_greedy();
    metadata.temperature.push_back(is_greedy ? 0.0F : params.temperature);
    metadata.top_p.push_back(params.top_p);
    metadata.top_k.push_back(params.top_k > 0 && params.top_k < vocab_size ? params.top_k : vocab_size);
    metadata.min_p.push_back(params.min_p);
    if (request.is_seeded) metadata.generators.emplace(i, request.seed);
    metadata.all_greedy = metadata.all_greedy && is_greedy;
  }
  return metadata;
}

}  // namespace deltaic
