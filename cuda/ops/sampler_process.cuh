// What changes the logits of a row before a token is chosen, in the order and the arithmetic of logits_processors.cpp,
// and the slot's state after it. A block changes its own chunk alone, and reads all lists for that.
#pragma once

#include "cuda/ops/sampler_block.cuh"
#include "cuda/ops/sampler_slot.cuh"

namespace deltaic::cuda::sampler_detail {

__device__ inline bool needs_processing(const ops::SlotRecord& record, int position) {
  return record.has_allowed || record.num_bad_words > 0 || position < record.min_tokens || record.num_bias > 0 ||
         record.has_penalties;
}

// A finite logit stays finite, whatever a penalty makes of it.
__device__ inline float clamp_finite(float logit) {
  constexpr float kMax = 3.402823466e38F;
  return fminf(fmaxf(logit, -kMax), kMax);
}

// `count`: as in SamplerSlot. Products and differences are rounded apart, as on the CPU.
__device__ inline float penalize(float logit, std::uint32_t count, const ops::SlotRecord& record) {
  if (logit == -infinity()) return logit;
  if (record.repetition_penalty != 1.0F)
    logit = clamp_finite(logit > 0 ? __fdiv_rn(logit, record.repetition_penalty)
                                   : __fmul_rn(logit, record.repetition_penalty));
  const std::uint32_t in_output = count & ~kInPrompt;
  if (in_output == 0 || (record.frequency_penalty == 0.0F && record.presence_penalty == 0.0F)) return logit;
  logit = __fsub_rn(logit, __fmul_rn(record.frequency_penalty, static_cast<float>(in_output)));
  return clamp_finite(__fsub_rn(logit, record.presence_penalty));
}

// Keeps the raw logits where the slot has room for them, and masks what is not allowed.
__device__ inline void keep_and_mask(const Chunk& chunk, const SamplerSlot& slot) {
  const bool raw_is_aligned = reinterpret_cast<std::uintptr_t>(slot.raw_logits) % 16 == 0;
  chunk.for_each_group<2>([&](int id, float4 v) {
    if (id >= chunk.end) return;
    if (slot.raw_logits != nullptr) chunk.store(slot.raw_logits, raw_is_aligned, id, v);
    if (!slot.record.has_allowed) return;
    const std::uint32_t allowed = slot.words[slot.record.allowed_at + id / 32] >> (id % 32);
    const float masked = -infinity();
    v = {(allowed & 1U) != 0 ? v.x : masked, (allowed & 2U) != 0 ? v.y : masked, (allowed & 4U) != 0 ? v.z : masked,
         (allowed & 8U) != 0 ? v.w : masked};
    chunk.store(chunk.row, chunk.is_aligned, id, v);
  });
}

// The drafts in front of a row, behind the tokens of its slot.
struct Context {
  const std::int32_t* ids;
  int count;

  __device__ std::uint32_t times(int id) const {
    std::uint32_t times = 0;
    for (int i = 0; i < count; ++i) times += ids[i] == id ? 1U : 0U;
    return times;
  }
  // Whether no id before is the same.
  __device__ bool is_first(int i) const {
    for (int j = 0; j < i; ++j)
      if (ids[j] == ids[i]) return false;
    return true;
  }
};

// Whether the output ends with all of the word but its last token.
__device__ inline bool is_begun(const SamplerSlot& slot, const Context& context, const std::uint32_t* word, int prefix,
                                int position) {
  if (prefix > position) return false;
  const std::uint32_t* history = slot.words + slot.record.history_at;
  const int num_kept = position - context.count;  // tokens of the slot
  for (int i = 0; i < prefix; ++i) {
    const int at = position - prefix + i;
    const std::uint32_t id =
        at < num_kept ? history[at % slot.record.history_size] : static_cast<std::uint32_t>(context.ids[at - num_kept]);
    if (id != word[i]) return false;
  }
  return true;
}

__device__ __noinline__ void process_logits(const Chunk& chunk, const SamplerSlot& slot, const Context& context,
                                            int position) {
  const ops::SlotRecord& record = slot.record;
  float* row = chunk.row;
  const auto for_each_of = [](int count, auto visit) {
    for (int i = Chunk::thread(); i < count; i += kThreads) visit(i);
    __syncthreads();
  };
  if (slot.raw_logits != nullptr || record.has_allowed) keep_and_mask(chunk, slot);
  __syncthreads();

  const std::uint32_t* starts = slot.words + record.word_starts_at;
  const std::uint32_t* tokens = slot.words + record.word_tokens_at;
  for_each_of(record.num_bad_words, [&](int i) {
    const auto first = static_cast<int>(starts[i]), last = static_cast<int>(starts[i + 1]) - 1;
    const auto id = static_cast<int>(tokens[last]);
    if (chunk.has(id) && is_begun(slot, context, tokens + first, last - first, position)) row[id] = -infinity();
  });
  const std::uint32_t* stop_ids = slot.words + record.stop_ids_at;
  for_each_of(position < record.min_tokens ? record.num_stop_ids : 0, [&](int i) {
    const auto id = static_cast<int>(stop_ids[i]);
    if (chunk.has(id)) row[id] = -infinity();
  });
  const std::uint32_t* bias_ids = slot.words + record.bias_ids_at;
  const std::uint32_t* biases = slot.words + record.bias_values_at;
  for_each_of(record.num_bias, [&](int i) {
    const auto id = static_cast<int>(bias_ids[i]);
    if (chunk.has(id)) row[id] = __fadd_rn(row[id], __uint_as_float(biases[i]));
  });
  for_each_of(record.has_penalties ? *slot.num_seen : 0, [&](int i) {
    const int id = slot.seen[i];
    if (chunk.has(id)) row[id] = penalize(row[id], slot.counts[id] + context.times(id), record);
  });
  for_each_of(record.has_penalties ? context.count : 0, [&](int i) {
    const int id = context.ids[i];
    if (chunk.has(id) && slot.counts[id] == 0 && context.is_first(i))
      row[id] = penalize(row[id], context.times(id), record);
  });
}

// Adds the token at an output position to the slot's state. One thread of the row calls it, when all have read it.
__device__ inline void add_token(const SamplerSlot& slot, int position, int token_id) {
  const ops::SlotRecord& record = slot.record;
  if (record.history_size > 0)
    slot.words[record.history_at + position % record.history_size] = static_cast<std::uint32_t>(token_id);
  if (!record.has_penalties) return;
  if (slot.counts[token_id]++ == 0) slot.seen[(*slot.num_seen)++] = token_id;
}

}  // namespace deltaic::cuda::sampler_detail
