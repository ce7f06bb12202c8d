#!/usr/bin/env bash
# Writes python/deltaic/_core.pyi from the installed module; with --check only compares, and fails where they differ.
set -euo pipefail
cd "$(dirname "$0")/.."

stubs=$(mktemp -d)
trap 'rm -rf "$stubs"' EXIT
pybind11-stubgen deltaic._core --output-dir "$stubs" --exit-code --enum-class-locations DeviceType:deltaic._core \
  --enum-class-locations EndStatus:deltaic._core >/dev/null
generated=$stubs/deltaic/_core.pyi
# What the generator leaves untyped.
sed -i -e 's/\*\*kwargs)/**kwargs: typing.Any)/' -e 's/os\.PathLike\b\([^[]\)/os.PathLike[str]\1/g' \
  -e 's/-> tuple:/-> tuple[typing.Any, ...]:/' -e 's/def __eq__(self, arg0: [A-Za-z]*)/def __eq__(self, arg0: object)/' -e 's/\*args,/*args: typing.Any,/' "$generated"
ruff check --quiet --fix --unsafe-fixes --config pyproject.toml "$generated"
ruff format --quiet --config pyproject.toml "$generated"
if [ "${1:-}" = --check ]; then
  diff -u python/deltaic/_core.pyi "$generated" || { echo "run scripts/stubs.sh and commit python/deltaic/_core.pyi" >&2; exit 1; }
else
  cp "$generated" python/deltaic/_core.pyi
fi
