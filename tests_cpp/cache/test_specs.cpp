#include <deltaic/cache.h>
#include <deltaic/error.h>
#include <doctest/doctest.h>

using namespace deltaic;

TEST_CASE("a full-attention page has block_size x heads x (head_size + head_size_v) elements") {
  FullAttentionSpec spec{
      .block_size = 16, .num_kv_heads = 2, .head_size = 64, .dtype = DType::bf16, .page_size_padded = {}};
  CHECK(spec.page_size_bytes() == 16 * 2 * (64 + 64) * 2);
  spec.head_size_v = 32;
  CHECK(spec.page_size_bytes() == 16 * 2 * (64 + 32) * 2);
  spec.dtype = DType::f32;
  CHECK(spec.page_size_bytes() == 16 * 2 * (64 + 32) * 4);
  spec.block_size = 1 << 20, spec.num_kv_heads = 1 << 10;  // past 32 bits
  CHECK(spec.page_size_bytes() == (std::int64_t{1} << 30) * (64 + 32) * 4);
}

TEST_CASE("a padded page counts as padded; padding below the real page is refused with both numbers") {
  FullAttentionSpec spec{
      .block_size = 16, .num_kv_heads = 1, .head_size = 8, .dtype = DType::f32, .page_size_padded = 4096};
  CHECK(spec.page_size_bytes() == 4096);
  spec.page_size_padded = 1024;
  CHECK(spec.page_size_bytes() == 1024);
  spec.page_size_padded = 1023;
  CHECK_THROWS_WITH_AS(spec.page_size_bytes(),
                       "FullAttentionSpec: page_size_padded is 1023 bytes, the page itself has 1024", InvalidArgument);
}

TEST_CASE("a mamba page is the sum of its states, each in its own dtype") {
  MambaSpec spec{.shapes = {{96, 3}, {4, 16, 8}}, .dtypes = {DType::bf16, DType::f16}, .page_size_padded = {}};
  CHECK(spec.page_size_bytes() == 96 * 3 * 2 + 4 * 16 * 8 * 2);
  spec.dtypes = {DType::bf16, DType::f32};
  CHECK(spec.page_size_bytes() == 96 * 3 * 2 + 4 * 16 * 8 * 4);
  spec.page_size_padded = 8192;
  CHECK(spec.page_size_bytes() == 8192);
  spec.page_size_padded = 100;
  CHECK_THROWS_WITH_AS(spec.page_size_bytes(), "MambaSpec: page_size_padded is 100 bytes, the page itself has 2624",
                       InvalidArgument);
}

TEST_CASE("a page of a uniform group has the pages of all its layers") {
  const FullAttentionSpec small{.block_size = 16, .num_kv_heads = 1, .head_size = 8, .page_size_padded = {}};
  FullAttentionSpec big = small;
  big.num_kv_heads = 3;
  const UniformTypeKVCacheSpecs group{.block_size = 16,
                                      .layer_specs = {{"model.layers.0", small}, {"model.layers.1", big}}};
  CHECK(group.page_size_bytes() == small.page_size_bytes() + big.page_size_bytes());
}

TEST_CASE("specs that cannot be are refused by name") {
  CHECK_THROWS_WITH_AS(FullAttentionSpec{}.page_size_bytes(), "FullAttentionSpec: num_kv_heads is 0, want at least 1",
                       InvalidArgument);
  FullAttentionSpec spec{.block_size = 0, .num_kv_heads = 1, .head_size = 8, .page_size_padded = {}};
  CHECK_THROWS_WITH_AS(spec.page_size_bytes(), "FullAttentionSpec: block_size is 0, want at least 1", InvalidArgument);
  spec.block_size = 16, spec.head_size = 0;
  CHECK_THROWS_AS(spec.page_size_bytes(), InvalidArgument);
  MambaSpec mamba{.shapes = {{4, 4}}, .dtypes = {}, .page_size_padded = {}};
  CHECK_THROWS_WITH_AS(mamba.page_size_bytes(), "MambaSpec: 1 shapes, 0 dtypes", InvalidArgument);
  mamba.dtypes = {DType::f32}, mamba.shapes = {{4, -4}};
  CHECK_THROWS_WITH_AS(mamba.page_size_bytes(), "MambaSpec: state 0 has a dimension of -4", InvalidArgument);
}
