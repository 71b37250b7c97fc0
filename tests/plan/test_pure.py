"""The layout algebra and the planner are pure: their imports say so."""

import ast
import importlib
import inspect
import pathlib

import pytest

import kvbaton.check.models
import kvbaton.check.requests
import kvbaton.check.worlds
import kvbaton.layout
import kvbaton.plan

PURE = {
    "kvbaton.layout": {"kvbaton.errors", "kvbaton.layout"},
    "kvbaton.plan": {"kvbaton.errors", "kvbaton.layout", "kvbaton.plan"},
}
LIBRARIES = {
    "__future__",
    "collections.abc",
    "dataclasses",
    "itertools",
    "math",
    "msgspec",
    "numpy",
    "numpy.typing",
    "typing",
}


@pytest.mark.parametrize("package", PURE)
def test_imports(package):
    folder = pathlib.Path(importlib.import_module(package).__file__).parent
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                ours = any(name == allowed or name.startswith(f"{allowed}.") for allowed in PURE[package])
                assert ours or name in LIBRARIES, f"{path.name} imports {name}"


def test_the_oracle_shares_no_code_with_the_planner():
    ours = set()
    oracle = ("content", "formats", "models", "oracle", "requests", "values", "worlds")
    for module in (importlib.import_module(f"kvbaton.check.{name}") for name in oracle):
        for node in ast.walk(ast.parse(pathlib.Path(module.__file__).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("kvbaton"):
                ours.add(node.module)
    assert ours <= {"kvbaton.layout", "kvbaton.errors", *(f"kvbaton.check.{name}" for name in oracle)}


@pytest.mark.parametrize("module", [kvbaton.layout, kvbaton.plan])
def test_what_is_exported_is_what_is_importable(module):
    found = {name for name, value in vars(module).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert found == set(module.__all__)
