"""What is exported is what is importable, and importing it costs no heavy package."""

import os
import subprocess
import sys
from pathlib import Path

import kvbaton


def test_every_public_name_is_there():
    assert kvbaton.__all__ == sorted(kvbaton.__all__, key=lambda name: (name[0].islower() or name[0] == "_", name))
    missing = [name for name in kvbaton.__all__ if not hasattr(kvbaton, name)]
    assert missing == []


def test_public_classes_have_docstrings():
    for name in kvbaton.__all__:
        value = getattr(kvbaton, name)
        if isinstance(value, type):
            assert value.__doc__, name


def test_the_core_imports_no_heavy_package():
    heavy = ("torch", "transformers", "fastapi", "uvicorn", "starlette", "httpx", "typer")
    program = f"import sys, kvbaton; print([name for name in {heavy!r} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(Path(kvbaton.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_layers_point_downwards():
    """The pure layers import neither sockets nor threads nor clocks."""
    program = (
        "import sys; before = set(sys.modules); import kvbaton.protocol; "
        "print([name for name in ('zmq', 'socket', 'asyncio', 'kvbaton.transport', 'kvbaton.runtime') "
        "if name in set(sys.modules) - before])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(kvbaton.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
