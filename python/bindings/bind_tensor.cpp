#include <bit>
#include <cstring>

#include <deltaic/device.h>
#include <deltaic/tensor.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/core/transfer.h"
#include "python/bindings/module.h"

using namespace deltaic;

namespace {

float half_to_float(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  std::uint32_t exponent = (bits >> 10) & 0x1FU, mantissa = bits & 0x3FFU;
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000U | (mantissa << 13));
  if (exponent == 0)
    return std::bit_cast<float>(sign) + (sign ? -1.0F : 1.0F) * static_cast<float>(mantissa) * 0x1p-24F;
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

template <class To, class From, class Convert>
py::array copy_elements(const TensorView& view, Convert convert) {
  py::array_t<To> result(std::vector<py::ssize_t>(view.shape.begin(), view.shape.begin() + view.rank));
  To* out = result.mutable_data();
  std::array<std::int64_t, kMaxRank> index{};
  for (std::int64_t i = 0; i < view.numel(); ++i) {
    std::int64_t offset = 0;
    for (int d = 0; d < view.rank; ++d) offset += index[d] * view.stride[d];
    out[i] = convert(static_cast<const From*>(view.data)[offset]);
    for (int d = view.rank - 1; d >= 0 && ++index[d] == view.shape[d]; --d) index[d] = 0;
  }
  return result;
}

py::array host_to_numpy(const TensorView& view) {
  const auto same = [](auto x) { return x; };
  switch (view.dtype) {
    case DType::f32:
      return copy_elements<float, float>(view, same);
    case DType::f64:
      return copy_elements<double, double>(view, same);
    case DType::bf16:
      return copy_elements<float, std::uint16_t>(
          view, [](std::uint16_t x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16); });
    case DType::f16:
      return copy_elements<float, std::uint16_t>(view, half_to_float);
    case DType::i8:
      return copy_elements<std::int8_t, std::int8_t>(view, same);
    case DType::i32:
      return copy_elements<std::int32_t, std::int32_t>(view, same);
    case DType::i64:
      return copy_elements<std::int64_t, std::int64_t>(view, same);
    case DType::u8:
      return copy_elements<std::uint8_t, std::uint8_t>(view, same);
  }
  throw py::value_error("unknown dtype");
}

// Waits for the device first.
py::array to_numpy(TensorView view) {
  if (view.device.type == DeviceType::cpu || view.numel() == 0) return host_to_numpy(view);
  std::int64_t last = 0;  // gaps between strides are copied too
  for (int d = 0; d < view.rank; ++d) last += (view.shape[d] - 1) * view.stride[d];
  std::vector<std::byte> elements(static_cast<std::size_t>(last + 1) * size_of(view.dtype));
  {
    py::gil_scoped_release unlocked;
    const cuda::CurrentDevice current(view.device);
    cuda::copy_and_wait(elements.data(), view.data, elements.size());
  }
  view.data = elements.data();
  return host_to_numpy(view);
}

}  // namespace

void bind_tensor(py::module_& m) {
  py::enum_<DType>(m, "DType")
      .value("f32", DType::f32)
      .value("f16", DType::f16)
      .value("bf16", DType::bf16)
      .value("f64", DType::f64)
      .value("i8", DType::i8)
      .value("i32", DType::i32)
      .value("i64", DType::i64)
      .value("u8", DType::u8);
  py::enum_<DeviceType>(m, "DeviceType").value("cpu", DeviceType::cpu).value("cuda", DeviceType::cuda);
  py::class_<Device>(m, "Device", "A CPU or one GPU.")
      .def(py::init([](DeviceType type, int index) { return Device{type, index}; }),
           py::arg_v("type", DeviceType::cpu, "DeviceType.cpu"), py::arg("index") = 0)
      .def_readonly("type", &Device::type)
      .def_readonly("index", &Device::index);
  py::class_<TensorView>(m, "TensorView", "A view of a tensor of the core. Its owner keeps the memory alive.")
      .def_readonly("dtype", &TensorView::dtype)
      .def_readonly("device", &TensorView::device)
      .def_property_readonly("shape",
                             [](const TensorView& view) {
                               return std::vector<std::int64_t>(view.shape.begin(), view.shape.begin() + view.rank);
                             })
      .def_property_readonly("strides",
                             [](const TensorView& view) {
                               return std::vector<std::int64_t>(view.stride.begin(), view.stride.begin() + view.rank);
                             })
      .def("numpy", &to_numpy, "Copy the elements into a NumPy array; f16 and bf16 become f32.");
  m.def("num_cuda_devices", &num_cuda_devices,
        "CUDA devices that this process may use; 0 in a build without CUDA or on a machine without a GPU.");
  m.def("device_name", &device_name, py::arg("device"), "What the driver calls a CUDA device.");
  m.def(
      "device_memory",
      [](const Device& device) {
        const DeviceMemory memory = device_memory(device);
        return std::pair(memory.free_bytes, memory.total_bytes);
      },
      py::arg("device"), "Free and total bytes of a CUDA device.");
}
