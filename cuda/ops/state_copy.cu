// Copies of recurrent states at block boundaries: decisions and bytes in one launch.
//   every block of a persistent grid decides for kCopyThreads requests at a time, from inputs that nobody writes, and
//   lists those that copy in shared memory, all blocks the same; then it takes each gridDim-th tile of that list
//   bound by memory: reads and writes every byte once; by the launch when nothing is to be copied
#include <algorithm>
#include <type_traits>
#include <vector>

#include "cpp/src/ops/state_copy_rules.h"
#include "cuda/device/copy.cuh"
#include "cuda/device/scan.cuh"
#include "cuda/handles.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kBlocksPerSm = 4;
static_assert(ops::kStateTileBytes == kTileBytes);

struct Plan {
  const ops::StateTensor* states;
  const ops::BlockTable* block_tables;
  const std::int32_t* tile_ends;  // of each state, within a request
  std::int32_t num_states;
};

// A piece moves down to a lower address, over itself, in units of T: every thread owns columns of units, and moves them
// row by row from the lowest up. Threads never meet, so the order between them does not matter.
template <class T>
__device__ void shift_columns(const char* src, char* dst, std::int64_t row_bytes, std::int64_t row_stride,
                              std::int64_t num_rows, std::int64_t tile, std::int64_t num_tiles) {
  for (std::int64_t at = (tile * kCopyThreads + threadIdx.x) * sizeof(T); at < row_bytes;
       at += num_tiles * kCopyThreads * static_cast<std::int64_t>(sizeof(T)))
    for (std::int64_t row = 0; row < num_rows; ++row)
      *reinterpret_cast<T*>(dst + row * row_stride + at) = *reinterpret_cast<const T*>(src + row * row_stride + at);
}

// The same with a row a thread: DS conv states, whose rows are a few elements long.
template <class T>
__device__ void shift_rows(const ops::StateMove& move, std::int64_t tile, std::int64_t num_tiles) {
  for (std::int64_t row = tile * kCopyThreads + threadIdx.x; row < move.num_rows; row += num_tiles * kCopyThreads)
    for (std::int64_t at = row * move.row_stride; at < row * move.row_stride + move.size;
         at += static_cast<std::int64_t>(sizeof(T)))
      *reinterpret_cast<T*>(move.dst + at) = *reinterpret_cast<const T*>(move.src + at);
}

// Calls f<T>() for the widest T of at most 16 bytes that divides `bits`, an OR of addresses and sizes.
template <class F>
__device__ void visit_width(std::uint64_t bits, F f) {
  if (bits % 16 == 0)
    f.template operator()<uint4>();
  else if (bits % 8 == 0)
    f.template operator()<std::uint64_t>();
  else if (bits % 4 == 0)
    f.template operator()<std::uint32_t>();
  else if (bits % 2 == 0)
    f.template operator()<std::uint16_t>();
  else
    f.template operator()<std::uint8_t>();
}

__device__ void move_tile(const ops::StateTensor& state, const ops::StateMove& move, std::int64_t tile,
                          std::int64_t num_tiles) {
  const std::uint64_t ends = reinterpret_cast<std::uint64_t>(move.src) | reinterpret_cast<std::uint64_t>(move.dst);
  if (move.num_rows > 0) {
    visit_width(ends | static_cast<std::uint64_t>(move.row_stride | move.size),
                [&]<class T>() { shift_rows<T>(move, tile, num_tiles); });
  } else if (move.in_place) {
    visit_width(ends | static_cast<std::uint64_t>(state.row_bytes), [&]<class T>() {
      shift_columns<T>(move.src, move.dst, state.row_bytes, state.row_bytes, move.size / state.row_bytes, tile,
                       num_tiles);
    });
  } else {
    copy_tile({move.src, move.dst, move.size}, tile);
  }
}

