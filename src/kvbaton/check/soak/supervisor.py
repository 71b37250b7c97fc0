"""The supervisor of a soak: keeps the load up, does something bad each second, and counts."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbaton.check.soak.descriptors import leaked, left_behind
from kvbaton.check.soak.diary import Diary
from kvbaton.check.soak.faults import Faults
from kvbaton.check.soak.fleet import Fleet
from kvbaton.check.soak.tally import Tally, normalised
from kvbaton.check.soak.traffic import FREE_SECONDS, Traffic

CALM_ROOMS = 10
"""Rooms of each pair of engines when nothing bad happens, before and after."""
FORGET_SECONDS = 7.0
"""After so long nothing is remembered of rooms that ended early."""
LAZY_THREADS = 4
"""Threads for handshakes that a manager starts when it first needs them."""
WARM_SECONDS = 20.0
"""Memory of a process counts from then on."""
GROWTH = 1.15
GROWTH_KIBIBYTES = 16 << 10
"""How much more than before a process may take in the last part of the run."""


class Soak:
    """``transports`` are tried side by side, one for each decode engine; ``load`` rooms are under way at each."""

    def __init__(
        self,
        transports: Sequence[str],
        seed: int,
        logs: Path,
        *,
        load: int = 8,
        interval: float = 1.0,
        progress: Callable[[Tally, float], None] | None = None,
    ) -> None:
        self.tally = Tally()
        self._logs = logs
        self._interval = interval
        self._progress = progress
        self._memory: dict[tuple[str, int], list[tuple[float, int]]] = {}
        rng = random.Random(seed)
        self._fleet = Fleet(
            transports,
            rng,
            logs,
            self.tally,
            lambda key, said: self._traffic.heard(key, said),
            lambda key: self._traffic.gone(key),
        )
        self._diary = diary = Diary(logs / "diary.txt")
        self._traffic = Traffic(self._fleet, rng, self.tally, load, diary)
        self._faults = Faults(self._fleet, random.Random(seed + 1), self.tally, diary)
        self._tags = 0

    def run(self, seconds: float) -> Tally:
        """Soak for so long (and some time before and after), and return what was counted."""
        shared_before = set(os.listdir("/dev/shm"))
        started_pids: set[int] = set()
        try:
            self._fleet.start()
            before = self._settle()
            self._rage(seconds, started_pids)
            self._faults.undo_all()
            self._wait_for_ranks()
            self._drain()
            after = self._settle()
            self._compare(before, after)
        finally:
            self._fleet.close()
            self._diary.close()
        self._look_at_memory()
        self._read_logs()
        left = left_behind(set(os.listdir("/dev/shm")) - shared_before, started_pids)
        self.tally.leaks += [f"/dev/shm/{name}" for name in left]
        return self.tally

    def _rage(self, seconds: float, started_pids: set[int]) -> None:
        began = time.monotonic()
        next_fault, next_look = began + self._interval, began
        while (now := time.monotonic()) < began + seconds:
            self._faults.undo_due()
            if now >= next_fault:
                next_fault += self._interval
                self._faults.inject()
            if now >= next_look:
                next_look = now + 1.0
                self._traffic.look_for_hangs()
                for key, child in self._fleet.ranks.items():
                    started_pids.add(child.process.pid)
                    history = self._memory.setdefault((key, child.process.pid), [])
                    history.append((now - child.started, child.private_kibibytes()))
                if self._progress:
                    self._progress(self.tally, now - began)
            self._traffic.fill()
            self._fleet.listen(0.02)

    def _wait_for_ranks(self) -> None:
        give_up = time.monotonic() + 60.0
        while not self._fleet.serving(self._fleet.keys):
            if time.monotonic() > give_up:
                missing = [key for key in self._fleet.keys if not self._fleet.serving([key])]
                self.tally.hangs.append(f"ranks that did not come back: {', '.join(missing)}")
                return
            self._fleet.listen(0.1)

    def _drain(self) -> None:
        give_up = time.monotonic() + FREE_SECONDS + 10
        while len(self._traffic) and time.monotonic() < give_up:
            self._fleet.listen(0.1)
            self._traffic.look_for_hangs()

    def _settle(self) -> dict[str, dict[str, Any]]:
        """Let some rooms pass in peace between all engines, and count what is held afterwards."""
        # A registry that was away has to hear of its ranks again.
        time.sleep(1.5)
        for _ in range(CALM_ROOMS):
            for engine, decodes in self._fleet.decodes.items():
                for replica, prefills in self._fleet.prefills.items():
                    if self._fleet.serving([*prefills, *decodes]):
                        self._traffic.begin(replica, engine, calm=True)
            self._drain()
        end = time.monotonic() + FORGET_SECONDS
        while time.monotonic() < end:
            self._fleet.listen(0.1)
        self._tags += 1
        for child in self._fleet.ranks.values():
            child.tell("count", tag=self._tags)
        end = time.monotonic() + 10
        counts = self._traffic.counts.setdefault(self._tags, {})
        while len(counts) < len(self._fleet.ranks) and time.monotonic() < end:
            self._fleet.listen(0.1)
        return counts

    def _compare(self, first: dict[str, dict[str, Any]], last: dict[str, dict[str, Any]]) -> None:
        for key in self._fleet.keys:
            if key not in last:
                self.tally.hangs.append(f"{key} does not answer")
                continue
            now, then = last[key], first[key]
            for name in ("held", "jobs", "pages_lost", "slots_lost", "faults"):
                if now[name]:
                    self.tally.leaks.append(f"{key}: {name} {now[name]}")
            if not now["clean"]:
                self.tally.wrong.append(f"{key}: free rows were written")
            if now["threads"] > then["threads"] + LAZY_THREADS:
                self.tally.leaks.append(f"{key}: {now['threads']} threads, {then['threads']} before")
            more = leaked(then["descriptors"], now["descriptors"], now["kept_sockets"])
            if more:
                self.tally.leaks.append(f"{key}: more descriptors than before: {more}")

    def _look_at_memory(self) -> None:
        for (key, pid), history in self._memory.items():
            warm = [size for age, size in history if age > WARM_SECONDS]
            if len(warm) < 60:
                continue
            part = len(warm) // 4
            first, last = statistics.median(warm[:part]), statistics.median(warm[-part:])
            if last > first * GROWTH and last - first > GROWTH_KIBIBYTES:
                self.tally.growth.append(f"{key} (process {pid}): {first:.0f} KiB, then {last:.0f} KiB")

    def memory(self) -> dict[str, list[int]]:
        """KiB of each process that lived long, in eight parts of its life."""
        found = {}
        for (key, pid), history in self._memory.items():
            warm = [size for age, size in history if age > WARM_SECONDS]
            if len(warm) >= 60:
                part = len(warm) / 8
                parts = [warm[int(part * number) : int(part * (number + 1))] for number in range(8)]
                found[f"{key} (process {pid}, {len(warm)} s)"] = [int(statistics.median(each)) for each in parts]
        return found

    def _read_logs(self) -> None:
        for log in self._logs.glob("*.log"):
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith(("ERROR", "CRITICAL", "Traceback")):
                    self.tally.logged[f"{log.stem[0]}: {normalised(line)}"] += 1
