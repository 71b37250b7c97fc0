"""What happened when: faults, and rooms that did not end well. To read when something was broken."""

from __future__ import annotations

import time
from pathlib import Path


class Diary:
    """Lines in a file, each with the seconds since the start."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        """Write a line."""
        self._file.write(f"{time.monotonic() - self._began:9.3f} {text}\n")

    def close(self) -> None:
        """Write no more."""
        self._file.close()
