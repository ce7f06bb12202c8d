// paged_attention with the lengths that choose kernels on CUDA, on every device there is.
#include <doctest/doctest.h>

#include <deltaic/error.h>

#include <cstdint>

#include "cpp/src/ops/paged_attention.h"
#include "tests_cpp/support/device_bytes.h"
#include "tests_cpp/support/reference.h"
#include "tests_cpp/support/tensors.h"
#include "tests_cpp/support/tolerance.h"

namespace deltaic {
namespace {

// Queries, keys and values of a request follow from its seed and the position.
struct Request {
  std::int64_t seq_len, query_len;
  std::uint32_t seed = 1;
};

struct Shape {
  std::int64_t num_kv_heads, group, dim, block_size;
  DType dtype, cache;
  bool gated = true;

  std::int64_t num_heads() const { return num_kv_heads * group; }
};

// Which requests are decodes, and the limits that a graph would be captured with (0: those of the batch).
struct Limits {
  int num_decodes = 0, max_decode_query_len = 1, max_query_len = 0, max_seq_len = 0;
};

// Draws k / 128 with -128 <= k < 128: every dtype has these exactly.
int draw(std::uint32_t seed, std::int64_t position, std::int64_t index) {
  std::uint64_t x = seed * 0x9E3779B97F4A7C15ULL + static_cast<std::uint64_t>(position) * 0xD1B54A32D192ED03ULL +
                    static_cast<std::uint64_t>(index) * 0x8CB92BA72F3D8DD7ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return static_cast<int>((x ^ (x >> 31)) >> 56);
}

// A row [size] of draws times limit, at an offset of the tensor.
class Draws {
 public:
  Draws(DType dtype, double limit) : table_(dtype, {256}) {
    for (int k = 0; k < 256; ++k) test::set_element(table_.view(), k, limit * (k - 128) / 128.0);
  }
  void write(const Tensor& tensor, std::int64_t offset, std::int64_t size, std::uint32_t seed,
             std::int64_t position) const {
    const auto bytes = static_cast<std::int64_t>(size_of(table_.view().dtype));
    for (std::int64_t j = 0; j < size; ++j)
      std::memcpy(static_cast<char*>(tensor.view().data) + (offset + j) * bytes,
                  static_cast<const char*>(table_.view().data) + draw(seed, position, j) * bytes,
                  static_cast<std::size_t>(bytes));
  }

 private:
  Tensor table_;
};

class Batch {
 public:
  Batch(const Shape& shape, const std::vector<Request>& requests) : shape_(shape), requests_(requests) {
    const std::int64_t size = shape.block_size, columns = num_columns();
    std::int64_t num_blocks = 2;
    for (const Request& r : requests) num_blocks += blocks_of(r), num_tokens_ += r.query_len;
    k_ = test::filled({num_blocks, size, shape.num_kv_heads, shape.dim}, shape.cache, NAN);
    v_ = test::filled({num_blocks, size, shape.num_kv_heads, shape.dim}, shape.cache, NAN);
    q_ = test::filled({num_tokens_ + 1, shape.num_heads(), 2 * shape.dim}, shape.dtype, NAN);
    table_ = Tensor(DType::i32, {static_cast<std::int64_t>(requests.size()), columns});
    std::fill_n(table_.as<std::int32_t>(), table_.view().numel(), 1 << 30);
    const Draws keys(shape.cache, 2.0), values(shape.cache, 1.0), queries(shape.dtype, 2.0);
    std::int32_t block = static_cast<std::int32_t>(num_blocks) - 2, token = 0;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const Request& r = requests[i];
      for (std::int64_t b = 0; b < blocks_of(r); ++b)
        table_.as<std::int32_t>()[static_cast<std::int64_t>(i) * columns + b] = block--;
      for (std::int64_t key = 0; key < r.seq_len; ++key) {
        keys.write(k_, offset(i, key, 0), shape.num_kv_heads * shape.dim, r.seed, key);
        values.write(v_, offset(i, key, 0), shape.num_kv_heads * shape.dim, r.seed + 1000000, key);
      }
      const std::int64_t row = shape.num_heads() * 2 * shape.dim;
      for (std::int64_t t = 0; t < r.query_len; ++t, ++token)
        queries.write(q_, token * row, row, r.seed + 2000000, r.seq_len - r.query_len + t);
      lens_.push_back(static_cast<std::int32_t>(r.seq_len));
      start_.push_back(token);
    }
  }

