// The slots of the device sampler: memory, uploads and the counts of a new request.
#include "cuda/ops/sampler_state.h"

#include <algorithm>
#include <cstring>

#include "cpp/src/check.h"
#include "cpp/src/core/buffer.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::size_t kPinnedBlockBytes = std::size_t{256} << 10;

// Blocks a row; bench_device_sampler chose them. Many rows fill the device with fewer blocks each.
int preferred_cluster(std::int64_t num_rows) {
  return num_rows <= 4 ? 16 : num_rows <= 16 ? 8 : num_rows <= 64 ? 4 : 2;
}

__global__ void write_entry_kernel(SamplerSlot value, SamplerSlot* entry) { *entry = value; }

// Fills counts and seen of an entry whose counts are 0.
__global__ void count_tokens_kernel(const std::int32_t* token_ids, std::int32_t num_prompt, std::int32_t num_tokens,
                                    SamplerSlot entry) {
  const auto i = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= num_tokens) return;
  const std::int32_t id = token_ids[i];
  const std::uint32_t old = i < num_prompt ? atomicOr(&entry.counts[id], kInPrompt) : atomicAdd(&entry.counts[id], 1U);
  if (old == 0) entry.seen[atomicAdd(entry.num_seen, 1)] = id;
}

template <class T>
std::span<const std::byte> bytes_of(std::span<const T> values) {
  return std::as_bytes(values);
}

SamplerSlot empty_slot() {
  SamplerSlot entry{};
  entry.record.top_p = 1.0F;
  entry.record.repetition_penalty = 1.0F;
  entry.record.num_logprobs = -1;
  return entry;
}

}  // namespace

PinnedBlocks::Block& PinnedBlocks::take(std::size_t num_bytes) {
  for (Block& block : blocks_) {
    if (block.num_bytes < num_bytes) continue;
    const cudaError_t code = cudaEventQuery(block.copied.get());
    if (code == cudaSuccess) return block;
    (void)cudaGetLastError();
    if (code != cudaErrorNotReady) check(code);
  }
  Block block;
  block.num_bytes = std::max(num_bytes, kPinnedBlockBytes);
  void* memory = nullptr;
  check(cudaMallocHost(&memory, block.num_bytes));
  block.memory.reset(memory);
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  block.copied.reset(event);
  blocks_.push_back(std::move(block));
  return blocks_.back();
}

SamplerState::SamplerState(int vocab_size, int max_num_slots, int max_context, const ops::Context& ctx)
    : vocab_size_(vocab_size),
      max_context_(max_context),
      device_index_(ctx.device.index),
      stream_(native(ctx.stream)),
      memory_(static_cast<std::size_t>(max_num_slots)) {
  const DeviceGuard guard(device_index_);
  max_cluster_ = max_sampler_cluster(device_index_);

  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device_index_;
  cudaMemPool_t pool = nullptr;
  check(cudaMemPoolCreate(&pool, &properties));
  pool_.reset(pool);
  std::uint64_t kept = ~std::uint64_t{0};
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept));

  const std::vector<SamplerSlot> empty(static_cast<std::size_t>(max_num_slots), empty_slot());
  table_ = cuda::allocate(empty.size() * sizeof(SamplerSlot), device_index_);
  check(cudaMemcpy(table_.get(), empty.data(), empty.size() * sizeof(SamplerSlot), cudaMemcpyHostToDevice));
}

SamplerState::~SamplerState() {
  for (Memory& memory : memory_) free(memory);
}

void* SamplerState::allocate(std::size_t num_bytes) {
  void* memory = nullptr;
  const cudaError_t code = cudaMallocFromPoolAsync(&memory, num_bytes, pool_.get(), stream_);
  if (code == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw OutOfMemory(detail::concat("no memory for ", num_bytes,
                                     " bytes of sampling state of a request on CUDA device ", device_index_,
                                     ": leave more memory free, or run fewer requests with penalties"));
  }
  check(code);
  return memory;
}

void SamplerState::free(void* memory) noexcept {
  if (memory != nullptr) (void)cudaFreeAsync(memory, stream_);
}
void SamplerState::free(Memory& memory) noexcept {
  free(memory.lists), free(memory.counts), free(memory.raw_logits);
  memory = {};
}

void SamplerState::upload(void* to, std::initializer_list<std::span<const std::byte>> parts) {
  std::size_t num_bytes = 0;
  for (const auto& part : parts) num_bytes += part.size();
  PinnedBlocks::Block& block = pinned_.take(num_bytes);
  std::size_t at = 0;
  for (const auto& part : parts) {
    if (!part.empty()) std::memcpy(static_cast<std::byte*>(block.memory.get()) + at, part.data(), part.size());
    at += part.size();
  }
  check(cudaMemcpyAsync(to, block.memory.get(), num_bytes, cudaMemcpyHostToDevice, stream_));
  check(cudaEventRecord(block.copied.get(), stream_));
}

void SamplerState::count_tokens(SamplerSlot& entry, std::span<const std::int32_t> prompt_token_ids,
                                std::span<const std::int32_t> output_token_ids) {
  const std::size_t num_tokens = prompt_token_ids.size() + output_token_ids.size();
  if (num_tokens == 0) return;
  void* token_ids = allocate(num_tokens * sizeof(std::int32_t));
  upload(token_ids, {bytes_of(prompt_token_ids), bytes_of(output_token_ids)});
  const auto count = static_cast<std::int32_t>(num_tokens);
  const Launch launch{.grid = dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)),
                      .block = dim3(kThreads),
                      .stream = stream_};
  launch(count_tokens_kernel, static_cast<const std::int32_t*>(token_ids),
         static_cast<std::int32_t>(prompt_token_ids.size()), count, entry);
  free(token_ids);
}

