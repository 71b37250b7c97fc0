"""Numbers for the kernels, on their way to the device: pinned host memory, and as much device memory, used in turn."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from kvbaton.plan.boxes import Int64s

FIRST_WORDS = 16384
MOST_PLACES = 64


class Place:
    """Room for ``words`` int64 on both sides, and what says that nobody reads it any more."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.words = words
        on_gpu = device.type == "cuda"
        self._host = torch.empty(words, dtype=torch.int64, pin_memory=on_gpu)
        self._device = torch.empty(words, dtype=torch.int64, device=device) if on_gpu else self._host
        self._event: Any = torch.cuda.Event() if on_gpu else None
        self.numbers: Int64s = self._host.numpy()
        self.address: int = self._device.data_ptr()

    def send(self, words: int) -> None:
        """Copy the first ``words`` numbers to the device, in the order of the current stream."""
        if self._event is not None:
            self._device[:words].copy_(self._host[:words], non_blocking=True)

    def used(self) -> None:
        """Everything that reads it is in the current stream by now."""
        if self._event is not None:
            self._event.record()

    @property
    def free(self) -> bool:
        """Whether nothing reads it any more."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until nothing reads it any more."""
        if self._event is not None:
            self._event.synchronize()


class Staging:
    """Places, the one that was used longest ago first. Not for two threads at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: deque[Place] = deque()

    def take(self, words: int) -> Place:
        """A place of at least ``words`` numbers that nobody reads. Waits only where very many are read."""
        if self._places and (len(self._places) >= MOST_PLACES or self._places[0].free):
            place = self._places.popleft()
            place.wait()
            if place.words < words:
                place = Place(_rounded(words), self._device)
        else:
            place = Place(_rounded(words), self._device)
        self._places.append(place)
        return place

    def drain(self) -> None:
        """Wait until no place is read."""
        for place in self._places:
            place.wait()


def upload(table: Int64s, device: torch.device) -> torch.Tensor:
    """A copy of ``table`` on the device, which is there when this returns."""
    flat = torch.from_numpy(np.ascontiguousarray(table).reshape(-1).copy())
    if device.type != "cuda":
        return flat
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        made = flat.pin_memory().to(device, non_blocking=True)
        stream.synchronize()
    return made


def _rounded(words: int) -> int:
    return max(FIRST_WORDS, 1 << (words - 1).bit_length())
