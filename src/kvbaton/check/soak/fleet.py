"""The ranks of a soak and their registry: who is there, who is being replaced, who stands still."""

from __future__ import annotations

import random
import selectors
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbaton.check.soak.children import Child, free_port, rank_child, registry_child
from kvbaton.check.soak.rank import NO_REGISTRY, RankOptions
from kvbaton.check.soak.tally import Tally

REPLICAS, REPLICA_SIZE = 2, 2
"""Data-parallel replicas at prefill, and the tensor-parallel ranks of each."""
READY_SECONDS = 60.0


class Fleet:
    """Prefill ranks with every transport; decode engines with one each, of one and of two ranks by turns.

    ``on_said(key, message)`` hears what ranks say; ``on_gone(key)`` that a rank is gone, whyever.
    """

    def __init__(
        self,
        transports: Sequence[str],
        rng: random.Random,
        logs: Path,
        tally: Tally,
        on_said: Callable[[str, dict[str, Any]], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._rng, self._logs, self._tally = rng, logs, tally
        self._on_said, self._on_gone = on_said, on_gone
        self._selector = selectors.DefaultSelector()
        self._port = free_port()
        self._registry: Child | None = None
        self.url = f"http://127.0.0.1:{self._port}"
        self.ranks: dict[str, Child] = {}
        self.prefills = {
            f"p{replica}": tuple(f"p{replica}.{rank}" for rank in range(REPLICA_SIZE)) for replica in range(REPLICAS)
        }
        names = [transports[number % len(transports)] for number in range(max(2, len(transports)))]
        self.decodes = {
            f"d{number}-{name}": tuple(f"d{number}.{rank}" for rank in range(1 + number % 2))
            for number, name in enumerate(names)
        }
        self._options: dict[str, dict[str, Any]] = {}
        for replica, keys in enumerate(self.prefills.values()):
            for rank, key in enumerate(keys):
                self._options[key] = {
                    "role": "prefill", "transports": tuple(transports), "rank": rank, "size": REPLICA_SIZE,
                    "replica": (replica, REPLICAS), "pages": 1024,
                }  # fmt: skip
        for (engine, keys), name in zip(self.decodes.items(), names, strict=True):
            for rank, key in enumerate(keys):
                self._options[key] = {
                    "role": "decode", "transports": (name,), "rank": rank, "size": len(self.decodes[engine]),
                    "replica": (0, 1),
                }  # fmt: skip
        self.spared = {*self.prefills["p0"], *next(iter(self.decodes.values()))}
        """Ranks that are never killed: their memory is watched over the whole time."""

    @property
    def keys(self) -> list[str]:
        """Every rank's place."""
        return list(self._options)

    def start(self) -> None:
        """Start everything; returns when all is ready."""
        self.start_registry()
        give_up = time.monotonic() + READY_SECONDS
        while not self._registry_answers():
            if time.monotonic() > give_up:
                raise RuntimeError(f"the registry did not come up; see {self._logs}")
            time.sleep(0.1)
        for key in self.keys:
            self.start_rank(key)
        while not all(child.ready for child in self.ranks.values()):
            if time.monotonic() > give_up or len(self.ranks) < len(self.keys):
                raise RuntimeError(f"not every rank came up; see {self._logs}")
            self.listen(0.1)

    def _registry_answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/topology?deployment=none", timeout=1):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def start_registry(self) -> None:
        """Start the registry, at the address where it always is."""
        self._registry = registry_child(self._port, self._logs / "registry.log")

    def kill_registry(self) -> None:
        """SIGKILL."""
        if self._registry is not None:
            self._registry.kill()
            self._registry = None

    def start_rank(self, key: str) -> None:
        """Put a new process into a place that is empty."""
        options = RankOptions(registry=self.url, seed=self._rng.getrandbits(32), **self._options[key])
        child = self.ranks[key] = rank_child(key, options, self._logs / f"{key}.log")
        self._selector.register(child.descriptor, selectors.EVENT_READ, child)

    def kill(self, key: str) -> None:
        """SIGKILL; `start_rank` puts a successor there."""
        child = self.ranks[key]
        self._forget(child)
        child.kill()

    def listen(self, seconds: float) -> None:
        """Hear what ranks say, for at most so long."""
        for ready, _ in self._selector.select(seconds):
            child: Child = ready.data
            if self.ranks.get(child.key) is not child:
                continue
            try:
                said = child.hear()
            except EOFError as error:
                self._forget(child)
                if child.process.returncode == NO_REGISTRY and not child.ready:
                    self.start_rank(child.key)
                else:
                    self._tally.ended.append(str(error))
                continue
            for message in said:
                if message["event"] == "ready":
                    child.ready = True
                else:
                    self._on_said(child.key, message)

    def _forget(self, child: Child) -> None:
        self._selector.unregister(child.descriptor)
        del self.ranks[child.key]
        self._on_gone(child.key)

    def serving(self, keys: Sequence[str]) -> bool:
        """Whether all of these ranks are there."""
        return all(key in self.ranks and self.ranks[key].ready for key in keys)

    def close(self) -> None:
        """End everything; notes who does not end by itself."""
        for child in self.ranks.values():
            child.go_on()
            child.tell("stop")
        for child in list(self.ranks.values()):
            code = child.end()
            if code != 0:
                self._tally.leaks.append(f"{child.key} did not end by itself: exit code {code}")
        self.ranks.clear()
        self.kill_registry()
        self._selector.close()
