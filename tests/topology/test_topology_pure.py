"""Topologies are plain data: what they import says so."""

import ast
from pathlib import Path

import kvbaton.topology

OURS = ("kvbaton.errors", "kvbaton.layout", "kvbaton.topology")
LIBRARIES = {
    "__future__",
    "bisect",
    "collections.abc",
    "difflib",
    "itertools",
    "json",
    "math",
    "msgspec",
    "pathlib",
    "re",
    "reprlib",
    "typing",
    "yaml",
}


def test_imports():
    paths = sorted(Path(kvbaton.topology.__file__).parent.glob("*.py"))
    assert len(paths) > 5
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.startswith(OURS) or name in LIBRARIES, f"{path.name} imports {name}"
