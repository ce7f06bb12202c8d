#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

// The part of cuBLASLt (12 and 13) that is used, declared here: the library is loaded at run time, so that neither its
// headers nor the library itself are needed to build or to start.
namespace deltaic::cuda::cublaslt {

using Handle = void*;
using Descriptor = void*;  // of a product, a layout or a preference: opaque

enum DataType : int { kF32 = 0, kF16 = 2, kBf16 = 14 };
enum ComputeType : int { kComputeF32 = 68 };
enum DescriptorAttribute : int { kTransposeA = 3, kTransposeB = 4 };
enum PreferenceAttribute : int {
  kMaxWorkspaceBytes = 1,
  kReductionSchemes = 3,
  kMinAlignmentA = 5,
  kMinAlignmentD = 8
};  // 5 to 8: A to D
enum ReductionScheme : std::uint32_t {
  kReduceInComputeType = 2
};  // of a product whose sum is split; no split is allowed, too
inline constexpr int kTransposed = 1;
enum AlgorithmAttribute : int { kTile = 1 };
enum Tile : int { kTile256x128 = 24, kTile168x128 = 197, kTile176x128 = 201 };  // rows of the weight x tokens

struct Algorithm {
  std::uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  std::size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

// Entry points; all return 0 for success.
struct Library {
  int (*create)(Handle*);
  int (*destroy)(Handle);
  int (*matmul)(Handle, Descriptor, const void* alpha, const void* a, Descriptor a_layout, const void* b,
                Descriptor b_layout, const void* beta, const void* c, Descriptor c_layout, void* d, Descriptor d_layout,
                const Algorithm*, void* workspace, std::size_t workspace_bytes, void* stream);
  int (*descriptor_create)(Descriptor*, int compute_type, int scale_type);
  int (*descriptor_destroy)(Descriptor);
  int (*descriptor_set)(Descriptor, int attribute, const void* value, std::size_t num_bytes);
  int (*layout_create)(Descriptor*, int data_type, std::uint64_t rows, std::uint64_t columns, std::int64_t stride);
  int (*layout_destroy)(Descriptor);
  int (*preference_create)(Descriptor*);
  int (*preference_destroy)(Descriptor);
  int (*preference_set)(Descriptor, int attribute, const void* value, std::size_t num_bytes);
  int (*heuristic)(Handle, Descriptor, Descriptor a, Descriptor b, Descriptor c, Descriptor d, Descriptor preference,
                   int num_requested, Heuristic*, int* num_found);
  int (*algorithm_get)(const Algorithm*, int attribute, void* value, std::size_t num_bytes, std::size_t* num_written);
};

// Where the library is looked for, in this order, version 13 before 12: by name alone (what the process has loaded,
// LD_LIBRARY_PATH, ldconfig), in the wheels nvidia-cublas (13) and nvidia-cublas-cu12 beside the Python package, in
// /usr/local/cuda. `folder`: of the file with this code, <site-packages>/deltaic in a wheel.
std::vector<std::string> candidates(const std::filesystem::path& folder);

// The first of `paths` that loads. Throws Unsupported with what was tried and the remedy where none does, and where the
// one that does lacks an entry point.
Library open_library(std::span<const std::string> paths);

// The library of this process, looked for once.
const Library& library();

}  // namespace deltaic::cuda::cublaslt
