#include "cuda/gemm/cublaslt.h"

#include <dlfcn.h>

#include <filesystem>
#include <system_error>

#include "cpp/src/check.h"

namespace deltaic::cuda::cublaslt {
namespace {

constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

// Where this library itself lies: <site-packages>/deltaic/ when it came as a wheel.
std::filesystem::path own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&library), &info) == 0 || info.dli_fname == nullptr) return {};
  return std::filesystem::path(info.dli_fname).parent_path();
}

template <class Function>
void load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw Unsupported(detail::concat("cuBLASLt has no ", name, ": version 12 or 13 is needed"));
}

}  // namespace

std::vector<std::string> candidates(const std::filesystem::path& folder) {
  std::vector<std::string> paths;
  const std::filesystem::path wheels = folder.parent_path() / "nvidia";
  for (const char* name : kNames) {
    paths.emplace_back(name);
    for (const char* wheel : {"cu13/lib", "cublas/lib"}) paths.push_back((wheels / wheel / name).string());
    for (const char* toolkit : {"/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"})
      paths.push_back((std::filesystem::path(toolkit) / name).string());
  }
  return paths;
}

Library open_library(std::span<const std::string> paths) {
  void* handle = nullptr;
  std::string tried;
  for (const std::string& path : paths) {
    handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) break;
    const char* reason = dlerror();
    tried += (tried.empty() ? "" : ", ") + path;
    std::error_code ignored;  // a file that is there and does not load is worth a reason
    if (reason != nullptr && std::filesystem::exists(path, ignored)) tried += detail::concat(" (", reason, ")");
  }
  if (handle == nullptr)
    throw Unsupported(detail::concat("cuBLASLt was not found (tried ", tried,
                                     "): install the package nvidia-cublas or the CUDA toolkit, or add the folder of "
                                     "libcublasLt to LD_LIBRARY_PATH"));
  Library lib{};
  load(handle, "cublasLtCreate", lib.create);
  load(handle, "cublasLtDestroy", lib.destroy);
  load(handle, "cublasLtMatmul", lib.matmul);
  load(handle, "cublasLtMatmulDescCreate", lib.descriptor_create);
  load(handle, "cublasLtMatmulDescDestroy", lib.descriptor_destroy);
  load(handle, "cublasLtMatmulDescSetAttribute", lib.descriptor_set);
  load(handle, "cublasLtMatrixLayoutCreate", lib.layout_create);
  load(handle, "cublasLtMatrixLayoutDestroy", lib.layout_destroy);
  load(handle, "cublasLtMatmulPreferenceCreate", lib.preference_create);
  load(handle, "cublasLtMatmulPreferenceDestroy", lib.preference_destroy);
  load(handle, "cublasLtMatmulPreferenceSetAttribute", lib.preference_set);
  load(handle, "cublasLtMatmulAlgoGetHeuristic", lib.heuristic);
  load(handle, "cublasLtMatmulAlgoConfigGetAttribute", lib.algorithm_get);
  return lib;
}

const Library& library() {
  static const Library loaded =
      open_library(candidates(own_folder()));  // never unloaded: handles may outlive any owner
  return loaded;
}

}  // namespace deltaic::cuda::cublaslt