  // [num_tokens, num_heads, dim] on the host.
  Tensor run(Device device, Limits limits) const {
    const Tensor q = test::copy_to(q_, device), k = test::copy_to(k_, device), v = test::copy_to(v_, device);
    const Tensor table = test::copy_to(table_, device), lens = test::copy_to(test::ints(lens_), device);
    const Tensor start = test::copy_to(test::ints(start_), device);
    const Tensor out =
        test::copy_to(test::filled({num_tokens_, shape_.num_heads(), shape_.dim}, shape_.dtype, NAN), device);
    const std::int64_t most = limits.max_seq_len > 0 ? limits.max_seq_len : num_columns() * shape_.block_size;
    const auto bytes = static_cast<std::int64_t>(ops::paged_attention_workspace_bytes(
        limits.num_decodes, limits.max_decode_query_len, most, shape_.num_heads(), shape_.dim));
    Tensor poison(DType::u8, {bytes});
    std::fill_n(static_cast<unsigned char*>(poison.view().data), bytes, 0xff);
    const Tensor workspace = test::copy_to(poison, device);
    ops::PagedAttentionArgs args{.q = heads_of(q, 0),
                                 .k_cache = k.view(),
                                 .v_cache = v.view(),
                                 .block_table = table.view(),
                                 .seq_lens = lens.view(),
                                 .query_start_loc = start.view(),
                                 .scale = 1.0F / std::sqrt(static_cast<float>(shape_.dim)),
                                 .out = out.view(),
                                 .num_decodes = limits.num_decodes,
                                 .max_decode_query_len = limits.max_decode_query_len,
                                 .max_query_len = limits.max_query_len,
                                 .max_seq_len = limits.max_seq_len,
                                 .workspace = workspace.view()};
    if (shape_.gated) args.gate = heads_of(q, shape_.dim);
    ops::paged_attention(test::context_of(device), args);
    return test::copy_to(out, Device{});
  }

  reference::Values expected() const {
    reference::Values all;
    const std::int64_t dim = shape_.dim;
    const auto queries = test::values(heads_of(q_, 0)), gates = test::values(heads_of(q_, dim));
    std::int64_t token = 0;
    for (std::size_t i = 0; i < requests_.size(); token += requests_[i].query_len, ++i) {
      std::vector<reference::Values> keys, values;
      for (std::int64_t h = 0; h < shape_.num_kv_heads; ++h)
        keys.push_back(rows(k_, i, h)), values.push_back(rows(v_, i, h));
      for (std::int64_t t = 0; t < requests_[i].query_len; ++t)
        for (std::int64_t h = 0; h < shape_.num_heads(); ++h) {
          const std::int64_t size = (requests_[i].seq_len - requests_[i].query_len + t + 1) * dim;
          const auto& k = keys[static_cast<std::size_t>(h / shape_.group)];
          const auto& v = values[static_cast<std::size_t>(h / shape_.group)];
          const std::int64_t at = ((token + t) * shape_.num_heads() + h) * dim;
          auto out =
              reference::attention(queries.data() + at, {k.begin(), k.begin() + size}, {v.begin(), v.begin() + size},
                                   dim, 1.0 / std::sqrt(static_cast<double>(dim)));
          for (std::int64_t c = 0; c < dim && shape_.gated; ++c) out[c] *= reference::sigmoid(gates[at + c]);
          all.insert(all.end(), out.begin(), out.end());
        }
    }
    return all;
  }

