#include "cpp/src/layers/workspace.h"

#include "cpp/src/check.h"

namespace deltaic {

namespace {

char* element(const TensorView& view, std::int64_t index) {
  return static_cast<char*>(view.data) + index * static_cast<std::int64_t>(size_of(view.dtype));
}

}  // namespace

TensorView Workspace::take(DType dtype, std::initializer_list<std::int64_t> shape) {
  constexpr std::size_t kAlignment = 64;
  TensorView view = make_view(nullptr, dtype, shape, device_);
  const std::size_t num_bytes = (view.num_bytes() + kAlignment - 1) / kAlignment * kAlignment;
  if (!measures_) {
    DELTAIC_CHECK(num_bytes <= buffer_.num_bytes() - num_taken_bytes_, "the workspace has ", buffer_.num_bytes(),
                  " bytes, ", num_taken_bytes_, " are taken and ", num_bytes, " more are needed");
    view.data = static_cast<char*>(buffer_.data()) + num_taken_bytes_;
  }
  num_taken_bytes_ += num_bytes;
  return view;
}

TensorView as_heads(const TensorView& rows, std::int64_t num_heads, std::int64_t dim) {
  DELTAIC_CHECK(rows.rank == 2 && rows.shape[1] == num_heads * dim && rows.stride[1] == 1, "rows of ", rows.shape[1],
                " elements are not ", num_heads, " heads of ", dim);
  TensorView heads = rows;
  heads.rank = 3;
  heads.shape = {rows.shape[0], num_heads, dim};
  heads.stride = {rows.stride[0], dim, 1};
  return heads;
}

TensorView part_of_heads(const TensorView& heads, std::int64_t begin, std::int64_t count) {
  DELTAIC_CHECK(heads.rank == 3 && 0 <= begin && 0 <= count && begin + count <= heads.shape[2], "channels [", begin,
                ", ", begin + count, ") of heads with ", heads.shape[2]);
  TensorView part = heads;
  part.data = element(heads, begin * heads.stride[2]);
  part.shape[2] = count;
  return part;
}

TensorView columns(const TensorView& matrix, std::int64_t begin, std::int64_t count) {
  DELTAIC_CHECK(matrix.rank == 2 && 0 <= begin && 0 <= count && begin + count <= matrix.shape[1], "columns [", begin,
                ", ", begin + count, ") of a matrix with ", matrix.shape[1]);
  TensorView part = matrix;
  part.data = element(matrix, begin * matrix.stride[1]);
  part.shape[1] = count;
  return part;
}

}  // namespace deltaic
