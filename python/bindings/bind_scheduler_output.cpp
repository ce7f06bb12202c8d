#include <deltaic/scheduler_output.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>

#include "python/bindings/module.h"
#include "python/bindings/struct.h"

using namespace deltaic;

namespace {

// last: a step of decodes of one token each, of requests that the runner knew. new_block_ids: by row.
SchedulerOutput next_decodes(const SchedulerOutput& last,
                             const std::map<std::size_t, std::vector<std::vector<std::int32_t>>>& new_block_ids) {
  SchedulerOutput next;
  next.scheduled_cached_reqs = last.scheduled_cached_reqs;
  next.num_scheduled_tokens = last.num_scheduled_tokens;
  next.total_num_scheduled_tokens = last.total_num_scheduled_tokens;
  next.num_drafts = last.num_drafts;
  CachedRequestData& cached = next.scheduled_cached_reqs;
  for (auto& count : cached.num_computed_tokens) ++count;
  for (auto& count : cached.num_output_tokens) ++count;
  std::fill(cached.new_block_ids.begin(), cached.new_block_ids.end(), std::nullopt);
  for (const auto& [row, block_ids] : new_block_ids) cached.new_block_ids.at(row) = block_ids;
  return next;
}

}  // namespace

void bind_scheduler_output(py::module_& m) {
  Struct<SamplingParams>(m, "SamplingParams", "How a request's tokens are chosen: what the core needs of it.")
      .field("temperature", &SamplingParams::temperature)
      .field("top_p", &SamplingParams::top_p)
      .field("top_k", &SamplingParams::top_k)
      .field("min_p", &SamplingParams::min_p)
      .field("presence_penalty", &SamplingParams::presence_penalty)
      .field("frequency_penalty", &SamplingParams::frequency_penalty)
      .field("repetition_penalty", &SamplingParams::repetition_penalty)
      .field("seed", &SamplingParams::seed)
      .field("logprobs", &SamplingParams::logprobs)
      .field("prompt_logprobs", &SamplingParams::prompt_logprobs)
      .field("logit_bias", &SamplingParams::logit_bias)
      .field("allowed_token_ids", &SamplingParams::allowed_token_ids)
      .field("bad_words", &SamplingParams::bad_words)
      .field("min_tokens", &SamplingParams::min_tokens)
      .field("stop_token_ids", &SamplingParams::stop_token_ids);
  m.def("validate_sampling_params", &validate, py::arg("params"), py::arg("vocab_size"),
        "Raise InvalidArgument, naming the field and the numbers, for a value or a token id out of range.");

  Struct<NewRequestData>(m, "NewRequestData", "A request that the runner has not seen, or that comes back.")
      .field("req_id", &NewRequestData::req_id)
      .field("prompt_token_ids", &NewRequestData::prompt_token_ids)
      .field("sampling_params", &NewRequestData::sampling_params)
      .field("block_ids", &NewRequestData::block_ids)
      .field("num_computed_tokens", &NewRequestData::num_computed_tokens)
      .field("prefill_token_ids", &NewRequestData::prefill_token_ids);

  Struct<CachedRequestData>(m, "CachedRequestData", "What changed for the requests that the runner knows.")
      .field("req_ids", &CachedRequestData::req_ids)
      .field("num_computed_tokens", &CachedRequestData::num_computed_tokens)
      .field("num_output_tokens", &CachedRequestData::num_output_tokens)
      .field("new_block_ids", &CachedRequestData::new_block_ids)
      .field("resumed_req_ids", &CachedRequestData::resumed_req_ids);

  py::enum_<StateCopyKind>(m, "StateCopyKind", "Which way a state copy goes.")
      .value("hit", StateCopyKind::hit, "snapshot slot to running slot, before the forward")
      .value("snapshot", StateCopyKind::snapshot, "running slot to snapshot slot, after the forward");
  Struct<StateCopy>(m, "StateCopy", "One copy of a request's recurrent state from or to a snapshot slot.")
      .field("req_id", &StateCopy::req_id)
      .field("kind", &StateCopy::kind)
      .field("snapshot_slot", &StateCopy::snapshot_slot)
      .field("num_tokens", &StateCopy::num_tokens);

  Struct<SchedulerOutput>(m, "SchedulerOutput", "What one step runs.")
      .field("scheduled_new_reqs", &SchedulerOutput::scheduled_new_reqs)
      .field("scheduled_cached_reqs", &SchedulerOutput::scheduled_cached_reqs)
      .field("num_scheduled_tokens", &SchedulerOutput::num_scheduled_tokens)
      .field("total_num_scheduled_tokens", &SchedulerOutput::total_num_scheduled_tokens)
      .field("scheduled_spec_decode_tokens", &SchedulerOutput::scheduled_spec_decode_tokens)
      .field("num_drafts", &SchedulerOutput::num_drafts)
      .field("finished_req_ids", &SchedulerOutput::finished_req_ids)
      .field("preempted_req_ids", &SchedulerOutput::preempted_req_ids)
      .field("state_copies", &SchedulerOutput::state_copies)
      .class_object()
      .def("next_decodes", &next_decodes, py::arg("new_block_ids"),
           "The step in which the requests of this one, decodes of one token each, run one token further. "
           "new_block_ids: "
           "by row, the new blocks of those that got some, a list a KV-cache group.");

  Struct<TokenLogprobs>(m, "TokenLogprobs",
                        "Raw log probabilities of one position: the token itself first, then the best.")
      .field("token_ids", &TokenLogprobs::token_ids)
      .field("logprobs", &TokenLogprobs::logprobs)
      .field("rank", &TokenLogprobs::rank);

  Struct<ModelRunnerOutput>(m, "ModelRunnerOutput", "The sampled tokens of one step.")
      .field("req_ids", &ModelRunnerOutput::req_ids)
      .field("req_id_to_index", &ModelRunnerOutput::req_id_to_index)
      .field("sampled_token_ids", &ModelRunnerOutput::sampled_token_ids)
      .field("draft_token_ids", &ModelRunnerOutput::draft_token_ids)
      .field("logprobs", &ModelRunnerOutput::logprobs)
      .field("prompt_logprobs", &ModelRunnerOutput::prompt_logprobs)
      .field("failed_req_ids", &ModelRunnerOutput::failed_req_ids);
}
