#!/usr/bin/env bash
# Installs the library into an empty prefix, builds examples/embed_cpp against it, and compares its greedy tokens with the CLI's.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT
cmake --preset dev
cmake --build --preset dev --target deltaic
cmake --install build/dev --prefix "$prefix" --component cpp
cmake -S examples/embed_cpp -B "$prefix/build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release
cmake --build "$prefix/build"
model=python/deltaic/default_model
embedded=$("$prefix/build/embed_deltaic" "$model" 24 965 594 258 475)
expected=$(python - "$model" <<'PY'
import json, sys
golden = json.load(open(sys.argv[1] + "/golden.json"))
print(*golden["prompts"][0]["greedy"][:24])
PY
)
echo "embedded: $embedded"
echo "golden:   $expected"
[ "$embedded" = "$expected" ]
