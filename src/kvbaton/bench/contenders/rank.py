"""One rank of kvbaton in a process of its own: hands all requests of a `Case` over at once, and checks every byte."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton import Manager, Region, SharedMemory, Status
from kvbaton.layout import (
    Component,
    Coords,
    RankLayout,
    aux_fields,
    conv_state,
    paged_kv,
    recurrent_state,
    replicated_spans,
    required_bytes,
)
from kvbaton.registry.server import RegistryServer

from .cases import AUX_FIELDS, CONV_BLOCKS, CONV_COLUMNS, STATE_HEADS, STATE_SHAPE, Case, page_words, state_words
from .side import Side, now, serve

POLL_SECONDS = 0.0002


class RankSide(Side):
    """``role`` is "source" (prefill) or "destination" (decode); ``number`` counts the ranks of that side."""

    def __init__(self, role: str, transport: str, number: int) -> None:
        self.role = role
        self.transport = transport
        self.number = number
        self.rooms: list[Any] = []

    def prepare(self, work: dict[str, Any]) -> dict[str, Any]:
        """As `Side.prepare`. The first source rank brings the registry; the others are told where it is."""
        self.case = Case.read(work)
        self.layout = layout_of(self.case, self.role, self.number)
        self.memory = [SharedMemory(nbytes) for nbytes in required_bytes(self.layout.components)]
        for memory in self.memory:
            memory.array[:] = 0
        self.rows = self.case.chosen(1 if self.role == "source" else 2)
        if self.role == "source":
            for request in range(self.case.requests):
                for _, there, expected in self._content(request):
                    there[...] = expected
            if not self.number:
                self.server = RegistryServer("127.0.0.1", 0)
                self.server.__enter__()
                return {"registry": self.server.url}
        return {}

    def meet(self, card: dict[str, Any]) -> None:
        """As `Side.meet`."""
        size = self.layout.coords.tp[1]
        destination = self.role != "source"
        self.manager = Manager(
            self.layout,
            [Region.of(memory) for memory in self.memory],
            role="decode" if destination else "prefill",
            registry=card["registry"],
            transports=[self.transport],
            destination_index=self.number if destination else 0,
            destinations=size if destination else 1,
        )

    def open(self, first_room: int, waiting: int = 0) -> None:
        """Open a room for each request; a destination offers its rows. ``waiting`` bounds how many, 0 for all."""
        make = self.manager.sender if self.role == "source" else self.manager.receiver
        count = waiting or self.case.requests
        self.rooms = [make(first_room + request) for request in range(count)]
        if self.role != "source":
            for request, room in enumerate(self.rooms):
                room.offer(tokens=self.case.tokens, **self._rows(request))

    def send(self) -> dict[str, Any]:
        """Source: hand every request over. Returned is when that began, and when the calls had returned."""
        started = now()
        for request, room in enumerate(self.rooms):
            room.finish(tokens=(0, self.case.tokens), **self._rows(request))
        returned = now()
        ends = self._wait()
        return {"started": started, "returned": returned, "ended": ends}

    def wait(self) -> list[float]:
        """Destination: when each request was seen to be complete."""
        return self._wait()

    def _wait(self) -> list[float]:
        pending = dict(enumerate(self.rooms))
        ends = [0.0] * len(pending)
        while pending:
            began = now()
            for request in [request for request, room in pending.items() if room.poll().terminal]:
                room = pending.pop(request)
                ends[request] = now()
                if room.poll() is not Status.SUCCESS:
                    raise RuntimeError(f"room {room.room} ended as {room.poll().value}: {room.reason}")
            if pending:
                # An engine that asks after a thousand rooms does other things too: a quarter of its time at most.
                time.sleep(max(POLL_SECONDS, 3 * (now() - began)))
        return ends

    def close_rooms(self) -> None:
        """Forget the rooms."""
        for room in self.rooms:
            room.close()
        self.rooms = []

    def check(self) -> list[str]:
        """Destination: the tensors whose bytes are wrong; then everything is emptied."""
        wrong = [
            f"request {request}: {name}"
            for request in range(self.case.requests)
            for name, there, expected in self._content(request)
            if not np.array_equal(there[...], expected)
        ]
        for memory in self.memory:
            memory.array[:] = 0
        return wrong

    def resident_bytes(self) -> int:
        """Memory of this process that no file backs: the pools, which are shared memory, are not in it."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _rows(self, request: int) -> dict[str, Any]:
        rows: dict[str, Any] = {"kv": self.rows[request]}
        if not self.case.state_layers:
            return {"rows": rows}
        slot = np.array([request + 1], np.int64)
        return {"rows": {**rows, "conv": slot, "recurrent": slot}, "aux": request + 1}

    def _content(self, request: int) -> list[tuple[str, Any, npt.NDArray[Any]]]:
        """Each tensor of a request: its name, where it lies (to be read or written with ``[...]``), what it holds."""
        parts: list[tuple[str, Any, npt.NDArray[Any]]] = []
        case = self.case
        for component in self.layout.components:
            for tensor in component.tensors:
                spans = tensor.axes[1 if component.name == "kv" and case.order == "NHD" else 0].spans
                name = f"{component.name} {tensor.role} {tensor.layer}"
                held = np.concatenate([np.arange(start, start + count) for start, count in spans])
                if component.name == "kv":
                    heads = range(int(held[0]), int(held[-1]) + 1)
                    words = page_words(case, request, tensor.layer, tensor.role == "value", heads)
                    there = PagesOfRequest(self._tensor(tensor), self.rows[request], case)
                    parts.append((name, there, words))
                else:
                    row = self._tensor(tensor)[request + 1].reshape(len(held), -1)
                    parts.append((name, row, state_words(request, tensor.layer, held, row.shape[1])))
        return parts

    def _tensor(self, tensor: Any) -> npt.NDArray[np.uint16]:
        words = self.memory[tensor.region].array[tensor.offset :]
        nbytes = tensor.itemsize * int(np.prod([axis.local_size for axis in tensor.axes]))
        rows = np.lib.stride_tricks.as_strided(words, (tensor.rows, nbytes), (tensor.row_stride, 1))
        shape = (tensor.rows, *(axis.local_size for axis in tensor.axes[:-1]), -1)
        viewed: npt.NDArray[np.uint16] = rows.view(np.uint16).reshape(shape)
        return viewed


