// The two kernels that walk the state of the chunked delta rule give the same.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cuda/kernel_limits.h"
#include "cuda/ops/gdn_prefill.h"
#include "tests_cpp/support/on_device.h"
#include "tests_cpp/support/reference.h"
#include "tests_cpp/support/tensors.h"
#include "tests_cpp/support/tolerance.h"

namespace deltaic {
namespace {

constexpr int kKeyHeads = 2, kValueHeads = 4, kDim = 128;
constexpr std::int64_t kConvDim = 2 * kKeyHeads * kDim + kValueHeads * kDim, kRow = 2 * kValueHeads;

struct Result {
  std::vector<double> out, state;
};

Result walk(bool by_mma, DType dtype, DType state_dtype, const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> start{0}, slots;
  for (const std::int32_t length : lengths) {
    start.push_back(start.back() + length);
    slots.push_back(static_cast<std::int32_t>(lengths.size() - slots.size()) - 1);
  }
  const auto num_seqs = static_cast<std::int64_t>(lengths.size());
  const std::int64_t num_tokens = start.back();
  const ops::GdnShape shape{kKeyHeads, kValueHeads, kDim, kDim, 4};
  const auto workspace_bytes =
      static_cast<std::int64_t>(cuda::gdn_prefill_workspace_bytes(shape, num_tokens, num_seqs));
  const Tensor qkv = test::to_gpu(test::random({num_tokens, kConvDim}, dtype, 1));
  const Tensor gates = test::to_gpu(test::random({num_tokens, kRow}, dtype, 2));
  const Tensor A_log = test::to_gpu(test::random({kValueHeads}, DType::f32, 3));
  const Tensor dt_bias = test::to_gpu(test::random({kValueHeads}, DType::f32, 4));
  const Tensor state = test::to_gpu(test::random({num_seqs, kValueHeads, kDim, kDim}, state_dtype, 5, 0.1));
  const Tensor out = test::to_gpu(test::filled({num_tokens, kValueHeads, kDim}, dtype, NAN));
  const Tensor starts = test::to_gpu(test::ints(start)), indices = test::to_gpu(test::ints(slots));
  Tensor has_state(DType::u8, {num_seqs}), poison(DType::u8, {workspace_bytes});
  std::fill_n(static_cast<unsigned char*>(has_state.view().data), num_seqs, 1);
  std::fill_n(static_cast<unsigned char*>(poison.view().data), workspace_bytes, 0xff);
  const Tensor has_initial_state = test::to_gpu(has_state), workspace = test::to_gpu(poison);
  const cuda::GdnPrefillArgs args{.shape = shape,
                                  .layout = {.b = 0, .b_group_stride = 2, .a = kValueHeads, .a_group_stride = 2},
                                  .qkv = qkv.view(),
                                  .proj = gates.view(),
                                  .A_log = A_log.view(),
                                  .dt_bias = dt_bias.view(),
                                  .sequences = {.query_start_loc = starts.view(),
                                                .state_indices = indices.view(),
                                                .has_initial_state = has_initial_state.view()},
                                  .temporal = state.view(),
                                  .workspace = workspace.view(),
                                  .out = out.view()};
  REQUIRE(cuda::can_prefill_gdn(args));
  cuda::prepare_gdn_chunks({}, args);
  by_mma ? cuda::walk_gdn_chunks_mma({}, args) : cuda::walk_gdn_chunks({}, args);
  return {test::values(test::to_host(out)), test::values(test::to_host(state))};
}

void check(const std::vector<std::int32_t>& lengths) {
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const DType state_dtype : {DType::f32, DType::bf16}) {
      CAPTURE(name(dtype));
      CAPTURE(name(state_dtype));
      const Result mma = walk(true, dtype, state_dtype, lengths), wgmma = walk(false, dtype, state_dtype, lengths);
      CHECK(test::relative_error(wgmma.out, mma.out) <= 0x1p-8);
      CHECK(test::relative_error(wgmma.state, mma.state) <= 0x1p-8);
    }
}

TEST_CASE("the state walks through the chunks by mma as by wgmma") {
  if (!test::has_gpu() || !cuda::is_hopper(0)) return;
  check({200, 1, 700, 64});
}

// racecheck does not see that an arrival at the barrier of another block frees a stage: no span comes to use one twice.
TEST_CASE("both walks of the state, short spans [sanitizer]") {
  if (!test::has_gpu() || !cuda::is_hopper(0)) return;
  check({130, 1, 64});
}

}  // namespace
}  // namespace deltaic
