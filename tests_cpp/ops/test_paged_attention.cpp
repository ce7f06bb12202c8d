#include <doctest/doctest.h>

#include <deltaic/error.h>

#include <numeric>

#include "cpp/src/ops/paged_attention.h"
#include "tests_cpp/support/reference.h"
#include "tests_cpp/support/tensors.h"
#include "tests_cpp/support/tolerance.h"

namespace deltaic {
namespace {

// Requests whose keys and values lie in shuffled blocks of caches that hold NaN elsewhere.
struct Paged {
  std::int64_t num_kv_heads, group, dim, block_size;
  std::vector<std::int32_t> seq_lens;
  Tensor k_cache, v_cache, block_table;
  std::vector<Tensor> q;  // a request: [seq_len, num_heads, dim], all its queries

  Paged(std::int64_t kv_heads, std::int64_t g, std::int64_t d, std::int64_t size, std::vector<std::int32_t> lens,
        DType dtype)
      : num_kv_heads(kv_heads), group(g), dim(d), block_size(size), seq_lens(std::move(lens)) {
    std::int64_t num_blocks = 3, columns = 1;
    for (const std::int32_t len : seq_lens) {
      num_blocks += (len + size - 1) / size;
      columns = std::max(columns, (len + size - 1) / size + 2);
    }
    k_cache = test::filled({num_blocks, size, kv_heads, d}, dtype, NAN);
    v_cache = test::filled({num_blocks, size, kv_heads, d}, dtype, NAN);
    const auto num_reqs = static_cast<std::int64_t>(seq_lens.size());
    block_table = Tensor(DType::i32, {num_reqs, columns});
    std::fill_n(block_table.as<std::int32_t>(), num_reqs * columns, -12345);
    std::vector<std::int32_t> free(static_cast<std::size_t>(num_blocks));
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), std::mt19937(3));
    for (std::int64_t i = 0; i < num_reqs; ++i) {
      for (std::int64_t b = 0; b * size < seq_lens[i]; ++b) {
        block_table.as<std::int32_t>()[i * columns + b] = free.back();
        free.pop_back();
      }
      const auto seed = static_cast<unsigned>(10 + 3 * i);
      q.push_back(test::random({seq_lens[i], kv_heads * g, d}, DType::f32, seed, 2.0));
      write(i, k_cache, test::random({seq_lens[i], kv_heads, d}, DType::f32, seed + 1, 2.0));
      write(i, v_cache, test::random({seq_lens[i], kv_heads, d}, DType::f32, seed + 2));
    }
  }

  std::int64_t offset(std::int64_t request, std::int64_t key, std::int64_t head) const {
    const std::int32_t block = block_table.as<std::int32_t>()[request * block_table.view().shape[1] + key / block_size];
    return ((block * block_size + key % block_size) * num_kv_heads + head) * dim;
  }
  void write(std::int64_t request, const Tensor& cache, const Tensor& rows) const {
    for (std::int64_t key = 0; key < seq_lens[request]; ++key)
      for (std::int64_t i = 0; i < num_kv_heads * dim; ++i)
        test::set_element(cache.view(), offset(request, key, 0) + i, rows.as<float>()[key * num_kv_heads * dim + i]);
  }
  reference::Values read(const Tensor& cache, std::int64_t request, std::int64_t head, std::int64_t num_keys) const {
    reference::Values rows;
    for (std::int64_t key = 0; key < num_keys; ++key)
      for (std::int64_t c = 0; c < dim; ++c)
        rows.push_back(test::element(cache.view(), offset(request, key, head) + c));
    return rows;
  }

  // The last query_lens[i] queries of each request, all seq_lens[i] - hidden[i] keys; [sum of query_lens, heads, dim].
  Tensor run(const std::vector<std::int32_t>& query_lens, const std::vector<std::int32_t>& hidden) const {
    std::vector<std::int32_t> start{0}, lens;
    for (std::size_t i = 0; i < seq_lens.size(); ++i) {
      start.push_back(start.back() + query_lens[i]);
      lens.push_back(seq_lens[i] - hidden[i]);
    }
    const std::int64_t num_heads = num_kv_heads * group, row = num_heads * dim;
    const std::int64_t stride = dim + 3;  // heads with gaps, as in a fused projection
    Tensor queries = test::filled({start.back(), num_heads, stride}, DType::f32, NAN);
    for (std::size_t i = 0; i < seq_lens.size(); ++i) {
      const std::int64_t first = std::max(0, lens[i] - query_lens[i]);  // more queries than tokens: refused below
      for (std::int64_t j = 0; j < query_lens[i] * num_heads; ++j)
        std::copy_n(q[i].as<float>() + first * row + j * dim, dim,
                    queries.as<float>() + (start[i] * num_heads + j) * stride);
    }
    TensorView query_view = queries.view();
    query_view.shape[2] = dim;
    Tensor out = test::filled({start.back(), num_heads, dim}, DType::f32, NAN);
    const Tensor seq = test::ints(lens), loc = test::ints(start);
    ops::paged_attention(test::cpu_context(), {.q = query_view,
                                               .k_cache = k_cache.view(),
                                               .v_cache = v_cache.view(),
                                               .block_table = block_table.view(),
                                               .seq_lens = seq.view(),
                                               .query_start_loc = loc.view(),
                                               .scale = 1.0F / std::sqrt(static_cast<float>(dim)),
                                               .out = out.view()});
    return out;
  }

