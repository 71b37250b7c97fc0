"""Changes valid inputs: bit by bit, or value by value. Seeded: the same seed gives the same inputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

INTEGERS = (
    *(0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 127, 128, 255, 256, 1023, 1024, 4096, 65535, 65536, 1 << 20, (1 << 20) + 1),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 48, 1 << 50, (1 << 50) + 1, 1 << 62),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -128, -(1 << 31), -(1 << 63)),
)
"""Where bounds are, and just beside them."""
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *("", "a", "kv", "token", "\0", "\n", "\u00e9", "\U0001f600", "-1", "tcp://127.0.0.1:1", "0.0.0.0"),
    *("x" * 129, "x" * 4000),
)
CHANGES = (1, 1, 1, 2, 2, 3, 5)
"""How many changes an input gets: most get few, so that many pass the first check."""
CLAIMS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\x7f\xff\xff\xff",
    b"\xc6\x10\x00\x00\x00",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\x00\x10\x00\x00\x01",
)
"""Beginnings of msgpack values that say that they are huge."""


class Mutator:
    """Makes inputs from ``examples``, which are valid ones."""

    def __init__(self, seed: int | str, examples: Sequence[bytes]) -> None:
        self.random = random.Random(seed)
        self._examples = tuple(examples)
        self._changes: tuple[Callable[[bytearray], None], ...] = (
            self._flip,
            self._flip,
            self._byte,
            self._integer,
            self._integer,
            self._insert,
            self._delete,
            self._repeat,
            self._splice,
            self._cut,
            self._claim,
        )

    def systematic(self) -> Iterator[bytes]:
        """Each example, all of its beginnings, and each with one more byte at its end."""
        for example in self._examples:
            yield example
            for length in range(len(example)):
                yield example[:length]
            yield example + b"\0"

    def next(self) -> bytes:
        """An example with a few changes."""
        changed = bytearray(self.random.choice(self._examples))
        for _ in range(self.random.choice(CHANGES)):
            self.random.choice(self._changes)(changed)
        return bytes(changed)

    def _at(self, data: bytearray) -> int:
        return self.random.randrange(len(data) + 1)

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self.random.randrange(len(data))] ^= 1 << self.random.getrandbits(3)

    def _byte(self, data: bytearray) -> None:
        if data:
            data[self.random.randrange(len(data))] = self.random.choice(
                (0, 1, 0x7F, 0x80, 0xFF, 0x90, 0xC0, 0x22, 0x2C)
            )

    def _integer(self, data: bytearray) -> None:
        width = self.random.choice((1, 2, 4, 8))
        value = self.random.choice(INTEGERS) & ((1 << 8 * width) - 1)
        at = self._at(data)
        data[at : at + width] = value.to_bytes(width, self.random.choice(("little", "big")))

    def _insert(self, data: bytearray) -> None:
        at = self._at(data)
        data[at:at] = self.random.randbytes(1 + self.random.getrandbits(3))

    def _delete(self, data: bytearray) -> None:
        at = self._at(data)
        del data[at : at + 1 + self.random.getrandbits(3)]

    def _repeat(self, data: bytearray) -> None:
        at = self._at(data)
        part = data[at : at + 1 + self.random.getrandbits(5)]
        data[at:at] = part * self.random.choice((1, 1, 2, 20))

    def _splice(self, data: bytearray) -> None:
        other = self.random.choice(self._examples)
        begin = self.random.randrange(len(other) + 1)
        at = self._at(data)
        data[at:] = other[begin:]

    def _cut(self, data: bytearray) -> None:
        del data[self._at(data) :]

    def _claim(self, data: bytearray) -> None:
        at = self._at(data)
        data[at : at + self.random.getrandbits(2)] = self.random.choice(CLAIMS)


class ValueMutator:
    """Changes values inside of plain data (what msgpack or JSON decode to): a few at a time."""

    def __init__(self, seed: int | str, examples: Sequence[Any]) -> None:
        self.random = random.Random(seed)
        self._examples = tuple(examples)

    def next(self) -> Any:
        """An example with a few values changed."""
        value = self.random.choice(self._examples)
        for _ in range(self.random.choice(CHANGES)):
            value = self._changed(value)
        return value

    def _changed(self, value: Any) -> Any:
        """A copy of ``value`` in which one thing differs, at a depth that chance decides."""
        draw = self.random
        if isinstance(value, list) and value and draw.random() < 0.85:
            at = draw.randrange(len(value))
            if draw.random() < 0.75:
                return [*value[:at], self._changed(value[at]), *value[at + 1 :]]
            return self._changed_list(value, at)
        if isinstance(value, dict) and value and draw.random() < 0.9:
            name = draw.choice(list(value))
            if draw.random() < 0.8:
                return {**value, name: self._changed(value[name])}
            rest = {key: other for key, other in value.items() if key != name}
            return rest if draw.random() < 0.5 else {**value, draw.choice(TEXTS): value[name]}
        return self._scalar(value)

    def _changed_list(self, value: list[Any], at: int) -> list[Any]:
        draw = self.random
        kind = draw.getrandbits(2)
        if kind == 0:
            return [*value[:at], *value[at + 1 :]]
        if kind == 1:
            return [*value[:at], *([value[at]] * draw.choice((2, 2, 3, 40))), *value[at + 1 :]]
        if kind == 2:
            return [*value[:at], value[draw.randrange(len(value))], *value[at + 1 :]]
        return draw.sample(value, len(value))

    def _scalar(self, value: Any) -> Any:
        draw = self.random
        chance = draw.random()
        if chance < 0.15:
            return draw.choice((None, True, False, [], {}, 1.5, "x", -1, b"", [[]], draw.choice(FLOATS)))
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            if chance < 0.5:
                return value + draw.choice((-2, -1, 1, 2))
            if chance < 0.6:
                return value * draw.choice((2, 3, 16, 1024))
            return draw.choice(INTEGERS)
        if isinstance(value, float):
            return draw.choice(FLOATS)
        if isinstance(value, bytes):
            at = draw.randrange(len(value) + 1)
            return value[:at] + draw.randbytes(draw.getrandbits(4)) + value[at + draw.getrandbits(2) :]
        if isinstance(value, str):
            if chance < 0.5:
                return draw.choice(TEXTS)
            at = draw.randrange(len(value) + 1)
            return value[:at] + draw.choice(TEXTS[:-2]) + value[at + draw.getrandbits(2) :]
        return draw.choice((*INTEGERS, *TEXTS))
