#include <optional>
#include <string>
#include <string_view>

#include "cpp/src/check.h"
#include "cpp/src/core/half.h"
#include "cpp/src/core/transfer.h"
#include "cpp/src/core/uniform.h"
#include "cpp/src/core/upload.h"
#include "cpp/src/models/placed_reader.h"

namespace deltaic {

namespace {

// Values are uniform in [centre - scale, centre + scale).
struct Range {
  float centre, scale;
};

// As in trained models: matrices with a standard deviation of 0.02, norms about 1, decays from fast to slow.
Range range_of(std::string_view name) {
  if (name.ends_with("norm.weight") || name.starts_with("mtp.pre_fc_norm_")) return {1.0F, 0.1F};
  if (name.ends_with("A_log")) return {1.4F, 1.4F};
  if (name.ends_with("dt_bias")) return {-4.0F, 3.0F};
  if (name.ends_with("conv1d.weight")) return {0.0F, 0.5F};
  return {0.0F, 0.035F};
}

std::uint64_t seed_of(std::string_view name, std::uint64_t seed) {
  std::uint64_t hash = 14695981039346656037U ^ seed;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211U;
  return hash;
}

class RandomSource final : public WeightSource {
 public:
  RandomSource(bool is_tied, std::uint64_t seed) : is_tied_(is_tied), seed_(seed) {}

  bool has(std::string_view name) const override { return name != "lm_head.weight" || !is_tied_; }

  // What a norm multiplies with is about 1, whatever is added to the stored weight.
  void read(const std::string& name, std::span<const std::int64_t> shape, float, float* values) override {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    const Range range = range_of(name);
    const std::uint64_t seed = seed_of(name, seed_);
    for (std::int64_t i = 0; i < count; ++i) values[i] = uniform(seed, i, range.centre, range.scale);
  }

  void write(const std::string& name, std::span<const std::int64_t>, const TensorView& dst) override {
    const Range range = range_of(name);
    const std::uint64_t seed = seed_of(name, seed_);
    if (dst.device.type == DeviceType::cuda) {
      cuda_device_ = dst.device.index;
      return cuda::fill_uniform(dst, seed, range.centre, range.scale);
    }
    for (std::int64_t i = 0; i < dst.numel(); ++i) {
      const float value = uniform(seed, i, range.centre, range.scale);
      if (dst.dtype == DType::f32)
        dst.as<float>()[i] = value;
      else
        dst.as<std::uint16_t>()[i] = dst.dtype == DType::bf16 ? to_bf16(value) : to_f16(value);
    }
  }

  void finish() override {
    if (cuda_device_) cuda::wait_for_device(*cuda_device_);
  }

 private:
  bool is_tied_;
  std::uint64_t seed_;
  std::optional<int> cuda_device_;  // where something was written
};

}  // namespace

std::unique_ptr<WeightSource> random_weights(bool is_tied, std::uint64_t seed) {
  return std::make_unique<RandomSource>(is_tied, seed);
}

}  // namespace deltaic
