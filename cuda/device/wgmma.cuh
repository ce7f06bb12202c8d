#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/bulk_copy.cuh"

// Warpgroup matrix products (sm_90a): d[64 x N] += a[64 x 16] b[16 x N], f32 sums, asynchronous.
// Warp w of the group holds rows 16 w ... 16 w + 15; with g = lane / 4, q = lane % 4, d[4 i + c] is row g + c / 2 * 8,
// column 8 i + 2 q + c % 2. b lies in shared memory in rows of 128 bytes, swizzled by 128 bytes, as boxes of a tensor
// map do.

namespace deltaic::cuda {

// Describes a matrix whose rows run along the summed dimension (64 elements of it a row): 8 rows are 1024 bytes, and
// the next 8 lie stride bytes further.
__device__ inline std::uint64_t rows_descriptor(std::uint32_t address, std::uint32_t stride = 1024) {
  return ((address & 0x3ffffU) >> 4) | (std::uint64_t{1} << 16) | (std::uint64_t{stride >> 4} << 32) |
         (std::uint64_t{1} << 62);
}
// Describes a matrix whose rows run along N: a row a summed index; the next 64 columns lie chunk_bytes further.
__device__ inline std::uint64_t columns_descriptor(std::uint32_t address, std::uint32_t chunk_bytes) {
  return ((address & 0x3ffffU) >> 4) | (std::uint64_t{chunk_bytes >> 4} << 16) | (std::uint64_t{1024 >> 4} << 32) |
         (std::uint64_t{1} << 62);
}

// The same for a matrix of 32 columns, in rows of 64 bytes swizzled by 64 bytes.
__device__ inline std::uint64_t narrow_descriptor(std::uint32_t address) {
  return ((address & 0x3ffffU) >> 4) | (std::uint64_t{1} << 16) | (std::uint64_t{512 >> 4} << 32) |
         (std::uint64_t{2} << 62);
}

// Before the first product, and whenever registers of the products were written by other instructions.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups of products are running.
template <int N>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving uses of registers that products write over a wait.
template <int N>
__device__ inline void hold_registers(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// wgmma_rows: a and b by rows_descriptor. wgmma_columns: a in registers (the fragments of mma.m16n8k16), b by
// columns_descriptor. wgmma_shared: a by rows_descriptor, or with kTransposedA by columns_descriptor, and b by
// narrow_descriptor or columns_descriptor. accumulate = 0: d is overwritten.
// clang-format off
// The first so many sums, as places in an instruction and as operands.
#define DELTAIC_PLACES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define DELTAIC_SUMS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define DELTAIC_PLACES_16 DELTAIC_PLACES_8 \
  ",%8,%9,%10,%11,%12,%13,%14,%15"
#define DELTAIC_SUMS_16 DELTAIC_SUMS_8, \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define DELTAIC_PLACES_32 DELTAIC_PLACES_16 \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define DELTAIC_SUMS_32 DELTAIC_SUMS_16, \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define DELTAIC_PLACES_40 DELTAIC_PLACES_32 \
  ",%32,%33,%34,%35,%36,%37,%38,%39"
#define DELTAIC_SUMS_40 DELTAIC_SUMS_32, \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define DELTAIC_PLACES_48 DELTAIC_PLACES_40 \
  ",%40,%41,%42,%43,%44,%45,%46,%47"
#define DELTAIC_SUMS_48 DELTAIC_SUMS_40, \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define DELTAIC_PLACES_56 DELTAIC_PLACES_48 \
  ",%48,%49,%50,%51,%52,%53,%54,%55"
#define DELTAIC_SUMS_56 DELTAIC_SUMS_48, \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define DELTAIC_PLACES_64 DELTAIC_PLACES_56 \
  ",%56,%57,%58,%59,%60,%61,%62,%63"
#define DELTAIC_SUMS_64 DELTAIC_SUMS_56, \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define DELTAIC_PLACES_72 DELTAIC_PLACES_64 \
  ",%64,%65,%66,%67,%68,%69,%70,%71"
#define DELTAIC_SUMS_72 DELTAIC_SUMS_64, \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define DELTAIC_PLACES_80 DELTAIC_PLACES_72 \
  ",%72,%73,%74,%75,%76,%77,%78,%79"
#define DELTAIC_SUMS_80 DELTAIC_SUMS_72, \
  "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define DELTAIC_PLACES_128 DELTAIC_PLACES_80 \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define DELTAIC_SUMS_128 DELTAIC_SUMS_80, \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
  "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
  "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
  "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
  "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// COUNT sums; A, B and P are COUNT, COUNT + 1 and COUNT + 2 (with a in registers B and P are COUNT + 4 and COUNT + 5).
#define DELTAIC_WGMMA_SHARED(N, TYPE, COUNT, A, B, P, ORDERS) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" DELTAIC_PLACES_##COUNT "}, " \
      "%" #A ", %" #B ", p, 1, 1, " ORDERS ";\n}" \
      : DELTAIC_SUMS_##COUNT : "l"(a), "l"(b), "r"(accumulate))
#define DELTAIC_WGMMA_COLUMNS(N, TYPE, COUNT, A, A1, A2, A3, B, P) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" DELTAIC_PLACES_##COUNT "}, " \
      "{%" #A ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", p, 1, 1, 1;\n}" \
      : DELTAIC_SUMS_##COUNT : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
// clang-format on

template <class T, int N>
__device__ inline void wgmma_rows(float (&d)[N / 2], std::uint64_t a, std::uint64_t b, int accumulate) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(N == 16 || N == 32 || N == 64 || N == 80 || N == 96 || N == 112 || N == 128 || N == 144 || N == 160 ||
                N == 256);
  if constexpr (N == 16 && kBf16) DELTAIC_WGMMA_SHARED(16, "bf16", 8, 8, 9, 10, "0, 0");
  if constexpr (N == 16 && !kBf16) DELTAIC_WGMMA_SHARED(16, "f16", 8, 8, 9, 10, "0, 0");
  if constexpr (N == 32 && kBf16) DELTAIC_WGMMA_SHARED(32, "bf16", 16, 16, 17, 18, "0, 0");
  if constexpr (N == 32 && !kBf16) DELTAIC_WGMMA_SHARED(32, "f16", 16, 16, 17, 18, "0, 0");
  if constexpr (N == 64 && kBf16) DELTAIC_WGMMA_SHARED(64, "bf16", 32, 32, 33, 34, "0, 0");
  if constexpr (N == 64 && !kBf16) DELTAIC_WGMMA_SHARED(64, "f16", 32, 32, 33, 34, "0, 0");
  if constexpr (N == 80 && kBf16) DELTAIC_WGMMA_SHARED(80, "bf16", 40, 40, 41, 42, "0, 0");
  if constexpr (N == 80 && !kBf16) DELTAIC_WGMMA_SHARED(80, "f16", 40, 40, 41, 42, "0, 0");
  if constexpr (N == 96 && kBf16) DELTAIC_WGMMA_SHARED(96, "bf16", 48, 48, 49, 50, "0, 0");
  if constexpr (N == 96 && !kBf16) DELTAIC_WGMMA_SHARED(96, "f16", 48, 48, 49, 50, "0, 0");
  if constexpr (N == 112 && kBf16) DELTAIC_WGMMA_SHARED(112, "bf16", 56, 56, 57, 58, "0, 0");
  if constexpr (N == 112 && !kBf16) DELTAIC_WGMMA_SHARED(112, "f16", 56, 56, 57, 58, "0, 0");
  if constexpr (N == 128 && kBf16) DELTAIC_WGMMA_SHARED(128, "bf16", 64, 64, 65, 66, "0, 0");
  if constexpr (N == 128 && !kBf16) DELTAIC_WGMMA_SHARED(128, "f16", 64, 64, 65, 66, "0, 0");
  if constexpr (N == 144 && kBf16) DELTAIC_WGMMA_SHARED(144, "bf16", 72, 72, 73, 74, "0, 0");
  if constexpr (N == 144 && !kBf16) DELTAIC_WGMMA_SHARED(144, "f16", 72, 72, 73, 74, "0, 0");
  if constexpr (N == 160 && kBf16) DELTAIC_WGMMA_SHARED(160, "bf16", 80, 80, 81, 82, "0, 0");
  if constexpr (N == 160 && !kBf16) DELTAIC_WGMMA_SHARED(160, "f16", 80, 80, 81, 82, "0, 0");
  if constexpr (N == 256 && kBf16) DELTAIC_WGMMA_SHARED(256, "bf16", 128, 128, 129, 130, "0, 0");
  if constexpr (N == 256 && !kBf16) DELTAIC_WGMMA_SHARED(256, "f16", 128, 128, 129, 130, "0, 0");
}

template <class T, int N>
__device__ inline void wgmma_columns(float (&d)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b, int accumulate) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(N == 64 || N == 128 || N == 256);
  if constexpr (N == 64 && kBf16) DELTAIC_WGMMA_COLUMNS(64, "bf16", 32, 32, 33, 34, 35, 36, 37);
  if constexpr (N == 64 && !kBf16) DELTAIC_WGMMA_COLUMNS(64, "f16", 32, 32, 33, 34, 35, 36, 37);
  if constexpr (N == 128 && kBf16) DELTAIC_WGMMA_COLUMNS(128, "bf16", 64, 64, 65, 66, 67, 68, 69);
  if constexpr (N == 128 && !kBf16) DELTAIC_WGMMA_COLUMNS(128, "f16", 64, 64, 65, 66, 67, 68, 69);
  if constexpr (N == 256 && kBf16) DELTAIC_WGMMA_COLUMNS(256, "bf16", 128, 128, 129, 130, 131, 132, 133);
  if constexpr (N == 256 && !kBf16) DELTAIC_WGMMA_COLUMNS(256, "f16", 128, 128, 129, 130, 131, 132, 133);
}

