"""How decode processes that hold different ranks of one engine give each other what theirs received.

Every process runs the whole model here, and so needs the whole cache. A real engine has no such step: its ranks run
their own part of the model on what they hold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol


class Exchange(Protocol):
    """Passes what the ranks hold of a request between the processes of one engine. Called by the engine's thread."""

    def put(self, room: int, packed: Mapping[int, bytes]) -> None:
        """Give the others what the ranks of this process hold, by number. Does not wait for them."""

    def take(self, room: int) -> dict[int, bytes] | None:
        """What all other ranks hold, by number; None while some of it is missing. Not asked again afterwards."""


class StoreExchange:
    """Passes them through ``store``, a ``torch.distributed.Store`` that all processes have opened.

    ``mine`` are the ranks of this process, of ``size`` in all. A room number must not be used for two requests at a
    time. The last process that has taken a request removes it.
    """

    def __init__(self, store: Any, mine: Collection[int], size: int) -> None:
        self._store = store
        self._mine = tuple(mine)
        self._size = size

    def put(self, room: int, packed: Mapping[int, bytes]) -> None:
        """As `Exchange.put`."""
        for number, data in packed.items():
            # A store cannot tell an empty value from none.
            self._store.set(_key(room, number), b"." + data)

    def take(self, room: int) -> dict[int, bytes] | None:
        """As `Exchange.take`."""
        others = [number for number in range(self._size) if number not in self._mine]
        if others and not self._store.check([_key(room, number) for number in others]):
            return None
        found = {number: bytes(self._store.get(_key(room, number)))[1:] for number in others}
        if self._store.add(_key(room, -1), len(self._mine)) == self._size:
            for number in range(-1, self._size):
                self._store.delete_key(_key(room, number))
        return found


def _key(room: int, number: int) -> str:
    return f"kvbaton/{room}/{number}"
