"""What the conformance checks are made of: memory with known content, connected pairs, transfers, a plain oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.errors import TransportError
from kvbaton.memory import Region, SharedMemory
from kvbaton.plan.boxes import Boxes, Int64s, Transfer
from kvbaton.transport.base import Transport

Bytes = npt.NDArray[np.uint8]

CANARY = 0xEE
"""What fills a destination before a write; sources never hold it."""


class PromiseBroken(AssertionError):
    """A transport does not keep a promise of `kvbaton.transport.base`."""


class NotApplicable(Exception):
    """A check asks for something that this transport or this machine does not claim to have."""


def require(kept: bool, message: str) -> None:
    """Raise `PromiseBroken` with that message unless ``kept``."""
    if not kept:
        raise PromiseBroken(message)


class Memory:
    """Host memory for a check. Authors of device transports subclass it and give their own `region`, `read`, `fill`."""

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        self._shared = SharedMemory(nbytes) if shared else None
        self._array: Bytes = self._shared.array if self._shared else np.zeros(nbytes, dtype=np.uint8)
        self.region = Region.of(self._shared if self._shared is not None else self._array)

    def read(self) -> Bytes:
        """A copy of the bytes, as a CPU that looks now sees them."""
        content: Bytes = self._array.copy()
        return content

    def fill(self, content: Bytes | int) -> None:
        """Set all bytes."""
        self._array[:] = content

    def close(self) -> None:
        """Give the memory back."""
        self._array = np.zeros(0, dtype=np.uint8)
        if self._shared is not None:
            self._shared.close()


class Pair:
    """A writer and a destination, registered, connected and admitted; the source is random, the destination canaries.

    As a context it closes both transports and the memory at the end. ``source_bytes`` and ``destination_bytes`` are the
    lengths of the regions.
    """

    def __init__(
        self,
        make: Callable[[str], Transport],
        memory: Callable[[int, bool], Memory],
        names: tuple[str, str],
        source_bytes: Sequence[int],
        destination_bytes: Sequence[int],
        timeout: float,
    ) -> None:
        self.timeout = timeout
        self.names = names
        self.writer = make(names[0])
        self.destination = make(names[1])
        shared = self.destination.capabilities.needs_shared_memory
        self.sources = [memory(nbytes, False) for nbytes in source_bytes]
        self.targets = [memory(nbytes, shared) for nbytes in destination_bytes]
        random = np.random.default_rng(len(self.sources) + sum(source_bytes))
        self.content = [random.integers(0, CANARY, nbytes, dtype=np.uint8) for nbytes in source_bytes]
        for source, content in zip(self.sources, self.content, strict=True):
            source.fill(content)
        for target in self.targets:
            target.fill(CANARY)
        self.writer.register([source.region for source in self.sources])
        self.destination.register([target.region for target in self.targets])
        self.peer = self.writer.connect(self.destination.describe())
        self.destination.admit(self.writer.describe())
        self.ended: dict[int, str] = {}

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()
        self.destination.close()
        for memory in (*self.sources, *self.targets):
            memory.close()

    def write(self, transfers: Sequence[Transfer], ticket: int) -> None:
        """Start a write to the peer."""
        self.writer.write(self.peer, transfers, ticket)

    def wait(self, tickets: Sequence[int]) -> dict[int, str]:
        """Poll until all of ``tickets`` ended; their errors. Breaks the promise if one ends twice or never."""
        wait_for(self.writer, tickets, self.ended, self.timeout)
        return {ticket: self.ended[ticket] for ticket in tickets}

    def succeed(self, tickets: Sequence[int]) -> None:
        """Wait, and require that every ticket ended without error."""
        for ticket, error in self.wait(tickets).items():
            require(not error, f"ticket {ticket} ended with an error: {error}")

    def require_content(self, expected: Sequence[Bytes], what: str) -> None:
        """Require that the destination holds exactly ``expected``."""
        for number, (target, wanted) in enumerate(zip(self.targets, expected, strict=True)):
            require_equal(target.read(), wanted, f"{what}: region {number}")

    def canaries(self) -> list[Bytes]:
        """What the destination held at first."""
        return [np.full(target.region.nbytes, CANARY, dtype=np.uint8) for target in self.targets]


def require_equal(found: Bytes, wanted: Bytes, what: str) -> None:
    """Require equal bytes; the message names the first that differs."""
    different = np.flatnonzero(found != wanted)
    if len(different):
        at = int(different[0])
        raise PromiseBroken(
            f"{what}: {len(different)} bytes differ, the first at {at}: 0x{found[at]:02x} instead of 0x{wanted[at]:02x}"
        )


def wait_for(transport: Transport, tickets: Sequence[int], ended: dict[int, str], timeout: float) -> None:
    """Poll until ``tickets`` ended, noting errors in ``ended``."""
    limit = time.monotonic() + timeout
    while True:
        for completion in transport.poll():
            require(completion.ticket not in ended, f"ticket {completion.ticket} ended twice")
            ended[completion.ticket] = completion.error
        left = [ticket for ticket in tickets if ticket not in ended]
        if not left:
            return
        require(time.monotonic() < limit, f"{len(left)} tickets did not end in {timeout} s, the first is {left[0]}")
        time.sleep(0.0005)


def refused(pair: Pair, transfers: Sequence[Transfer], ticket: int) -> bool:
    """Whether a write raises `TransportError`, or its ticket ends with an error."""
    try:
        pair.write(transfers, ticket)
    except TransportError:
        return True
    return bool(pair.wait([ticket])[ticket])


def table(*rows: Sequence[int]) -> Int64s:
    """A table of boxes as int64, C-contiguous."""
    return np.array(rows, dtype=np.int64)


def rows(nbytes: int, source_rows: Any, destination_rows: Any, *, stride: int = 0, region: int = 0) -> Transfer:
    """Whole rows of ``nbytes`` bytes, one piece each, ``stride`` apart in the destination (by default, adjacent)."""
    shape = table((1, 1, nbytes))
    source = table((0, 0, nbytes, 1, 0, 0, 0))
    destination = table((region, 0, stride or nbytes, 1, 0, 0, 0))
    units = (np.asarray(source_rows, dtype=np.int64), np.asarray(destination_rows, dtype=np.int64))
    return Transfer(Boxes(shape, source, destination), *units)


def apply(transfers: Sequence[Transfer], sources: Sequence[Bytes], targets: Sequence[Bytes]) -> None:
    """Do what ``transfers`` say, piece by piece: the oracle. For small transfers."""
    for boxes, source_units, destination_units in transfers:
        for source_unit, destination_unit in zip(source_units.tolist(), destination_units.tolist(), strict=True):
            for shape, source, destination in zip(*(side.tolist() for side in boxes[:3]), strict=True):
                for i0 in range(shape[0]):
                    for i1 in range(shape[1]):
                        start, to = _place(source, source_unit, i0, i1), _place(destination, destination_unit, i0, i1)
                        piece = sources[source[0]][start : start + shape[2]]
                        targets[destination[0]][to : to + shape[2]] = piece


def _place(side: Sequence[int], unit: int, i0: int, i1: int) -> int:
    _, offset, row_stride, units_per_row, unit_stride, stride0, stride1 = side
    row, part = divmod(unit, units_per_row)
    return offset + row * row_stride + part * unit_stride + i0 * stride0 + i1 * stride1
