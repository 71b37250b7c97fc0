"""Copies boxes between device memory, with the Triton kernels: what `kvbaton.copy` does for host memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch

from kvbaton.copy.digests import packed_side
from kvbaton.copy.gpu.configuration import LIMITED, WHOLE, Configuration
from kvbaton.copy.gpu.device import INTERPRETED, Cuda, Device, Interpreter
from kvbaton.copy.gpu.tables import HEADER, MOST_UNIT, WIDEST, Cut, Launch, Tables
from kvbaton.errors import ConfigurationError, RowsError
from kvbaton.plan.boxes import Boxes, Cast, Int64s, Transfer

KEPT_PLANS = 256
"""Plans whose tables stay on the device; the one that was used longest ago makes room."""


class _Side(NamedTuple):
    """One side of a call: its units (None: packed, unit ``i`` at ``i``) and what is added to its addresses."""

    units: Int64s | None
    shift: int


class _Plan:
    """The tables of a transfer, and those that are on the device."""

    def __init__(self, tables: Tables, holds: tuple[object, ...]) -> None:
        self.tables = tables
        self._holds = holds  # what the key names by identity must live as long
        self._uploaded: dict[int, tuple[Launch, torch.Tensor]] = {}

    def address(self, launch: Launch, device: Device) -> int:
        """Where the device has the table of a launch."""
        found = self._uploaded.get(id(launch))
        if found is None:
            found = self._uploaded[id(launch)] = launch, device.upload(launch.table)
        return found[1].data_ptr()


class Copier:
    """Copies on one device. May be used from several threads.

    Every call queues its work and returns: what it reads must be ready in the order of the stream, and what it writes
    is ready once the stream is there. Nothing waits for the device, but for what a plan uploads when it is used first.
    Nothing here checks addresses: `kvbaton.copy.check_bounds` does, and must come first. Tables of boxes are taken as
    they were when they came first: they must not be changed afterwards.
    """

    def __init__(
        self, device: int = 0, *, multiprocessors: int | None = None, configuration: Configuration | None = None
    ) -> None:
        """``multiprocessors`` is how many of them copies may use at the same time; all if not given.

        ``configuration`` is for who measures; a rule chooses it if it is not given.

        Raises `ConfigurationError` where the device is not there, or ``multiprocessors`` makes no sense. Under
        ``TRITON_INTERPRET=1`` Triton's interpreter runs the kernels on host memory, for tests.
        """
        if multiprocessors is not None and multiprocessors < 1:
            raise ConfigurationError(f"multiprocessors is {multiprocessors}; give at least 1, or None for all")
        self._index = device
        self._configuration = configuration or (WHOLE if multiprocessors is None else LIMITED)
        warps = self._configuration.warps
        self._device: Device = Interpreter(warps) if INTERPRETED else Cuda(device, warps)
        everything = self._device.multiprocessors
        used = everything if multiprocessors is None else min(multiprocessors, everything)
        self._programs = used * self._configuration.programs
        self._plans: OrderedDict[tuple[object, ...], _Plan] = OrderedDict()
        self._lock = threading.Lock()

    def copy_boxes(
        self,
        transfer: Transfer,
        source_bases: Int64s,
        destination_bases: Int64s,
        *,
        begin: int = 0,
        end: int | None = None,
        stream: Any = None,
    ) -> None:
        """Copy the bytes ``[begin, end)`` of the transfer's packed stream (all of it by default) from rows to rows.

        ``source_bases`` and ``destination_bases`` hold the address of each region, as int64: of this device, of a
        peer's that is mapped, or of pinned host memory. The two must not overlap. ``stream`` is a
        ``torch.cuda.Stream``; the current one if not given. Raises ``ValueError`` or ``TypeError`` as
        `kvbaton.copy.copy_boxes` does, and `RowsError` for more units, or larger ones, than the kernels count.
        """
        boxes, at, to = transfer
        if len(at) != len(to):
            raise ValueError(f"{len(at)} source units but {len(to)} destination units")
        end = transfer.nbytes if end is None else end
        with self._lock:
            plan = self._plan(boxes, source_bases, destination_bases)
            self._run(plan, _Side(at, 0), _Side(to, 0), begin, end, stream)

    def gather(
        self,
        shape: Int64s,
        side: Int64s,
        units: Int64s,
        bases: Int64s,
        packed: int,
        nbytes: int,
        *,
        begin: int = 0,
        cast: Cast | None = None,
        stream: Any = None,
    ) -> None:
        """Fill ``nbytes`` bytes at the address ``packed`` with the rows' packed stream, from its byte ``begin``."""
        with self._lock:
            plan = self._plan(Boxes(shape, side, side, cast), bases, None)
            self._run(plan, _Side(units, 0), _Side(None, packed - begin), begin, begin + nbytes, stream)

    def scatter(
        self,
        shape: Int64s,
        side: Int64s,
        units: Int64s,
        bases: Int64s,
        packed: int,
        nbytes: int,
        *,
        begin: int = 0,
        stream: Any = None,
    ) -> None:
        """Spread ``nbytes`` bytes at the address ``packed``, the stream from its byte ``begin``, over the rows."""
        with self._lock:
            plan = self._plan(Boxes(shape, side, side), None, bases)
            self._run(plan, _Side(None, packed - begin), _Side(units, 0), begin, begin + nbytes, stream)

    def _plan(self, boxes: Boxes, source_bases: Int64s | None, destination_bases: Int64s | None) -> _Plan:
        bases = tuple(None if each is None else each.tobytes() for each in (source_bases, destination_bases))
        key = (*(id(table) for table in (*boxes[:3], *(boxes.cast or ()))), *bases)
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            return plan
        given = boxes
        if source_bases is None:
            boxes = boxes._replace(source=packed_side(boxes.shape))
        elif destination_bases is None:
            boxes = boxes._replace(destination=packed_side(boxes.shape))
        plan = self._plans[key] = _Plan(Tables(boxes, source_bases, destination_bases), (given, *(given.cast or ())))
        if len(self._plans) > KEPT_PLANS:
            self._device.drain()
            self._plans.popitem(last=False)
        return plan

    def _run(self, plan: _Plan, source: _Side, destination: _Side, begin: int, end: int, stream: Any) -> None:
        tables = plan.tables
        sides = source, destination
        listed = [side.units for side in sides if side.units is not None]
        for units in listed:
            _check_units(units)
        total = tables.unit_bytes * len(listed[0])
        if not 0 <= begin <= end <= total:
            raise ValueError(f"bytes [{begin}, {end}) are not in a stream of {total} bytes")
        if begin == end:
            return
        if INTERPRETED:
            for first, last in _parts(tables, begin, end):
                self._part(plan, sides, first, last, None)
            return
        with torch.cuda.device(self._index):
            queue = torch.cuda.current_stream() if stream is None else stream
            for first, last in _parts(tables, begin, end):
                self._part(plan, sides, first, last, queue)

    def _part(self, plan: _Plan, sides: tuple[_Side, _Side], begin: int, end: int, stream: Any) -> None:
        """Launch what moves the bytes ``[begin, end)``."""
        tables = plan.tables
        first, last = begin // tables.unit_bytes, -(-end // tables.unit_bytes)
        count, skipped = last - first, first * tables.unit_bytes
        cut = Cut(begin != skipped or end != last * tables.unit_bytes, begin - skipped, end - skipped)
        shifts = [side.shift + (skipped if side.units is None else 0) for side in sides]
        launches = tables.launches(shifts[0], shifts[1], cut, self._configuration)
        # First all int64, which must be aligned, then the units.
        at, lists = 8 * sum(HEADER + len(launch.table) for launch in launches), 4 * count
        place = self._device.take(at + 2 * lists)
        addresses = []
        for side in sides:
            addresses.append(place.device + at)
            if side.units is not None:
                place.bytes[at : at + lists].view(np.int32)[:] = side.units[first:last]
                at += lists
        listed = [int(side.units is not None) for side in sides]
        fixed = [count, cut.begin, cut.end, *shifts, *listed, tables.unit_bytes]
        numbers, header = place.bytes[: at - at % 8].view(np.int64), 0
        ready = []
        for launch in launches:
            each, order = launch.tiles(count)
            until = np.cumsum(each)
            tiles, first = int(until[-1]), int(each[0])
            alike = first if first * len(each) == tiles and bool((each == first).all()) else 0
            numbers[header : header + HEADER] = [tiles, *fixed, len(each), alike]
            numbers[header + HEADER : header + HEADER + len(each)] = until - each
            ready.append((launch, order, tiles, place.device + 8 * header))
            header += HEADER + len(each)
        self._device.send(place, at, stream)
        for launch, order, tiles, address in ready:
            arguments = address, plan.address(launch, self._device), *addresses
            self._device.launch(launch, order, min(tiles, self._programs), arguments, stream)
        self._device.used(place, stream)


def _check_units(units: Int64s) -> None:
    if units.dtype != np.int64 or units.ndim != 1:
        raise TypeError("units must be int64, of one dimension")
    if not 0 <= int(np.bitwise_or.reduce(units)) <= MOST_UNIT:
        if (lowest := int(units.min())) < 0:
            raise ValueError(f"unit {lowest} is negative")
        raise RowsError(f"unit {int(units.max())} is more than {MOST_UNIT}, which is as far as the GPU counts")


def _parts(tables: Tables, begin: int, end: int) -> list[tuple[int, int]]:
    """The range, or its whole units apart from what is cut off, where that would slow all of it down."""
    size = tables.unit_bytes
    first, last = -(-begin // size) * size, end // size * size
    smooth = not tables.casts and begin % WIDEST == 0 and end % WIDEST == 0
    if smooth or first >= last or (first == begin and last == end):
        return [(begin, end)]
    return [part for part in ((begin, first), (first, last), (last, end)) if part[0] < part[1]]
