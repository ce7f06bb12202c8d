// The convolution and the recurrence of Gated DeltaNet, token by token: the state of a span stays in registers or L1.
#include "cpp/src/ops/kernels/vec.h"

namespace deltaic::cpu::DELTAIC_ISA {

namespace {

// Vectors of channels [c, c + count): the taps stay in registers, the window of inputs slides over the tokens.
template <int Taps>
void convolve_channels(const ConvArgs& args, int64_t c, int count) {
  constexpr int kAhead = 12;  // tokens: a row of input is a page or more from the next
  float columns[Taps][kLanes] = {};
  for (int i = 0; i < count; ++i)
    for (int j = 0; j < Taps; ++j) columns[j][i] = args.weight[(c + i) * Taps + j];
  Vec weight[Taps], window[Taps];
  for (int j = 0; j < Taps; ++j) weight[j] = load(columns[j]);
  for (int j = 0; j < Taps - 1; ++j) window[j] = load_some(args.history + j * args.dim + c, count);
  const float* input = args.input + c;
  float* out = args.out + c;
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    if (t + kAhead < args.num_tokens) __builtin_prefetch(input + kAhead * args.input_stride);
    window[Taps - 1] = load_some(input, count);
    Vec acc{};
    for (int j = 0; j < Taps; ++j) acc = fma(weight[j], window[j], acc);
    store_some(out, silu(acc), count);
    for (int j = 0; j < Taps - 1; ++j) window[j] = window[j + 1];
    input += args.input_stride, out += args.out_stride;
  }
}

// Any number of taps, read anew for every token.
void convolve_any(const ConvArgs& args, int64_t c, int count) {
  const int taps = args.kernel;
  float columns[kMaxConvKernel][kLanes] = {};
  for (int i = 0; i < count; ++i)
    for (int j = 0; j < taps; ++j) columns[j][i] = args.weight[(c + i) * taps + j];
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    Vec acc{};
    for (int j = 0; j < taps; ++j) {
      const int64_t from = t - (taps - 1) + j;
      const float* row = from < 0 ? args.history + (from + taps - 1) * args.dim : args.input + from * args.input_stride;
      acc = fma(load(columns[j]), load_some(row + c, count), acc);
    }
    store_some(args.out + t * args.out_stride + c, silu(acc), count);
  }
}

}  // namespace

// out = silu(sum of the taps in order); channels in lanes.
void causal_conv(const ConvArgs& args) {
  for_each_vec(args.dim, [&](int64_t c, int count) {
    if (args.kernel == 4) return convolve_channels<4>(args, c, count);
    convolve_any(args, c, count);
  });
}

void qk_scalars(const float* q, const float* k, int64_t n, float scale, float* scalars) {
  Vec qq{}, kk{}, qk{};
  for_each_vec(n, [&](int64_t i, int count) {
    const Vec qv = load_some(q + i, count), kv = load_some(k + i, count);
    qq = fma(qv, qv, qq);
    kk = fma(kv, kv, kk);
    qk = fma(qv, kv, qk);
  });
  const float q_factor = scale / __builtin_sqrtf(sum(qq) + 1e-6F);
  const float k_factor = 1.0F / __builtin_sqrtf(sum(kk) + 1e-6F);
  scalars[0] = q_factor;
  scalars[1] = k_factor;
  scalars[2] = sum(qk) * q_factor;
}

namespace {

// One token's numbers for all rows: a row r with the raw dots S k and S q adds `update_v * v[r] - update_dot * dot_k`
// times k to the decayed S, and gives `out_dot * dot_q + out_update` times that factor.
struct Step {
  float decay, update_v, update_dot, out_dot, out_update;
};
DELTAIC_INLINE Step step_of(const float* scalars, const float* gates) {
  const float q_factor = scalars[0], k_factor = scalars[1], decay = gates[0], beta = gates[1];
  const float update_v = beta * k_factor;
  return {decay, update_v, update_v * (decay * k_factor), decay * q_factor, scalars[2]};
}
DELTAIC_INLINE float update_of(const Step& step, float dot_k, float v) {
  return fma(-step.update_dot, dot_k, step.update_v * v);
}
DELTAIC_INLINE float out_of(const Step& step, float dot_q, float update) {
  return fma(step.out_update, update, step.out_dot * dot_q);
}

// R rows of the state, N vectors each, in registers or on the stack over all tokens. Several rows hide the time that a
// sum over lanes takes.
template <int N, int R>
void rows_in_registers(const DeltaArgs& args, int row) {
  Vec s[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) s[r][i] = load(args.state + (row + r) * args.key_dim + i * kLanes);
  const float *q = args.q, *k = args.k, *v = args.v + row, *scalars = args.scalars, *gates = args.gates;
  float *out = args.out + row, *updates = args.updates == nullptr ? nullptr : args.updates + row;
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    Vec dot_k[4] = {}, dot_q[4] = {};
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      const Vec kv = load(k + i * kLanes), qv = load(q + i * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        dot_k[r] = fma(s[r][i], kv, dot_k[r]);
        dot_q[r] = fma(s[r][i], qv, dot_q[r]);
      }
    }
    const Vec4 sums_k = sum4(dot_k[0], dot_k[1], dot_k[2], dot_k[3]);
    const Step step = step_of(scalars, gates);
    float factor[R];
    Vec update[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      factor[r] = update_of(step, sums_k[r], v[r]);
      update[r] = splat(factor[r]);
    }
    const Vec decay = splat(step.decay);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      const Vec kv = load(k + i * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) s[r][i] = fma(kv, update[r], s[r][i] * decay);
    }
    const Vec4 sums_q = sum4(dot_q[0], dot_q[1], dot_q[2], dot_q[3]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) out[r] = out_of(step, sums_q[r], factor[r]);
    if (updates != nullptr) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) updates[r] = factor[r];
      updates += args.updates_stride;
    }
    q += args.stride, k += args.stride, v += args.stride;
    scalars += args.scalars_stride, gates += args.gates_stride, out += args.out_stride;
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) store(args.state + (row + r) * args.key_dim + i * kLanes, s[r][i]);
}

