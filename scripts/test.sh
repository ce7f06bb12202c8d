#!/usr/bin/env bash
# The whole test: clean build with the CUDA backend (compiling it needs no GPU), C++ tests, Python tests, lint, clang-tidy.
source "$(dirname "$0")/setup.sh"
need_nvcc

section() { echo; echo "== $1 ($(date +%T))"; }

section "install the wheel and what the tests need"
pip_install --constraint .ci/constraints.txt \
  --config-settings=cmake.define.DELTAIC_CUDA=ON --config-settings=cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON \
  '.[test,dev]' 'cmake>=3.26' ninja

section "clean build"
rm -rf build/ci
cmake --preset ci
cmake --build --preset ci

section "C++ tests"
ctest --preset ci

section "Python tests"
python -m pytest tests_py

section "embedding"
scripts/check_embedding.sh build/ci

section "documentation"
NO_MKDOCS_2_WARNING=1 mkdocs build --strict

section "lint"
scripts/stubs.sh --check
scripts/lint.sh

section "clang-tidy"
scripts/tidy.sh