// bf16, N = 32.
template <bool kTransposedA>
__device__ inline void wgmma_shared(float (&d)[16], std::uint64_t a, std::uint64_t b, int accumulate) {
  if constexpr (kTransposedA)
    DELTAIC_WGMMA_SHARED(32, "bf16", 16, 16, 17, 18, "1, 1");
  else
    DELTAIC_WGMMA_SHARED(32, "bf16", 16, 16, 17, 18, "0, 1");
}

#undef DELTAIC_WGMMA_SHARED
#undef DELTAIC_WGMMA_COLUMNS
#undef DELTAIC_PLACES_8
#undef DELTAIC_SUMS_8
#undef DELTAIC_PLACES_16
#undef DELTAIC_SUMS_16
#undef DELTAIC_PLACES_32
#undef DELTAIC_SUMS_32
#undef DELTAIC_PLACES_40
#undef DELTAIC_SUMS_40
#undef DELTAIC_PLACES_48
#undef DELTAIC_SUMS_48
#undef DELTAIC_PLACES_56
#undef DELTAIC_SUMS_56
#undef DELTAIC_PLACES_64
#undef DELTAIC_SUMS_64
#undef DELTAIC_PLACES_72
#undef DELTAIC_SUMS_72
#undef DELTAIC_PLACES_80
#undef DELTAIC_SUMS_80
#undef DELTAIC_PLACES_128
#undef DELTAIC_SUMS_128

}  // namespace deltaic::cuda
