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

constexpr std::size_t kMaxSharedBytes = 16 << 10;  // what the tables may take of shared memory
static_assert(ops::kStateTileBytes == kTileBytes);

struct Plan {
  const ops::StateTensor* states;
  const ops::BlockTable* block_tables;
  const std::int32_t* tile_ends;  // of each state, within a request
  std::int32_t num_states, num_groups;

  __host__ __device__ std::size_t num_bytes() const {
    return num_states * (sizeof(ops::StateTensor) + sizeof(std::int32_t)) + num_groups * sizeof(ops::BlockTable);
  }
};

// The tables of a plan, one after the other: all but the last are of structs whose size is a multiple of 8.
__host__ __device__ Plan tables_at(const char* data, std::int32_t num_states, std::int32_t num_groups) {
  static_assert(sizeof(ops::StateTensor) % 8 == 0 && sizeof(ops::BlockTable) % 8 == 0);
  const char* block_tables = data + num_states * sizeof(ops::StateTensor);
  const char* tile_ends = block_tables + num_groups * sizeof(ops::BlockTable);
  return {reinterpret_cast<const ops::StateTensor*>(data), reinterpret_cast<const ops::BlockTable*>(block_tables),
          reinterpret_cast<const std::int32_t*>(tile_ends), num_states, num_groups};
}

struct StateTile {
  ops::StateMove move;
  std::int64_t row_bytes;
  std::int32_t tile, num_tiles;
};

// A piece moves down to a lower address, over itself, in units of T: every thread owns columns of units, and moves them
// row by row from the lowest up. Threads never meet, so the order between them does not matter.
template <class T>
__device__ void shift_columns(const char* src, char* dst, std::int64_t row_bytes, std::int64_t num_rows,
                              std::int64_t tile, std::int64_t num_tiles) {
  for (std::int64_t at = (tile * kCopyThreads + threadIdx.x) * sizeof(T); at < row_bytes;
       at += num_tiles * kCopyThreads * static_cast<std::int64_t>(sizeof(T)))
    for (std::int64_t row = 0; row < num_rows; ++row)
      *reinterpret_cast<T*>(dst + row * row_bytes + at) = *reinterpret_cast<const T*>(src + row * row_bytes + at);
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

// A shift within rows or within one slot. Out of line for the registers that it would cost everything else.
__device__ void shift_tile(const StateTile& tile) {
  const ops::StateMove& move = tile.move;
  const std::uint64_t ends = reinterpret_cast<std::uint64_t>(move.src) | reinterpret_cast<std::uint64_t>(move.dst);
  if (move.num_rows > 0)
    visit_width(ends | static_cast<std::uint64_t>(move.row_stride | move.size),
                [&]<class T>() { shift_rows<T>(move, tile.tile, tile.num_tiles); });
  else
    visit_width(ends | static_cast<std::uint64_t>(tile.row_bytes), [&]<class T>() {
      shift_columns<T>(move.src, move.dst, tile.row_bytes, move.size / tile.row_bytes, tile.tile, tile.num_tiles);
    });
}

__device__ void move_tile(const StateTile& tile) {
  if (tile.move.size == 0) return;
  if (tile.move.num_rows > 0 || tile.move.in_place)
    shift_tile(tile);
  else
    copy_tile({tile.move.src, tile.move.dst, tile.move.size}, tile.tile);
}

// Puts the plan's tables, which lie one after the other, into shared memory, and says in `tables` where they are:
// there, or where they were if `shared` is null. A barrier must follow.
__device__ void stage(const Plan& plan, std::uint32_t* shared, Plan& tables) {
  if (threadIdx.x == 0)
    tables =
        shared == nullptr ? plan : tables_at(reinterpret_cast<const char*>(shared), plan.num_states, plan.num_groups);
  if (shared == nullptr) return;
  const auto* words = reinterpret_cast<const std::uint32_t*>(plan.states);
  for (std::size_t i = threadIdx.x; i < plan.num_bytes() / 4; i += kCopyThreads) shared[i] = words[i];
}

// Tile `tile` of a list of copies, of which each has all tiles of all states.
__device__ StateTile find_tile(const Plan& tables, const ops::RequestCopy* copies, std::int64_t tile) {
  const std::int64_t tiles_per_copy = tables.tile_ends[tables.num_states - 1];
  const std::int64_t copy = tile / tiles_per_copy;
  const auto within = static_cast<std::int32_t>(tile - copy * tiles_per_copy);
  int state = 0, last = tables.num_states - 1;  // the first state with tile_ends > within
  while (state < last) {
    const int middle = (state + last) / 2;
    if (tables.tile_ends[middle] <= within)
      state = middle + 1;
    else
      last = middle;
  }
  const std::int32_t first = state == 0 ? 0 : tables.tile_ends[state - 1];
  const ops::StateTensor& tensor = tables.states[state];
  return {ops::locate(tensor, tables.block_tables[tensor.group], copies[copy]), tensor.row_bytes, within - first,
          tables.tile_ends[state] - first};
}

__global__ void __launch_bounds__(kCopyThreads, kCopyBlocksPerSm)
    copy_states_kernel(Plan plan, ops::StateCopyArgs args, bool stage_tables) {
  __shared__ ops::RequestCopy copies[kCopyThreads];
  __shared__ Plan tables;
  extern __shared__ std::uint64_t shared_tables[];
  allow_next_kernel();
  // Nobody writes the tables.
  stage(plan, stage_tables ? reinterpret_cast<std::uint32_t*>(shared_tables) : nullptr, tables);
  wait_for_previous_kernel();
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
    const std::int64_t total = std::int64_t{num_copies} * tables.tile_ends[tables.num_states - 1];
    const auto find = [&](std::int64_t tile) { return find_tile(tables, copies, tile); };
    next = for_each_tile<StateTile>(next, total, find, move_tile) - total;
  }
}

