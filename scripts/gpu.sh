#!/usr/bin/env bash
# Puts Triton into .venv: for copies on a GPU, and for the tests of them in Triton's interpreter, which need no GPU.
# Does nothing when it is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "setup-gpu: $1" >&2; }
stamp=$({ cat scripts/gpu.sh; grep -E '^(torch|triton)' constraints.txt; } | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.gpu 2>/dev/null || true)" = "$stamp" ]; then exit 0; fi
say "installing Triton into .venv (a download of 190 MB, 640 MB on the disk)"
.venv/bin/python -m pip --disable-pip-version-check install -q --no-deps -c constraints.txt triton ||
    { say "pip could not install Triton: see the lines above"; exit 1; }
.venv/bin/python - <<'PYTHON'
import torch

from kvbaton.copy.gpu import Copier

found = torch.cuda.device_count()
print(f"setup-gpu: {Copier.__name__} is ready; torch {torch.__version__} sees {found} CUDA devices")
PYTHON
echo "$stamp" >.venv/.gpu