 private:
  std::int64_t blocks_of(const Request& r) const { return (r.seq_len + shape_.block_size - 1) / shape_.block_size; }
  std::int64_t num_columns() const {
    std::int64_t columns = 1;
    for (const Request& r : requests_) columns = std::max(columns, blocks_of(r) + 1);
    return columns;
  }
  std::int64_t offset(std::size_t request, std::int64_t key, std::int64_t head) const {
    const std::int64_t size = shape_.block_size;
    const std::int64_t row = static_cast<std::int64_t>(request) * num_columns();
    const std::int64_t block = table_.as<std::int32_t>()[row + key / size];
    return ((block * size + key % size) * shape_.num_kv_heads + head) * shape_.dim;
  }
  TensorView heads_of(const Tensor& tensor, std::int64_t first_channel) const {
    TensorView view = tensor.view();
    view.data = static_cast<char*>(view.data) + first_channel * static_cast<std::int64_t>(size_of(view.dtype));
    view.shape[0] = num_tokens_, view.shape[2] = shape_.dim;
    return view;
  }
  reference::Values rows(const Tensor& cache, std::size_t request, std::int64_t head) const {
    reference::Values result;
    for (std::int64_t key = 0; key < requests_[request].seq_len; ++key)
      for (std::int64_t c = 0; c < shape_.dim; ++c)
        result.push_back(test::element(cache.view(), offset(request, key, head) + c));
    return result;
  }

