"""What happens in one world: its ranks, its requests and its faults, all drawn from a seed before anything runs.

A scenario is plain data. It can be written down, made smaller by leaving requests and faults out, and run again; what
is left to chance while it runs (delays) is drawn from streams that are named by the seed and by who draws, so that
leaving one thing out changes little else.
"""

from __future__ import annotations

import random
import zlib

import msgspec

from kvbaton.check.faults.models import MOST_TOKENS, Shape

FAULTS_FROM, FAULTS_UNTIL = 0.2, 9.0
"""Seconds of the world within which faults strike."""
ARRIVALS_UNTIL = 6.0
"""Seconds of the world within which requests arrive."""

PROCESS = ("kill", "stop", "clock_jump", "version_skew", "slow_background", "stranger", "double_open")
NETWORK = ("cut", "cut_to_prefill", "cut_to_decode", "slow", "control_closed", "data_closed")
FRAMES = ("corrupt", "duplicate", "reorder", "hostile_rows")
WRITES = ("write_error", "piece_lost", "completion_lost", "slow_write", "admit_refused", "slow_fence", "flip")
REGISTRY = ("registry_down", "registry_restart")
ENGINE = (
    "abort_prefill",
    "abort_decode",
    "abort_twice",
    "abort_after_success",
    "close_early",
    "close_manager",
    "lost_chunk",
    "never_finish",
    "wrong_tokens",
    "no_offer",
    "no_sender",
)
KINDS = PROCESS + NETWORK + FRAMES + WRITES + REGISTRY + ENGINE
"""Every kind of fault."""

HARMLESS = (
    "duplicate",
    "reorder",
    "slow",
    "slow_write",
    "slow_background",
    "stop",
    "stranger",
    "double_open",
    "abort_after_success",
)
"""Kinds that no room may fail of, if they last a second at most."""

SLIPS = ("lost_chunk", "never_finish", "wrong_tokens", "no_offer", "no_sender", "abort_after_success")
"""What an engine does wrong with one request: ``target`` is its index."""


SILENT = ("flip",)
"""Kinds that nothing but digests can find: a world with one of them has digests."""

AT_DECODE = ("admit_refused", "slow_fence", "hostile_rows", "abort_decode")
"""What befalls decode ranks only."""


class Fault(msgspec.Struct, frozen=True):
    """Something that goes wrong at a time. What ``target`` and ``other`` name depends on the kind.

    `FRAMES` strike the next frames of a place, ``other`` + 1 of them where they are repeated or reordered.
    """

    kind: str
    at: float
    target: int = 0
    other: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.at:7.3f} s  {self.kind}(target {self.target}, other {self.other}, {self.seconds:g} s)"


class Request(msgspec.Struct, frozen=True):
    """A request as the router sees it."""

    index: int
    room: int
    at: float
    replica: int
    group: int
    tokens: int
    prefix: int
    cuts: tuple[int, ...]
    named: bool
    """Whether the decode side is told which replica serves it."""
    aux: bool

    def __str__(self) -> str:
        return (
            f"{self.at:7.3f} s  request {self.index}: room {self.room}, replica {self.replica}, group {self.group}, "
            f"tokens {self.prefix}..{self.tokens}, cuts {list(self.cuts)}"
        )


class Scenario(msgspec.Struct, frozen=True):
    """Everything that is decided beforehand."""

    seed: int
    shape: Shape
    transports: tuple[str, ...]
    fabric_aux: bool
    striped: bool
    digest: bool
    """Whether rooms are checked by digests."""
    write_seconds: float
    """How long a write takes at most, where nothing is wrong with it."""
    must_succeed: bool
    """Whether every request must succeed: nothing in ``faults`` can make one fail."""
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]

    def stream(self, *names: object) -> random.Random:
        """A source of chance for one purpose."""
        return random.Random(self.seed * 0x9E3779B1 ^ zlib.crc32(repr(names).encode()))


