#pragma once

#include <initializer_list>

#include "cpp/src/ops/checks.h"
#include "cpp/src/ops/gated_delta_net.h"

// What the GDN ops check of their tensors. All throw InvalidArgument naming the op and the numbers.

namespace deltaic::ops {

void check_gdn_shape(const char* op, const GdnShape& shape);
void check_gdn_sequences(const char* op, const GdnSequences& sequences, const Context& ctx);
// That no offset of the layout reaches past a row of proj.
void check_gdn_layout(const char* op, const GdnShape& shape, const GdnProjectionLayout& layout, std::int64_t row);
// f32 on the CPU, any float on CUDA.
void check_gdn_activation(const char* op, const char* name, const TensorView& tensor, const Context& ctx,
                          std::initializer_list<std::int64_t> shape);
void check_gdn_conv_state(const char* op, const TensorView& conv_state, const GdnShape& shape, int num_draft_tokens,
                          const Context& ctx);
void check_gdn_temporal(const char* op, const TensorView& temporal, const GdnShape& shape, const Context& ctx);
// Nothing without drafts.
void check_gdn_replay(const char* op, const TensorView& replay, const GdnSequences& sequences, const GdnShape& shape,
                      const Context& ctx);

}  // namespace deltaic::ops
