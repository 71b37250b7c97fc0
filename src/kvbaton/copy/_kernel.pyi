from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.plan.boxes import Cast, Transfer

Int64s = npt.NDArray[np.int64]

def extent(numbers: Int64s, /) -> tuple[int, int]: ...
def check(shape: Int64s, side: Int64s, units: Int64s, region_bytes: Int64s, /) -> int: ...
def copy(
    shape: Int64s,
    source: Int64s,
    destination: Int64s,
    source_units: Int64s,
    destination_units: Int64s,
    source_bases: Int64s,
    destination_bases: Int64s,
    begin: int,
    end: int,
    threads: int,
    cast: Cast | None = None,
    /,
) -> None: ...
def gather(
    shape: Int64s,
    side: Int64s,
    units: Int64s,
    bases: Int64s,
    packed: Any,
    begin: int,
    threads: int,
    cast: Cast | None = None,
    /,
) -> None: ...
def scatter(
    shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, packed: Any, begin: int, threads: int, /
) -> None: ...
def send(
    descriptor: int, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, begin: int, end: int, /
) -> int: ...
def receive(
    descriptor: int, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, begin: int, end: int, /
) -> int: ...
def digest(
    shape: Int64s,
    side: Int64s,
    units: Int64s,
    numbers: Int64s,
    bases: Int64s,
    stream: int,
    threads: int,
    instructions: str = "",
    /,
) -> int: ...

class Pool:
    def __new__(cls, workers: int, name: str, chunk: int, least_chunk: int, /) -> Pool: ...
    def attach(self, bases: Int64s, descriptor: int, dead: str, /) -> object: ...
    def submit(
        self, peer: object, ticket: int, transfers: Sequence[Transfer], source_bases: Int64s, at_once: int, /
    ) -> str | None: ...
    def drain(self) -> list[tuple[int, str]]: ...
    def forget(self, peer: object, reason: str, /) -> None: ...
    def wake_by(self, descriptor: int, /) -> None: ...
    def close(self, reason: str, /) -> None: ...
