#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "cpp/src/core/buffer.h"
#include "cpp/src/layers/projection.h"
#include "cpp/src/loader/checkpoint.h"
#include "cpp/src/models/weight_placement.h"
#include "cpp/src/ops/moe.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

// Takes a model's tensors one after another, puts them where the backend wants them and counts their bytes. Names are
// without the checkpoint's prefix. All throw InvalidArgument for a tensor that is missing or has another shape, and
// Unsupported for a dtype that is not a floating-point one.
class WeightReader {
 public:
  struct Rows {
    std::string name;
    std::int64_t count;
  };
  // Names of experts start with `prefix`; those of a shared one that is to be the last of them with `shared_prefix`.
  struct Experts {
    std::string prefix, shared_prefix;
    std::int64_t count, intermediate, hidden;
  };

  explicit WeightReader(Device device) : device_(device) {}
  virtual ~WeightReader() = default;

  virtual bool has(std::string_view name) const = 0;
  // Whether matrices of one input become one, and a shared expert may be among the experts.
  bool fuses() const { return device_.type == DeviceType::cuda; }

  // [out_features, in_features]
  virtual ops::Weight matrix(const std::string& name, std::int64_t out_features, std::int64_t in_features) = 0;
  // Matrices [count, in_features] of one input. As one matrix it gets rows of zeros, up to a multiple of 8 rows.
  virtual Projection projection(std::span<const Rows> parts, std::int64_t in_features) = 0;
  Projection projection(std::initializer_list<Rows> parts, std::int64_t in_features) {
    return projection(std::span<const Rows>(parts.begin(), parts.size()), in_features);
  }
  // Either layout, by the names that are there: one tensor for all experts, or three an expert.
  virtual ops::ExpertWeights experts(const Experts& experts) = 0;

  // A small tensor in f32, with `offset` added. Its own memory.
  Tensor values(const std::string& name, std::initializer_list<std::int64_t> shape, float offset = 0.0F);
  // Vectors beside each other, in f32.
  Tensor vectors(std::span<const Rows> parts);
  Tensor vectors(std::initializer_list<Rows> parts) { return vectors({parts.begin(), parts.size()}); }

  // Bytes of all that was taken, in the memory where it is used.
  std::int64_t num_bytes() const { return num_bytes_; }

 protected:
  // Writes a tensor's values, with `offset` added, to the host.
  virtual void read(const std::string& name, std::span<const std::int64_t> shape, float offset, float* values) = 0;
  void count_bytes(std::size_t num_bytes) { num_bytes_ += static_cast<std::int64_t>(num_bytes); }

 private:
  Tensor place(Tensor host);

  Device device_;
  std::int64_t num_bytes_ = 0;
};

// The stored tensor of a matrix or of matrices. Throws Unsupported for another dtype than f32, f16 and bf16.
const StoredTensor& stored_matrix(const Checkpoint& checkpoint, std::string_view name,
                                  std::span<const std::int64_t> shape);
// What WeightReader::read does, from a checkpoint.
void read_stored_values(const Checkpoint& checkpoint, std::string_view name, std::span<const std::int64_t> shape,
                        float offset, float* values);

// Rows [begin, end) of a matrix.
ops::Weight rows(const ops::Weight& matrix, std::int64_t begin, std::int64_t end);

// On the CPU: matrices are views of the checkpoint, as they are stored; one that does not lie at a multiple of its
// element size is copied.
class ViewReader final : public WeightReader {
 public:
  explicit ViewReader(const Checkpoint& checkpoint) : WeightReader(Device{}), checkpoint_(checkpoint) {}
  using WeightReader::projection;
  bool has(std::string_view name) const override { return checkpoint_.has(name); }
  ops::Weight matrix(const std::string& name, std::int64_t out_features, std::int64_t in_features) override;
  Projection projection(std::span<const Rows> parts, std::int64_t in_features) override;
  ops::ExpertWeights experts(const Experts& experts) override;

 private:
  void read(const std::string& name, std::span<const std::int64_t> shape, float offset, float* values) override {
    read_stored_values(checkpoint_, name, shape, offset, values);
  }
  ops::Weight take(std::string_view name, std::span<const std::int64_t> shape, std::int64_t rows);

  const Checkpoint& checkpoint_;
};

}  // namespace deltaic
