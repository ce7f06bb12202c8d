#include "cpp/src/ops/kernels/isa.h"

#include <cstdlib>

#include "cpp/src/check.h"

namespace deltaic::cpu {
namespace {

constexpr Isa kAll[] = {Isa::avx512, Isa::avx2, Isa::baseline};  // best first

Isa choose() {
  const char* wanted = std::getenv("DELTAIC_CPU_ISA");
  if (wanted != nullptr && *wanted != '\0') {
    for (const Isa isa : kAll) {
      if (wanted != name(isa)) continue;
      DELTAIC_CHECK(is_available(isa), "DELTAIC_CPU_ISA=", wanted, ": this machine does not have it");
      return isa;
    }
    DELTAIC_CHECK(false, "DELTAIC_CPU_ISA=", wanted, ": expected baseline, avx2 or avx512");
  }
  for (const Isa isa : kAll)
    if (is_available(isa)) return isa;
  return Isa::baseline;
}

}  // namespace

std::string_view name(Isa isa) {
  switch (isa) {
    case Isa::baseline:
      return "baseline";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
  }
  return "?";
}

bool is_available(Isa isa) {
#if defined(DELTAIC_X86_KERNELS)
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  switch (isa) {
    case Isa::baseline:
      return true;
    case Isa::avx2:
      return has_avx2;
    case Isa::avx512:
      return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  return false;
#else
  return isa == Isa::baseline;
#endif
}

Isa active_isa() {
  static const Isa isa = choose();
  return isa;
}

const Kernels& kernels() {
  static const Kernels& table = kernels_of(active_isa());
  return table;
}

const Kernels& kernels_of(Isa isa) {
  DELTAIC_CHECK(is_available(isa), "this machine does not have ", name(isa));
#if defined(DELTAIC_X86_KERNELS)
  if (isa == Isa::avx512) return avx512::kKernels;
  if (isa == Isa::avx2) return avx2::kKernels;
#endif
  return baseline::kKernels;
}

Float float_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return Float::f32;
    case DType::f16:
      return Float::f16;
    case DType::bf16:
      return Float::bf16;
    default:
      DELTAIC_CHECK(false, "a tensor of dtype ", deltaic::name(dtype), " where f32, f16 or bf16 is needed");
  }
  return Float::f32;
}

}  // namespace deltaic::cpu
