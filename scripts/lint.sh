#!/usr/bin/env bash
# Formatting, style and types; changes nothing. `scripts/lint.sh --fix` formats.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t sources < <(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')
if [ "${1:-}" = --fix ]; then
  clang-format -i "${sources[@]}"
  ruff format .
  ruff check --fix .
  exit
fi
clang-format --dry-run --Werror "${sources[@]}"
ruff format --check .
ruff check .
mypy
