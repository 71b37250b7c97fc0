"""The router of a soak: keeps every decode engine full, and notes how each room ends at each of its ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbaton.check.soak.diary import Diary
from kvbaton.check.soak.fleet import Fleet
from kvbaton.check.soak.tally import Tally, normalised

END_SECONDS = 40.0
"""Every room has ended by then: all its deadlines together are shorter. Time in which a rank stands still is extra."""
FREE_SECONDS = 60.0
"""Its rows are back by then."""
HALF_SHARE = 0.003
"""Rooms of which only one side ever hears."""


@dataclass
class _Room:
    number: int
    started: float
    still: dict[str, float]
    """How long each of its ranks had stood still before."""
    not_ended: set[str]
    not_free: set[str]
    calm: bool
    engine: str
    ends: dict[str, tuple[str, str]] = field(default_factory=dict)


class Traffic:
    """Rooms under way, by number."""

    def __init__(self, fleet: Fleet, rng: random.Random, tally: Tally, load: int, diary: Diary) -> None:
        self._fleet, self._rng, self._tally, self._load, self._diary = fleet, rng, tally, load, diary
        self._rooms: dict[int, _Room] = {}
        self._of_engine = dict.fromkeys(fleet.decodes, 0)
        self.counts: dict[int, dict[str, dict[str, Any]]] = {}
        """Answers to `count`, by tag and rank."""

    def __len__(self) -> int:
        return len(self._rooms)

    def fill(self) -> None:
        """Begin as many rooms as the load allows."""
        replicas = [name for name, keys in self._fleet.prefills.items() if self._fleet.serving(keys)]
        for engine, keys in self._fleet.decodes.items():
            while replicas and self._fleet.serving(keys) and self._of_engine[engine] < self._load:
                self.begin(self._rng.choice(replicas), engine)

    def begin(self, replica: str, engine: str, *, calm: bool = False) -> None:
        """Begin one room, as a router does: both sides are told. ``calm``: no fault is about, so it must succeed."""
        prefills, decodes = self._fleet.prefills[replica], self._fleet.decodes[engine]
        number = self._rng.getrandbits(63)
        pages = self._rng.choice((1, 2, 3, 6, 10, 16, 24, 96))
        tokens = pages * 16 - self._rng.randrange(16)
        told = [*prefills, *decodes]
        if not calm and self._rng.random() < HALF_SHARE:
            told = list(self._rng.choice((prefills, decodes)))
        self._rng.shuffle(told)
        chunks = self._rng.choice((1, 1, 2, 4))
        for key in told:
            self._fleet.ranks[key].tell("room", number=number, tokens=tokens, chunks=chunks)
        still = {key: self._fleet.ranks[key].still_seconds for key in told}
        self._rooms[number] = _Room(number, time.monotonic(), still, set(told), set(told), calm, engine)
        self._of_engine[engine] += 1
        self._tally.rooms += 1

    def heard(self, key: str, said: dict[str, Any]) -> None:
        """A rank said something."""
        event = said["event"]
        if event == "count":
            self.counts.setdefault(said["tag"], {})[key] = said
            return
        room = self._rooms.get(said["room"])
        if event == "wrong":
            self._tally.wrong.append(f"{key}: room {said['room']}: {said['what']} ({said['words']} words)")
        elif room is None:
            return
        elif event == "end":
            room.ends[key] = (said["status"], said["reason"])
            room.not_ended.discard(key)
        elif event == "free":
            room.not_free.discard(key)
            self._close_if_over(room)

    def gone(self, key: str) -> None:
        """A rank is gone, and with it what it had to say."""
        for room in list(self._rooms.values()):
            room.not_ended.discard(key)
            room.not_free.discard(key)
            self._close_if_over(room)

    def look_for_hangs(self) -> None:
        """Note the rooms that are late, and wait for them no more."""
        now = time.monotonic()
        for room in list(self._rooms.values()):
            for key in [*room.not_free]:
                lived = now - room.started - (self._fleet.ranks[key].still_seconds - room.still[key])
                limit = END_SECONDS if key in room.not_ended else FREE_SECONDS
                if lived > limit:
                    what = "did not end" if key in room.not_ended else f"ended ({room.ends[key]}) and keeps its rows"
                    self._tally.hangs.append(f"room {room.number} {what} within {limit:g} s at {key} of {room.engine}")
                    room.not_ended.discard(key)
                    room.not_free.discard(key)
            self._close_if_over(room)

    def _close_if_over(self, room: _Room) -> None:
        if room.not_free or room.number not in self._rooms:
            return
        del self._rooms[room.number]
        self._of_engine[room.engine] -= 1
        self._count(room)

    def _count(self, room: _Room) -> None:
        if any(status != "SUCCESS" for status, _ in room.ends.values()):
            lived = time.monotonic() - room.started
            self._diary.note(
                f"room {room.number} of {room.engine}, {lived:.3f} s, told {sorted(room.still)}: {room.ends}"
            )
        tally = self._tally
        decodes = self._of(room, "d")
        prefills = self._of(room, "p")
        for status, reason in prefills:
            if status == "FAILED":
                tally.prefill_reasons[normalised(reason)] += 1
        failed = [reason for status, reason in decodes if status == "FAILED"]
        tally.unnamed += sum(not reason for _, reason in (*decodes, *prefills) if _ == "FAILED")
        if failed:
            tally.failed += 1
            tally.reasons[normalised(failed[0])] += 1
        elif len(decodes) == len(self._fleet.decodes[room.engine]):
            tally.succeeded += 1
        elif any(status == "FAILED" for status, _ in prefills):
            tally.failed += 1
            tally.reasons["(at prefill) " + normalised(next(r for s, r in prefills if s == "FAILED"))] += 1
        else:
            tally.lost_with_their_process += 1
        if room.calm:
            reasons = [reason for status, reason in (*decodes, *prefills) if status == "FAILED"]
            if reasons and not any("whim" in reason for reason in reasons):
                tally.not_recovered.append(f"room {room.number} of {room.engine}: {reasons[0]}")

    @staticmethod
    def _of(room: _Room, side: str) -> Sequence[tuple[str, str]]:
        return [end for key, end in room.ends.items() if key.startswith(side)]
