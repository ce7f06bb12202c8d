#!/usr/bin/env bash
# Builds and checks the CUDA backend on a machine with a GPU. Downloads nothing: packages that such a machine lacks may lie
# in .carry/prefix (include/, share/cmake/, lib/cmake/ of nlohmann_json and doctest).
#   scripts/gpu_check.sh [--only TEST] [--sanitize] [BENCH ...]
# --only: build and run this C++ test program alone, and no Python tests. --sanitize: compute-sanitizer on the tests
# marked for it. BENCH: programs of bench/, for example bench_state_copy. Logs go to $OUT if that is set, else build/gpu.
set -uo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/local/cuda/bin"

only= sanitize= benches=()
while [ $# -gt 0 ]; do
  case "$1" in
    --only) only=$2; shift ;;
    --sanitize) sanitize=1 ;;
    *) benches+=("$1") ;;
  esac
  shift
done

build=build/cuda
logs=${OUT:-build/gpu}
mkdir -p "$logs"
results=()
failed=0
# step NAME COMMAND...: runs it, logs it, and notes how it went and how long it took.
step() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  if "$@" >"$logs/$name.log" 2>&1; then
    results+=("$(printf '%-28s ok      %4d s' "$name" $((SECONDS - start)))")
  else
    results+=("$(printf '%-28s FAILED  %4d s' "$name" $((SECONDS - start)))")
    failed=1
    tail -n 40 "$logs/$name.log"
    return 1
  fi
}

targets=("${benches[@]}")
if [ -n "$only" ]; then targets+=("$only"); else targets+=(all); fi
[ -d .carry/prefix ] && export CMAKE_PREFIX_PATH="$PWD/.carry/prefix${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}"
if step configure cmake --preset cuda -DDELTAIC_PYTHON=ON -DPython_EXECUTABLE="$(command -v python3)" &&
  step build cmake --build "$build" --parallel "$(nproc)" --target "${targets[@]}"; then
  if [ -n "$only" ]; then
    step "$only" "$build/tests_cpp/$only"
  else
    step ctest ctest --preset cuda
    cp "$build"/python/bindings/_core*.so python/deltaic/
    step pytest env PYTHONPATH=python python3 -m pytest tests_py -p no:cacheprovider
    step pytest-cuda env PYTHONPATH=python DELTAIC_TEST_DEVICE=cuda python3 -m pytest -p no:cacheprovider \
      tests_py/test_parity.py tests_py/test_invariance.py tests_py/test_engine_end_to_end.py
  fi
  if [ -n "$sanitize" ]; then
    programs=(test_state_copy test_attention_kernels test_gdn_mixer test_cuda test_device_sampler test_models test_runner)
    [ -n "$only" ] && programs=("$only")
    for tool in memcheck racecheck initcheck; do
      for program in "${programs[@]}"; do
        step "$tool-$program" env DELTAIC_TEST_DEVICE=cuda compute-sanitizer --tool "$tool" --error-exitcode 1 \
          "$build/tests_cpp/$program" --test-case='*[sanitizer]*'
      done
    done
  fi
  for bench in "${benches[@]}"; do step "$bench" "$build/$bench"; done
fi

for bench in "${benches[@]}"; do [ -e "$logs/$bench.log" ] && cat "$logs/$bench.log"; done
for log in "$logs"/{pytest,pytest-cuda,"$only",memcheck-*,racecheck-*,initcheck-*}.log; do [ -e "$log" ] && tail -n 3 "$log"; done
echo "== $(git rev-parse --short HEAD 2>/dev/null) on $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null)"
printf '%s\n' "${results[@]}"
exit $failed
