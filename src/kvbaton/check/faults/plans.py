"""Plans that are made once: worlds have few shapes and many handshakes, and a plan depends on its layouts alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from kvbaton.plan import assign, compile_pair
from kvbaton.protocol import handshake
from kvbaton.runtime import source

_compiled = functools.lru_cache(1 << 12)(compile_pair)


@functools.lru_cache(1 << 12)
def _assigned(sources: tuple[Any, ...], destination: Any, **options: Any) -> Any:
    return assign(sources, destination, **options)


def _assign(sources: Any, destination: Any, **options: Any) -> Any:
    return _assigned(tuple(sources), destination, **options)


@contextmanager
def remembered_plans() -> Iterator[None]:
    """Let handshakes take plans that were made before, from equal layouts."""
    with (
        mock.patch.object(source, "assign", _assign),
        mock.patch.object(source, "compile_pair", _compiled),
        mock.patch.object(handshake, "assign", _assign),
        mock.patch.object(handshake, "compile_pair", _compiled),
    ):
        yield
