#include "python/bindings/array.h"

#include <string>

#include "cpp/src/check.h"

using namespace deltaic;

namespace {

// The C structs of DLPack's ABI, as far as they are read here.
struct DLTensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t ndim;
  std::uint8_t type_code, bits;
  std::uint16_t lanes;
  std::int64_t *shape, *strides;  // strides: null for a contiguous tensor
  std::uint64_t byte_offset;
};
enum : std::int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 };

void set_contiguous_strides(Array& array) {
  std::int64_t stride = 1;
  for (int d = array.rank - 1; d >= 0; --d) {
    array.stride[d] = stride;
    stride *= array.shape[d];
  }
}

void set_rank(Array& array, std::int64_t rank, const char* what) {
  DELTAIC_CHECK(rank <= kMaxRank, what, " has ", rank, " dimensions, at most ", kMaxRank, " are supported");
  array.rank = static_cast<int>(rank);
}

Array from_dlpack(py::handle object, const char* what) {
  const auto device = object.attr("__dlpack_device__")().cast<std::pair<std::int32_t, std::int32_t>>();
  const bool on_gpu = device.first == kDLCUDA || device.first == kDLCUDAManaged;
  DELTAIC_CHECK(on_gpu || device.first == kDLCPU || device.first == kDLCUDAHost, what, " is on DLPack device type ",
                device.first, ", neither CPU nor CUDA");
  // -1: whoever calls orders the streams.
  const py::object capsule = on_gpu ? object.attr("__dlpack__")(py::arg("stream") = -1) : object.attr("__dlpack__")();
  const auto* tensor = static_cast<const DLTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (tensor == nullptr) throw py::error_already_set();
  DELTAIC_CHECK(tensor->lanes == 1 && tensor->bits % 8 == 0, what, " has elements of ", tensor->bits, " bits in ",
                tensor->lanes, " lanes");
  Array array;
  array.address = reinterpret_cast<std::uint64_t>(tensor->data) + tensor->byte_offset;
  array.kind = tensor->type_code == 0 ? 'i' : tensor->type_code == 1 ? 'u' : tensor->type_code == 2 ? 'f' : 'V';
  array.elem_size = tensor->bits / 8;
  array.device = {on_gpu ? DeviceType::cuda : DeviceType::cpu, on_gpu ? tensor->device_id : 0};
  set_rank(array, tensor->ndim, what);
  std::copy_n(tensor->shape, array.rank, array.shape.begin());
  if (tensor->strides == nullptr)
    set_contiguous_strides(array);
  else
    std::copy_n(tensor->strides, array.rank, array.stride.begin());
  return array;
}

Array from_array_interface(const py::dict& interface, DeviceType device, const char* what) {
  Array array;
  array.address = interface["data"].cast<py::tuple>()[0].cast<std::uint64_t>();
  array.device = {device, 0};
  const auto type = interface["typestr"].cast<std::string>();
  DELTAIC_CHECK(type.size() >= 3 && type[0] != '>', what, " has elements of type ", type);
  array.kind = type[1];
  array.elem_size = std::stoi(type.substr(2));
  const auto shape = interface["shape"].cast<py::tuple>();
  set_rank(array, static_cast<std::int64_t>(shape.size()), what);
  for (int d = 0; d < array.rank; ++d) array.shape[d] = shape[d].cast<std::int64_t>();
  if (!interface.contains("strides") || interface["strides"].is_none()) {
    set_contiguous_strides(array);
    return array;
  }
  const auto strides = interface["strides"].cast<py::tuple>();
  for (int d = 0; d < array.rank; ++d) {
    const auto bytes = strides[d].cast<std::int64_t>();
    DELTAIC_CHECK(bytes % array.elem_size == 0, what, " has a stride of ", bytes, " bytes, elements of ",
                  array.elem_size);
    array.stride[d] = bytes / array.elem_size;
  }
  return array;
}

}  // namespace

TensorView Array::view(DType dtype) const {
  TensorView view = make_view(reinterpret_cast<void*>(address), dtype,
                              std::span(shape.data(), static_cast<std::size_t>(rank)), device);
  view.stride = stride;
  return view;
}

Array read_array(py::handle object, const char* what) {
  if (py::hasattr(object, "__array_interface__"))
    return from_array_interface(object.attr("__array_interface__"), DeviceType::cpu, what);
  if (py::hasattr(object, "__dlpack__")) return from_dlpack(object, what);
  if (py::hasattr(object, "__cuda_array_interface__"))
    return from_array_interface(object.attr("__cuda_array_interface__"), DeviceType::cuda, what);
  throw InvalidArgument(detail::concat(what, " is a ",
                                       py::str(py::type::of(object).attr("__name__")).cast<std::string>(),
                                       ", which has neither DLPack nor an array interface"));
}
