#pragma once

#include <deltaic/runner.h>

#include "cpp/src/runner/input_batch.h"

namespace deltaic {

// Builds what the first num_rows rows of the batch run on, in row order. The vectors of `inputs` and `metadata` are
// reused from step to step.
//   position of the j-th scheduled token   computed + j
//   input token                            the row's token at that position, then its drafts (0 for a placeholder);
//                                          where none is known, the last sampled one with use_last_sampled, else 0
//   seq_len                                computed + scheduled
//   logits index                           query_start_loc[i + 1] - 1
// With use_last_sampled the last input before the drafts of every row that is beyond its prefill length there is its
// last sampled token, whatever the row's own tokens say.
void build_step_inputs(const InputBatch& batch, int num_rows, bool use_last_sampled, StepInputs& inputs);

// seq_lens and slot_mapping (block id x block_size + offset) of the same rows, for the attention group `group`. The
// block table stays in the batch; only its row stride is set here.
void build_attention_metadata(const InputBatch& batch, int num_rows, int group, int block_size,
                              AttentionMetadataView& metadata);

}  // namespace deltaic
