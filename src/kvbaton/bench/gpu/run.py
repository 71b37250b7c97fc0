"""All figures of ``kvbaton bench gpu``. Rates are in GB/s (10**9 bytes a second), as vendors state memory's."""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kvbaton.bench.contenders.work import TENSORS, Work
from kvbaton.bench.gpu.cases import Case, conv_blocks, head_slices, in_pieces, request
from kvbaton.bench.gpu.checks import digests
from kvbaton.bench.gpu.contenders import MOST_BATCHED, PREFER_COPY_ENGINE, Pools, batch, indexing, of_case
from kvbaton.bench.gpu.measure import latency, once, seconds_each, slow_down
from kvbaton.bench.gpu.nixl import Nixl
from kvbaton.bench.gpu.peer import Peer
from kvbaton.bench.report import Figure, absent, at_least, at_most
from kvbaton.bench.transfer import size_words
from kvbaton.copy.gpu import Copier
from kvbaton.errors import KVBatonError, TransferFailed

STRAIGHT, NIXL, BATCH, ENGINE = "straight copy", "NIXL", "cudaMemcpyBatchAsync", "cudaMemcpyBatchAsync, copy engine"
SMALL, TINY = 128, 256
STRAIGHT_TARGETS = {128: 0.75, 256: 0.9, 512: 0.9, 1024: 0.9, 2048: 0.9}
NIXL_TARGETS = {256: 5000.0, 512: 5000.0, 1024: 5000.0, 2048: 5000.0}
SLICES_TARGET = 0.75
PACKED_TARGETS = (0.35, 2000.0)
PACKED_PIECE, PACKED_TIMES = 2048, 4
BEYOND_SECONDS = 1e-3
LAUNCH_SECONDS = 200e-6
LIMITS = (8, 16, 32, 64)
LATENCY_PAGES = (1, 4, 16, 64)