void SamplerState::write_entry(int slot, const SamplerSlot& entry) {
  const Launch launch{.grid = dim3(1), .block = dim3(1), .stream = stream_};
  launch(write_entry_kernel, entry, static_cast<SamplerSlot*>(table_.get()) + slot);
}

void SamplerState::set(int slot, const ops::PackedSlot& packed, std::span<const std::int32_t> prompt_token_ids,
                       std::span<const std::int32_t> output_token_ids) {
  const DeviceGuard guard(device_index_);
  free(memory_[static_cast<std::size_t>(slot)]);
  const auto vocab_size = static_cast<std::size_t>(vocab_size_);
  const ops::SlotRecord& record = packed.record;
  const bool changes_logits = record.has_allowed || record.num_bad_words > 0 || record.num_stop_ids > 0 ||
                              record.min_tokens > 0 || record.num_bias > 0 || record.has_penalties;
  Memory memory;
  try {
    SamplerSlot entry{};
    entry.record = record;
    if (!packed.words.empty()) {
      memory.lists = allocate(packed.words.size() * sizeof(std::uint32_t));
      entry.words = static_cast<std::uint32_t*>(memory.lists);
      upload(memory.lists, {bytes_of(std::span<const std::uint32_t>(packed.words))});
    }
    if (record.has_penalties) {
      memory.counts = allocate((2 * vocab_size + 1) * sizeof(std::uint32_t));
      entry.counts = static_cast<std::uint32_t*>(memory.counts);
      entry.seen = reinterpret_cast<std::int32_t*>(entry.counts + vocab_size);
      entry.num_seen = entry.seen + vocab_size;
      check(cudaMemsetAsync(entry.counts, 0, vocab_size * sizeof(std::uint32_t), stream_));
      check(cudaMemsetAsync(entry.num_seen, 0, sizeof(std::int32_t), stream_));
      count_tokens(entry, prompt_token_ids, output_token_ids);
    }
    if (record.num_logprobs >= 0 && changes_logits) {
      memory.raw_logits = allocate((1 + static_cast<std::size_t>(max_context_)) * vocab_size * sizeof(float));
      entry.raw_logits = static_cast<float*>(memory.raw_logits);
    }
    write_entry(slot, entry);
  } catch (...) {
    free(memory);
    write_entry(slot, empty_slot());
    throw;
  }
  memory_[static_cast<std::size_t>(slot)] = memory;
}

void SamplerState::clear(int slot) {
  const DeviceGuard guard(device_index_);
  write_entry(slot, empty_slot());
  free(memory_[static_cast<std::size_t>(slot)]);
}

void SamplerState::sample(const ops::DeviceSampler::Args& args, int cluster) const {
  const DeviceGuard guard(device_index_);
  const std::int64_t num_rows = args.logits.shape[0];
  SampleParams params{};
  params.logits = args.logits.as<float>();
  params.row_stride = args.logits.stride[0];
  params.vocab_size = vocab_size_;
  params.slots = args.slots.as<std::int32_t>();
  params.output_positions = args.output_positions.as<std::int32_t>();
  if (args.num_context.data != nullptr) {
    params.context_ids = args.context_ids.as<std::int32_t>();
    params.num_context = args.num_context.as<std::int32_t>();
    params.max_context = max_context_;
  }
  params.table = static_cast<const SamplerSlot*>(table_.get());
  params.token_ids = args.token_ids.as<std::int32_t>();
  params.is_finite = args.is_finite.as<std::uint8_t>();
  params.num_logprobs = args.num_logprobs;
  if (args.num_logprobs >= 0) {
    params.logprob_token_ids = args.logprob_token_ids.as<std::int32_t>();
    params.logprobs = args.logprobs.as<float>();
    params.ranks = args.ranks.as<std::int32_t>();
  }
  if (cluster == 0) cluster = std::min(preferred_cluster(num_rows), max_cluster_);
  launch_sampler(stream_, params, num_rows, args.all_greedy, cluster);
}

void SamplerState::add_tokens(const ops::DeviceSampler::AddedTokens& tokens) const {
  const DeviceGuard guard(device_index_);
  launch_add_tokens(stream_, {.table = static_cast<const SamplerSlot*>(table_.get()),
                              .slots = tokens.slots.as<std::int32_t>(),
                              .output_positions = tokens.output_positions.as<std::int32_t>(),
                              .token_ids = tokens.token_ids.as<std::int32_t>(),
                              .counts = tokens.counts.as<std::int32_t>(),
                              .num_rows = static_cast<std::int32_t>(tokens.slots.shape[0]),
                              .columns = static_cast<std::int32_t>(tokens.token_ids.shape[1])});
}

std::shared_ptr<SamplerState> make_sampler_state(int vocab_size, int max_num_slots, int max_context,
                                                 const ops::Context& ctx) {
  return std::make_shared<SamplerState>(vocab_size, max_num_slots, max_context, ctx);
}
void set_sampler_slot(SamplerState& state, int slot, const ops::PackedSlot& packed,
                      std::span<const std::int32_t> prompt_token_ids, std::span<const std::int32_t> output_token_ids) {
  state.set(slot, packed, prompt_token_ids, output_token_ids);
}
void clear_sampler_slot(SamplerState& state, int slot) { state.clear(slot); }
void sample(SamplerState& state, const ops::DeviceSampler::Args& args) { state.sample(args); }
void add_sampled_tokens(SamplerState& state, const ops::DeviceSampler::AddedTokens& tokens) {
  state.add_tokens(tokens);
}

}  // namespace deltaic::cuda
