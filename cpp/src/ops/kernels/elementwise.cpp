#include "cpp/src/ops/kernels/elementwise.h"

namespace deltaic::cpu::DELTAIC_ISA {
namespace {

// 1 / sqrt(mean(x^2) + eps)
float inverse_rms(const float* x, float eps, int64_t n) {
  Vec acc[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      const Vec value = load(x + i + j * kLanes);
      acc[j] = fma(value, value, acc[j]);
    }
  for_each_vec(n - i, [&](int64_t offset, int count) {
    const Vec value = load_some(x + i + offset, count);
    acc[0] = fma(value, value, acc[0]);
  });
  const float mean = sum((acc[0] + acc[1]) + (acc[2] + acc[3])) / static_cast<float>(n);
  return 1.0F / __builtin_sqrtf(mean + eps);
}

template <class T>
void widen_of(const void* x, int64_t n, float* y) {
  for_each_vec(n, [&](int64_t i, int count) {
    const char* from = static_cast<const char*>(x) + i * T::kBytes;
    store_some(y + i, count == kLanes ? load<T>(from) : load_partial<T>(from, count), count);
  });
}

template <class T>
void narrow_of(const float* x, int64_t n, void* y) {
  for_each_vec(n, [&](int64_t i, int count) {
    char* to = static_cast<char*>(y) + i * T::kBytes;
    const Vec value = load_some(x + i, count);
    if (count == kLanes) return store<T>(to, value);
    store_partial<T>(to, value, count);
  });
}

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* y) {
  const Vec factor = splat(inverse_rms(x, eps, n));
  for_each_vec(n, [&](int64_t i, int count) {
    store_some(y + i, load_some(x + i, count) * factor * load_some(weight + i, count), count);
  });
}

void gated_rms_norm(const float* x, const float* z, const float* weight, float eps, int64_t n, float* y) {
  const Vec factor = splat(inverse_rms(x, eps, n));
  for_each_vec(n, [&](int64_t i, int count) {
    const Vec normed = load_some(x + i, count) * factor * load_some(weight + i, count);
    store_some(y + i, normed * silu(load_some(z + i, count)), count);
  });
}

void silu_mul(const float* gate, const float* up, int64_t n, float* y) {
  for_each_vec(n, [&](int64_t i, int count) {
    store_some(y + i, silu(load_some(gate + i, count)) * load_some(up + i, count), count);
  });
}

void sigmoid_mul(const float* gate, int64_t n, float* x) {
  for_each_vec(n, [&](int64_t i, int count) {
    store_some(x + i, load_some(x + i, count) * sigmoid(load_some(gate + i, count)), count);
  });
}

void rotate(const float* cos, const float* sin, int64_t half, float* x) {
  for_each_vec(half, [&](int64_t i, int count) {
    const Vec c = load_some(cos + i, count), s = load_some(sin + i, count);
    const Vec a = load_some(x + i, count), b = load_some(x + half + i, count);
    store_some(x + i, fma(a, c, -(b * s)), count);
    store_some(x + half + i, fma(b, c, a * s), count);
  });
}

void scale(float factor, int64_t n, float* x) {
  for_each_vec(n, [&](int64_t i, int count) { store_some(x + i, load_some(x + i, count) * factor, count); });
}

void add_scaled(float factor, const float* x, int64_t n, float* y) {
  for_each_vec(n, [&](int64_t i, int count) {
    store_some(y + i, fma(splat(factor), load_some(x + i, count), load_some(y + i, count)), count);
  });
}

void softmax(int64_t n, float* x) {
  float largest = -__builtin_inff();
  for (int64_t i = 0; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  float total = 0.0F;
  for_each_vec(n, [&](int64_t i, int count) {
    const Vec value = exp(load_some(x + i, count) - largest);
    store_some(x + i, value, count);
    for (int j = 0; j < count; ++j) total += value[j];
  });
  for_each_vec(n, [&](int64_t i, int count) { store_some(x + i, load_some(x + i, count) / total, count); });
}

void widen(Float type, const void* x, int64_t n, float* y) {
  switch (type) {
    case Float::f32:
      return widen_of<F32>(x, n, y);
    case Float::f16:
      return widen_of<F16>(x, n, y);
    case Float::bf16:
      return widen_of<BF16>(x, n, y);
  }
}

void narrow(Float type, const float* x, int64_t n, void* y) {
  switch (type) {
    case Float::f32:
      return narrow_of<F32>(x, n, y);
    case Float::f16:
      return narrow_of<F16>(x, n, y);
    case Float::bf16:
      return narrow_of<BF16>(x, n, y);
  }
}

}  // namespace deltaic::cpu::DELTAIC_ISA