// The same for any size, with the rows in L1. The sums have the order of rows_in_registers.
template <int R>
void rows_in_memory(const DeltaArgs& args, int row) {
  float* s = args.state + static_cast<int64_t>(row) * args.key_dim;
  const int64_t n = args.key_dim;
  const float *q = args.q, *k = args.k, *v = args.v + row, *scalars = args.scalars, *gates = args.gates;
  float *out = args.out + row, *updates = args.updates == nullptr ? nullptr : args.updates + row;
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    Vec dot_k[4] = {}, dot_q[4] = {};
    for_each_vec(n, [&](int64_t i, int count) __attribute__((always_inline)) {
      const Vec kv = load_some(k + i, count), qv = load_some(q + i, count);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Vec value = load_some(s + r * n + i, count);
        dot_k[r] = fma(value, kv, dot_k[r]);
        dot_q[r] = fma(value, qv, dot_q[r]);
      }
    });
    const Vec4 sums_k = sum4(dot_k[0], dot_k[1], dot_k[2], dot_k[3]);
    const Vec4 sums_q = sum4(dot_q[0], dot_q[1], dot_q[2], dot_q[3]);
    const Step step = step_of(scalars, gates);
    Vec update[R];
    for (int r = 0; r < R; ++r) {
      const float factor = update_of(step, sums_k[r], v[r]);
      out[r] = out_of(step, sums_q[r], factor);
      update[r] = splat(factor);
      if (updates != nullptr) updates[r] = factor;
    }
    if (updates != nullptr) updates += args.updates_stride;
    const Vec decay = splat(step.decay);
    for_each_vec(n, [&](int64_t i, int count) __attribute__((always_inline)) {
      const Vec kv = load_some(k + i, count);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        float* at = s + r * n + i;
        store_some(at, fma(kv, update[r], load_some(at, count) * decay), count);
      }
    });
    q += args.stride, k += args.stride, v += args.stride;
    scalars += args.scalars_stride, gates += args.gates_stride, out += args.out_stride;
  }
}

template <int N, int R>
void delta_rule_in_registers(const DeltaArgs& args) {
  int row = 0;
  for (; row + R <= args.num_rows; row += R) rows_in_registers<N, R>(args, row);
  for (; row < args.num_rows; ++row) rows_in_registers<N, 1>(args, row);
}

}  // namespace

void delta_rule(const DeltaArgs& args) {
#if defined(__AVX512F__)
  if (args.key_dim == 128) return delta_rule_in_registers<8, 4>(args);
  if (args.key_dim == 64) return delta_rule_in_registers<4, 4>(args);
#endif
  int row = 0;
  for (; row + 4 <= args.num_rows; row += 4) rows_in_memory<4>(args, row);
  for (; row < args.num_rows; ++row) rows_in_memory<1>(args, row);
}

// A piece of a row stays in a register over all tokens.
void replay(const ReplayArgs& args) {
  for (int row = 0; row < args.num_rows; ++row) {
    float* s = args.state + static_cast<int64_t>(row) * args.key_dim;
    for_each_vec(args.key_dim, [&](int64_t i, int count) __attribute__((always_inline)) {
      Vec value = load_some(s + i, count);
      for (int64_t t = 0; t < args.num_tokens; ++t) {
        const int64_t at = t * args.stride;
        const Vec update = splat(args.updates[at + row]), decay = splat(args.decay[at]);
        value = fma(load_some(args.k + at + i, count), update, value * decay);
      }
      store_some(s + i, value, count);
    });
  }
}

}  // namespace deltaic::cpu::DELTAIC_ISA
