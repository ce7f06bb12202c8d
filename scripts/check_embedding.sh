#!/usr/bin/env bash
# Installs the library into an empty prefix, builds tests_cpp/embed against it by find_package and by pkg-config, and
# compares its greedy tokens with those of `deltaic generate`. With --add-subdirectory the project builds the library
# itself too.
#   scripts/check_embedding.sh [BUILD_DIR] [--add-subdirectory]     BUILD_DIR: has the built library; default build/dev
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/dev add_subdirectory=
for argument in "$@"; do
  case "$argument" in
    --add-subdirectory) add_subdirectory=1 ;;
    *) build=$argument ;;
  esac
done
if [ "$build" = build/dev ]; then
  cmake --preset dev
  cmake --build --preset dev --target deltaic
fi

prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT
cmake --install "$build" --prefix "$prefix/installed" --component cpp
model=python/deltaic/default_model

# expect PROGRAM: fails where its tokens are not the CLI's.
expected=$(python - <<'PY'
import json, subprocess, sys
for prompt in ("Once upon a time", "The king said"):
    command = [sys.executable, "-m", "deltaic", "generate", prompt, "--temperature", "0", "--max-tokens", "24", "--json"]
    print(*json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["token_ids"])
PY
)
prompts=$(python - <<'PY'
import tokenizers
tokenizer = tokenizers.Tokenizer.from_file("python/deltaic/default_model/tokenizer.json")
print(*(",".join(map(str, tokenizer.encode(prompt).ids)) for prompt in ("Once upon a time", "The king said")))
PY
)
expect() {
  local tokens
  # shellcheck disable=SC2086  # a prompt a word
  tokens=$("$1" "$model" 24 $prompts)
  if [ "$tokens" != "$expected" ]; then
    printf '%s gives\n%s\nand the CLI\n%s\n' "$1" "$tokens" "$expected" >&2
    return 1
  fi
  echo "$1: the tokens of the CLI"
}

embed() { cmake -S tests_cpp/embed -B "$prefix/$1" -G Ninja -DCMAKE_BUILD_TYPE=Release "${@:2}" && cmake --build "$prefix/$1"; }
embed find_package -DCMAKE_PREFIX_PATH="$prefix/installed"
expect "$prefix/find_package/embed_deltaic"

if command -v pkg-config >/dev/null; then
  flags=$(PKG_CONFIG_PATH=$(dirname "$(find "$prefix/installed" -name deltaic.pc)") pkg-config --cflags --libs deltaic)
  # shellcheck disable=SC2086  # a list of flags
  ${CXX:-g++} -std=c++20 -O2 examples/embed_cpp/main.cpp $flags -o "$prefix/by_pkg_config"
  expect "$prefix/by_pkg_config"
else
  echo "not run: pkg-config is not installed"
fi

if [ -n "$add_subdirectory" ]; then
  embed add_subdirectory -DDELTAIC_SOURCE_DIR="$PWD" -DDELTAIC_CUDA=OFF
  expect "$prefix/add_subdirectory/embed_deltaic"
fi
