#!/usr/bin/env bash
# Prepares a machine to build deltaic: system packages (Debian, Ubuntu) and a virtual environment in .venv; need_nvcc adds
# CUDA 13's compiler from PyPI where there is none. Sourced by install.sh, test.sh and full_check.sh.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

missing_packages() {
  command -v g++ >/dev/null || echo g++
  command -v git >/dev/null || echo git
  command -v ccache >/dev/null || echo ccache
  command -v curl >/dev/null || echo curl             # the tests of the documentation
  command -v pkg-config >/dev/null || echo pkg-config # the test of embedding
  python3 -c 'import ensurepip' 2>/dev/null || echo python3-venv
  python3 -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || echo python3-dev
  [ -e /usr/include/nlohmann/json.hpp ] || [ -e /usr/local/include/nlohmann/json.hpp ] || echo nlohmann-json3-dev
  [ -e /usr/include/doctest/doctest.h ] || [ -e /usr/local/include/doctest/doctest.h ] || echo doctest-dev
}

packages=$(missing_packages)
sudo=$([ "$(id -u)" = 0 ] || echo sudo)
if [ -n "$packages" ] && command -v apt-get >/dev/null; then
  echo "== installing system packages:" $packages
  $sudo apt-get update -qq
  # shellcheck disable=SC2086  # a list of words
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $packages >/dev/null
elif [ -n "$packages" ]; then
  echo "warning: not found, and this is no Debian or Ubuntu:" $packages "(see README.md, Build)" >&2
fi

[ -x .venv/bin/python ] || python3 -m venv .venv
export PATH="$root/.venv/bin:$PATH"
pip_install() { python -m pip install --quiet --disable-pip-version-check "$@"; }
pip_install --upgrade pip

# ccache makes the second build of the same file (wheel, tests) free.
if command -v ccache >/dev/null; then
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
  export CCACHE_BASEDIR="$root" CCACHE_NOHASHDIR=1
fi

# Puts an nvcc on PATH: the one that is there, else CUDA 13's from PyPI, in the virtual environment.
need_nvcc() {
  if command -v nvcc >/dev/null; then return; fi
  if [ -x /usr/local/cuda/bin/nvcc ]; then
    export PATH="/usr/local/cuda/bin:$PATH"
    return
  fi
  pip_install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-runtime==13.0.*' \
    'nvidia-cuda-cccl==13.0.*'
  local cuda
  cuda=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13
  # The packages have lib/; nvcc's profile and CMake look for lib64/ and an unversioned libcudart.
  [ -e "$cuda/lib64" ] || ln -s lib "$cuda/lib64"
  [ -e "$cuda/lib/libcudart.so" ] || ln -s libcudart.so.13 "$cuda/lib/libcudart.so"
  export PATH="$cuda/bin:$PATH" CUDAToolkit_ROOT="$cuda" CUDACXX="$cuda/bin/nvcc"
}
