#include "cuda/gemm/cublaslt.h"

#include <dlfcn.h>

#include <filesystem>
#include <string>
#include <vector>

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

// The usual search (LD_LIBRARY_PATH, ldconfig, what is loaded already), the wheels beside the Python package, and the
// toolkit.
std::vector<std::string> candidates() {
  std::vector<std::string> paths;
  const std::filesystem::path wheels = own_folder().parent_path() / "nvidia";
  for (const char* name : kNames) {
    paths.emplace_back(name);
    for (const char* folder : {"cu13/lib", "cublas/lib"}) paths.push_back((wheels / folder / name).string());
    for (const char* folder : {"/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"})
      paths.push_back(std::string(folder) + "/" + name);
  }
  return paths;
}

template <class Function>
void load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw Unsupported(detail::concat("cuBLASLt has no ", name, ": version 12 or 13 is needed"));
}

Library load_library() {
  void* handle = nullptr;
  std::string tried;
  for (const std::string& path : candidates()) {
    handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) break;
    tried += (tried.empty() ? "" : ", ") + path;
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
  return lib;
}

}  // namespace

const Library& library() {
  static const Library loaded = load_library();  // never unloaded: handles may outlive any owner
  return loaded;
}

}  // namespace deltaic::cuda::cublaslt
