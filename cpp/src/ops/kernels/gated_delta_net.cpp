// The convolution and the recurrence of Gated DeltaNet, token by token: the state of a span stays in registers or L1.
#include "cpp/src/ops/kernels/vec.h"

namespace deltaic::cpu::DELTAIC_ISA {

// out = silu(sum of the taps in order); channels in lanes.
void causal_conv(const ConvArgs& args) {
  const int taps = args.kernel;
  for_each_vec(args.dim, [&](int64_t c, int count) {
    Vec weight[kMaxConvKernel];
    for (int j = 0; j < taps; ++j) {
      Vec column{};
      for (int i = 0; i < count; ++i) column[i] = args.weight[(c + i) * taps + j];
      weight[j] = column;
    }
    for (int64_t t = 0; t < args.num_tokens; ++t) {
      Vec acc{};
      for (int j = 0; j < taps; ++j) {
        const int64_t from = t - (taps - 1) + j;
        const float* row =
            from < 0 ? args.history + (from + taps - 1) * args.dim : args.input + from * args.input_stride;
        acc = fma(weight[j], load_some(row + c, count), acc);
      }
      store_some(args.out + t * args.out_stride + c, silu(acc), count);
    }
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
  scalars[2] = sum(qk) * q_factor * k_factor;
}

namespace {

// One token for one row, from the row's dots with the raw k and q: what is added to the row is k times `update`.
struct RowStep {
  float update, out;
};
DELTAIC_INLINE RowStep row_step(float dot_k, float dot_q, float v, const float* scalars, const float* gates) {
  const float decay = gates[0], beta = gates[1];
  const float u = beta * fma(-decay, dot_k * scalars[1], v);
  return {u * scalars[1], fma(decay, dot_q * scalars[0], u * scalars[2])};
}

// R rows of the state, N vectors each, in registers over all tokens.
template <int N, int R>
void rows_in_registers(const DeltaArgs& args, int row) {
  Vec s[R][N];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < N; ++i) s[r][i] = load(args.state + (row + r) * args.key_dim + i * kLanes);
  const float *q = args.q, *k = args.k, *v = args.v + row, *scalars = args.scalars, *gates = args.gates;
  float* out = args.out + row;
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    Vec dots[4] = {};  // k and q of row 0, of row 1
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      const Vec kv = load(k + i * kLanes), qv = load(q + i * kLanes);
      for (int r = 0; r < R; ++r) {
        dots[2 * r] = fma(s[r][i], kv, dots[2 * r]);
        dots[2 * r + 1] = fma(s[r][i], qv, dots[2 * r + 1]);
      }
    }
    const Vec4 sums = sum4(dots[0], dots[1], dots[2], dots[3]);
    Vec update[R];
    for (int r = 0; r < R; ++r) {
      const RowStep step = row_step(sums[2 * r], sums[2 * r + 1], v[r], scalars, gates);
      out[r] = step.out;
      update[r] = splat(step.update);
    }
    const Vec decay = splat(gates[0]);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      const Vec kv = load(k + i * kLanes);
      for (int r = 0; r < R; ++r) s[r][i] = fma(kv, update[r], s[r][i] * decay);
    }
    q += args.stride, k += args.stride, v += args.stride;
    scalars += args.scalars_stride, gates += args.gates_stride, out += args.out_stride;
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < N; ++i) store(args.state + (row + r) * args.key_dim + i * kLanes, s[r][i]);
}

// The same for any size, with the row in L1. The sums have the order of rows_in_registers.
void row_in_memory(const DeltaArgs& args, int row) {
  float* s = args.state + static_cast<int64_t>(row) * args.key_dim;
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    const float *q = args.q + t * args.stride, *k = args.k + t * args.stride;
    const float *scalars = args.scalars + t * args.scalars_stride, *gates = args.gates + t * args.gates_stride;
    Vec dot_k{}, dot_q{};
    for_each_vec(args.key_dim, [&](int64_t i, int count) {
      const Vec value = load_some(s + i, count);
      dot_k = fma(value, load_some(k + i, count), dot_k);
      dot_q = fma(value, load_some(q + i, count), dot_q);
    });
    const Vec4 sums = sum4(dot_k, dot_q, dot_k, dot_q);
    const RowStep step = row_step(sums[0], sums[1], args.v[t * args.stride + row], scalars, gates);
    args.out[t * args.out_stride + row] = step.out;
    for_each_vec(args.key_dim, [&](int64_t i, int count) {
      store_some(s + i, fma(load_some(k + i, count), splat(step.update), load_some(s + i, count) * gates[0]), count);
    });
  }
}

template <int N>
void delta_rule_in_registers(const DeltaArgs& args) {
  int row = 0;
  for (; row + 2 <= args.num_rows; row += 2) rows_in_registers<N, 2>(args, row);
  if (row < args.num_rows) rows_in_registers<N, 1>(args, row);
}

}  // namespace

void delta_rule(const DeltaArgs& args) {
#if defined(__AVX512F__)
  if (args.key_dim == 128) return delta_rule_in_registers<8>(args);
  if (args.key_dim == 64) return delta_rule_in_registers<4>(args);
#elif defined(__AVX2__)
  if (args.key_dim == 32) return delta_rule_in_registers<4>(args);
#endif
  for (int row = 0; row < args.num_rows; ++row) row_in_memory(args, row);
}

}  // namespace deltaic::cpu::DELTAIC_ISA
