// Every CUDA entry point of a build without CUDA: a clear Unsupported. Compiled instead of cuda/.
#include "cpp/src/check.h"
#include "cpp/src/core/buffer.h"
#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/core/matmul.h"
#include "cpp/src/core/transfer.h"
#include "cpp/src/core/upload.h"
#include "cpp/src/ops/activation.h"
#include "cpp/src/ops/batch_memcpy.h"
#include "cpp/src/ops/ceilings.h"
#include "cpp/src/ops/device_sampler.h"
#include "cpp/src/ops/embedding.h"
#include "cpp/src/ops/gated_delta_net.h"
#include "cpp/src/ops/gdn_mixer.h"
#include "cpp/src/ops/linear.h"
#include "cpp/src/ops/moe.h"
#include "cpp/src/ops/paged_attention.h"
#include "cpp/src/ops/rms_norm.h"
#include "cpp/src/ops/rotary.h"
#include "cpp/src/ops/state_copy.h"
#include "cpp/src/runner/draft_kernels.h"
#include "cpp/src/runner/step_kernels.h"

namespace deltaic::cuda {
namespace {

[[noreturn]] void no_cuda(const char* what) {
  throw Unsupported(
      detail::concat(what, ": this build of deltaic has no CUDA backend; use the CPU, or build with DELTAIC_CUDA=ON"));
}

}  // namespace

std::shared_ptr<void> allocate(std::size_t, int) { no_cuda("a buffer on a CUDA device"); }
std::shared_ptr<Matmul> make_matmul(int) { no_cuda("products on a CUDA device"); }
int num_devices() { return 0; }
void wait_for_device(int) { no_cuda("wait_for_device"); }
std::unique_ptr<Uploader> make_uploader(int) { no_cuda("weights on a CUDA device"); }
void fill_uniform(const TensorView&, std::uint64_t, float, float) { no_cuda("weights on a CUDA device"); }
void copy_and_wait(void*, const void*, std::size_t) { no_cuda("copy_and_wait"); }
DeviceMemory device_memory(int) { no_cuda("device_memory"); }
std::string device_name(int) { no_cuda("device_name"); }
double measure_read_bandwidth(int) { no_cuda("measure_read_bandwidth"); }
double measure_matrix_peak(int) { no_cuda("measure_matrix_peak"); }
CurrentDevice::CurrentDevice(Device device) {
  if (device.type != DeviceType::cpu) no_cuda("a CUDA device");
}
CurrentDevice::~CurrentDevice() = default;
Stream::Stream() { no_cuda("a stream"); }
void Stream::wait() const { no_cuda("a stream"); }
Event::Event() { no_cuda("an event"); }
void Event::record(const Stream&) const { no_cuda("an event"); }
void Event::wait() const { no_cuda("an event"); }
PinnedBuffer::PinnedBuffer(std::size_t) { no_cuda("pinned memory"); }
Graph::Graph(const Stream&, const std::function<void()>&) { no_cuda("a graph"); }
void Graph::launch(const Stream&) const { no_cuda("a graph"); }
void copy_async(const Stream&, void*, const void*, std::size_t) { no_cuda("copy_async"); }
void fill_async(const Stream&, void*, unsigned char, std::size_t) { no_cuda("fill_async"); }
void upload_step(ops::Stream, const StepUpload&) { no_cuda("a step"); }
void commit_tokens(ops::Stream, const TokenCommit&) { no_cuda("a step"); }
void place_tokens(ops::Stream, const PlaceTokens&) { no_cuda("drafts"); }
void verify_tokens(ops::Stream, const VerifyTokens&) { no_cuda("drafts"); }
void take_draft(ops::Stream, const TakeDraft&) { no_cuda("drafts"); }
void copy_words(ops::Stream, const void*, void*, std::int64_t) { no_cuda("copy_words"); }

void batch_memcpy(ops::Stream, TensorView, TensorView, TensorView) { no_cuda("batch_memcpy"); }
void paged_attention(ops::Stream, const ops::PagedAttentionArgs&) { no_cuda("paged_attention"); }
void qk_norm_rope(ops::Stream, const ops::QkNormRopeArgs&) { no_cuda("qk_norm_rope"); }
void causal_conv(ops::Stream, const ops::GdnShape&, const ops::GdnProjectionLayout&, TensorView, TensorView,
                 const ops::GdnSequences&, TensorView, TensorView) {
  no_cuda("causal_conv");
}
void gated_delta_rule(ops::Stream, const ops::GdnShape&, const ops::GdnProjectionLayout&, TensorView, TensorView,
                      TensorView, TensorView, const ops::GdnSequences&, TensorView, TensorView, TensorView) {
  no_cuda("gated_delta_rule");
}
std::size_t gdn_mixer_workspace_bytes(const ops::GdnShape&, DType, std::int64_t, std::int64_t, std::int64_t) {
  no_cuda("gdn_mixer");
}
void gdn_mixer(ops::Stream, const ops::GdnMixerArgs&) { no_cuda("gdn_mixer"); }
bool linear_fuses(TensorView, const ops::Weight&) { no_cuda("linear"); }
void linear(ops::Stream, Matmul*, TensorView, const ops::Weight&, const ops::LinearOptions&, TensorView) {
  no_cuda("linear");
}
void embedding(ops::Stream, TensorView, const ops::Weight&, TensorView) { no_cuda("embedding"); }
void silu_mul(ops::Stream, TensorView, TensorView, TensorView) { no_cuda("silu_mul"); }
void sigmoid_mul(ops::Stream, TensorView, TensorView) { no_cuda("sigmoid_mul"); }
void moe_router(ops::Stream, TensorView, TensorView, bool, TensorView, TensorView) { no_cuda("moe_router"); }
bool moe_route_fits(TensorView, const ops::Weight&, std::int64_t) { no_cuda("moe_route"); }
void moe_route(ops::Stream, TensorView, const ops::FusedNorm&, const ops::Weight&, std::int64_t, bool, bool, TensorView,
               TensorView) {
  no_cuda("moe_route");
}
bool moe_experts_fuses_norm(TensorView, TensorView, TensorView, std::int64_t) { no_cuda("moe_experts"); }
void moe_experts(ops::Stream, TensorView, const ops::FusedNorm&, TensorView, TensorView, TensorView, TensorView,
                 TensorView, TensorView) {
  no_cuda("moe_experts");
}
std::size_t moe_scratch_bytes(std::int64_t, int, std::int64_t, std::int64_t, std::int64_t) { no_cuda("moe_experts"); }
void add_sigmoid_scaled(ops::Stream, TensorView, TensorView, TensorView) { no_cuda("add_sigmoid_scaled"); }
void rms_norm(ops::Stream, TensorView, TensorView, float, TensorView) { no_cuda("rms_norm"); }
void gated_rms_norm(ops::Stream, TensorView, TensorView, TensorView, float, TensorView) { no_cuda("gated_rms_norm"); }
Buffer upload_state_copy_tables(const ops::StateCopyPlan&) { no_cuda("state copies"); }
std::shared_ptr<SamplerState> make_sampler_state(int, int, int, const ops::Context&) { no_cuda("the device sampler"); }
void set_sampler_slot(SamplerState&, int, const ops::PackedSlot&, std::span<const std::int32_t>,
                      std::span<const std::int32_t>) {
  no_cuda("the device sampler");
}
void clear_sampler_slot(SamplerState&, int) { no_cuda("the device sampler"); }
void sample(SamplerState&, const ops::DeviceSampler::Args&) { no_cuda("the device sampler"); }
void add_sampled_tokens(SamplerState&, const ops::DeviceSampler::AddedTokens&) { no_cuda("the device sampler"); }
void copy_states(ops::Stream, const ops::StateCopyPlan&, const ops::StateCopyArgs&) { no_cuda("state copies"); }

}  // namespace deltaic::cuda
