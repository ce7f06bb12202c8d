#pragma once

#include "cuda/device/convert.cuh"
#include "cuda/handles.h"
#include "cuda/launch.cuh"
#include "cuda/ops/gdn_chunk.cuh"
#include "cuda/ops/gdn_math.cuh"
#include "cuda/ops/gdn_prefill.h"

// What the kernels that walk the state through the chunks share. Both take what prepare_gdn_chunks left.

namespace deltaic::cuda {

template <class T, class State>
struct GdnWalkParams {
  ops::GdnShape shape;
  const std::int32_t *start, *state_indices;
  std::int64_t state_indices_stride;
  const std::uint8_t* has_initial_state;
  State* temporal;
  std::int64_t slot_stride, head_stride;
  GdnWorkspace workspace;
  T* out;
  std::int64_t out_stride;
};

// Launches kernel_of(T{}, State{}) with `parts` blocks a (value head, sequence), in clusters of `cluster`.
template <class KernelOf>
void launch_gdn_walk(ops::Stream stream, const GdnPrefillArgs& args, unsigned parts, unsigned cluster,
                     unsigned num_threads, std::size_t shared_bytes, const KernelOf& kernel_of) {
  const std::int64_t num_seqs = args.sequences.state_indices.shape[0], num_tokens = args.qkv.shape[0];
  const DependentLaunch launch{
      .grid = dim3(parts, static_cast<unsigned>(args.shape.num_value_heads), static_cast<unsigned>(num_seqs)),
      .block = dim3(num_threads),
      .stream = native(stream),
      .shared_bytes = shared_bytes,
      .cluster = cluster};
  visit_half(args.out.dtype, [&]<class T>(T) {
    const auto walk = [&]<class State>(State) {
      const auto kernel = kernel_of(T{}, State{});
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
      launch(kernel, GdnWalkParams<T, State>{
                         .shape = args.shape,
                         .start = static_cast<const std::int32_t*>(args.sequences.query_start_loc.data),
                         .state_indices = static_cast<const std::int32_t*>(args.sequences.state_indices.data),
                         .state_indices_stride = args.sequences.state_indices.stride[0],
                         .has_initial_state = static_cast<const std::uint8_t*>(args.sequences.has_initial_state.data),
                         .temporal = static_cast<State*>(args.temporal.data),
                         .slot_stride = args.temporal.stride[0],
                         .head_stride = args.temporal.stride[1],
                         .workspace =
                             GdnWorkspace(args.workspace.data, args.shape, num_pieces<kGdnChunk>(num_tokens, num_seqs)),
                         .out = static_cast<T*>(args.out.data),
                         .out_stride = args.out.stride[0]});
    };
    args.temporal.dtype == DType::f32 ? walk(float{}) : walk(__nv_bfloat16{});
  });
}

}  // namespace deltaic::cuda
