#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cpp/src/ops/gated_delta_net.h"

// What prepare_gdn_chunks leaves in the workspace for gdn_prefill. Tiles are images of shared memory.

namespace deltaic::cuda {

constexpr int kGdnChunk = 64;    // tokens
constexpr int kGdnDim = 128;     // key and value head dim
constexpr int kGdnRows = 32;     // value rows of a block of the walk
constexpr int kGdnMaxRatio = 4;  // value heads a key head

// Byte offset of a 16-byte piece in a tile of 16-bit elements with rows of 64 or 128 bytes, or of kGdnChunk rows of 256
// bytes, whose halves lie one after the other. Pieces are permuted within a row so that eight rows of one column of
// pieces lie in different banks, as wgmma reads tiles swizzled by 64 or 128 bytes.
template <int kRowBytes>
__device__ inline int tile_offset(int row, int piece) {
  static_assert(kRowBytes == 64 || kRowBytes == 128 || kRowBytes == 256);
  if constexpr (kRowBytes == 64) return row * 64 + ((piece ^ ((row >> 1) & 3)) << 4);
  if constexpr (kRowBytes == 128) return row * 128 + ((piece ^ (row & 7)) << 4);
  return (piece >> 3) * (kGdnChunk * 128) + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
}

// Of a chunk and key head: normalised rows, q scaled.
struct alignas(128) GdnKeyTiles {
  __nv_bfloat16 k[kGdnChunk * kGdnDim], q[kGdnChunk * kGdnDim];
};
// Of a chunk and value head, with G the running sum of the log decays, D_ij = e^(G_i - G_j) for j <= i,
// T = (1 + strictly lower part of diag(beta) K K^T o D)^-1.
struct alignas(128) GdnValueTiles {
  __nv_bfloat16 w[kGdnChunk * kGdnDim];                       // T diag(beta e^G) K
  __nv_bfloat16 p[kGdnChunk * kGdnChunk];                     // Q K^T o D
  float from_start[kGdnChunk];                                // e^G_i
  float to_end[kGdnChunk];                                    // e^(G_last - G_i)
  __nv_bfloat16 u[kGdnDim / kGdnRows][kGdnChunk * kGdnRows];  // T diag(beta) V, kGdnRows columns a tile
};

// Chunk `number` (gdn_math.cuh) has tiles [number * heads, (number + 1) * heads) of each array.
struct GdnWorkspace {
  GdnKeyTiles* keys = nullptr;
  GdnValueTiles* values = nullptr;

  GdnWorkspace(void* memory, const ops::GdnShape& shape, std::int64_t num_chunks)
      : keys(static_cast<GdnKeyTiles*>(memory)),
        values(reinterpret_cast<GdnValueTiles*>(keys + num_chunks * shape.num_key_heads)) {}
};

}  // namespace deltaic::cuda
