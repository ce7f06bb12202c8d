#include "cuda/check.h"
#include "cuda/handles.h"
#include "tests_cpp/ops/device_sampler_support.h"

using namespace deltaic;
using namespace deltaic::test;

TEST_CASE("a captured step of the device sampler stays right while requests come and go") {
  if (!has_gpu()) return;
  constexpr int kVocab = 5001, kRows = 6, kSlots = 24, kReplays = 60, kLogprobs = 20;
  cudaStream_t handle = nullptr;
  cuda::check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
  const cuda::UniqueStream stream(handle);
  RandomRequests random(kVocab, 3);
  ops::DeviceSampler sampler(kVocab, kSlots, kRows, {.device = kGpu, .stream = {handle}});
  const Tensor logits(DType::f32, {kRows, kVocab}, kGpu), slots(DType::i32, {kRows}, kGpu);
  const Tensor positions(DType::i32, {kRows}, kGpu), tokens(DType::i32, {kRows}, kGpu),
      finite(DType::u8, {kRows}, kGpu);
  const Tensor ids(DType::i32, {kRows, 1 + kLogprobs}, kGpu), logprobs(DType::f32, {kRows, 1 + kLogprobs}, kGpu);
  const Tensor ranks(DType::i32, {kRows}, kGpu);
  const ops::DeviceSampler::Args args{.logits = logits.view(),
                                      .slots = slots.view(),
                                      .output_positions = positions.view(),
                                      .num_logprobs = kLogprobs,
                                      .token_ids = tokens.view(),
                                      .is_finite = finite.view(),
                                      .logprob_token_ids = ids.view(),
                                      .logprobs = logprobs.view(),
                                      .ranks = ranks.view()};
  sampler.sample(args);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cuda::check(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal));
  sampler.sample(args);
  cuda::check(cudaStreamEndCapture(handle, &graph));
  cuda::check(cudaGraphInstantiate(&exec, graph, 0));
  const cuda::Unique<cudaGraph_t, cudaGraphDestroy> graph_owner(graph);
  const cuda::Unique<cudaGraphExec_t, cudaGraphExecDestroy> exec_owner(exec);

  std::vector<std::optional<SampledRequest>> requests(kSlots);
  for (int replay = 0; replay < kReplays; ++replay) {
    CAPTURE(replay);
    std::vector<std::int32_t> row_slots, row_positions;
    std::vector<std::vector<float>> rows;
    std::vector<float> flat;
    const int first = random.integer(0, kSlots - 1);
    for (int row = 0; row < kRows; ++row) {
      const int slot = (first + row) % kSlots;
      auto& request = requests[static_cast<std::size_t>(slot)];
      if (!request || random.one_in(6)) {
        request = random.request();
        sampler.set_request(slot, request->params, request->prompt, request->output, request->seed);
      }
      row_slots.push_back(slot);
      row_positions.push_back(static_cast<std::int32_t>(request->output.size()));
      rows.push_back(random.logits());
      flat.insert(flat.end(), rows.back().begin(), rows.back().end());
    }
    // The device waits for nothing but the stream between these and the replay: set_request is ordered on it.
    cuda::check(cudaMemcpyAsync(slots.view().data, row_slots.data(), kRows * 4, cudaMemcpyHostToDevice, handle));
    cuda::check(
        cudaMemcpyAsync(positions.view().data, row_positions.data(), kRows * 4, cudaMemcpyHostToDevice, handle));
    cuda::check(cudaMemcpyAsync(logits.view().data, flat.data(), flat.size() * 4, cudaMemcpyHostToDevice, handle));
    cuda::check(cudaGraphLaunch(exec, handle));
    // Slots of other requests are given away while the step runs.
    for (int i = 0; i < 3; ++i) {
      const int slot = (first + kRows + random.integer(0, kSlots - kRows - 1)) % kSlots;
      requests[static_cast<std::size_t>(slot)] = random.request();
      const SampledRequest& request = *requests[static_cast<std::size_t>(slot)];
      sampler.set_request(slot, request.params, request.prompt, request.output, request.seed);
    }
    cuda::check(cudaStreamSynchronize(handle));
    const Tensor host_tokens = to_host(tokens), host_finite = to_host(finite), host_ids = to_host(ids);
    const Tensor host_logprobs = to_host(logprobs), host_ranks = to_host(ranks);
    for (std::size_t row = 0; row < kRows; ++row) {
      CAPTURE(row);
      auto& request = requests[static_cast<std::size_t>(row_slots[row])];
      const ops::SampledToken expected = sample_on_cpu(rows[row], *request);
      DeviceToken token{.token_id = host_tokens.as<std::int32_t>()[row],
                        .is_finite = host_finite.as<std::uint8_t>()[row] != 0};
      token.logprobs.rank = host_ranks.as<std::int32_t>()[row];
      const std::size_t at = row * (1 + kLogprobs);
      token.logprobs.token_ids.assign(host_ids.as<std::int32_t>() + at,
                                      host_ids.as<std::int32_t>() + at + 1 + kLogprobs);
      token.logprobs.logprobs.assign(host_logprobs.as<float>() + at, host_logprobs.as<float>() + at + 1 + kLogprobs);
      check_same(token, expected);
      if (expected.is_finite)
        request->output.push_back(expected.token_id);
      else
        request.reset();
    }
  }
}
