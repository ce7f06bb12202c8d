#pragma once

// A vector of f32 in the registers of the instruction set that a file is compiled for (DELTAIC_ISA: baseline, avx2 or
// avx512), with loads and stores of f32, f16 and bf16. Addresses need no alignment.

#include <stddef.h>
#include <stdint.h>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpp/src/ops/kernels/table.h"

#define DELTAIC_INLINE inline __attribute__((always_inline))

namespace deltaic::cpu::DELTAIC_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));
typedef float Vec4 __attribute__((vector_size(16)));

// The element types of weights and caches.
struct F32 {
  static constexpr int kBytes = 4;
};
struct F16 {
  static constexpr int kBytes = 2;
};
struct BF16 {
  static constexpr int kBytes = 2;
};

DELTAIC_INLINE Vec splat(float value) { return value - Vec{}; }

DELTAIC_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
DELTAIC_INLINE float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

DELTAIC_INLINE Vec select(IntVec mask, Vec a, Vec b) { return mask ? a : b; }
DELTAIC_INLINE Vec max(Vec a, Vec b) { return select(a > b, a, b); }

// The first `count` elements, the rest zero.
template <class T>
DELTAIC_INLINE void copy_elements(void* to, const void* from, int count) {
  __builtin_memcpy(to, from, static_cast<size_t>(count) * T::kBytes);
}

DELTAIC_INLINE Vec widen_bf16(HalfVec bits) { return (Vec)(__builtin_convertvector(bits, UintVec) << 16); }

DELTAIC_INLINE Vec widen_f16(HalfVec bits) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps((__m256i)bits);
#elif defined(__AVX2__)
  return _mm256_cvtph_ps((__m128i)bits);
#else
  const UintVec wide = __builtin_convertvector(bits, UintVec);
  const UintVec magnitude = wide & 0x7fffU;
  const UintVec scaled = (UintVec)((Vec)(magnitude << 13) * 0x1p112F);  // also right for denormal numbers
  const UintVec special = (UintVec)(magnitude > 0x7bffU) & 0x7f800000U;
  return (Vec)(((wide & 0x8000U) << 16) | scaled | special);
#endif
}

DELTAIC_INLINE HalfVec narrow_bf16(Vec value) {
  const UintVec bits = (UintVec)value;
  const UintVec rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const UintVec quiet = (bits >> 16) | 0x40U;
  const UintVec is_nan = (UintVec)(value != value);
  return __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), HalfVec);
}

#if !defined(__AVX2__)
// Rounds to nearest even; too large numbers become infinite.
DELTAIC_INLINE uint16_t narrow_f16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return sign | 0x7e00U;
  if (magnitude >= 0x477ff000U) return sign | 0x7c00U;
  if (magnitude < 0x38800000U) {  // denormal in f16: let the adder round
    const uint32_t half_bits = 0x3f000000U;
    float shifted, half;
    __builtin_memcpy(&shifted, &magnitude, 4);
    __builtin_memcpy(&half, &half_bits, 4);
    shifted += half;
    uint32_t result;
    __builtin_memcpy(&result, &shifted, 4);
    return static_cast<uint16_t>(sign | (result - half_bits));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13));
}
#endif

DELTAIC_INLINE HalfVec narrow_f16(Vec value) {
#if defined(__AVX512F__)
  return (HalfVec)_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (HalfVec)_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  HalfVec result{};
  for (int i = 0; i < kLanes; ++i) result[i] = narrow_f16(value[i]);
  return result;
#endif
}

template <class T>
DELTAIC_INLINE Vec load(const void* from);
template <>
DELTAIC_INLINE Vec load<F32>(const void* from) {
  Vec value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}
template <>
DELTAIC_INLINE Vec load<F16>(const void* from) {
  HalfVec bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
  return widen_f16(bits);
}
template <>
DELTAIC_INLINE Vec load<BF16>(const void* from) {
  HalfVec bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
#if defined(__AVX512F__)
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16));
#elif defined(__AVX2__)
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16));
#else
  return widen_bf16(bits);
#endif
}
DELTAIC_INLINE Vec load(const float* from) { return load<F32>(from); }

// The first `count` < kLanes elements, the other lanes zero; nothing else is read.
template <class T>
DELTAIC_INLINE Vec load_partial(const void* from, int count) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  const __mmask16 mask = static_cast<__mmask16>((1U << count) - 1U);
  if constexpr (T::kBytes == 4) return _mm512_maskz_loadu_ps(mask, from);
  const HalfVec bits = (HalfVec)_mm256_maskz_loadu_epi16(mask, from);
  return load<T>(&bits);
#else
  char buffer[kLanes * T::kBytes] = {};
  copy_elements<T>(buffer, from, count);
  return load<T>(buffer);
#endif
}
DELTAIC_INLINE Vec load_partial(const float* from, int count) { return load_partial<F32>(from, count); }

