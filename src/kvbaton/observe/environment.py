"""The environment variables of observation, all in one place."""

from __future__ import annotations

import os

from kvbaton.observe.base import Observer

TRACE_VARIABLE = "KVBATON_TRACE"
"""A folder: each manager of the process writes its events into a file of its own there. See `TraceFolder`."""


def observers_of_environment() -> list[Observer]:
    """The observers that the environment asks for."""
    folder = os.environ.get(TRACE_VARIABLE, "")
    if not folder:
        return []
    from kvbaton.observe.timeline import TraceFolder

    return [TraceFolder(folder)]
