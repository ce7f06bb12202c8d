#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include <deltaic/sampling_params.h>

#include "cpp/src/ops/context.h"

namespace deltaic {

namespace cuda {
class SamplerState;  // what the slots hold, on one device
}

namespace ops {

// The sampler of sampler.h on a CUDA device: the same rules, random numbers and tokens. What a request needs lives on
// the device in a slot, and sample() keeps it up to date, so that steps follow each other without the host.
//
// Memory: a table of fixed address has one entry a slot; kernels find everything else through it, so a captured graph
// stays valid while requests come and go. Lists (logit_bias, allowed_token_ids, bad_words, stop ids) take their bytes
// in a pool of the driver that belongs to this object; token counts (8 bytes a word of the vocabulary) are there only
// for slots with penalties, a copy of the raw logits (4 bytes) only for those with logprobs and something that changes
// logits. The pool grows when a request needs more than is free, by at least 2 MiB, and shrinks only when this object
// goes. max_slot_bytes() bounds what a slot can take.
//
// Everything is enqueued on ctx.stream; nothing waits for the device. One thread at a time.
//
// With drafts a slot has several rows: those of a request's newest token and of the drafts behind it. Each sees the
// slot's tokens and the drafts in front of it (Args::context_ids), and add_tokens() brings the slot up to date once it
// is known which of them stand.
class DeviceSampler {
 public:
  // The most logprobs a row that sample() gives. A request with more, or with -1 (all), gets none from it: the runner
  // copies its row of logits to the host before sample() and calls token_logprobs(); the same for prompt_logprobs.
  static constexpr int kMaxLogprobs = 64;
  // Whether sample() gives the logprobs of such a request.
  static bool gives_logprobs(const SamplingParams& params) {
    return params.logprobs && *params.logprobs >= 0 && *params.logprobs <= kMaxLogprobs;
  }
  // Whether a request is fine with Args::all_greedy at every output position >= num_output_tokens.
  static bool needs_only_argmax(const SamplingParams& params, std::size_t num_output_tokens);
  // The most bytes that a slot of a vocabulary can take, lists aside.
  static std::size_t max_slot_bytes(int vocab_size, int max_context = 0);

  //   max_context  the most drafts in front of a row
  // Throws Unsupported on the CPU and in a build without CUDA, OutOfMemory.
  DeviceSampler(int vocab_size, int max_num_slots, int max_num_rows, const Context& ctx, int max_context = 0);

  // Gives a slot in [0, max_num_slots) to a request, at admission and at readmission; replaces what it had. The params
  // must have passed validate(). output_token_ids: all generated so far; none may be a placeholder. Copies what it
  // needs before it returns. Not while the stream is captured. Throws InvalidArgument for an id outside the vocabulary
  // or a slot out of range, OutOfMemory (the slot is then as after release()).
  void set_request(int slot, const SamplingParams& params, std::span<const std::int32_t> prompt_token_ids,
                   std::span<const std::int32_t> output_token_ids, std::uint64_t seed);

  // Gives back what the slot has. Steps that were enqueued before still find it. No need to call it for a free slot.
  void release(int slot);

  struct Args {
    TensorView logits{};            // [num_rows, vocab_size] f32, rows contiguous, any row stride; changed in place
    TensorView slots{};             // [num_rows] i32; -1: padding. No slot twice, unless rows have a context
    TensorView output_positions{};  // [num_rows] i32: output tokens before this one, the context included
    // Drafts, or none: of row i the first num_context[i] ids stand in front of it, behind the tokens of its slot, and
    // no two rows of a slot have as many. The slots' state is only read then. What a row with an id outside the
    // vocabulary gives means nothing.
    TensorView context_ids{};  // [num_rows, max_context] i32
    TensorView num_context{};  // [num_rows] i32
    // A fact that the host knows: needs_only_argmax() and no logprobs for every row. Then the slots' state is neither
    // read nor written.
    bool all_greedy = false;
    // The most logprobs that a row wants, at most kMaxLogprobs; -1: no row wants any, not even its own token's.
    int num_logprobs = -1;

    TensorView token_ids{};  // [num_rows] i32; 0 where not finite or padding
    TensorView is_finite{};  // [num_rows] u8; see SampledToken. 1 for padding
    // With num_logprobs >= 0, as TokenLogprobs. Written for finite rows whose slot gives logprobs, up to the request's
    // own number; the rest is left as it was.
    TensorView logprob_token_ids{};  // [num_rows, 1 + num_logprobs] i32
    TensorView logprobs{};           // [num_rows, 1 + num_logprobs] f32
    TensorView ranks{};              // [num_rows] i32
  };

  // Chooses a token a row and adds it to its slot's state (not for a row that is not finite, nor with a context).
  // Allocates nothing; may be
  // captured in a graph once one call ran outside of a capture. num_rows may be 0. Throws InvalidArgument for a tensor
  // that does not fit.
  void sample(const Args& args);

  struct AddedTokens {
    TensorView slots{};             // [num_rows] i32; -1: padding. No slot twice
    TensorView output_positions{};  // [num_rows] i32: output tokens, these included
    TensorView token_ids{};         // [num_rows, columns] i32
    TensorView counts{};            // [num_rows] i32: so many of them
  };
  // Adds tokens to the slots' state. Throws and may be captured as sample().
  void add_tokens(const AddedTokens& tokens);

 private:
  Context ctx_;
  int vocab_size_, max_num_slots_, max_num_rows_, max_context_;
  std::shared_ptr<cuda::SamplerState> state_;
};

struct PackedSlot;  // sampler_slot.h

}  // namespace ops

namespace cuda {
std::shared_ptr<SamplerState> make_sampler_state(int vocab_size, int max_num_slots, int max_context,
                                                 const ops::Context& ctx);
void set_sampler_slot(SamplerState& state, int slot, const ops::PackedSlot& packed,
                      std::span<const std::int32_t> prompt_token_ids, std::span<const std::int32_t> output_token_ids);
void clear_sampler_slot(SamplerState& state, int slot);
void sample(SamplerState& state, const ops::DeviceSampler::Args& args);
void add_sampled_tokens(SamplerState& state, const ops::DeviceSampler::AddedTokens& tokens);
}  // namespace cuda

}  // namespace deltaic