Plan tables_of(const ops::StateCopyPlan& plan, const void* data) {
  return tables_at(static_cast<const char*>(data), static_cast<std::int32_t>(plan.states().size()),
                   static_cast<std::int32_t>(plan.block_tables().size()));
}

template <class T>
void upload(const T* device, const std::vector<T>& host) {
  static_assert(std::is_trivially_copyable_v<T>);
  check(cudaMemcpy(const_cast<T*>(device), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
}

}  // namespace

Buffer upload_state_copy_tables(const ops::StateCopyPlan& plan) {
  const DeviceGuard guard(plan.device().index);
  Buffer buffer(tables_of(plan, nullptr).num_bytes(), plan.device());
  const Plan tables = tables_of(plan, buffer.data());
  upload(tables.states, plan.states());
  upload(tables.block_tables, plan.block_tables());
  upload(tables.tile_ends, plan.tile_ends());
  return buffer;
}

void copy_states(ops::Stream stream, const ops::StateCopyPlan& plan, const ops::StateCopyArgs& args) {
  const DeviceGuard guard(plan.device().index);
  int num_sms = 0;
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, plan.device().index));
  const std::int64_t max_tiles = std::int64_t{args.num_reqs} * plan.tile_ends().back();
  const std::int64_t num_blocks = std::clamp<std::int64_t>(max_tiles, 1, num_sms * kCopyBlocksPerSm);
  const Plan tables = tables_of(plan, plan.device_tables().data());
  const bool stage_tables = tables.num_bytes() <= kMaxSharedBytes;
  const DependentLaunch launch{.grid = dim3(static_cast<unsigned>(num_blocks)),
                               .block = dim3(kCopyThreads),
                               .stream = native(stream),
                               .shared_bytes = stage_tables ? tables.num_bytes() : 0};
  launch(copy_states_kernel, tables, args, stage_tables);
}

}  // namespace deltaic::cuda