class PagesOfRequest:
    """The tokens of a request in a pool of pages, in their order, as ``[tokens, heads, dim]``."""

    def __init__(self, pool: npt.NDArray[np.uint16], rows: npt.NDArray[np.int64], case: Case) -> None:
        self._pool = pool
        self._rows = rows
        self._case = case

    def __getitem__(self, _: object) -> npt.NDArray[np.uint16]:
        pages = self._pool[self._rows]
        if self._case.order == "HND":
            pages = pages.swapaxes(1, 2)
        return pages.reshape(-1, *pages.shape[2:])[: self._case.tokens]

    def __setitem__(self, _: object, words: npt.NDArray[np.uint16]) -> None:
        padded = np.zeros((self._case.pages * self._case.page_size, *words.shape[1:]), np.uint16)
        padded[: len(words)] = words
        pages = padded.reshape(self._case.pages, self._case.page_size, *words.shape[1:])
        self._pool[self._rows] = pages.swapaxes(1, 2) if self._case.order == "HND" else pages


def layout_of(case: Case, role: str, number: int) -> RankLayout:
    """The memory of one rank: a region for each component."""
    size = case.prefill_tp if role == "source" else case.decode_tp
    components: list[Component] = [
        paged_kv(
            layers=range(case.layers),
            rows=case.rows,
            page_size=case.page_size,
            heads=case.heads,
            head_dim=case.head_dim,
            dtype="bfloat16",
            head_spans=replicated_spans(case.heads, number, size),
            order="NHD" if case.order == "NHD" else "HND",
        )
    ]
    if case.state_layers:
        layers, slots = range(case.layers, case.layers + case.state_layers), case.requests + 1
        components += [
            conv_state(
                layers=layers,
                rows=slots,
                blocks=CONV_BLOCKS,
                columns=CONV_COLUMNS,
                dtype="bfloat16",
                rank=number,
                size=size,
                region=1,
            ),
            recurrent_state(
                layers=layers,
                rows=slots,
                heads=STATE_HEADS,
                shape=STATE_SHAPE,
                dtype="float32",
                rank=number,
                size=size,
                region=2,
            ),
            aux_fields(AUX_FIELDS, rows=slots, region=3),
        ]
    return RankLayout(tuple(components), Coords(tp=(number, size)))


if __name__ == "__main__":
    serve(RankSide(sys.argv[-1], sys.argv[-3], int(sys.argv[-2])))
