"""Who moves a case from the source's pools into the mapped pool of the destination's process, all on streams."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from kvbaton.bench.contenders.work import TENSORS, Work
from kvbaton.bench.gpu.cases import Case
from kvbaton.bench.gpu.checks import places, sizes
from kvbaton.copy.gpu import Copier
from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.plan import Int64s

MOST_BATCHED = 65536
PREFER_COPY_ENGINE = 1
"""cudaMemcpyFlagPreferOverlapWithCompute."""


class Pools:
    """The memory of one case: of each source rank here, of the destination mapped."""

    def __init__(self, case: Case, mapped: torch.Tensor, device: int) -> None:
        self.case = case
        self.mapped = mapped
        self.device = device
        self.sources = [
            torch.randint(1, 256, (nbytes,), dtype=torch.uint8, device=f"cuda:{device}") for nbytes in case.source_bytes
        ]
        self.bases = [_base(source) for source in self.sources]
        self.there = _base(mapped)
        # Ordinary copies open the way between two GPUs, each in its direction.
        mapped[:1].copy_(self.sources[0][:1])
        self.sources[0][:1].copy_(mapped[:1])

    def copy(self, copier: Copier) -> None:
        """Ours: rows to rows."""
        for base, transfers in zip(self.bases, self.case.transfers, strict=True):
            for transfer in transfers:
                copier.copy_boxes(transfer, base, self.there)

    def gather(self, copier: Copier, packed: torch.Tensor) -> None:
        """Ours: rows to a packed buffer."""
        at = packed.data_ptr()
        for base, transfers in zip(self.bases, self.case.transfers, strict=True):
            for transfer in transfers:
                boxes, units = transfer.boxes, transfer.source_units
                copier.gather(boxes.shape, boxes.source, units, base, at, transfer.nbytes, cast=boxes.cast)
                at += transfer.nbytes

    def scatter(self, copier: Copier, packed: torch.Tensor) -> None:
        """Ours: a packed buffer to the mapped rows."""
        at = packed.data_ptr()
        for transfers in self.case.transfers:
            for transfer in transfers:
                boxes, units = transfer.boxes, transfer.destination_units
                copier.scatter(boxes.shape, boxes.destination, units, self.there, at, transfer.nbytes)
                at += transfer.nbytes

    def straight(self) -> None:
        """As many contiguous bytes, by the driver's own copy."""
        at = 0
        for source, transfers in zip(self.sources, self.case.transfers, strict=True):
            nbytes = sum(transfer.nbytes for transfer in transfers)
            self.mapped[at : at + nbytes].copy_(source[:nbytes], non_blocking=True)
            at += nbytes


def indexing(pools: Pools, work: Work, rows: tuple[Int64s, Int64s]) -> Callable[[], None]:
    """Torch: a gather by ``index_select``, a scatter by ``index_copy_``, of elements as wide as they may be."""
    dtype = torch.int64 if work.piece % 8 == 0 else torch.uint8
    shape = TENSORS, work.rows, -1
    source, mapped = (each.view(dtype).view(shape) for each in (pools.sources[0], pools.mapped))
    at, to = (torch.from_numpy(each).to(pools.sources[0].device) for each in rows)

    def move() -> None:
        mapped.index_copy_(1, to, source.index_select(1, at))

    return move


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (("order", ctypes.c_int), ("source", _Location), ("destination", _Location), ("flags", ctypes.c_uint))


def batch(pools: Pools, flags: int) -> Callable[[], None]:
    """CUDA's ``cudaMemcpyBatchAsync`` with a list of all pieces; it refuses the default stream.

    Raises `TransportUnavailable` where there is none.
    """
    function, forget = _batch_functions()
    at, to, lengths = pieces_of(pools)
    to += pools.there[0]
    attributes, first = _Attributes(order=1, flags=flags), ctypes.c_size_t(0)
    count = len(lengths)

    def move() -> None:
        code = function(
            to.ctypes.data,
            at.ctypes.data,
            lengths.ctypes.data,
            count,
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            torch.cuda.current_stream(pools.device).cuda_stream,
        )
        if code:
            forget()  # torch would raise it at whatever comes next
            raise TransportError(f"cudaMemcpyBatchAsync of {count} pieces: error {code}")

    return move


def _batch_functions() -> tuple[Any, Any]:
    if int((torch.version.cuda or "0").split(".")[0]) < 13:
        raise TransportUnavailable("cudaMemcpyBatchAsync is called as CUDA 13 has it")
    try:
        library = ctypes.CDLL("libcudart.so.13")
        function = library.cudaMemcpyBatchAsync
    except (OSError, AttributeError) as error:
        raise TransportUnavailable(f"cudaMemcpyBatchAsync: {error}") from error
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer]
    return function, library.cudaGetLastError


def pieces_of(pools: Pools) -> tuple[Int64s, Int64s, Int64s]:
    """Of every piece the address at the source, its place in the destination's pool, and its bytes."""
    found = [
        (places(each, "source") + base[0], places(each, "destination"), sizes(each))
        for base, transfers in zip(pools.bases, pools.case.transfers, strict=True)
        for each in transfers
    ]
    at, to, lengths = (np.concatenate(column) for column in zip(*found, strict=True))
    return at, to, lengths


def of_case(pools: Pools, copier: Copier, packed: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Those of whom every case has one: by name."""
    return {
        "straight copy": pools.straight,
        "ours": partial(pools.copy, copier),
        "our gather": partial(pools.gather, copier, packed),
        "our scatter": partial(pools.scatter, copier, packed),
    }


def _base(memory: torch.Tensor) -> Int64s:
    return np.array([memory.data_ptr()], np.int64)
