"""Requests between SGLang's own pools, where SGLang is installed: see `sglang_real_pools`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("sglang") is None or find_spec("triton") is None,
    reason="sglang and triton are not installed (pip install --no-deps sglang==0.5.23; pip install triton)",
)

CASES = "Attention Latent Window Hybrid Kimi Sparse SparseTail Scaled ScaledByHead Quick SparseLayers Compressed"


@pytest.fixture(scope="module")
def outcomes():
    """What went wrong, by case: all of them run in one process, since SGLang takes seconds to import."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), *filter(None, sys.path)])
    script = [sys.executable, str(here / "sglang_real_pools.py")]
    done = subprocess.run(
        script, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('["')]
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(line) for line in lines)


@pytest.mark.parametrize("grid", ["1->1", "2->1", "1->2", "4->2"])
@pytest.mark.parametrize("case", CASES.split())
def test_what_comes_out_of_pools_of_sglang(outcomes, case, grid):
    assert outcomes[f"{case} {grid}"] == ""
