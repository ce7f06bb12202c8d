#include "cuda/gemm/matmul.h"

#include <algorithm>
#include <span>

#include "cpp/src/check.h"

namespace deltaic::cuda {
namespace {

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
constexpr std::uint32_t kAlignment = 16;
constexpr std::size_t kMaxPlans = 4096;  // lengths of prompts differ: plans are forgotten, all at once, beyond this

constexpr int kCandidates = 8;
constexpr std::int64_t kManyTokens = 2048;  // from here on prefers_tile

// Of products of many tokens, tiles that cuBLASLt ranks behind others and that were faster
// (docs/decisions/0007-products-on-cuda.md).
bool prefers_tile(int tile, bool accumulate) {
  return accumulate ? tile == cublaslt::kTile256x128 : tile == cublaslt::kTile168x128 || tile == cublaslt::kTile176x128;
}

void check_status(int status, const char* call) {
  if (status != 0) throw DeviceError(detail::concat(call, " of cuBLASLt failed with status ", status));
}

cublaslt::DataType data_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return cublaslt::kF32;
    case DType::f16:
      return cublaslt::kF16;
    case DType::bf16:
      return cublaslt::kBf16;
    default:
      throw InvalidArgument(detail::concat("a product in ", name(dtype), ": f32, f16 and bf16 are supported"));
  }
}

}  // namespace

// cuBLASLt is column-major: y^T [out, tokens] = W [in, out]^T x^T [in, tokens].
struct Matmul::Plan {
  cublaslt::Descriptor product = nullptr, weight = nullptr, x = nullptr, y = nullptr;
  cublaslt::Algorithm algorithm{};

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    const cublaslt::Library& lib = cublaslt::library();
    if (product != nullptr) (void)lib.descriptor_destroy(product);
    for (const cublaslt::Descriptor layout : {weight, x, y})
      if (layout != nullptr) (void)lib.layout_destroy(layout);
  }
};

std::shared_ptr<Matmul> make_matmul(int device_index) { return std::make_shared<Matmul>(device_index); }

Matmul::Matmul(int device_index) : device_index_(device_index) {}

Matmul::~Matmul() {
  plans_.clear();
  if (handle_ != nullptr) (void)cublaslt::library().destroy(handle_);
}

const Matmul::Plan& Matmul::plan_of(const Key& key, DType dtype, DType out_dtype) {
  if (const auto found = plans_.find(key); found != plans_.end()) return *found->second;
  if (plans_.size() >= kMaxPlans) plans_.clear();
  const cublaslt::Library& lib = cublaslt::library();
  const auto [num_tokens, out_features, in_features, x_stride, weight_stride, y_stride, in_type, out_type, accumulate] =
      key;
  auto plan = std::make_unique<Plan>();
  check_status(lib.descriptor_create(&plan->product, cublaslt::kComputeF32, cublaslt::kF32), "MatmulDescCreate");
  check_status(lib.descriptor_set(plan->product, cublaslt::kTransposeA, &cublaslt::kTransposed, sizeof(int)),
               "MatmulDescSetAttribute");
  const auto layout = [&](cublaslt::Descriptor& into, DType type, std::int64_t rows, std::int64_t columns,
                          std::int64_t stride) {
    check_status(lib.layout_create(&into, data_type(type), static_cast<std::uint64_t>(rows),
                                   static_cast<std::uint64_t>(columns), stride),
                 "MatrixLayoutCreate");
  };
  layout(plan->weight, dtype, in_features, out_features, weight_stride);
  layout(plan->x, dtype, in_features, num_tokens, x_stride);
  layout(plan->y, out_dtype, out_features, num_tokens, y_stride);

  cublaslt::Descriptor preference = nullptr;
  check_status(lib.preference_create(&preference), "MatmulPreferenceCreate");
  const std::unique_ptr<void, int (*)(void*)> owner(preference, lib.preference_destroy);
  check_status(lib.preference_set(preference, cublaslt::kMaxWorkspaceBytes, &kWorkspaceBytes, sizeof(kWorkspaceBytes)),
               "MatmulPreferenceSetAttribute");
  constexpr std::uint32_t kSchemes = cublaslt::kReduceInComputeType;  // never in the dtype of y
  check_status(lib.preference_set(preference, cublaslt::kReductionSchemes, &kSchemes, sizeof(kSchemes)),
               "MatmulPreferenceSetAttribute");
  for (int operand = cublaslt::kMinAlignmentA; operand <= cublaslt::kMinAlignmentD; ++operand)
    check_status(lib.preference_set(preference, operand, &kAlignment, sizeof(kAlignment)),
                 "MatmulPreferenceSetAttribute");
  std::array<cublaslt::Heuristic, kCandidates> candidates{};
  int num_found = 0;
  const int status = lib.heuristic(handle_, plan->product, plan->weight, plan->x, plan->y, plan->y, preference,
                                   kCandidates, candidates.data(), &num_found);
  if (status != 0 || num_found == 0)
    throw Unsupported(detail::concat("cuBLASLt has no kernel for ", num_tokens, " tokens, a weight of ", out_features,
                                     " x ", in_features, " ", name(dtype), " (status ", status, ")"));
  const std::span<const cublaslt::Heuristic> found(candidates.data(), static_cast<std::size_t>(num_found));
  const auto is_preferred = [&](const cublaslt::Heuristic& candidate) {
    int tile = 0;
    std::size_t num_written = 0;
    return lib.algorithm_get(&candidate.algorithm, cublaslt::kTile, &tile, sizeof(tile), &num_written) == 0 &&
           prefers_tile(tile, accumulate != 0);
  };
  auto best = found.begin();
  if (num_tokens >= kManyTokens && in_type == out_type) best = std::find_if(best, found.end(), is_preferred);
  plan->algorithm = (best == found.end() ? found.begin() : best)->algorithm;
  return *plans_.emplace(key, std::move(plan)).first->second;
}

void Matmul::run(ops::Stream stream, TensorView x, TensorView weight, TensorView y, bool accumulate) {
  const cublaslt::Library& lib = cublaslt::library();
  if (handle_ == nullptr) {
    check_status(lib.create(&handle_), "Create");
    workspace_ = Buffer(kWorkspaceBytes, {DeviceType::cuda, device_index_});
  }
  const Plan& plan = plan_of({x.shape[0], weight.shape[0], weight.shape[1], x.stride[0], weight.stride[0], y.stride[0],
                              static_cast<std::int64_t>(x.dtype), static_cast<std::int64_t>(y.dtype), accumulate},
                             x.dtype, y.dtype);
  const float alpha = 1.0F, beta = accumulate ? 1.0F : 0.0F;
  check_status(lib.matmul(handle_, plan.product, &alpha, weight.data, plan.weight, x.data, plan.x, &beta, y.data,
                          plan.y, y.data, plan.y, &plan.algorithm, workspace_.data(), kWorkspaceBytes, stream.handle),
               "Matmul");
}

}  // namespace deltaic::cuda