template <class T>
DELTAIC_INLINE void store(void* to, Vec value);
template <>
DELTAIC_INLINE void store<F32>(void* to, Vec value) {
  __builtin_memcpy(to, &value, sizeof(value));
}
template <>
DELTAIC_INLINE void store<F16>(void* to, Vec value) {
  const HalfVec bits = narrow_f16(value);
  __builtin_memcpy(to, &bits, sizeof(bits));
}
template <>
DELTAIC_INLINE void store<BF16>(void* to, Vec value) {
  const HalfVec bits = narrow_bf16(value);
  __builtin_memcpy(to, &bits, sizeof(bits));
}
DELTAIC_INLINE void store(float* to, Vec value) { store<F32>(to, value); }

template <class T>
DELTAIC_INLINE void store_partial(void* to, Vec value, int count) {
  char buffer[kLanes * T::kBytes];
  store<T>(buffer, value);
  copy_elements<T>(to, buffer, count);
}
DELTAIC_INLINE void store_partial(float* to, Vec value, int count) { store_partial<F32>(to, value, count); }

// The sums of the lanes of a, b, c and d. The tree is the same for each: lanes i and i + half, half by half.
DELTAIC_INLINE Vec4 fold(Vec value) {
#if defined(__AVX512F__)
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(value),
                                    _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(value), 1)));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  return _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
#else
  return value;
#endif
}
DELTAIC_INLINE Vec4 sum4(Vec a, Vec b, Vec c, Vec d) {
#if defined(__AVX512F__)
  const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
  const __m512 cd = _mm512_shuffle_f32x4(c, d, 0x44) + _mm512_shuffle_f32x4(c, d, 0xee);
  const __m512 quarters = _mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xdd);
  const __m512 pairs = quarters + _mm512_permute_ps(quarters, 0x4e);
  const __m512 sums = pairs + _mm512_permute_ps(pairs, 0xb1);
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castps512_ps128(_mm512_permutexvar_ps(first, sums));
#else
  const Vec4 fa = fold(a), fb = fold(b), fc = fold(c), fd = fold(d);
  const Vec4 ab = __builtin_shufflevector(fa, fb, 0, 4, 1, 5) + __builtin_shufflevector(fa, fb, 2, 6, 3, 7);
  const Vec4 cd = __builtin_shufflevector(fc, fd, 0, 4, 1, 5) + __builtin_shufflevector(fc, fd, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
#endif
}
DELTAIC_INLINE float sum(Vec value) {
  const Vec4 f = fold(value);
  return (f[0] + f[2]) + (f[1] + f[3]);
}
DELTAIC_INLINE float max_lane(Vec value) {
  float result = value[0];
  for (int i = 1; i < kLanes; ++i) result = value[i] > result ? value[i] : result;
  return result;
}

// e^x within a few units in the last place; below -87.3 zero, above 88.3 infinite; NaN stays NaN.
DELTAIC_INLINE Vec exp(Vec x) {
  const Vec kLow = splat(-87.33F), kHigh = splat(88.37F), kShift = splat(0x1.8p23F);
  const Vec clamped = select(x < kLow, kLow, select(x > kHigh, kHigh, x));
  const Vec shifted = fma(clamped, splat(1.44269504F), kShift);  // its low bits hold round(x / ln 2)
  const Vec n = shifted - kShift;
  const Vec r = fma(n, splat(2.12194440e-4F), fma(n, splat(-0.693359375F), clamped));
  Vec p = splat(1.0F / 5040.0F);
  p = fma(p, r, splat(1.0F / 720.0F));
  p = fma(p, r, splat(1.0F / 120.0F));
  p = fma(p, r, splat(1.0F / 24.0F));
  p = fma(p, r, splat(1.0F / 6.0F));
  p = fma(p, r, splat(0.5F));
  p = fma(p, r, splat(1.0F));
  p = fma(p, r, splat(1.0F));
  const Vec power = (Vec)(((UintVec)shifted + 127U) << 23);
  const Vec result = select(x < kLow, Vec{}, p * power);
  return select(x > kHigh, splat(__builtin_inff()), result);
}
DELTAIC_INLINE Vec sigmoid(Vec x) { return splat(1.0F) / (splat(1.0F) + exp(-x)); }
DELTAIC_INLINE Vec silu(Vec x) { return x / (splat(1.0F) + exp(-x)); }

// body(offset, count) over [0, n): whole vectors (count = kLanes), then the tail.
template <class Body>
DELTAIC_INLINE void for_each_vec(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, static_cast<int>(n - i));
}
DELTAIC_INLINE Vec load_some(const float* from, int count) {
  return count == kLanes ? load(from) : load_partial(from, count);
}
DELTAIC_INLINE void store_some(float* to, Vec value, int count) {
  if (count == kLanes) return store(to, value);
  store_partial(to, value, count);
}

}  // namespace deltaic::cpu::DELTAIC_ISA