__global__ void __launch_bounds__(kCopyThreads, kBlocksPerSm) copy_states_kernel(Plan plan, ops::StateCopyArgs args) {
  __shared__ ops::RequestCopy copies[kCopyThreads];
  const std::int64_t tiles_per_request = plan.tile_ends[plan.num_states - 1];
  std::int64_t next = blockIdx.x;  // this block's next tile, counted from the first tile of the current list
  for (std::int32_t base = 0; base < args.num_reqs; base += kCopyThreads) {
    const std::int32_t row = base + static_cast<std::int32_t>(threadIdx.x);
    ops::Decision decision;
    if (row < args.num_reqs) decision = ops::decide(args, row);
    if (blockIdx.x == 0 && decision.slot >= 0) {
      args.num_accepted_out[decision.slot] = decision.num_accepted;
      if (args.state_idx_out != nullptr) args.state_idx_out[decision.slot] = decision.state_idx;
    }
    const int num_copies = __syncthreads_count(decision.has_copy);  // and the last list is done with
    if (num_copies == 0) continue;
    const int end = inclusive_block_sum<kCopyThreads>(decision.has_copy ? 1 : 0);
    if (decision.has_copy) copies[end - 1] = decision.copy;
    __syncthreads();
    const std::int64_t total = num_copies * tiles_per_request;
    for (; next < total; next += gridDim.x) {
      const auto tile = static_cast<std::int32_t>(next % tiles_per_request);
      int state = 0, end_state = plan.num_states - 1;  // the first state with tile_ends > tile
      while (state < end_state) {
        const int middle = (state + end_state) / 2;
        if (plan.tile_ends[middle] <= tile)
          state = middle + 1;
        else
          end_state = middle;
      }
      const std::int32_t first = state == 0 ? 0 : plan.tile_ends[state - 1];
      const ops::StateTensor& tensor = plan.states[state];
      const ops::StateMove move =
          ops::locate(tensor, plan.block_tables[tensor.group], copies[next / tiles_per_request]);
      if (move.size > 0) move_tile(tensor, move, tile - first, plan.tile_ends[state] - first);
    }
    next -= total;
  }
}

// Where the tables lie in the plan's buffer. All but the last are of structs whose size is a multiple of 8.
Plan tables_of(const ops::StateCopyPlan& plan, char* data) {
  static_assert(sizeof(ops::StateTensor) % 8 == 0 && sizeof(ops::BlockTable) % 8 == 0);
  const std::size_t states_bytes = plan.states().size() * sizeof(ops::StateTensor);
  const std::size_t block_tables_bytes = plan.block_tables().size() * sizeof(ops::BlockTable);
  return {reinterpret_cast<const ops::StateTensor*>(data),
          reinterpret_cast<const ops::BlockTable*>(data + states_bytes),
          reinterpret_cast<const std::int32_t*>(data + states_bytes + block_tables_bytes),
          static_cast<std::int32_t>(plan.states().size())};
}

template <class T>
void upload(const T* device, const std::vector<T>& host) {
  static_assert(std::is_trivially_copyable_v<T>);
  check(cudaMemcpy(const_cast<T*>(device), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
}

}  // namespace

Buffer upload_state_copy_tables(const ops::StateCopyPlan& plan) {
  const std::size_t num_bytes = plan.states().size() * sizeof(ops::StateTensor) +
                                plan.block_tables().size() * sizeof(ops::BlockTable) +
                                plan.tile_ends().size() * sizeof(std::int32_t);
  Buffer buffer(num_bytes, plan.device());
  const Plan tables = tables_of(plan, static_cast<char*>(buffer.data()));
  upload(tables.states, plan.states());
  upload(tables.block_tables, plan.block_tables());
  upload(tables.tile_ends, plan.tile_ends());
  return buffer;
}

void copy_states(ops::Stream stream, const ops::StateCopyPlan& plan, const ops::StateCopyArgs& args) {
  int num_sms = 0;
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, plan.device().index));
  const std::int64_t max_tiles = std::int64_t{args.num_reqs} * plan.tile_ends().back();
  const std::int64_t num_blocks = std::clamp<std::int64_t>(max_tiles, 1, num_sms * kBlocksPerSm);
  const Launch launch{
      .grid = dim3(static_cast<unsigned>(num_blocks)), .block = dim3(kCopyThreads), .stream = native(stream)};
  launch(copy_states_kernel, tables_of(plan, static_cast<char*>(plan.device_tables().data())), args);
}

}  // namespace deltaic::cuda
