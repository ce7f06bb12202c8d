#!/usr/bin/env bash
# clang-tidy with the checks of .clang-tidy over the C++ of cpp/src, python/bindings and cuda; changes nothing. Kernels
# (*.cu) are left out: their compile commands are nvcc's, which clang does not take.
#   scripts/tidy.sh [--analyze] [FILE...]     without files: all; --analyze: the analyzer's checks too, twice the time
set -euo pipefail
cd "$(dirname "$0")/.."

options=(--quiet)
if [ "${1:-}" = --analyze ]; then
  options+=('--checks=clang-analyzer-*,-clang-analyzer-optin.performance.Padding')
  shift
fi
build=build/tidy # configured for its compile_commands.json, never built; what is a warning to GCC alone is no error here
cmake --preset ci -B "$build" -DCMAKE_COMPILE_WARNING_AS_ERROR=OFF -DDELTAIC_TESTS=OFF -DDELTAIC_PYTHON=ON \
  -DPython_EXECUTABLE="$(command -v python)" >/dev/null
sources=("$@")
if [ $# = 0 ]; then
  # no_cuda.cpp is what a build with CUDA does not compile.
  mapfile -t sources < <(git ls-files 'cpp/src/*.cpp' 'python/bindings/*.cpp' 'cuda/*.cpp' | grep -v '/no_cuda\.cpp$')
fi
printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -n 1 clang-tidy "${options[@]}" -p "$build" 2> >(grep -v ' generated\.$' >&2)
echo "clang-tidy: ${#sources[@]} files are clean"
