"""Copies boxes between device memory, with the Triton kernels: what `kvbaton.copy` does for host memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch

from kvbaton.copy.digests import packed_side
from kvbaton.copy.gpu import kernels
from kvbaton.copy.gpu.configuration import LIMITED, WHOLE, Configuration
from kvbaton.copy.gpu.staging import Staging, upload
from kvbaton.copy.gpu.tables import HEADER, MOST_UNIT, WIDEST, Cut, Launch, Tables
from kvbaton.errors import ConfigurationError, RowsError
from kvbaton.plan.boxes import Boxes, Cast, Int64s, Transfer

KEPT_PLANS = 256
"""Plans whose tables stay on the device; the one that was used longest ago makes room."""
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


class _Side(NamedTuple):
    """One side of a call: its units (None: packed, unit ``i`` at ``i``) and what is added to its addresses."""

    units: Int64s | None
    shift: int


class _Plan:
    """The tables of a transfer, and those that are on the device."""

    def __init__(self, tables: Tables, holds: tuple[object, ...]) -> None:
        self.tables = tables
        self._holds = holds  # what the key names by identity must live as long
        self._uploaded: dict[int, torch.Tensor] = {}

    def address(self, launch: Launch, device: torch.device) -> int:
        """Where the device has the table of a launch."""
        found = self._uploaded.get(id(launch))
        if found is None:
            found = self._uploaded[id(launch)] = upload(launch.table, device)
        return found.data_ptr()


class Copier:
    """Copies on one device. May be used from several threads.

    Every call queues its work and returns: what it reads must be ready in the order of the stream, and what it writes is
    ready once the stream is there. Nothing waits for the device. Nothing here checks addresses:
    `kvbaton.copy.check_bounds` does, and must come first. Tables of boxes are taken as they were when they came first:
    they must not be changed afterwards.
    """

    def __init__(
        self, device: int = 0, *, multiprocessors: int | None = None, configuration: Configuration | None = None
    ) -> None:
        """``multiprocessors`` is how many of them copies may use at the same time; all if not given.

        ``configuration`` is for who measures; a rule chooses it if it is not given.

        Raises `ConfigurationError` where the device is not there, or ``multiprocessors`` makes no sense. Under
        ``TRITON_INTERPRET=1`` Triton's interpreter runs the kernels on host memory, for tests.
        """
        if not INTERPRETED and device >= torch.cuda.device_count():
            raise ConfigurationError(f"there is no CUDA device {device}; {torch.cuda.device_count()} were found")
        if multiprocessors is not None and multiprocessors < 1:
            raise ConfigurationError(f"multiprocessors is {multiprocessors}; give at least 1, or None for all")
        self._device = torch.device("cpu") if INTERPRETED else torch.device("cuda", device)
        everything = 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
        self._configuration = configuration or (WHOLE if multiprocessors is None else LIMITED)
        self._programs = (
            everything if multiprocessors is None else min(multiprocessors, everything)
        ) * self._configuration.programs
        self._staging = Staging(self._device)
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

        ``source_bases`` and ``destination_bases`` hold the address of each region, as int64: of this device, of a peer's
        that is mapped, or of pinned host memory. The two must not overlap. ``stream`` is a ``torch.cuda.Stream``; the
        current one if not given. Raises ``ValueError`` or ``TypeError`` as `kvbaton.copy.copy_boxes` does, and
        `RowsError` for a unit of more than the kernels count.
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
        """Fill ``nbytes`` bytes at the address ``packed`` with the packed stream of the rows, from its byte ``begin``."""
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
        """Spread ``nbytes`` bytes at the address ``packed``, the packed stream from its byte ``begin``, over the rows."""
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
            self._staging.drain()
            self._plans.popitem(last=False)
        return plan

    def _run(self, plan: _Plan, source: _Side, destination: _Side, begin: int, end: int, stream: Any) -> None:
        tables = plan.tables
        units = source.units if source.units is not None else destination.units
        assert units is not None
        _check_units(tables, source, destination)
        total = tables.unit_bytes * len(units)
        if not 0 <= begin <= end <= total:
            raise ValueError(f"bytes [{begin}, {end}) are not in a stream of {total} bytes")
        if begin == end:
            return
        with self._on(stream):
            for first, last in _parts(tables, begin, end):
                self._part(plan, source, destination, first, last)

    def _part(self, plan: _Plan, source: _Side, destination: _Side, begin: int, end: int) -> None:
        """Launch what moves the bytes ``[begin, end)``."""
        tables = plan.tables
        unit_bytes = tables.unit_bytes
        first, last = begin // unit_bytes, -(-end // unit_bytes)
        count, skipped = last - first, first * unit_bytes
        cut = Cut(begin != skipped or end != last * unit_bytes, begin - skipped, end - skipped)
        sides = [
            _Side(None if side.units is None else side.units[first:last], side.shift) for side in (source, destination)
        ]
        shifts = [side.shift + (skipped if side.units is None else 0) for side in sides]
        launches = tables.launches(shifts[0], shifts[1], cut, self._configuration)
        lists = [side.units for side in sides if side.units is not None]
        place = self._staging.take(len(lists) * count + sum(HEADER + len(each.table) for each in launches))
        numbers, at, where = place.numbers, 0, []
        for side in sides:
            where.append(place.address + 8 * at)
            if side.units is not None:
                numbers[at : at + count] = side.units
                at += count
        headers, tiles, orders = [], [], []
        listed = [int(side.units is not None) for side in sides]
        for launch in launches:
            headers.append(place.address + 8 * at)
            each, by_piece = launch.tiles(count)
            until = np.cumsum(each)
            tiles.append(int(until[-1]))
            orders.append(by_piece)
            fixed = (tiles[-1], count, cut.begin, cut.end, *shifts, *listed, unit_bytes, len(until))
            numbers[at : at + HEADER] = fixed
            numbers[at + HEADER] = 0
            numbers[at + HEADER + 1 : at + HEADER + len(until)] = until[:-1]
            at += HEADER + len(until)
        place.send(at)
        for launch, header, many, by_piece in zip(launches, headers, tiles, orders, strict=True):
            kernel = getattr(kernels, launch.kernel)
            grid = (min(many, self._programs),)
            address = plan.address(launch, self._device)
            kernel[grid](
                header, address, *where, **launch.constants, BY_PIECE=by_piece, num_warps=self._configuration.warps
            )
        place.used()

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Any:
        if INTERPRETED:
            with np.errstate(all="ignore"):
                yield
        elif stream is None:
            with torch.cuda.device(self._device):
                yield
        else:
            with torch.cuda.stream(stream):
                yield


def _check_units(tables: Tables, *sides: _Side) -> None:
    for side in sides:
        if side.units is None or not len(side.units):
            continue
        if side.units.dtype != np.int64 or side.units.ndim != 1:
            raise TypeError("units must be int64, of one dimension")
        lowest, highest = int(side.units.min()), int(side.units.max())
        if lowest < 0:
            raise ValueError(f"unit {lowest} is negative")
        if tables.divides and highest > MOST_UNIT:
            raise RowsError(f"unit {highest} is more than {MOST_UNIT}, which is as far as the GPU counts parts of rows")


def _parts(tables: Tables, begin: int, end: int) -> list[tuple[int, int]]:
    """The range, or its whole units apart from what is cut off, where that would slow all of it down."""
    size = tables.unit_bytes
    first, last = -(-begin // size) * size, end // size * size
    smooth = not tables.casts and begin % WIDEST == 0 and end % WIDEST == 0
    if smooth or first >= last or (first == begin and last == end):
        return [(begin, end)]
    return [part for part in ((begin, first), (first, last), (last, end)) if part[0] < part[1]]
