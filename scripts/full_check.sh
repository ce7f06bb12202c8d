#!/usr/bin/env bash
# Everything that is too long for CI: the test command, sanitizers, debug checks, clang-tidy, slow tests, the C++ example
# against an installed tree. Run it before a release.
source "$(dirname "$0")/setup.sh"

section() { echo; echo "== $1 ($(date +%T))"; }

scripts/test.sh

section "the kernel benches build"
need_nvcc
cmake --build --preset ci --target benches

section "AddressSanitizer and UndefinedBehaviorSanitizer"
cmake --preset asan
cmake --build --preset asan
ctest --preset asan

section "debug build: the caches check the token count of every slot"
cmake --preset debug -DDELTAIC_PYTHON=ON -DPython_EXECUTABLE="$(command -v python)"
cmake --build --preset debug
ctest --preset debug
debug_package=$(mktemp -d)
cp -r python/deltaic "$debug_package/"
cp build/debug/python/bindings/_core*.so "$debug_package/deltaic/"
PYTHONPATH=$debug_package python -m pytest tests_py/test_invariance.py tests_py/test_scheduler_prefix.py tests_py/test_engine.py
rm -rf "$debug_package"

section "slow Python tests, those of the page in Chromium"
pip_install 'playwright>=1.50' 'axe-playwright-python>=0.1.4'
if ! command -v chromium >/dev/null && command -v apt-get >/dev/null; then
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
fi
python -m pytest tests_py -m slow -rs  # without Chromium the tests of the page fail, and say what to install

section "clang-tidy, with the analyzer"
scripts/tidy.sh --analyze

section "every kernel compiles for the architectures that the build above does not compile for"
object=$(mktemp)
for source in $(git ls-files 'cuda/*.cu'); do
  # To machine code, at once: PTX is not checked for what an architecture lacks. Unused there is what others alone use.
  nvcc -std=c++20 -fatbin -Xptxas=-O0 -diag-suppress=177 -Werror=all-warnings -I. -Icpp/include --expt-relaxed-constexpr \
    -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_89,code=sm_89 -gencode=arch=compute_100f,code=sm_100f \
    -gencode=arch=compute_120,code=sm_120 -o "$object" "$source"
done
rm "$object"

section "the C++ example against an installed tree"
scripts/check_embedding.sh build/ci --add-subdirectory
