#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpp/src/core/buffer.h"
#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/runner/step_arrays.h"
#include "cpp/src/runner/step_graphs.h"
#include "cpp/src/runner/step_kernels.h"
#include "tests_cpp/support/on_device.h"

using namespace deltaic;
using namespace deltaic::test;

TEST_CASE("D67: decode steps are padded by rows, exactly up to 16 and by a quarter at most") {
  int last = 0;
  for (int rows = 1; rows <= 1024; ++rows) {
    const int padded = padded_num_rows(rows, 1024);
    CAPTURE(rows);
    CHECK(padded >= rows);
    CHECK(padded >= last);
    CHECK(padded_num_rows(padded, 1024) == padded);
    if (rows <= 16) CHECK(padded == rows);
    CHECK(padded * 4 < rows * 5);
    last = padded;
  }
  CHECK(padded_num_rows(17, 1024) == 20);
  CHECK(padded_num_rows(33, 1024) == 40);
  CHECK(padded_num_rows(65, 1024) == 80);
  CHECK(padded_num_rows(129, 1024) == 144);
  CHECK(padded_num_rows(97, 100) == 100);
}

TEST_CASE("state copies move no other array of a step") {
  const StepSizes without{.num_tokens = 5, .num_rows = 3, .num_samples = 2};
  StepSizes with = without;
  with.num_copies = 7;
  alignas(16) std::byte memory[4096];
  const StepArrays a = StepArrays::at(memory, without), b = StepArrays::at(memory, with);
  CHECK(a.positions == b.positions);
  CHECK(a.has_initial_state == b.has_initial_state);
  CHECK(a.output_positions == b.output_positions);
  CHECK(reinterpret_cast<std::byte*>(b.copy_sizes + 7) <= memory + b.num_bytes);
  CHECK(a.num_bytes % 16 == 0);
  CHECK(StepArrays::at(nullptr, with).num_bytes == b.num_bytes);
}

namespace {

std::vector<std::int32_t> on_host(const Tensor& tensor) {
  const Tensor host = to_host(tensor);
  return {host.as<std::int32_t>(), host.as<std::int32_t>() + host.view().numel()};
}

}  // namespace

