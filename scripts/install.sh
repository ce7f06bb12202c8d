#!/usr/bin/env bash
# Installs deltaic into .venv and lets the bundled model write a few sentences.
source "$(dirname "$0")/setup.sh"

echo "== building and installing deltaic (a few minutes the first time)"
pip_install .
echo '== deltaic generate "Once upon a time"'
deltaic generate "Once upon a time" --max-tokens 80
echo
echo "== installed: .venv/bin/deltaic"