class Bench:
    """One run: a destination's process on one GPU, and this one on the same or another."""

    def __init__(self, devices: tuple[int, int], against: Sequence[str], megabytes: int, runs: int) -> None:
        self._here, self._there = devices
        self._against, self._nbytes, self._runs = against, megabytes << 20, runs
        torch.cuda.set_device(self._here)
        self._copier = Copier(self._here)
        self.figures: list[Figure] = []

    def run(self, pieces: Sequence[int]) -> list[Figure]:
        """All of it. What fails is a row that says why."""
        size = self._nbytes
        with Peer(self._there) as self._peer, torch.cuda.stream(torch.cuda.Stream(self._here)):  # type: ignore[no-untyped-call]
            for piece in pieces:
                self._try(f"mapped, {size_words(piece)} pieces, shuffled", self._pieces, piece)
            for piece in (256, 2048):
                words = f"mapped, {size_words(piece)} pieces, contiguous"
                self._try(words, lambda piece: self._case(in_pieces(piece, size, shuffled=False)[0], None), piece)
            for slices in ((2, 1, 1), (2, 1, 16), (8, 4, 1), (8, 4, 16)):
                words = f"mapped, head slices {slices}"
                self._try(
                    words, lambda each: self._case(head_slices(each[0], each[1], each[2], size), SLICES_TARGET), slices
                )
            self._try("mapped, conv sub-blocks", lambda nbytes: self._case(conv_blocks(nbytes), None), size)
            for pages in LATENCY_PAGES:
                self._try(f"latency of {pages} pages", self._small, pages)
            self._try("one request", self._one_request, 4096)
            self._try("matrix products", self._beside_products, size)
        return self.figures

    def _try(self, name: str, part: Callable[[Any], object], argument: Any) -> None:
        try:
            part(argument)
        except Exception as error:
            traceback.print_exc()
            self._add(absent(name, "GB/s", "", f"{type(error).__name__}: {error}"))

    def _pieces(self, piece: int) -> None:
        case, work = in_pieces(piece, self._nbytes)
        pools, rates = self._case(case, STRAIGHT_TARGETS.get(piece), work)
        if "nixl" not in self._against:
            return
        nixl, direct = self._nixl(pools, rates, NIXL_TARGETS.get(piece))
        if nixl is not None:
            nixl.close()
        if piece == PACKED_PIECE and nixl is not None:
            del nixl, pools
            self._packed(in_pieces(piece, PACKED_TIMES * self._nbytes)[0], direct)

    def _case(self, case: Case, target: float | None, work: Work | None = None) -> tuple[Pools, dict[str, float]]:
        pools = Pools(case, self._peer.call("pool", case.destination_bytes), self._here)
        buffer = torch.empty(case.nbytes, dtype=torch.uint8, device=f"cuda:{self._here}")
        contenders = of_case(pools, self._copier, buffer)
        if work is not None:
            contenders["torch indexing"] = indexing(pools, work, (work.chosen("source"), work.chosen("destination")))
        reasons: dict[str, str] = {}
        if case.pieces <= MOST_BATCHED:
            for name, flags in ((BATCH, 0), (ENGINE, PREFER_COPY_ENGINE)):
                try:
                    contenders[name] = batch(pools, flags)
                    contenders[name]()
                except KVBatonError as error:
                    contenders.pop(name, None)
                    reasons[name] = str(error)
        self._check(pools, contenders)
        seconds = seconds_each(contenders, self._runs)
        rates = {name: case.nbytes / each / 1e9 for name, each in seconds.items()}
        self._say(case, rates, target, reasons)
        return pools, rates

    def _check(self, pools: Pools, contenders: dict[str, Any]) -> None:
        """Every contender that moves rows leaves the right bytes, and no other."""
        parts = list(zip(pools.case.transfers, pools.sources, strict=True))
        wanted = [digest for transfers, pool in parts for digest in digests(transfers, "source", pool)]
        flat = [transfer for transfers in pools.case.transfers for transfer in transfers]
        for name, move in contenders.items():
            if name in (STRAIGHT, "our gather"):
                continue
            self._peer.call("empty")
            if name == "our scatter":
                contenders["our gather"]()
            move()
            torch.cuda.synchronize()
            self._compare(flat, wanted, f"{name}, {pools.case.name}")

    def _compare(self, transfers: list[Any], wanted: list[int], what: str) -> None:
        found, clean = self._peer.call("digests", transfers)
        if found != wanted or not clean:
            raise TransferFailed(f"{what}: the destination has other bytes than the source")

    def _say(self, case: Case, rates: dict[str, float], target: float | None, reasons: dict[str, str]) -> None:
        straight = rates[STRAIGHT]
        self._add(at_least(f"mapped, {case.name}", rates["ours"], "GB/s", STRAIGHT, straight, target))
        for name in ("our gather", "our scatter"):
            self._add(at_least(f"{name}, {case.name}", rates[name], "GB/s", STRAIGHT, straight, None))
        for name in ("torch indexing", BATCH, ENGINE):
            words = f"mapped, {case.name}, beside {name}"
            if name in rates:
                self._add(at_least(words, rates["ours"], "GB/s", name, rates[name], None))
            elif name in reasons:
                self._add(absent(words, "GB/s", name, reasons[name], None, rates["ours"]))
        for name in sorted(rates):
            self._add(Figure(f"{name}: {case.name}, {case.nbytes / 2**20:.0f} MiB", rates[name], "GB/s"))

    def _nixl(self, pools: Pools, rates: dict[str, float], target: float | None) -> tuple[Nixl | None, float]:
        """Piece by piece; the agents and what they moved in GB/s, if NIXL is here."""
        words = f"mapped, {pools.case.name}"
        try:
            nixl = Nixl(pools, self._peer)
        except (KVBatonError, RuntimeError) as error:
            self._add(absent(words, "GB/s", NIXL, str(error), target, rates["ours"]))
            return None, 0.0
        nixl.direct()
        timings = [nixl.direct() for _ in range(3)]
        direct = statistics.median(nbytes / seconds / 1e9 for seconds, nbytes in timings)
        self._add(at_least(words, rates["ours"], "GB/s", NIXL, direct, target))
        self._add(Figure(f"{NIXL}: {pools.case.name}, {timings[0][1] / 2**20:.0f} MiB", direct, "GB/s"))
        return nixl, direct

    def _packed(self, case: Case, direct: float) -> None:
        """Gather, one write, scatter; a large request, so that what a turn of two processes costs does not decide."""
        pools = Pools(case, self._peer.call("pool", case.destination_bytes), self._here)
        nixl = Nixl(pools, self._peer)
        (transfers,) = case.transfers
        wanted = digests(transfers, "source", pools.sources[0])
        nixl.packed(self._copier)
        self._compare(list(transfers), wanted, "packed over NIXL")
        seconds = statistics.median(nixl.packed(self._copier) for _ in range(self._runs))
        straight = seconds_each({STRAIGHT: pools.straight}, self._runs)[STRAIGHT]
        name, rate = f"packed over NIXL, {case.name}, {case.nbytes / 2**20:.0f} MiB", case.nbytes / seconds / 1e9
        self._add(at_least(name, rate, "GB/s", STRAIGHT, case.nbytes / straight / 1e9, PACKED_TARGETS[0]))
        self._add(at_least(name, rate, "GB/s", NIXL, direct, PACKED_TARGETS[1]))
        nixl.close()

    def _small(self, pages: int) -> None:
        """A small request: from the call until the bytes are in place, pieces of 2 KiB in 64 tensors."""
        case, _ = in_pieces(2048, pages * TENSORS * 2048)
        pools = Pools(case, self._peer.call("pool", case.destination_bytes), self._here)
        ours, straight = partial(pools.copy, self._copier), pools.straight
        for move in (ours, straight):
            latency(move, 20)
        name = f"latency of {pages} pages of 64 pieces, 2 KiB each"
        mine, theirs = (latency(move, 200) * 1e6 for move in (ours, straight))
        self._add(at_most(name, mine, "us", STRAIGHT, theirs, None))
        if "nixl" not in self._against:
            return
        try:
            nixl = Nixl(pools, self._peer)
        except (KVBatonError, RuntimeError) as error:
            self._add(absent(name, "us", NIXL, str(error), None, mine))
            return
        nixl.direct()
        direct = statistics.median(nixl.direct()[0] for _ in range(5)) * 1e6
        self._add(at_most(name, mine, "us", NIXL, direct, None))
        nixl.close()

    def _one_request(self, tokens: int) -> None:
        """One request of so many tokens in 64 layers: bound, launched, and there."""
        plan, pages, nbytes = request(tokens, 64)
        first = tuple(plan.bind("kv", (0, tokens), *pages))
        case = Case(f"{tokens:,} tokens, 64 layers", (first,), (nbytes,), nbytes)
        pools = Pools(case, self._peer.call("pool", nbytes), self._here)
        self._check(pools, {"ours": partial(pools.copy, self._copier)})
        prepared: list[float] = []

        def hand_over() -> None:
            started = time.perf_counter()
            for transfer in plan.bind("kv", (0, tokens), *pages):
                self._copier.copy_boxes(transfer, pools.bases[0], pools.there)
            prepared.append(time.perf_counter() - started)

        for move in (hand_over, pools.straight):
            latency(move, 10)
        pairs = [(once(hand_over), once(pools.straight)) for _ in range(100)]
        whole, copied = (statistics.median(column) for column in zip(*pairs, strict=True))
        words = f"one request of {tokens:,} tokens, 64 layers, page 1"
        beyond = (whole - copied) * 1e3
        self._add(at_most(f"{words}, until it is visible", whole * 1e3, "ms", STRAIGHT, copied * 1e3, None))
        self._limit(f"{words}, beyond the time of a straight copy", beyond, BEYOND_SECONDS * 1e3, "ms")
        launched = statistics.median(prepared[-100:]) * 1e6
        self._limit(f"{words}, plan and launch on the CPU", launched, LAUNCH_SECONDS * 1e6, "us")

    def _limit(self, name: str, value: float, target: float, unit: str) -> None:
        self._add(Figure(name, value, unit, target=target, met=value <= target, target_unit=unit))

    def _beside_products(self, nbytes: int) -> None:
        """A stream of matrix products, with copies beside it: on a stream like theirs, and on one that comes first."""
        case, _ = in_pieces(2048, nbytes)
        pools = Pools(case, self._peer.call("pool", case.destination_bytes), self._here)
        movers: dict[str, Callable[[], None]] = {
            "all multiprocessors": partial(pools.copy, self._copier),
            STRAIGHT: pools.straight,
        }
        for limit in LIMITS:
            copier = Copier(self._here, multiprocessors=limit)
            movers[f"{limit} multiprocessors"] = partial(pools.copy, copier)
        large, _ = in_pieces(8 << 20, 1)
        large_pools = Pools(large, self._peer.call("pool", large.destination_bytes), self._here)
        engine = f"copy engine, {size_words(8 << 20)} pieces"
        try:
            movers[engine] = batch(large_pools, PREFER_COPY_ENGINE)
            movers[engine]()
        except KVBatonError as error:
            self._add(absent(f"copies beside products, {engine}", "GB/s", "", str(error)))
            movers.pop(engine, None)
        alone = slow_down(torch.cuda.current_stream(), None, 0)[0]
        for words, priority in (("", 0), (" first", -1)):
            stream = torch.cuda.Stream(self._here, priority=priority)  # type: ignore[no-untyped-call]
            for name, move in movers.items():
                with torch.cuda.stream(stream):
                    latency(move, 3)
                seconds, rate = slow_down(stream, move, large.nbytes if name == engine else case.nbytes)
                what = f"8192^3 bfloat16 product beside copies{words}, {name}"
                self._add(at_most(what, seconds * 1e3, "ms", "alone", alone * 1e3, None))
                self._add(Figure(f"copies{words} beside products, {name}", rate / 1e9, "GB/s"))

    def _add(self, figure: Figure) -> None:
        self.figures.append(figure)
        ratio = "" if figure.ratio is None else f", {figure.ratio:.3g} x {figure.peer}"
        # It takes minutes: who waits sees how far it is.
        print(f"{figure.name}: {figure.value} {figure.unit}{ratio} {figure.note}", file=sys.stderr, flush=True)