TEST_CASE("a step reaches the device: arrays, tokens of the device, blocks by slot and by row [sanitizer]") {
  if (!has_gpu()) return;
  constexpr int kRows = 3, kStride = 5000, kTokens = 3000;
  const cuda::Stream stream;
  const cuda::PinnedBuffer memory(1 << 20);
  constexpr int kNumBytes = 16 * 1100;
  for (int i = 0; i < kNumBytes; ++i) memory.data()[i] = static_cast<std::byte>(i * 7);
  auto* ids = reinterpret_cast<std::int32_t*>(memory.data() + kNumBytes);
  for (int i = 0; i < kTokens; ++i) ids[i] = i % 10 == 3 ? ~(i % 4) : i % 10 == 7 ? cuda::StepUpload::kNoToken : i;
  auto* row_slots = ids + kTokens;
  auto *num_known = row_slots + kRows, *new_begin = num_known + kRows, *new_blocks = new_begin + kRows + 1;
  const int slots[kRows] = {2, -1, 0}, known[kRows] = {2, 0, 0}, begin[kRows + 1] = {0, 1, 1, 4501};
  std::copy_n(slots, kRows, row_slots), std::copy_n(known, kRows, num_known), std::copy_n(begin, kRows + 1, new_begin);
  for (int i = 0; i < 4501; ++i) new_blocks[i] = 100 + i;

  const Tensor target(DType::u8, {kNumBytes + 16}, kGpu), input_ids(DType::i32, {kTokens + 1}, kGpu),
      token_ids(DType::i32, {kTokens + 1}, kGpu);
  const Tensor kept_tokens = to_gpu(ints({50, 51, -1, 53}));
  Tensor tables(DType::i32, {4, kStride}), rows(DType::i32, {kRows, kStride});
  std::fill_n(tables.as<std::int32_t>(), tables.view().numel(), -1);
  std::fill_n(rows.as<std::int32_t>(), rows.view().numel(), -1);
  tables.as<std::int32_t>()[2 * kStride] = 7, tables.as<std::int32_t>()[2 * kStride + 1] = 8;
  const Tensor slot_tables = to_gpu(tables), block_table = to_gpu(rows);
  cuda::upload_step({stream.handle()}, {.source = memory.data(),
                                        .target = target.as<std::byte>(),
                                        .num_bytes = kNumBytes,
                                        .source_ids = ids,
                                        .input_ids = input_ids.as<std::int32_t>(),
                                        .token_ids = token_ids.as<std::int32_t>(),
                                        .kept_tokens = kept_tokens.as<std::int32_t>(),
                                        .num_tokens = kTokens,
                                        .row_slots = row_slots,
                                        .num_known = num_known,
                                        .new_begin = new_begin,
                                        .new_blocks = new_blocks,
                                        .slot_tables = slot_tables.as<std::int32_t>(),
                                        .block_table = block_table.as<std::int32_t>(),
                                        .row_stride = kStride,
                                        .num_rows = kRows});
  stream.wait();

  const Tensor copied = to_host(target);
  CHECK(std::memcmp(copied.view().data, memory.data(), kNumBytes) == 0);
  for (int i = 0; i < 16; ++i) CHECK(copied.as<std::uint8_t>()[kNumBytes + i] == 0);
  const std::vector<std::int32_t> inputs = on_host(input_ids), tokens = on_host(token_ids);
  for (int i = 0; i < kTokens; ++i) {
    const int kept = i % 4 == 2 ? -1 : 50 + i % 4, expected = i % 10 == 3 ? kept : i % 10 == 7 ? -1 : i;
    REQUIRE(tokens[static_cast<std::size_t>(i)] == expected);
    REQUIRE(inputs[static_cast<std::size_t>(i)] == std::max(expected, 0));
  }
  CHECK(inputs.back() == 0);

  std::vector<std::int32_t> expected_tables(4 * kStride, -1), expected_rows(kRows * kStride, -1);
  for (auto* table : {expected_tables.data() + 2 * kStride, expected_rows.data()})
    table[0] = 7, table[1] = 8, table[2] = 100;
  for (auto* table : {expected_tables.data(), expected_rows.data() + 2 * kStride})
    for (int i = 0; i < 4500; ++i) table[i] = 101 + i;
  CHECK(on_host(slot_tables) == expected_tables);
  CHECK(on_host(block_table) == expected_rows);
}

TEST_CASE("tokens reach the host and the next step [sanitizer]") {
  if (!has_gpu()) return;
  constexpr int kRows = 300;
  const cuda::Stream stream;
  const cuda::PinnedBuffer host(kRows * 5);
  std::vector<std::int32_t> tokens, slots;
  std::vector<std::uint8_t> finite;
  for (int i = 0; i < kRows; ++i) tokens.push_back(1000 + i), slots.push_back(kRows - i), finite.push_back(i % 3 != 0);
  const Tensor token_ids = to_gpu(ints(tokens)), by_row = to_gpu(ints(slots)), is_finite = to_gpu(bytes(finite));
  const Tensor last_sampled(DType::i32, {kRows + 1}, kGpu);
  auto* host_tokens = reinterpret_cast<std::int32_t*>(host.data());
  auto* host_finite = reinterpret_cast<std::uint8_t*>(host.data() + kRows * 4);
  cuda::commit_tokens({stream.handle()}, {.token_ids = token_ids.as<std::int32_t>(),
                                          .is_finite = is_finite.as<std::uint8_t>(),
                                          .slots = by_row.as<std::int32_t>(),
                                          .num_rows = kRows,
                                          .last_sampled = last_sampled.as<std::int32_t>(),
                                          .host_token_ids = host_tokens,
                                          .host_is_finite = host_finite});
  const cuda::Event done;
  done.record(stream);
  done.wait();
  CHECK(std::vector(host_tokens, host_tokens + kRows) == tokens);
  CHECK(std::vector(host_finite, host_finite + kRows) == finite);
  const std::vector<std::int32_t> last = on_host(last_sampled);
  CHECK(last[0] == 0);
  for (int i = 0; i < kRows; ++i) REQUIRE(last[static_cast<std::size_t>(kRows - i)] == 1000 + i);
}
