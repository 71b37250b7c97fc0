"""Open descriptors of a rank, which of them it should have closed, and files that processes left behind."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Set

from kvbaton.observe import ObservedRank, Observer, PeerRecord
from kvbaton.transport import Transport

_SOCKET = "socket:[N]"


def open_descriptors() -> Counter[str]:
    """How many descriptors this process has, by kind."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kinds[re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{name}"))] += 1
    return kinds


class Met(Observer):
    """Counts the processes that a rank ever met by each of its transports."""

    def __init__(self, transports: Iterable[Transport]) -> None:
        self._kept = {each.name: each.capabilities.kept_sockets for each in transports}
        self._met: dict[str, set[str]] = {name: set() for name in self._kept}

    def peer_joined(self, rank: ObservedRank, peer: PeerRecord) -> None:
        """See `Observer.peer_joined`."""
        self._met[peer.transport].add(peer.instance)

    @property
    def kept_sockets(self) -> int:
        """How many sockets the transports may keep of all these processes, as they declare it themselves."""
        return sum(kept * len(self._met[name]) for name, kept in self._kept.items())


def leaked(before: Mapping[str, int], after: Mapping[str, int], kept_sockets: int) -> dict[str, int]:
    """Descriptors that are more than ``before``, by kind; empty if all that are more are sockets that may be kept."""
    more = Counter(after) - Counter(before)
    fewer = Counter(before) - Counter(after)
    kept = min(more[_SOCKET], kept_sockets)
    # Kinds may change places: a connection that is idle in one count is waited for in the other.
    return dict(more) if more.total() - kept > fewer.total() else {}


def left_behind(names: Iterable[str], pids: Set[int]) -> list[str]:
    """Those files that are named after one of the processes; others use the same folder meanwhile."""
    number = re.compile(r"(?<![0-9a-zA-Z])\d+(?![0-9a-zA-Z])")
    return [name for name in names if pids & {int(digits) for digits in number.findall(name)}]
