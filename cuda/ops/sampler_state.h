#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpp/src/ops/device_sampler.h"
#include "cpp/src/ops/sampler_slot.h"
#include "cuda/handles.h"
#include "cuda/ops/sampler_slot.cuh"

namespace deltaic::cuda {

// Pinned memory for uploads. A block is written again only once the copies from it have run; where none is free, there
// is one more.
class PinnedBlocks {
 public:
  struct Block {
    std::unique_ptr<void, Destroyer<cudaFreeHost>> memory;
    std::size_t num_bytes = 0;
    UniqueEvent copied;
  };
  // A block of at least num_bytes that nothing reads. Valid until the next call.
  Block& take(std::size_t num_bytes);

 private:
  std::vector<Block> blocks_;
};

// The slots of a device sampler: the table that kernels read, and the memory behind its entries.
class SamplerState {
 public:
  SamplerState(int vocab_size, int max_num_slots, int max_context, const ops::Context& ctx);
  ~SamplerState();
  SamplerState(const SamplerState&) = delete;
  SamplerState& operator=(const SamplerState&) = delete;

  void set(int slot, const ops::PackedSlot& packed, std::span<const std::int32_t> prompt_token_ids,
           std::span<const std::int32_t> output_token_ids);
  void clear(int slot);
  // cluster: blocks a row, at most max_sampler_cluster(); 0: by the number of rows.
  void sample(const ops::DeviceSampler::Args& args, int cluster = 0) const;
  void add_tokens(const ops::DeviceSampler::AddedTokens& tokens) const;

 private:
  struct Memory {
    void *lists = nullptr, *counts = nullptr, *raw_logits = nullptr;
  };

  void* allocate(std::size_t num_bytes);
  void free(void* memory) noexcept;
  void free(Memory& memory) noexcept;
  void upload(void* to, std::initializer_list<std::span<const std::byte>> parts);
  void count_tokens(SamplerSlot& entry, std::span<const std::int32_t> prompt_token_ids,
                    std::span<const std::int32_t> output_token_ids);
  void write_entry(int slot, const SamplerSlot& entry);

  int vocab_size_, max_context_, device_index_;
  cudaStream_t stream_;
  int max_cluster_ = 1;
  Unique<cudaMemPool_t, cudaMemPoolDestroy> pool_;
  std::shared_ptr<void> table_;  // SamplerSlot[max_num_slots]
  std::vector<Memory> memory_;
  PinnedBlocks pinned_;
};

// Which blocks a row gets: clusters need compute capability 9.0, and more than 8 blocks a device that allows it.
int max_sampler_cluster(int device_index);
void launch_sampler(cudaStream_t stream, const SampleParams& params, std::int64_t num_rows, bool all_greedy,
                    int cluster);
void launch_add_tokens(cudaStream_t stream, const AddedTokensParams& params);

}  // namespace deltaic::cuda
