"""The tests of the GPU's kernels without a GPU: in Triton's interpreter, in a process of its own.

What Triton does with a kernel is decided when it is imported, for the whole process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: make setup-gpu")
pytest.importorskip("torch", reason="torch is not installed")


def test_the_kernels_are_right_in_the_interpreter():
    tests = Path(__file__).with_name("test_gpu_copy.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
