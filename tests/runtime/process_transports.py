"""Transports between processes of one host, those of libraries that are not installed skipped by name."""

from importlib.util import find_spec

import pytest


def _library(name, module):
    missing = find_spec(module) is None
    skip = pytest.mark.skipif(missing, reason=f"{name} is not installed: make setup-fabrics")
    return pytest.param(name, marks=[skip, pytest.mark.long])


LIBRARIES = [_library("nixl", "nixl_cu13"), _library("mooncake", "mooncake")]
EVERY_TRANSPORT = ["shm", "tcp", *LIBRARIES]
