"""What must hold after every turn of a process, whatever happens around it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvbaton.protocol import Action, Deliver, RoomChanged, RowsReleased, Status
from kvbaton.runtime.context import Context
from kvbaton.runtime.decode import DecodeSide
from kvbaton.runtime.prefill import PrefillSide

DEPLOYMENT = "default"


@dataclass
class _Life:
    """One use of a room number, as its core tells of it."""

    status: Status = Status.WAITING
    released: bool = False


class Watch:
    """Looks at what the cores say, and at the tables of both sides. ``violate`` is told what is wrong."""

    def __init__(self, violate: Callable[[str], None]) -> None:
        self._violate = violate
        self._lives: dict[int, _Life] = {}

    def began(self, room: int) -> None:
        """The engine has a new room of this number."""
        self._lives[room] = _Life()

    def on_action(self, action: Action) -> None:
        """A core asks for something."""
        if not isinstance(action, (RoomChanged, RowsReleased, Deliver)):
            return
        life = self._lives.get(action.room)
        if life is None:
            return
        if isinstance(action, RowsReleased):
            if life.released:
                self._violate(f"the rows of room {action.room} were released twice")
            if not life.status.terminal:
                self._violate(f"the rows of room {action.room} were released while it was {life.status.value}")
            life.released = True
        elif life.status.terminal:
            what = action.status.value if isinstance(action, RoomChanged) else "delivered to"
            self._violate(f"room {action.room} had ended as {life.status.value}, and then was {what}")
        elif isinstance(action, RoomChanged):
            life.status = action.status

    def check(self, side: PrefillSide | DecodeSide, connected: Collection[str]) -> None:
        """A room that needs a peer which is gone has failed."""
        if isinstance(side, DecodeSide):
            for number, room in side.core._rooms.items():
                if room.status.terminal:
                    continue
                for link in room.links.values():
                    if link.expected and not link.done and link.peer not in connected:
                        self._violate(f"room {number} goes on although {link.name} is gone, and is not done")
        else:
            for number, sending in side.core._rooms.items():
                if sending.status.terminal:
                    continue
                for destination in sending.destinations.values():
                    if destination.peer not in connected:
                        self._violate(f"room {number} goes on although a decode rank that offered is gone")


class WatchedPrefill(PrefillSide):
    """The prefill side, with somebody who looks at every action before it is carried out."""

    def __init__(self, context: Context, watch: Watch) -> None:
        super().__init__(context)
        self._watch = watch

    def _carry_out(self, action: Action) -> list[Action]:
        self._watch.on_action(action)
        return super()._carry_out(action)


class WatchedDecode(DecodeSide):
    """As `WatchedPrefill`, for the decode side."""

    def __init__(self, context: Context, index: int, count: int, watch: Watch) -> None:
        super().__init__(context, DEPLOYMENT, index, count)
        self._watch = watch

    def _carry_out(self, action: Action) -> list[Action]:
        self._watch.on_action(action)
        return super()._carry_out(action)
