#include "cpp/src/ops/device_sampler.h"

#include "cpp/src/check.h"
#include "cpp/src/ops/checks.h"
#include "cpp/src/ops/logits_processors.h"
#include "cpp/src/ops/sampler_slot.h"

namespace deltaic::ops {
namespace {

void check_ids(const char* field, std::span<const std::int32_t> ids, int vocab_size) {
  for (const std::int32_t id : ids)
    DELTAIC_CHECK(id >= 0 && id < vocab_size, field, " has token id ", id, ", outside the vocabulary [0, ", vocab_size,
                  ")");
}

}  // namespace

bool DeviceSampler::needs_only_argmax(const SamplingParams& params, std::size_t num_output_tokens) {
  return params.is_greedy() && !needs_processing(params, num_output_tokens);
}

std::size_t DeviceSampler::max_slot_bytes(int vocab_size, int max_context) {
  // Counts, ids that have one, raw logits; alignment.
  return static_cast<std::size_t>(vocab_size) * (12 + 4 * static_cast<std::size_t>(max_context)) + 4096;
}

DeviceSampler::DeviceSampler(int vocab_size, int max_num_slots, int max_num_rows, const Context& ctx, int max_context)
    : ctx_(ctx),
      vocab_size_(vocab_size),
      max_num_slots_(max_num_slots),
      max_num_rows_(max_num_rows),
      max_context_(max_context) {
  DELTAIC_CHECK(vocab_size > 0 && max_num_slots > 0 && max_num_rows > 0, "the device sampler has a vocabulary of ",
                vocab_size, ", ", max_num_slots, " slots and ", max_num_rows, " rows; each must be > 0");
  if (ctx.device.type != DeviceType::cuda)
    throw Unsupported("the device sampler works on CUDA alone: use ops::sample on the CPU");
  state_ = cuda::make_sampler_state(vocab_size, max_num_slots, max_context, ctx);
}

void DeviceSampler::set_request(int slot, const SamplingParams& params, std::span<const std::int32_t> prompt_token_ids,
                                std::span<const std::int32_t> output_token_ids, std::uint64_t seed) {
  DELTAIC_CHECK(slot >= 0 && slot < max_num_slots_, "slot ", slot, " of the device sampler is outside [0, ",
                max_num_slots_, ")");
  check_ids("the prompt", prompt_token_ids, vocab_size_);
  check_ids("the output", output_token_ids, vocab_size_);
  PackedSlot packed = pack_slot(params, vocab_size_, output_token_ids, seed);
  if (!gives_logprobs(params)) packed.record.num_logprobs = -1;
  // Prompt tokens count for the repetition penalty alone.
  if (params.repetition_penalty == 1.0F) prompt_token_ids = {};
  cuda::set_sampler_slot(*state_, slot, packed, prompt_token_ids, output_token_ids);
}

void DeviceSampler::release(int slot) {
  DELTAIC_CHECK(slot >= 0 && slot < max_num_slots_, "slot ", slot, " of the device sampler is outside [0, ",
                max_num_slots_, ")");
  cuda::clear_sampler_slot(*state_, slot);
}

void DeviceSampler::sample(const Args& args) {
  constexpr const char* kOp = "the device sampler";
  check_tensor(kOp, "logits", args.logits, ctx_, {DType::f32}, {kAnySize, vocab_size_});
  const std::int64_t num_rows = args.logits.shape[0];
  DELTAIC_CHECK(num_rows <= max_num_rows_, "the device sampler got ", num_rows, " rows and was made for ",
                max_num_rows_);
  check_contiguous(kOp, "slots", args.slots, ctx_, {DType::i32}, {num_rows});
  check_contiguous(kOp, "output_positions", args.output_positions, ctx_, {DType::i32}, {num_rows});
  if (args.num_context.data != nullptr) {
    check_contiguous(kOp, "context_ids", args.context_ids, ctx_, {DType::i32}, {num_rows, max_context_});
    check_contiguous(kOp, "num_context", args.num_context, ctx_, {DType::i32}, {num_rows});
  }
  check_contiguous(kOp, "token_ids", args.token_ids, ctx_, {DType::i32}, {num_rows});
  check_contiguous(kOp, "is_finite", args.is_finite, ctx_, {DType::u8}, {num_rows});
  DELTAIC_CHECK(args.num_logprobs >= -1 && args.num_logprobs <= kMaxLogprobs, "num_logprobs of the device sampler is ",
                args.num_logprobs, "; it must be in [-1, ", kMaxLogprobs, "]");
  if (args.num_logprobs >= 0) {
    DELTAIC_CHECK(!args.all_greedy, "all_greedy rows of the device sampler give no logprobs; num_logprobs is ",
                  args.num_logprobs);
    const std::int64_t columns = 1 + args.num_logprobs;
    check_contiguous(kOp, "logprob_token_ids", args.logprob_token_ids, ctx_, {DType::i32}, {num_rows, columns});
    check_contiguous(kOp, "logprobs", args.logprobs, ctx_, {DType::f32}, {num_rows, columns});
    check_contiguous(kOp, "ranks", args.ranks, ctx_, {DType::i32}, {num_rows});
  }
  if (num_rows == 0) return;
  cuda::sample(*state_, args);
}

void DeviceSampler::add_tokens(const AddedTokens& tokens) {
  constexpr const char* kOp = "the device sampler's add_tokens";
  const std::int64_t num_rows = tokens.slots.shape[0];
  check_contiguous(kOp, "slots", tokens.slots, ctx_, {DType::i32}, {num_rows});
  check_contiguous(kOp, "output_positions", tokens.output_positions, ctx_, {DType::i32}, {num_rows});
  check_contiguous(kOp, "token_ids", tokens.token_ids, ctx_, {DType::i32}, {num_rows, kAnySize});
  check_contiguous(kOp, "counts", tokens.counts, ctx_, {DType::i32}, {num_rows});
  if (num_rows == 0) return;
  cuda::add_sampled_tokens(*state_, tokens);
}

}  // namespace deltaic::ops
