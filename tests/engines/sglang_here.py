"""Whether SGLang can be imported here, and how scripts that import it are run: each in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPTS = HERE / "sglang"
ROOT = HERE.parents[1]
HARNESS = ROOT.parent / "shared" / "peers" / "sglang_harness"
MANAGERS = ("sglang", "triton", "torch", "requests", "psutil", "pybase64", "orjson", "PIL", "aiohttp")
"""What SGLang's managers import ..."""
SERVERS = (
    *MANAGERS,
    "uvloop",
    "xgrammar",
    "openai",
    "openai_harmony",
    "compressed_tensors",
    "tvm_ffi",
    "gguf",
    "IPython",
)
"""... and some of what its servers do."""


def _python():
    made = ROOT / "build" / "sglang" / "venv" / "bin" / "python"
    named = os.environ.get("KVBATON_SGLANG_PYTHON")
    return named or (str(made) if made.exists() else sys.executable)


PYTHON = _python()
"""The Python that has SGLang, if one has."""


@functools.cache
def absent(modules):
    """Those of ``modules`` that `PYTHON` does not have."""
    find = "import sys; from importlib.util import find_spec; print(*(n for n in sys.argv[1:] if find_spec(n) is None))"
    done = subprocess.run([PYTHON, "-c", find, *modules], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def needs(modules):
    """Skips a test where some of ``modules`` are absent."""
    missing = absent(modules)
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (make setup-sglang)")


needs_sglang = needs(MANAGERS)
needs_harness = pytest.mark.skipif(
    not (HARNESS / "harness.py").exists(), reason="the harness for SGLang's managers is not there (../shared)"
)


def environment(**given):
    """For a process that imports SGLang, and helpers of these tests."""
    path = os.pathsep.join(map(str, (HERE, SCRIPTS, ROOT / "src")))
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **given}


def run(script, *arguments, **given):
    """The standard output of a script; fails the test with its errors if it ends badly."""
    done = subprocess.run(
        [PYTHON, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(**given),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def outcomes(script):
    """What a script of scenarios says of each: what was wrong, by name."""
    lines = run(script, "--report").splitlines()
    return {name: wrong for name, wrong, *_ in (json.loads(line) for line in lines if line.startswith('["'))}