  Shape shape_;
  std::vector<Request> requests_;
  std::int64_t num_tokens_ = 0;
  Tensor k_, v_, q_, table_;
  std::vector<std::int32_t> lens_, start_{0};
};

// Weights of the sum over keys are rounded to dtype before the tensor cores multiply them, and the result is.
double tolerance(DType dtype, std::int64_t dim, std::int64_t num_keys) {
  const double weights = dtype == DType::f32 ? 0.0 : test::unit_roundoff(dtype);
  return weights + 4.0 * test::tolerance(DType::f32, dim) + test::tolerance(dtype, num_keys);
}

std::vector<DType> dtypes_of(Device device) {
  if (device.type == DeviceType::cpu) return {DType::f32};
  return {DType::f32, DType::f16, DType::bf16};
}

void check(const Shape& shape, const std::vector<Request>& requests, Limits limits) {
  std::vector<Device> devices = test::devices();
  if (shape.dtype != DType::f32) devices.erase(devices.begin());  // the CPU
  if (devices.empty()) return;
  const Batch batch(shape, requests);
  const auto expected = batch.expected();
  std::int64_t num_keys = 0;
  for (const Request& r : requests) num_keys = std::max(num_keys, r.seq_len);
  for (const Device device : devices) {
    CAPTURE(static_cast<int>(device.type));
    CAPTURE(name(shape.dtype));
    CAPTURE(name(shape.cache));
    CAPTURE(shape.num_kv_heads);
    CAPTURE(shape.group);
    CAPTURE(shape.dim);
    CAPTURE(shape.block_size);
    CAPTURE(limits.num_decodes);
    CHECK(test::max_error(test::values(batch.run(device, limits)), expected) <=
          tolerance(shape.dtype, shape.dim, num_keys));
  }
}

TEST_CASE("decodes agree with the reference for every dtype and head size") {
  const std::vector<Request> requests{{1, 1, 1},   {15, 1, 2},  {16, 1, 3},  {0, 0, 4},   {17, 1, 5},
                                      {255, 1, 6}, {256, 1, 7}, {257, 1, 8}, {700, 1, 9}, {65, 1, 10}};
  for (const DType dtype : test::kFloatTypes)
    for (const std::int64_t dim : {64, 128, 256, 96})
      check({2, 8, dim, 16, dtype, dtype}, requests, {.num_decodes = 10});
}

TEST_CASE("decodes agree with the reference for every group and block size") {
  const std::vector<Request> requests{{300, 1, 1}, {40, 1, 2}, {129, 1, 3}};
  for (const std::int64_t group : {1, 2, 3, 4, 6, 7, 9, 12, 16, 20})
    for (const std::int64_t block_size : {16, 48, 528})
      check({1, group, 128, block_size, DType::bf16, DType::bf16, group % 2 == 0}, requests,
            {.num_decodes = 3, .max_seq_len = 300});
  check({2, 4, 256, 24, DType::bf16, DType::bf16}, requests, {.num_decodes = 3});
  check({2, 4, 64, 16, DType::bf16, DType::f16}, requests, {.num_decodes = 3});
}

TEST_CASE("decodes with several query tokens see what their positions see") {
  const std::vector<Request> requests{{4, 4, 1}, {260, 4, 2}, {258, 2, 3}, {80, 1, 4}, {0, 0, 5}, {513, 3, 6}};
  for (const std::int64_t group : {1, 2, 4, 8})
    for (const std::int64_t dim : {64, 256})
      check({2, group, dim, 48, DType::bf16, DType::bf16}, requests, {.num_decodes = 6, .max_decode_query_len = 4});
}

TEST_CASE("a decode over more keys than kMaxSplits splits of the least size agrees with the reference") {
  check({1, 8, 64, 528, DType::bf16, DType::bf16}, {{20000, 1, 1}, {16385, 1, 2}, {300, 1, 3}}, {.num_decodes = 3});
}

TEST_CASE("prefills agree with the reference for every dtype and head size") {
  const std::vector<Request> requests{{300, 90, 1}, {129, 129, 2}, {1, 1, 3}, {40, 0, 4}, {81, 30, 5}, {80, 80, 6}};
  for (const DType dtype : test::kFloatTypes)
    for (const std::int64_t dim : {64, 128, 256, 32}) check({2, 4, dim, 16, dtype, dtype}, requests, {});
}

TEST_CASE("prefills agree with the reference for every group and block size") {
  const std::vector<Request> requests{{140, 140, 1}, {270, 33, 2}};
  for (const std::int64_t group : {1, 2, 3, 4, 6, 7, 16})
    for (const std::int64_t block_size : {16, 48, 528})
      check({1, group, group % 2 == 0 ? 256 : 128, block_size, DType::bf16, DType::bf16, group % 2 == 0}, requests,
            {.max_query_len = 140, .max_seq_len = 270});
}

TEST_CASE("decodes and prefills of one batch agree with the reference") {
  const std::vector<Request> requests{{300, 1, 1}, {513, 1, 2}, {0, 0, 3}, {200, 90, 4}, {64, 64, 5}};
  for (const DType dtype : test::kFloatTypes)
    check({2, 4, 128, 16, dtype, dtype}, requests, {.num_decodes = 3, .max_query_len = 90, .max_seq_len = 4000});
}

TEST_CASE("small batches of every attention kernel [sanitizer]") {
  const std::vector<Request> requests{{270, 1, 1}, {20, 1, 2}, {90, 50, 3}};
  for (const std::int64_t dim : {64, 128, 256})
    check({1, 4, dim, 16, DType::bf16, DType::bf16}, requests, {.num_decodes = 2});
  check({1, 2, 48, 16, DType::f32, DType::f32}, {{20, 1, 1}, {30, 9, 2}}, {.num_decodes = 1});
}

TEST_CASE("a request gives the same bits whatever else is in the batch") {
  for (const Device device : test::devices())
    for (const DType dtype : dtypes_of(device))
      for (const std::int64_t dim : {64, 256}) {
        CAPTURE(static_cast<int>(device.type));
        CAPTURE(name(dtype));
        const Shape shape{2, 4, dim, 16, dtype, dtype};
        const Request decode{900, 1, 7}, prefill{333, 150, 8};
        const auto row_bytes = static_cast<std::size_t>(shape.num_heads() * dim) * size_of(dtype);
        const auto decode_alone = test::bits(Batch(shape, {decode}).run(device, {.num_decodes = 1}));
        const auto prefill_alone = test::bits(Batch(shape, {prefill}).run(device, {}));
        std::vector<Request> others;
        for (std::uint32_t i = 0; i < 20; ++i) others.push_back({1 + 47 * i, 1, 20 + i});
        others.insert(others.begin() + 11, decode);
        others.push_back({100, 70, 50});
        others.push_back(prefill);
        const auto together = test::bits(
            Batch(shape, others)
                .run(device,
                     {.num_decodes = 21, .max_decode_query_len = 2, .max_query_len = 150, .max_seq_len = 100000}));
        CHECK(std::equal(decode_alone.begin(), decode_alone.end(),
                         together.begin() + static_cast<std::ptrdiff_t>(11 * row_bytes)));
        CHECK(std::equal(prefill_alone.begin(), prefill_alone.end(),
                         together.begin() + static_cast<std::ptrdiff_t>((21 + 70) * row_bytes)));
      }
}

TEST_CASE("a prompt gives the same bits in chunks of the prefill kernel") {
  for (const Device device : test::devices())
    for (const DType dtype : dtypes_of(device)) {
      CAPTURE(static_cast<int>(device.type));
      CAPTURE(name(dtype));
      const Shape shape{1, 8, 256, 48, dtype, dtype};
      const auto whole = test::bits(Batch(shape, {{400, 400, 3}}).run(device, {}));
      const auto row_bytes = static_cast<std::size_t>(shape.num_heads() * shape.dim) * size_of(dtype);
      std::int64_t end = 0;
      for (const std::int64_t chunk : {17, 1, 62, 100, 220}) {
        end += chunk;
        const auto part = test::bits(Batch(shape, {{end, chunk, 3}}).run(device, {}));
        CHECK(
            std::equal(part.begin(), part.end(),
                       whole.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(end - chunk) * row_bytes)));
      }
    }
}

