#pragma once

#include "cpp/src/ops/kernels/vec.h"

namespace deltaic::cpu::DELTAIC_ISA {

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* y);
void gated_rms_norm(const float* x, const float* z, const float* weight, float eps, int64_t n, float* y);
void silu_mul(const float* gate, const float* up, int64_t n, float* y);
void sigmoid_mul(const float* gate, int64_t n, float* x);
void rotate(const float* cos, const float* sin, int64_t half, float* x);
void scale(float factor, int64_t n, float* x);
void add_scaled(float factor, const float* x, int64_t n, float* y);
void softmax(int64_t n, float* x);
void widen(Float type, const void* x, int64_t n, float* y);
void narrow(Float type, const float* x, int64_t n, void* y);

}  // namespace deltaic::cpu::DELTAIC_ISA
