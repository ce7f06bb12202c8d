#include "cpp/src/models/placed_reader.h"

#include <array>
#include <memory>
#include <utility>

#include "cpp/src/core/upload.h"

namespace deltaic {

namespace {

constexpr std::int64_t kRowMultiple = 8;  // rows of results then start at multiples of 16 bytes

class UploadSource final : public WeightSource {
 public:
  UploadSource(const Checkpoint& checkpoint, Device device)
      : checkpoint_(checkpoint), uploader_(cuda::make_uploader(device.index)) {}
  bool has(std::string_view name) const override { return checkpoint_.has(name); }
  void read(const std::string& name, std::span<const std::int64_t> shape, float offset, float* values) override {
    read_stored_values(checkpoint_, name, shape, offset, values);
  }
  void write(const std::string& name, std::span<const std::int64_t> shape, const TensorView& dst) override {
    uploader_->upload(stored_matrix(checkpoint_, name, shape).view, dst);
  }
  void finish() override { uploader_->finish(); }

 private:
  const Checkpoint& checkpoint_;
  std::unique_ptr<cuda::Uploader> uploader_;
};

}  // namespace

std::unique_ptr<WeightSource> upload_from(const Checkpoint& checkpoint, Device device) {
  return std::make_unique<UploadSource>(checkpoint, device);
}

ops::Weight PlacedReader::allocate(std::initializer_list<std::int64_t> shape) {
  auto tensor = std::make_shared<const Tensor>(placement_.dtype, shape, placement_.device);
  count_bytes(tensor->view().num_bytes());
  return {.view = tensor->view(), .owner = tensor};
}

ops::Weight PlacedReader::matrix(const std::string& name, std::int64_t out_features, std::int64_t in_features) {
  ops::Weight weight = allocate({out_features, in_features});
  source_.write(name, std::array{out_features, in_features}, weight.view);
  return weight;
}

Projection PlacedReader::projection(std::span<const Rows> parts, std::int64_t in_features) {
  std::int64_t num_rows = 0;
  for (const Rows& part : parts) num_rows += part.count;
  ops::Weight weight = allocate({(num_rows + kRowMultiple - 1) / kRowMultiple * kRowMultiple, in_features});
  std::int64_t begin = 0;
  for (const Rows& part : parts) {
    source_.write(part.name, std::array{part.count, in_features}, weight.view.slice(begin, begin + part.count));
    begin += part.count;
  }
  Projection result;
  result.add(std::move(weight));
  return result;
}

void PlacedReader::write_expert(const std::string& prefix, const Experts& sizes, const ops::ExpertWeights& all,
                                std::int64_t index) {
  const auto i = static_cast<std::size_t>(index);
  source_.write(prefix + "gate_proj.weight", std::array{sizes.intermediate, sizes.hidden}, all.gate[i].view);
  source_.write(prefix + "up_proj.weight", std::array{sizes.intermediate, sizes.hidden}, all.up[i].view);
  source_.write(prefix + "down_proj.weight", std::array{sizes.hidden, sizes.intermediate}, all.down[i].view);
}

ops::ExpertWeights PlacedReader::experts(const Experts& sizes) {
  const auto& [prefix, shared_prefix, count, intermediate, hidden] = sizes;
  const std::int64_t total = count + (shared_prefix.empty() ? 0 : 1);
  ops::ExpertWeights all;
  all.all_gate_up = allocate({total, 2 * intermediate, hidden});
  all.all_down = allocate({total, hidden, intermediate});
  const ops::Weight gate_up{.view = all.all_gate_up.view.reshape({total * 2 * intermediate, hidden}),
                            .owner = all.all_gate_up.owner};
  const ops::Weight down{.view = all.all_down.view.reshape({total * hidden, intermediate}),
                         .owner = all.all_down.owner};
  for (std::int64_t i = 0; i < total; ++i) {
    const std::int64_t first = 2 * i * intermediate;
    all.gate.push_back(rows(gate_up, first, first + intermediate));
    all.up.push_back(rows(gate_up, first + intermediate, first + 2 * intermediate));
    all.down.push_back(rows(down, i * hidden, (i + 1) * hidden));
  }
  if (has(prefix + "gate_up_proj")) {
    source_.write(prefix + "gate_up_proj", std::array{count, 2 * intermediate, hidden},
                  all.all_gate_up.view.slice(0, count));
    source_.write(prefix + "down_proj", std::array{count, hidden, intermediate}, all.all_down.view.slice(0, count));
  } else {
    for (std::int64_t i = 0; i < count; ++i) write_expert(prefix + std::to_string(i) + ".", sizes, all, i);
  }
  if (!shared_prefix.empty()) write_expert(shared_prefix, sizes, all, count);
  return all;
}

}  // namespace deltaic