TEST_CASE("fewer keys than query tokens, which nobody may ask for, do not keep the prefill kernel from ending") {
  for (const Device device : test::devices()) {
    if (device.type == DeviceType::cpu) continue;
    for (const std::int64_t dim : {64, 256}) {
      CAPTURE(dim);
      const Shape shape{2, 8, dim, 16, DType::bf16, DType::bf16};
      const auto alone = test::bits(Batch(shape, {{100, 100, 1}, {50, 20, 4}}).run(device, {}));
      const auto together =
          test::bits(Batch(shape, {{100, 100, 1}, {3, 300, 2}, {0, 40, 3}, {50, 20, 4}}).run(device, {}));
      const std::size_t row_bytes = static_cast<std::size_t>(shape.num_heads() * dim) * size_of(shape.dtype);
      REQUIRE(together.size() == 460 * row_bytes);
      CHECK(std::equal(alone.begin(), alone.begin() + static_cast<std::ptrdiff_t>(100 * row_bytes), together.begin()));
      CHECK(std::equal(alone.begin() + static_cast<std::ptrdiff_t>(100 * row_bytes), alone.end(),
                       together.begin() + static_cast<std::ptrdiff_t>(440 * row_bytes)));
    }
  }
}

TEST_CASE("paged_attention names a workspace that is too small") {
  for (const Device device : test::devices()) {
    if (device.type == DeviceType::cpu) continue;
    const Tensor q(DType::bf16, {1, 2, 64}, device), out(DType::bf16, {1, 2, 64}, device);
    const Tensor cache(DType::bf16, {2, 16, 1, 64}, device), ints(DType::i32, {2}, device);
    const Tensor table(DType::i32, {1, 2}, device), workspace(DType::u8, {16}, device);
    TensorView lens = ints.view();
    lens.shape[0] = 1;
    CHECK_THROWS_WITH_AS(ops::paged_attention(test::context_of(device), {.q = q.view(),
                                                                         .k_cache = cache.view(),
                                                                         .v_cache = cache.view(),
                                                                         .block_table = table.view(),
                                                                         .seq_lens = lens,
                                                                         .query_start_loc = ints.view(),
                                                                         .scale = 1.0F,
                                                                         .out = out.view(),
                                                                         .num_decodes = 1,
                                                                         .workspace = workspace.view()}),
                         "paged_attention: workspace has 16 bytes, 528 are needed for 1 decodes", InvalidArgument);
  }
}

}  // namespace
}  // namespace deltaic
