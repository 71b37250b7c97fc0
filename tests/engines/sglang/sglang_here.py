"""Whether SGLang can be imported here, and how scripts that import it are run: each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

MODULES = ("sglang", "triton", "torch", "requests", "psutil", "pybase64", "orjson", "PIL", "aiohttp")
"""What SGLang's managers import."""
ABSENT = [name for name in MODULES if find_spec(name) is None]
HERE = Path(__file__).parent
HARNESS = HERE.parents[3].parent / "shared" / "peers" / "sglang_harness"

needs_sglang = pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)} (make setup-sglang)")
needs_harness = pytest.mark.skipif(
    not (HARNESS / "harness.py").exists(), reason="the harness for SGLang's managers is not there (../shared)"
)


def run(script, *arguments, **environment):
    """The standard output of a script; fails the test with its errors if it ends badly."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def outcomes(script):
    """What a script of scenarios says of each: what was wrong, by name."""
    lines = run(script, "--report").splitlines()
    return {name: wrong for name, wrong, *_ in (json.loads(line) for line in lines if line.startswith('["'))}
