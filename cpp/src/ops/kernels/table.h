#pragma once

#include <stdint.h>

// The inner kernels of the CPU ops, compiled once an instruction set from the same sources and reached through a table
// of pointers. Plain C types only: a kernel's file must not instantiate inline code of the standard library, since the
// linker would keep one copy of it, perhaps one with instructions that this machine does not have.
namespace deltaic::cpu {

enum class Float : uint8_t { f32, f16, bf16 };

// y[i, j] (+)= x[row i] . w[j] (+ bias[j]) for m rows of x and n rows of w, all in f32.
struct LinearArgs {
  const float* x;
  int64_t x_stride;
  const int32_t* x_rows;  // [m] rows of x to use; null: rows 0 to m - 1
  int64_t m;
  const void* w;
  int64_t w_stride;  // elements
  Float w_type;
  int64_t n, k;
  const float* bias;  // [n]; null: none
  bool accumulate;
  float* y;
  int64_t y_stride;
};

// One partition of keys for up to kMaxAttentionRows query rows that share a key/value head.
inline constexpr int kMaxAttentionRows = 24;
inline constexpr int kMaxHeadDim = 512;
inline constexpr int kAttentionTile = 32;        // keys a softmax step, aligned on absolute positions
inline constexpr int kAttentionPartition = 256;  // keys summed by themselves, then merged in order
struct AttentionArgs {
  int num_rows, head_dim;
  const float* q[kMaxAttentionRows];
  int64_t position[kMaxAttentionRows];  // of the query: sees keys 0 to position; ascending
  float scale;
  const char *k_cache, *v_cache;  // of the key/value head
  Float k_type, v_type;
  int64_t k_block_bytes, v_block_bytes, k_slot_bytes, v_slot_bytes;
  const int32_t* block_table;
  int64_t block_size;
  int64_t key_begin;  // a multiple of kAttentionPartition
  // A row's largest score, sum of exponentials and weighted sum of values; nothing is written for a row that sees no
  // key.
  float *max, *sum;  // [num_rows]
  float* acc;        // [num_rows, head_dim]
};

// A stretch of one head of one sequence (GdnShape's segment) through the convolution.
struct ConvArgs {
  int64_t num_tokens;
  int dim, kernel;
  const float* input;  // [num_tokens, dim] at the segment
  int64_t input_stride;
  const float* weight;   // [dim, kernel]
  const float* history;  // [kernel - 1, dim]: the inputs before the first token, oldest first
  float* out;
  int64_t out_stride;
};
inline constexpr int kMaxConvKernel = 16;

// Rows of the state of one value head of one sequence through the gated delta rule.
struct DeltaArgs {
  int64_t num_tokens;
  int key_dim, num_rows;
  const float *q, *k, *v;  // of token 0; v at the first row
  int64_t stride;          // between tokens, of q, k and v
  const float* scalars;    // of token 0: 1 / |q| times the scale, 1 / |k|, q . k times the first
  int64_t scalars_stride;
  const float* gates;  // of token 0: decay = exp(g), beta
  int64_t gates_stride;
  float* state;  // [num_rows, key_dim]
  float* out;    // of token 0, at the first row
  int64_t out_stride;
  float* updates;  // of token 0, at the first row: what ReplayArgs takes; null: not wanted
  int64_t updates_stride;
};
// What tokens did to the same rows, without their outputs: the same bits.
struct ReplayArgs {
  int64_t num_tokens;
  int key_dim, num_rows;
  const float *k, *updates, *decay;  // of token 0; updates at the first row
  int64_t stride;                    // between tokens, of all three
  float* state;                      // [num_rows, key_dim]
};
inline constexpr int kMaxKeyHeadDim = 512;

struct Kernels {
  void (*linear)(const LinearArgs&);
  void (*attention)(const AttentionArgs&);
  // Merges a partition's (max, sum, acc) into a running one.
  void (*attention_merge)(float* max, float* sum, float* acc, float other_max, float other_sum, const float* other_acc,
                          int64_t n);
  void (*causal_conv)(const ConvArgs&);
  void (*delta_rule)(const DeltaArgs&);
  void (*replay)(const ReplayArgs&);
  // scalars[0..2] as DeltaArgs has them.
  void (*qk_scalars)(const float* q, const float* k, int64_t n, float scale, float* scalars);

  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* y);
  void (*gated_rms_norm)(const float* x, const float* z, const float* weight, float eps, int64_t n, float* y);
  void (*silu_mul)(const float* gate, const float* up, int64_t n, float* y);
  void (*sigmoid_mul)(const float* gate, int64_t n, float* x);
  void (*rotate)(const float* cos, const float* sin, int64_t half, float* x);  // pairs (i, i + half)
  void (*scale)(float factor, int64_t n, float* x);
  void (*add_scaled)(float factor, const float* x, int64_t n, float* y);  // y += factor * x
  void (*softmax)(int64_t n, float* x);
  void (*widen)(Float type, const void* x, int64_t n, float* y);
  void (*narrow)(Float type, const float* x, int64_t n, void* y);
};

// Defined by the table.cpp of each instruction set.
namespace baseline {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}

}  // namespace deltaic::cpu