def draw(seed: int, size: int = 1) -> Scenario:
    """The scenario of a seed. ``size`` is how many times more requests and faults than in a small world."""
    chance = random.Random(seed * 2 + 1)
    shape = _shape(chance)
    mood = chance.random()
    if mood < 0.3:
        # Rows for everybody: ranks that wait for each other's rows would be a reason to fail.
        shape = msgspec.structs.replace(shape, pool_tokens=12 * MOST_TOKENS, slots=12)
    requests = tuple(_request(chance, shape, index, size) for index in range(chance.randint(4, 9) * size))
    # A look-up while the registry has not heard from all ranks again fails; but no room that is open may be lost.
    restarts = 0.1 <= mood < 0.3 and chance.random() < 0.4
    if restarts:
        shape = msgspec.structs.replace(shape, replicas=2)
        requests = tuple(_request(chance, shape, index, size) for index in range(len(requests)))
    if mood < 0.1:
        faults: tuple[Fault, ...] = ()
    else:
        harmless = mood < 0.3
        known: tuple[str, ...] = HARMLESS if harmless else KINDS
        if restarts:
            known = ("registry_restart", "slow_background", "double_open")
        # A few kinds at a time: what they do to each other is seen more often than among all.
        kinds = chance.sample(known, min(len(known), chance.randint(1, 6)))
        count = chance.randint(1, 8) * size
        faults = tuple(_fault(chance, shape, len(requests), chance.choice(kinds), harmless) for _ in range(count))
    return Scenario(
        seed,
        shape,
        chance.choice((("stream",), ("stream",), ("mapped",), ("mapped", "stream"))),
        chance.random() < 0.4,
        chance.random() < 0.7,
        chance.random() < 0.25 or any(fault.kind in SILENT for fault in faults),
        chance.choice((0.05, 0.3, 1.5)),
        mood < 0.3 and not restarts,
        requests,
        tuple(sorted(faults, key=lambda fault: fault.at)),
    )


def _shape(chance: random.Random) -> Shape:
    parts = [name for name in ("kv", "swa", "conv", "aux") if chance.random() < 0.6] or ["kv"]
    prefill = chance.choice(((1, 1), (1, 1), (2, 1), (2, 1), (1, 2), (2, 2)))
    replicas = chance.choice((1, 1, 2)) if prefill != (2, 2) else 1
    decode, groups = chance.choice(((1, 1), (1, 2), (2, 1), (2, 1), (1, 1)))
    return Shape(
        tuple(parts),
        *prefill,
        replicas,
        decode,
        groups,
        chance.choice((2, 4)),
        chance.choice((2, 4)),
        chance.choice((24, 32, 48)),
        chance.choice((2, 3)),
    )


def _request(chance: random.Random, shape: Shape, index: int, size: int) -> Request:
    tokens = chance.choice((0, 1, 3, 5, 8, 11, 13, MOST_TOKENS))
    prefix = chance.choice((0, 0, 0, tokens // 2, tokens, min(tokens, shape.decode_page)))
    cuts = tuple(sorted(chance.randint(0, tokens) for _ in range(chance.choice((0, 0, 1, 2, 3)))))
    replica = chance.randrange(shape.replicas)
    return Request(
        index,
        # A number that one replica gave up is for a while not to be used at another.
        room=7 + 100 * replica + chance.randrange(2 * size),
        at=round(chance.uniform(0.0, ARRIVALS_UNTIL), 3),
        replica=replica,
        group=chance.randrange(shape.groups),
        tokens=tokens,
        prefix=prefix,
        cuts=cuts,
        named=chance.random() < 0.5,
        aux="aux" in shape.parts and chance.random() < 0.8,
    )


def _fault(chance: random.Random, shape: Shape, requests: int, kind: str, harmless: bool) -> Fault:
    prefill = shape.prefill_ranks * shape.replicas
    decode = shape.decode_tp * shape.groups
    seconds = chance.uniform(0.05, 0.8) if harmless else chance.choice((0.3, 1.0, 3.0, 6.0, 12.0)) * chance.random()
    targets = range(prefill + decode)
    if kind in SLIPS:
        targets = range(requests)
    elif kind in AT_DECODE:
        targets = range(prefill, prefill + decode)
    elif kind in NETWORK or kind in WRITES or kind in ("abort_prefill", "stranger"):
        targets = range(prefill)
    target, other = chance.choice(targets), chance.randrange(decode if kind in NETWORK else 8)
    return Fault(kind, round(chance.uniform(FAULTS_FROM, FAULTS_UNTIL), 3), target, other, round(seconds, 3))
