"""Lets the GPU's kernels move what the oracle checks: the memory of both sides goes there and comes back."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvbaton.check.oracle import Memory
from kvbaton.errors import ConfigurationError
from kvbaton.plan import Transfer

DEVICES = ("", "cuda")


def check_device(device: str) -> None:
    """Raise `ConfigurationError` for a device that is not known, or not here."""
    if device not in DEVICES:
        raise ConfigurationError(f"--device {device}: it must be cuda, or nothing for the CPU")
    if device:
        _copier()


def move(transfer: Transfer, source: Memory, destination: Memory) -> None:
    """Copy what ``transfer`` says on the GPU, from rows to rows or through a packed buffer, in one part or in two.

    Which of these it is depends on its bytes. All addresses must have been checked. Under ``TRITON_INTERPRET=1``
    Triton's interpreter moves them, without a GPU.
    """
    import torch

    from kvbaton.copy.gpu.device import INTERPRETED

    copier, place = _copier(), "cpu" if INTERPRETED else "cuda"
    here, there = (torch.from_numpy(memory.bytes.copy()).to(place) for memory in (source, destination))
    bases = [each.data_ptr() + memory.bases[:-1] for each, memory in ((here, source), (there, destination))]
    boxes, nbytes = transfer.boxes, transfer.nbytes
    way = nbytes % 4
    middle = nbytes // 3 if way % 2 else nbytes
    for begin, end in ((0, middle), (middle, nbytes)):
        if begin == end:
            continue
        if way < 2:
            copier.copy_boxes(transfer, bases[0], bases[1], begin=begin, end=end)
            continue
        packed = torch.empty(end - begin, dtype=torch.uint8, device=place)
        at, size = packed.data_ptr(), end - begin
        copier.gather(
            boxes.shape, boxes.source, transfer.source_units, bases[0], at, size, begin=begin, cast=boxes.cast
        )
        copier.scatter(boxes.shape, boxes.destination, transfer.destination_units, bases[1], at, size, begin=begin)
    destination.bytes[:] = there.cpu().numpy()
    if not np.array_equal(here.cpu().numpy(), source.bytes):
        raise AssertionError("a copy on the GPU changed its source")


@functools.cache
def _copier() -> Any:
    from kvbaton.copy.gpu import Copier

    return Copier()