  reference::Values expected(const std::vector<std::int32_t>& query_lens) const {
    reference::Values all;
    const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
    for (std::size_t i = 0; i < seq_lens.size(); ++i) {
      const auto queries = test::values(q[i]);
      for (std::int64_t t = seq_lens[i] - query_lens[i]; t < seq_lens[i]; ++t)
        for (std::int64_t h = 0; h < num_kv_heads * group; ++h) {
          const auto request = static_cast<std::int64_t>(i);
          const auto out = reference::attention(queries.data() + (t * num_kv_heads * group + h) * dim,
                                                read(k_cache, request, h / group, t + 1),
                                                read(v_cache, request, h / group, t + 1), dim, scale);
          all.insert(all.end(), out.begin(), out.end());
        }
    }
    return all;
  }
};

// exp multiplies the error of a score, a sum of dim products with terms up to 4.
double tolerance(std::int64_t dim, std::int64_t num_keys) {
  return 4.0 * test::tolerance(DType::f32, dim) + test::tolerance(DType::f32, num_keys);
}

TEST_CASE("paged_attention agrees with the reference for every group size") {
  for (const std::int64_t group : {1, 2, 3, 4, 7, 8, 16}) {
    CAPTURE(group);
    const Paged paged(2, group, 24, 16, {1, 40, 33}, DType::f32);
    const std::vector<std::int32_t> query_lens{1, 1, 20};
    CHECK(test::max_error(test::values(paged.run(query_lens, {0, 0, 0})), paged.expected(query_lens)) <=
          tolerance(24, 40));
  }
}

TEST_CASE("paged_attention agrees with the reference for every dtype, head size and block size") {
  for (const DType dtype : test::kFloatTypes)
    for (const std::int64_t dim : {1, 5, 16, 31, 64, 100, 256})
      for (const std::int64_t block_size : {1, 16, 48, 528}) {
        CAPTURE(name(dtype));
        CAPTURE(dim);
        CAPTURE(block_size);
        const Paged paged(1, 2, dim, block_size, {65, 2}, dtype);
        const std::vector<std::int32_t> query_lens{9, 2};
        CHECK(test::max_error(test::values(paged.run(query_lens, {0, 0})), paged.expected(query_lens)) <=
              tolerance(dim, 65));
      }
}

TEST_CASE("paged_attention agrees with the reference over many partitions") {
  const Paged paged(2, 4, 32, 16, {1030, 256, 257}, DType::bf16);
  const std::vector<std::int32_t> decode{1, 1, 1}, mixed{30, 1, 257};
  CHECK(test::max_error(test::values(paged.run(decode, {0, 0, 0})), paged.expected(decode)) <= tolerance(32, 1030));
  CHECK(test::max_error(test::values(paged.run(mixed, {0, 0, 0})), paged.expected(mixed)) <= tolerance(32, 1030));
}

TEST_CASE("paged_attention skips a request without tokens") {
  const Paged paged(1, 1, 8, 16, {20, 5, 9}, DType::f32);
  const std::vector<std::int32_t> query_lens{2, 0, 1};
  CHECK(test::max_error(test::values(paged.run(query_lens, {0, 0, 0})), paged.expected(query_lens)) <=
        tolerance(8, 20));
}

TEST_CASE("a token of paged_attention has the same bits alone, batched and chunked") {
  for (const DType dtype : test::kFloatTypes)
    for (const std::int64_t group : {1, 4}) {
      const std::int32_t len = 773;
      const Paged paged(2, group, 40, 16, {len, 300}, dtype);
      const auto whole = test::bits(paged.run({len, 0}, {0, 0}));
      const auto row_bytes = static_cast<std::size_t>(2 * group * 40 * 4);
      for (const std::vector<std::int32_t>& chunks :
           {std::vector<std::int32_t>{16, 2, 8, 13, 734}, {270, 88, 212, 203}, {63, 1, 64, 65, 580}, {772, 1}}) {
        CAPTURE(name(dtype));
        CAPTURE(chunks[0]);
        std::int32_t end = 0;
        for (const std::int32_t chunk : chunks) {
          end += chunk;
          // Another request is in the batch: it must not matter.
          const auto part = test::bits(paged.run({chunk, end % 2 == 0 ? 1 : 17}, {len - end, 0}));
          CHECK(std::equal(part.begin(), part.begin() + static_cast<std::ptrdiff_t>(chunk * row_bytes),
                           whole.begin() + static_cast<std::ptrdiff_t>((end - chunk) * row_bytes)));
        }
        CHECK(end == len);
      }
    }
}

TEST_CASE("a value that is not finite reaches only the queries that see its key") {
  Paged paged(1, 2, 16, 16, {40}, DType::f32);
  const auto before = test::bits(paged.run({20}, {0}));
  for (std::int64_t c = 0; c < 16; ++c) test::set_element(paged.v_cache.view(), paged.offset(0, 30, 0) + c, INFINITY);
  for (std::int64_t c = 0; c < 16; ++c) test::set_element(paged.k_cache.view(), paged.offset(0, 31, 0) + c, NAN);
  const Tensor out = paged.run({20}, {0});
  const auto after = test::bits(out);
  const std::size_t clean = 10 * 2 * 16 * 4;  // queries 20 to 29
  CHECK(std::equal(after.begin(), after.begin() + clean, before.begin()));
  CHECK_FALSE(std::isfinite(out.as<float>()[10 * 2 * 16]));
}

TEST_CASE("paged_attention refuses block ids and lengths that do not fit") {
  Paged paged(1, 1, 8, 16, {20}, DType::f32);
  paged.block_table.as<std::int32_t>()[1] = 99;
  CHECK_THROWS_WITH_AS(paged.run({1}, {0}), "paged_attention: request 0 has block 99, the cache has 5",
                       InvalidArgument);
  CHECK_THROWS_AS(paged.run({5}, {16}), InvalidArgument);
}

}  // namespace
}  // namespace deltaic
