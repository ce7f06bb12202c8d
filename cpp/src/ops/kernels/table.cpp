#include "cpp/src/ops/kernels/elementwise.h"

namespace deltaic::cpu::DELTAIC_ISA {

void linear(const LinearArgs& args);
void attention(const AttentionArgs& args);
void attention_merge(float* max, float* sum, float* acc, float other_max, float other_sum, const float* other_acc,
                     int64_t n);
void causal_conv(const ConvArgs& args);
void delta_rule(const DeltaArgs& args);
void replay(const ReplayArgs& args);
void qk_scalars(const float* q, const float* k, int64_t n, float scale, float* scalars);

const Kernels kKernels = {
    .linear = linear,
    .attention = attention,
    .attention_merge = attention_merge,
    .causal_conv = causal_conv,
    .delta_rule = delta_rule,
    .replay = replay,
    .qk_scalars = qk_scalars,
    .rms_norm = rms_norm,
    .gated_rms_norm = gated_rms_norm,
    .silu_mul = silu_mul,
    .sigmoid_mul = sigmoid_mul,
    .rotate = rotate,
    .scale = scale,
    .add_scaled = add_scaled,
    .softmax = softmax,
    .widen = widen,
    .narrow = narrow,
};

}  // namespace deltaic::cpu::DELTAIC_ISA
