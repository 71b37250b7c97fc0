"""Checks digests: what a source sends in chunks and what is in place have the same one, until a byte is another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbaton.check.content import Int64s
from kvbaton.check.explain import Problem
from kvbaton.check.oracle import Memory
from kvbaton.copy import digest_half
from kvbaton.plan import Half, Pages, PairPlan

MODULUS = 1 << 64


class DigestCheck:
    """The digests of one destination, by part and component."""

    def __init__(self, destination: Memory, tokens: int, prefix: int) -> None:
        self._destination = destination
        self._request = tokens, prefix
        self._sent: dict[tuple[int, str], int] = {}
        self._landed: dict[tuple[int, str], list[Half]] = {}

    def tokens(
        self, part: int, plan: PairPlan, name: str, source: Memory, chunk: tuple[int, int], at: Pages, to: Pages
    ) -> None:
        """A chunk of a component with tokens is sent from ``at``; all that is needed lies in ``to`` in the end."""
        self._send(part, name, source, plan.halves(name, "source", chunk, at))
        needed = self._destination.layout.component(name).kind.needed(*self._request)
        self._landed[part, name] = plan.halves(name, "destination", needed, to)

    def rows(self, part: int, plan: PairPlan, name: str, source: Memory, at: Int64s, to: Int64s) -> None:
        """A component without tokens is sent."""
        self._send(part, name, source, plan.slot_halves(name, "source", at))
        self._landed[part, name] = plan.slot_halves(name, "destination", to)

    def problems(self, written: Sequence[int], where: str) -> list[Problem]:
        """What is wrong, once all is in place. ``written`` are the addresses of some bytes that a source wrote."""
        found = self._found()
        problems = [
            Problem(where, f"component {name}: part {part} sent other bytes than those in place, by their digests")
            for (part, name), digest in found.items()
            if digest != self._sent[part, name]
        ]
        memory = self._destination.bytes
        for address in written:
            memory[address] ^= 0x10
            if self._found() == found:
                problems.append(Problem(where, f"byte {address} was changed, and every digest is the same"))
            memory[address] ^= 0x10
        return problems

    def _send(self, part: int, name: str, source: Memory, halves: Sequence[Half]) -> None:
        before = self._sent.get((part, name), 0)
        self._sent[part, name] = (before + sum(_digest(source, half) for half in halves)) % MODULUS

    def _found(self) -> dict[tuple[int, str], int]:
        return {
            key: sum(_digest(self._destination, half) for half in halves) % MODULUS
            for key, halves in self._landed.items()
        }


def _digest(memory: Memory, half: Half) -> int:
    sizes = np.array(memory.sizes, np.int64)
    return digest_half(half, memory.bytes.ctypes.data + memory.bases[:-1], sizes)
