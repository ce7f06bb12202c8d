#include "cpp/src/models/weight_reader.h"

#include <array>
#include <cstring>

#include "cpp/src/check.h"
#include "cpp/src/core/half.h"
#include "cpp/src/core/transfer.h"

namespace deltaic {

namespace {

void check_dtype(const Checkpoint& checkpoint, std::string_view tensor_name, DType dtype,
                 std::initializer_list<DType> allowed) {
  for (const DType one : allowed)
    if (dtype == one) return;
  throw Unsupported(detail::concat("the tensor ", checkpoint.stored_name(tensor_name), " has dtype ", name(dtype),
                                   ", which is not supported for it"));
}

}  // namespace

const StoredTensor& stored_matrix(const Checkpoint& checkpoint, std::string_view name,
                                  std::span<const std::int64_t> shape) {
  const StoredTensor& stored = checkpoint.get(name, shape);
  check_dtype(checkpoint, name, stored.view.dtype, {DType::f32, DType::f16, DType::bf16});
  return stored;
}

void read_stored_values(const Checkpoint& checkpoint, std::string_view name, std::span<const std::int64_t> shape,
                        float offset, float* values) {
  const StoredTensor& stored = checkpoint.get(name, shape);
  const DType dtype = stored.view.dtype;
  check_dtype(checkpoint, name, dtype, {DType::f32, DType::f16, DType::bf16, DType::f64});
  const char* source = static_cast<const char*>(stored.view.data);
  for (std::int64_t i = 0; i < stored.view.numel(); ++i)
    values[i] = to_f32(source + i * static_cast<std::int64_t>(size_of(dtype)), dtype) + offset;
}

ops::Weight rows(const ops::Weight& matrix, std::int64_t begin, std::int64_t end) {
  return {.view = matrix.view.slice(begin, end), .owner = matrix.owner};
}

Tensor WeightReader::place(Tensor host) {
  const TensorView& view = host.view();
  count_bytes(view.num_bytes());
  if (device_.type == DeviceType::cpu) return host;
  Tensor tensor(DType::f32, std::span(view.shape.data(), static_cast<std::size_t>(view.rank)), device_);
  cuda::copy_and_wait(tensor.view().data, view.data, view.num_bytes());
  return tensor;
}

Tensor WeightReader::values(const std::string& name, std::initializer_list<std::int64_t> shape, float offset) {
  Tensor host(DType::f32, shape);
  read(name, std::span(shape.begin(), shape.size()), offset, host.as<float>());
  return place(std::move(host));
}

Tensor WeightReader::vectors(std::span<const Rows> parts) {
  std::int64_t size = 0;
  for (const Rows& part : parts) size += part.count;
  Tensor host(DType::f32, {size});
  float* values = host.as<float>();
  for (const Rows& part : parts) {
    read(part.name, std::array{part.count}, 0.0F, values);
    values += part.count;
  }
  return place(std::move(host));
}

ops::Weight ViewReader::take(std::string_view name, std::span<const std::int64_t> shape, std::int64_t rows) {
  const StoredTensor& stored = stored_matrix(checkpoint_, name, shape);
  const std::size_t num_bytes = stored.view.num_bytes();
  count_bytes(num_bytes);
  ops::Weight weight{.view = stored.view.reshape({rows, shape.back()}), .owner = stored.owner};
  if (reinterpret_cast<std::uintptr_t>(weight.view.data) % size_of(weight.view.dtype) != 0) {
    const auto copy = std::make_shared<const Buffer>(num_bytes, Device{});
    std::memcpy(copy->data(), weight.view.data, num_bytes);
    weight.view.data = copy->data();
    weight.owner = copy;
  }
  return weight;
}

ops::Weight ViewReader::matrix(const std::string& name, std::int64_t out_features, std::int64_t in_features) {
  return take(name, std::array{out_features, in_features}, out_features);
}

Projection ViewReader::projection(std::span<const Rows> parts, std::int64_t in_features) {
  Projection result;
  for (const Rows& part : parts) result.add(matrix(part.name, part.count, in_features));
  return result;
}

ops::ExpertWeights ViewReader::experts(const Experts& experts) {
  const auto& [prefix, shared_prefix, count, intermediate, hidden] = experts;
  ops::ExpertWeights result;
  if (has(prefix + "gate_up_proj")) {
    const ops::Weight gate_up =
        take(prefix + "gate_up_proj", std::array{count, 2 * intermediate, hidden}, count * 2 * intermediate);
    const ops::Weight down = take(prefix + "down_proj", std::array{count, hidden, intermediate}, count * hidden);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t first = 2 * i * intermediate;
      result.gate.push_back(rows(gate_up, first, first + intermediate));
      result.up.push_back(rows(gate_up, first + intermediate, first + 2 * intermediate));
      result.down.push_back(rows(down, i * hidden, (i + 1) * hidden));
    }
    return result;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const std::string expert = prefix + std::to_string(i) + ".";
    result.gate.push_back(matrix(expert + "gate_proj.weight", intermediate, hidden));
    result.up.push_back(matrix(expert + "up_proj.weight", intermediate, hidden));
    result.down.push_back(matrix(expert + "down_proj.weight", hidden, intermediate));
  }
  return result;
}

}  // namespace deltaic
