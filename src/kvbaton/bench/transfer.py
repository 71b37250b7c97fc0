"""Hands one large request over between two real processes, in shuffled pieces, and checks every byte."""

from __future__ import annotations

import multiprocessing
import statistics
import time
import zlib
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from kvbaton import Component, Manager, RankLayout, Region, SharedMemory, Status
from kvbaton.bench.report import Figure
from kvbaton.errors import TransferFailed
from kvbaton.layout import PAGED, TOKEN, Axis, Tensor
from kvbaton.registry.server import RegistryServer

LAYERS = 32


def _layout(piece: int, pages: int) -> RankLayout:
    """Pages of one token: each is a separate piece of ``piece`` bytes in every tensor, twice as many as are moved."""
    axes = (Axis(TOKEN, 1, piece, ((0, 1),)), Axis("byte", piece, 1, ((0, piece),)))
    tensors = tuple(
        Tensor(role, layer, 0, (2 * layer + index) * 2 * pages * piece, 2 * pages, piece, "uint8", axes)
        for layer in range(LAYERS)
        for index, role in enumerate(("key", "value"))
    )
    return RankLayout((Component("kv", PAGED, tensors, 1),))


def _rows(pages: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng(seed).permutation(2 * pages)[:pages].astype(np.int64)


def _checksum(memory: SharedMemory, rows: np.ndarray[tuple[int], np.dtype[np.int64]], pages: int, piece: int) -> int:
    """A checksum of the rows in their order, in every tensor."""
    return zlib.crc32(np.ascontiguousarray(memory.array.reshape(2 * LAYERS, 2 * pages, piece)[:, rows]).data)


def _decode(pipe: Connection, registry: str, transport: str, piece: int, pages: int) -> None:
    """The other process: offers rows for each room it is told, and answers with what arrived."""
    memory = SharedMemory(4 * LAYERS * pages * piece)
    memory.array[:] = 0
    rows = _rows(pages, 2)
    with Manager(
        _layout(piece, pages), [Region.of(memory)], role="decode", registry=registry, transports=[transport]
    ) as manager:
        pipe.send("ready")
        while (room := pipe.recv()) is not None:
            receiver = manager.receiver(room)
            receiver.offer({"kv": rows}, tokens=pages)
            pipe.send("offered")
            while not receiver.poll().terminal:
                time.sleep(0.0005)
            arrived = time.monotonic()
            pipe.send((receiver.poll(), receiver.reason, arrived, _checksum(memory, rows, pages, piece)))
            receiver.close()


def measure(transport: str, piece: int, megabytes: int, runs: int) -> float:
    """Seconds from the first `send` to success at the receiver: the median of ``runs``, after one that is not counted.

    Raises `TransferFailed` if a room fails or a byte differs.
    """
    pages = max(1, (megabytes << 20) // (2 * LAYERS * piece))
    memory = SharedMemory(4 * LAYERS * pages * piece)
    memory.array[:] = np.random.default_rng(3).integers(0, 256, memory.nbytes, dtype=np.uint8)
    rows = _rows(pages, 1)
    expected = _checksum(memory, rows, pages, piece)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    seconds: list[float] = []
    with RegistryServer("127.0.0.1", 0) as server:
        process = context.Process(target=_decode, args=(there, server.url, transport, piece, pages), daemon=True)
        process.start()
        with Manager(
            _layout(piece, pages), [Region.of(memory)], role="prefill", registry=server.url, transports=[transport]
        ) as manager:
            here.recv()
            for room in range(1 + runs):
                here.send(room)
                here.recv()
                started = time.monotonic()
                sender = manager.sender(room)
                sender.finish({"kv": rows}, tokens=(0, pages))
                status, reason, arrived, checksum = here.recv()
                if status is not Status.SUCCESS or checksum != expected:
                    raise TransferFailed(
                        f"{transport}, {piece} B: {status.value} {reason}; checksum {checksum}, not {expected}"
                    )
                seconds.append(arrived - started)
                sender.close()
            here.send(None)
        process.join(10)
    return statistics.median(seconds[1:])


def copy_seconds(megabytes: int, runs: int) -> float:
    """Seconds of one straight copy of as many bytes within this process, by one thread: the median of ``runs``."""
    source = np.ones(megabytes << 20, np.uint8)
    target = np.zeros_like(source)
    seconds: list[float] = []
    for _ in range(1 + runs):
        started = time.monotonic()
        np.copyto(target, source)
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds[1:])


def run(transports: Sequence[str], pieces: Sequence[int], megabytes: int, runs: int) -> list[Figure]:
    """All figures: throughput of each transport and piece size, as a ratio to a straight copy."""
    straight = megabytes / 1024 / copy_seconds(megabytes, runs)
    figures = [Figure("straight copy, one thread", straight, "GiB/s")]
    for piece in pieces:
        for transport in transports:
            value = megabytes / 1024 / measure(transport, piece, megabytes, runs)
            name = f"{transport}, {piece} B pieces, {megabytes} MiB"
            figures.append(Figure(name, value, "GiB/s", "straight copy", value / straight))
    return figures
