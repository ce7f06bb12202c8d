#include "cuda/gemm/cublaslt.h"

#include <algorithm>
#include <fstream>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "tests_cpp/support/temp_dir.h"

using namespace deltaic;
using namespace deltaic::cuda;

namespace {

std::string refusal(const std::vector<std::string>& paths) {
  try {
    (void)cublaslt::open_library(paths);
  } catch (const Unsupported& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("cuBLASLt is looked for by name, then in wheels beside the package, then in the toolkit, 13 before 12") {
  const std::vector<std::string> paths = cublaslt::candidates("/site-packages/deltaic");
  const std::vector<std::string> expected{
      "libcublasLt.so.13",
      "/site-packages/nvidia/cu13/lib/libcublasLt.so.13",
      "/site-packages/nvidia/cublas/lib/libcublasLt.so.13",
      "/usr/local/cuda/lib64/libcublasLt.so.13",
      "/usr/local/cuda/targets/x86_64-linux/lib/libcublasLt.so.13",
  };
  REQUIRE(paths.size() == 2 * expected.size());
  CHECK(std::equal(expected.begin(), expected.end(), paths.begin()));
  CHECK(std::all_of(paths.begin() + 5, paths.end(), [](const std::string& path) { return path.ends_with(".so.12"); }));
}

TEST_CASE("the first library that loads is taken") {
  const cublaslt::Library library =
      cublaslt::open_library(std::vector<std::string>{"/nowhere/libcublasLt.so.13", DELTAIC_FAKE_CUBLASLT});
  cublaslt::Handle handle = nullptr;
  CHECK(library.create(&handle) == 13);
}

TEST_CASE("a refusal says what was tried, why a file does not load, and the remedy") {
  const test::TempDir folder;
  const std::string broken = (folder.path() / "libcublasLt.so.13").string();
  std::ofstream(broken) << "no library";
  const std::string message = refusal({"/nowhere/libcublasLt.so.12", broken});
  CAPTURE(message);
  CHECK(contains(message, "tried /nowhere/libcublasLt.so.12, " + broken + " ("));
  CHECK(contains(message, "nvidia-cublas"));
  CHECK(contains(message, "LD_LIBRARY_PATH"));
  CHECK(contains(refusal({DELTAIC_OLD_CUBLASLT}), "cublasLtMatmulAlgoGetHeuristic"));
}
