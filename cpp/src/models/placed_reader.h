#pragma once

#include "cpp/src/models/weight_reader.h"

namespace deltaic {

// Where values come from.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  virtual bool has(std::string_view name) const = 0;
  // As WeightReader::read.
  virtual void read(const std::string& name, std::span<const std::int64_t> shape, float offset, float* values) = 0;
  // Writes the matrix or matrices of this name to memory of the placement's device, as the dtype of dst; on CUDA it may
  // be under way until finish().
  //   dst  contiguous, as many elements
  virtual void write(const std::string& name, std::span<const std::int64_t> shape, const TensorView& dst) = 0;
  // Waits until all has been written.
  virtual void finish() = 0;
};

// Matrices in memory of their own, of the placement's dtype: fused, as kernels on CUDA want them.
class PlacedReader final : public WeightReader {
 public:
  PlacedReader(WeightSource& source, WeightPlacement placement)
      : WeightReader(placement.device), source_(source), placement_(placement) {}
  using WeightReader::projection;
  bool has(std::string_view name) const override { return source_.has(name); }
  ops::Weight matrix(const std::string& name, std::int64_t out_features, std::int64_t in_features) override;
  Projection projection(std::span<const Rows> parts, std::int64_t in_features) override;
  // The lists of single experts are filled too, as views.
  ops::ExpertWeights experts(const Experts& experts) override;

 private:
  void read(const std::string& name, std::span<const std::int64_t> shape, float offset, float* values) override {
    source_.read(name, shape, offset, values);
  }
  ops::Weight allocate(std::initializer_list<std::int64_t> shape);
  void write_expert(const std::string& prefix, const Experts& sizes, const ops::ExpertWeights& all, std::int64_t index);

  WeightSource& source_;
  WeightPlacement placement_;
};

// Uploads a checkpoint to a CUDA device, converted there where the dtypes differ.
std::unique_ptr<WeightSource> upload_from(const Checkpoint& checkpoint, Device device);
// Random weights whose values follow from the seed, the name and the place in the tensor, on any device. The names of a
// model whose embedding is the head when `is_tied`, with fused experts.
std::unique_ptr<WeightSource> random_weights(bool is_tied, std::uint64_t seed);

}  // namespace deltaic
