#include "cpp/src/ops/sampler_slot.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "cpp/src/check.h"
#include "cpp/src/ops/top_k_top_p.h"

namespace deltaic::ops {
namespace {

class Packer {
 public:
  Packer(int vocab_size, std::vector<std::uint32_t>& words) : vocab_size_(vocab_size), words_(words) {}

  std::int32_t end() const { return static_cast<std::int32_t>(words_.size()); }
  void add(std::int32_t value) { words_.push_back(static_cast<std::uint32_t>(value)); }
  void add(float value) { words_.push_back(std::bit_cast<std::uint32_t>(value)); }
  void add_id(const char* field, std::int64_t id) {
    DELTAIC_CHECK(id >= 0 && id < vocab_size_, field, " has token id ", id, ", outside the vocabulary [0, ",
                  vocab_size_, ")");
    add(static_cast<std::int32_t>(id));
  }
  void add_bits(const char* field, const std::vector<int>& ids) {
    const std::size_t first = words_.size();
    words_.resize(first + (static_cast<std::size_t>(vocab_size_) + 31) / 32);
    for (const int id : ids) {
      DELTAIC_CHECK(id >= 0 && id < vocab_size_, field, " has token id ", id, ", outside the vocabulary [0, ",
                    vocab_size_, ")");
      words_[first + static_cast<std::size_t>(id) / 32] |= 1U << (id % 32);
    }
  }

 private:
  int vocab_size_;
  std::vector<std::uint32_t>& words_;
};

}  // namespace

PackedSlot pack_slot(const SamplingParams& params, int vocab_size, std::span<const std::int32_t> output_token_ids,
                     std::uint64_t seed) {
  PackedSlot packed;
  SlotRecord& record = packed.record;
  Packer pack(vocab_size, packed.words);
  record.temperature = params.is_greedy() ? 0.0F : params.temperature;
  record.top_p = has_top_p(params) ? params.top_p : 1.0F;
  record.top_k = has_top_k(params, static_cast<std::size_t>(vocab_size)) ? params.top_k : 0;
  record.has_min_p = params.min_p > 0.0F;
  if (record.has_min_p)
    record.min_p_offset = static_cast<double>(params.temperature) * std::log(static_cast<double>(params.min_p));
  record.presence_penalty = params.presence_penalty;
  record.frequency_penalty = params.frequency_penalty;
  record.repetition_penalty = params.repetition_penalty;
  record.has_penalties =
      params.presence_penalty != 0.0F || params.frequency_penalty != 0.0F || params.repetition_penalty != 1.0F;
  record.min_tokens = std::max(params.min_tokens, 0);
  record.seed = seed;
  record.num_logprobs = params.logprobs.value_or(-1);

  record.has_allowed = !params.allowed_token_ids.empty();
  record.allowed_at = pack.end();
  if (record.has_allowed) pack.add_bits("allowed_token_ids", params.allowed_token_ids);

  record.num_bias = static_cast<std::int32_t>(params.logit_bias.size());
  record.bias_ids_at = pack.end();
  for (const auto& [id, value] : params.logit_bias) pack.add_id("logit_bias", id);
  record.bias_values_at = pack.end();
  for (const auto& [id, value] : params.logit_bias) pack.add(value);

  record.stop_ids_at = pack.end();
  if (static_cast<std::size_t>(record.min_tokens) > output_token_ids.size()) {
    record.num_stop_ids = static_cast<std::int32_t>(params.stop_token_ids.size());
    for (const int id : params.stop_token_ids) pack.add_id("stop_token_ids", id);
  }

  record.num_bad_words = static_cast<std::int32_t>(params.bad_words.size());
  record.word_starts_at = pack.end();
  std::int32_t start = 0;
  for (const std::vector<int>& word : params.bad_words) {
    DELTAIC_CHECK(!word.empty(), "bad_words has an empty word");
    pack.add(start);
    start += static_cast<std::int32_t>(word.size());
    record.history_size = std::max(record.history_size, static_cast<std::int32_t>(word.size()) - 1);
  }
  if (start > 0) pack.add(start);
  record.word_tokens_at = pack.end();
  for (const std::vector<int>& word : params.bad_words)
    for (const int id : word) pack.add_id("bad_words", id);

  record.history_at = pack.end();
  const auto history_size = static_cast<std::size_t>(record.history_size);
  packed.words.resize(packed.words.size() + history_size);
  const std::size_t num_outputs = output_token_ids.size();
  for (std::size_t j = num_outputs - std::min(num_outputs, history_size); j < num_outputs; ++j)
    packed.words[static_cast<std::size_t>(record.history_at) + j % history_size] =
        static_cast<std::uint32_t>(output_token_ids[j]);
  return packed;
}

}  // namespace deltaic::ops
