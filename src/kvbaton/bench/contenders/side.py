"""One process of a contender: answers the commands of its parent, one JSON object a line.

A request is ``{"do": name, "with": {...}}``; the answer ``{"ok": value}`` or ``{"error": text}``. The process ends with
its standard input. Whatever a library prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any


class Side:
    """What a contender does on one side. The parent calls the methods in this order; ``run`` and ``arm`` repeat.

    ``prepare`` makes the memory and gives a card; ``meet`` takes the card of the other side. For each run the
    destination's ``arm`` returns when it waits for data, the source's ``run`` moves them, and the destination's
    ``arrived`` returns when it sees them all.
    """

    role: str

    def prepare(self, work: dict[str, Any]) -> dict[str, Any]:
        """Allocate, register, listen. What it returns is the card."""
        raise NotImplementedError

    def meet(self, card: dict[str, Any]) -> None:
        """Connect to the other side."""

    def arm(self) -> None:
        """Destination: get ready for one run; what the last one wrote is overwritten."""

    def run(self) -> dict[str, float]:
        """Source: move everything once. ``started`` and ``ended`` are on the system's monotonic clock, in seconds."""
        raise NotImplementedError

    def arrived(self) -> float | None:
        """Destination: when the bytes were seen there; None if only the source knows."""
        return None

    def checksum(self) -> int:
        """Of the bytes to move (source) or of those that came (destination), in the order of the pieces."""
        raise NotImplementedError

    def processor_seconds(self) -> float:
        """Processor time of this process so far, of all its threads."""
        return time.process_time()


def serve(side: Side) -> None:
    """Answer the parent until it closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            value = getattr(side, request["do"])(**request["with"])
        except Exception as error:
            traceback.print_exc()
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        else:
            answers.write(json.dumps({"ok": value}) + "\n")
    answers.flush()
    # Libraries leave threads behind that would keep the process, or crash it, at an orderly end.
    os._exit(0)


def now() -> float:
    """Seconds on the clock that all processes of the machine share."""
    return time.monotonic()
