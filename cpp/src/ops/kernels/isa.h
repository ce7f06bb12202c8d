#pragma once

#include <string_view>

#include <deltaic/tensor.h>

#include "cpp/src/ops/kernels/table.h"

namespace deltaic::cpu {

enum class Isa { baseline, avx2, avx512 };

std::string_view name(Isa isa);
bool is_available(Isa isa);

// The best instruction set of this machine, or what DELTAIC_CPU_ISA asks for; decided once. Throws InvalidArgument when
// the variable names one that does not exist here.
Isa active_isa();
const Kernels& kernels();
const Kernels& kernels_of(Isa isa);

// Throws InvalidArgument for a dtype that is not f32, f16 or bf16.
Float float_type(DType dtype);

}  // namespace deltaic::cpu
