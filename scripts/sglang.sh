#!/usr/bin/env bash
# Puts SGLang into .venv, without its own dependencies, and what its managers import: for the tests of the back-end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "setup-sglang: $1" >&2; }
SGLANG="sglang==0.5.23"
# Its own dependencies are for GPUs, and pin other versions of what kvbaton needs.
NEEDS=(requests psutil pybase64 pillow triton)

stamp=$({ cat scripts/sglang.sh; grep -E '^(requests|psutil|pybase64|pillow|triton)==' constraints.txt; } | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.sglang 2>/dev/null || true)" = "$stamp" ]; then exit 0; fi
say "installing $SGLANG and ${NEEDS[*]} into .venv (some 300 MB)"
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
pip install -q -c constraints.txt "${NEEDS[@]}" || { say "pip could not install ${NEEDS[*]}"; exit 1; }
pip install -q --no-deps "$SGLANG" || { say "pip could not install $SGLANG"; exit 1; }
echo "$stamp" >.venv/.sglang
say "ready"
