"""What is exported is what is importable, and importing it costs no heavy package."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    heavy += ("prometheus_client", "opentelemetry")
    program = f"import sys, kvbaton; print([name for name in {heavy!r} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(Path(kvbaton.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


PURE = ("layout", "plan", "protocol")
FORBIDDEN = {"zmq", "socket", "threading", "time", "asyncio", "torch", "concurrent", "kvbaton.transport"}
FORBIDDEN |= {f"kvbaton.{layer}" for layer in ("runtime", "registry", "copy", "engines", "serve", "memory")}


@pytest.mark.parametrize("layer", PURE)
def test_pure_layers_import_no_io(layer):
    files = sorted((Path(kvbaton.__file__).parent / layer).glob("*.py"))
    assert files
    for file in files:
        imported = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
        found = {name for name in imported for bad in FORBIDDEN if name == bad or name.startswith(bad + ".")}
        assert not found, f"{file.name} imports {found}"
