"""Feeds decoders: counts what they refuse, and keeps what they choke on."""

from __future__ import annotations

import gc
import itertools
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.check.fuzz.mutate import Mutator, ValueMutator
from kvbaton.check.fuzz.target import Decoder

GROWTH_BYTES = 128 << 20
"""Memory that a slice of inputs may leave behind: caches and pools, not what was sent."""
MOST_FINDINGS = 10
"""Findings after which a slice ends."""


class Finding(msgspec.Struct, frozen=True):
    """An input that was neither taken nor refused as it should be."""

    target: str
    data: bytes
    error: str

    def text(self) -> str:
        """What happened, and the command that repeats it."""
        return f"{self.target}: {self.error}\n  kvbaton check fuzz --only '{self.target}' --replay {self.data.hex()}"


class Count(msgspec.Struct):
    """What became of the inputs of one target."""

    target: str
    inputs: int = 0
    taken: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    """CPU seconds of the input that took longest."""
    growth: int = 0
    """Bytes of memory that the process has more than before."""
    findings: list[Finding] = []

    def add(self, other: Count) -> None:
        """Add another slice of the same target."""
        self.inputs += other.inputs
        self.taken += other.taken
        self.refused += other.refused
        self.seconds += other.seconds
        self.slowest = max(self.slowest, other.slowest)
        self.growth = max(self.growth, other.growth)
        self.findings = [*self.findings, *other.findings]


def inputs_of(decoder: Decoder, count: int, seed: str, *, systematic: bool) -> Iterator[bytes]:
    """``count`` inputs: with ``systematic`` first the examples cut at each byte, then changed ones."""
    changed = Mutator(seed, decoder.examples)
    first = itertools.islice(changed.systematic(), count) if systematic else iter(())
    given = 0
    for data in first:
        given += 1
        yield data
    values = _values(decoder, seed) if decoder.values else None
    for number in range(count - given):
        yield next(values) if values is not None and number % 2 else changed.next()


def _values(decoder: Decoder, seed: str) -> Iterator[bytes]:
    kind = msgspec.msgpack if decoder.values == "msgpack" else msgspec.json
    pack: Callable[[Any], bytes] = kind.encode
    unpack: Callable[[bytes], Any] = kind.decode
    mutator = ValueMutator(seed, [unpack(example[decoder.head :]) for example in decoder.examples])
    while True:
        try:
            packed = pack(mutator.next())
        except (OverflowError, TypeError, ValueError):
            # A number or a key that the format cannot say.
            continue
        yield decoder.wrap(packed)


def fuzz(
    decoder: Decoder,
    count: int,
    seed: str,
    *,
    systematic: bool = True,
    progress: Callable[[int], None] = lambda inputs: None,
) -> Count:
    """Feed ``count`` inputs. ``progress`` is told now and then how many there were."""
    found = Count(decoder.name)
    feed = decoder.make()
    before = _memory()
    began = time.perf_counter()
    clock = time.thread_time
    for data in inputs_of(decoder, count, seed, systematic=systematic):
        start = clock()
        try:
            feed(data)
            found.taken += 1
        except decoder.refusals:
            found.refused += 1
        except Exception as error:
            found.findings.append(Finding(decoder.name, data, _where(error)))
            feed = decoder.make()
        took = clock() - start
        found.inputs += 1
        if took > found.slowest:
            found.slowest = took
            if took > decoder.patience:
                found.findings.append(Finding(decoder.name, data, f"it took {took:.1f} s"))
        if not found.inputs % 1000:
            progress(found.inputs)
        if len(found.findings) >= MOST_FINDINGS:
            break
    found.seconds = time.perf_counter() - began
    found.growth = max(0, _memory() - before)
    if found.growth > GROWTH_BYTES:
        found.findings.append(Finding(decoder.name, b"", f"{found.growth >> 20} MiB more memory after {count} inputs"))
    return found


def replay(decoder: Decoder, data: bytes) -> Count:
    """Feed one input."""
    found = Count(decoder.name)
    try:
        decoder.make()(data)
        found.taken = 1
    except decoder.refusals:
        found.refused = 1
    except Exception as error:
        found.findings.append(Finding(decoder.name, data, _where(error)))
    found.inputs = 1
    return found


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    return f"{type(error).__name__}: {str(error)[:200]} ({Path(last.filename).name}:{last.lineno} in {last.name})"


def _memory() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
