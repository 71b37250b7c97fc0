"""The soak of the demo servers: real models behind the real router, whose servers are killed, stopped and drained."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvbaton.check.soak.requests import Clients, Requests
from kvbaton.demo.cases import TRAINED_MODEL, trained_questions
from kvbaton.serve.processes import PDCluster, http_get

WEIGHTS = {"kill": 3, "stop": 4, "drain": 2}
QUESTIONS = 24
DEADLINE_SECONDS = 60.0
"""Every request is answered by then."""
BACK_SECONDS = 90.0
"""Every server is back by then, and known to the router."""


class ServedFigures(NamedTuple):
    """What came out of a soak of servers."""

    requests: Requests
    faults: Counter[str]
    broken: list[str]
    """Promises that were broken."""


class ServedSoak:
    """Two prefill and two decode servers under the router; one of each role is always left alone."""

    def __init__(
        self,
        transports: Sequence[str],
        seed: int,
        logs: Path,
        *,
        interval: float = 1.0,
        clients: int = 8,
        progress: Callable[[Requests, Counter[str], float], None] | None = None,
    ) -> None:
        self._rng = random.Random(seed)
        self._interval = interval
        self._progress = progress
        self._cluster = PDCluster(
            str(TRAINED_MODEL),
            2,
            2,
            logs=logs,
            options={"threads": 1, "manager_options": {"transports": list(transports)}, "offer_wait_seconds": 10},
            # One request in a step: the answers are then the same to the last bit, whoever runs beside.
            decode_options={"max_batch": 1},
            router_options=("--router-option=--request-timeout-secs", "--router-option=45"),
        )
        self._seed, self._clients = seed, clients
        self._faults: Counter[str] = Counter()
        self._away: dict[str, bool] = {}
        """Servers that were struck and are not back; whether they were let go on, or started again."""
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def run(self, seconds: float) -> ServedFigures:
        """Soak for so long, and return what was counted."""
        with self._cluster as cluster:
            questions = trained_questions(QUESTIONS)
            clients = Clients(cluster.url, questions, count=self._clients, deadline=DEADLINE_SECONDS, seed=self._seed)
            clients.learn()
            clients.start()
            try:
                self._rage(seconds, clients.requests)
            finally:
                requests = clients.stop()
            while self._later:
                heapq.heappop(self._later)[2]()
            broken = list(requests.broken)
            broken += self._wait_until_back()
            broken += [f"not right when all was over: {what}" for what in clients.ask_in_peace(2)]
            broken += self._still_running()
            return ServedFigures(requests, self._faults, broken)

    def _rage(self, seconds: float, requests: Requests) -> None:
        began = time.monotonic()
        next_fault = began + self._interval
        while (now := time.monotonic()) < began + seconds:
            while self._later and self._later[0][0] <= now:
                heapq.heappop(self._later)[2]()
            for name in [name for name, undone in self._away.items() if undone and self._answers(name)]:
                del self._away[name]
            if now >= next_fault:
                next_fault += self._interval
                self._inject()
            if self._progress:
                self._progress(requests, self._faults, now - began)
            time.sleep(0.1)

    def _inject(self) -> None:
        free = [
            name
            for role in ("prefill", "decode")
            if not any(away.startswith(role) for away in self._away)
            for name in (f"{role}-0", f"{role}-1")
        ]
        if not free:
            return
        name, kind = self._rng.choice(free), self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        self._faults[f"{kind} {name.partition('-')[0]}"] += 1
        self._away[name] = False
        process = self._cluster.process(name)
        if kind == "stop":

            def go_on() -> None:
                os.kill(process.pid, signal.SIGCONT)
                self._away[name] = True

            os.kill(process.pid, signal.SIGSTOP)
            self._after(self._rng.choice((0.2, 1.0, 3.0, 6.0)), go_on)
            return
        os.kill(process.pid, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
        self._start_again_later(name)

    def _start_again_later(self, name: str) -> None:
        def start() -> None:
            if self._cluster.process(name).ended() is None:
                # It drains.
                self._start_again_later(name)
            else:
                self._cluster.start_again(name)
                self._away[name] = True

        self._after(0.5, start)

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), what))

    def _answers(self, name: str) -> bool:
        return http_get(f"{self._url_of(name)}/health", timeout=0.5) is not None

    def _url_of(self, name: str) -> str:
        role, _, number = name.partition("-")
        urls = self._cluster.prefill_urls if role == "prefill" else self._cluster.decode_urls
        return urls[int(number)]

    def _wait_until_back(self) -> list[str]:
        give_up = time.monotonic() + BACK_SECONDS
        while time.monotonic() < give_up:
            body = http_get(f"{self._cluster.url}/readiness") or b"{}"
            if msgspec.json.decode(body).get("healthy_workers") == len(self._cluster.processes) - 1:
                return []
            time.sleep(0.2)
        return [f"not every server was back within {BACK_SECONDS:g} s"]

    def _still_running(self) -> list[str]:
        left = []
        for url in (*self._cluster.prefill_urls, *self._cluster.decode_urls):
            give_up = time.monotonic() + 30
            while True:
                info = msgspec.json.decode(http_get(f"{url}/server_info") or b"{}")
                running = info.get("running_requests", "unknown")
                if running == 0:
                    break
                if time.monotonic() > give_up:
                    left.append(f"{url} still runs {running} requests")
                    break
                time.sleep(0.5)
        return left
