"""A submitted request: what its owner holds, and what the engine keeps of it."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvbaton.engines.base import EndEvent, Event, Finish, GenerateRequest, TokenEvent
from kvbaton.engines.hf.pools import RankRows
from kvbaton.engines.hf.rows import Allocation
from kvbaton.protocol import Status
from kvbaton.runtime.later import Event as DeviceEvent


class Room(Protocol):
    """The part of a sender or receiver that both roles use; see `kvbaton.engines.hf.ranks`."""

    @property
    def bytes_by_component(self) -> dict[str, int]:
        """Bytes moved so far."""

    def poll(self) -> Status:
        """The state of the room."""

    @property
    def reason(self) -> str:
        """Why it failed."""

    @property
    def rows_released(self) -> bool:
        """Whether its rows may be used again."""

    @property
    def seconds(self) -> float:
        """How long the transfer took."""

    def abort(self, reason: str) -> None:
        """Fail the room."""

    def close(self) -> None:
        """Forget the room."""


class SenderRoom(Room, Protocol):
    """The room of a prefill engine; see `kvbaton.engines.hf.ranks.GroupSender`."""

    def send(self, rows: RankRows, tokens: tuple[int, int], after: DeviceEvent | None = None) -> None:
        """Hand over a chunk."""

    def finish(
        self, rows: RankRows, tokens: tuple[int, int], aux: Sequence[int | None], after: DeviceEvent | None = None
    ) -> None:
        """Hand over what is left."""


class ReceiverRoom(Room, Protocol):
    """The room of a decode engine; see `kvbaton.engines.hf.ranks.GroupReceiver`."""

    def offer(self, rows: RankRows, tokens: int, aux: Sequence[int | None]) -> None:
        """Say where the data shall go."""


class Manager(Protocol):
    """What the engines need of `kvbaton.engines.hf.ranks.RankGroup`."""

    def sender(self, room: int) -> Any:
        """A `SenderRoom`. Raises `RoomError` if the room is in use."""

    def receiver(self, room: int, source: str | None = None) -> Any:
        """A `ReceiverRoom`. Raises `RoomError` if the room is in use."""

    def close(self) -> None:
        """Close sockets and threads."""


class RequestHandle:
    """A request that was submitted to an engine."""

    def __init__(self, request: GenerateRequest, wake: Any) -> None:
        self.request = request
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        """Token events in order, then one `EndEvent`."""
        self.bytes_by_component: dict[str, int] = {}
        """Bytes that were moved; final when the request has ended."""
        self.transfer_seconds = 0.0
        """Seconds from the moment when the prefill engine handed over the last rows to the end of the transfer.

        On the decode side both clocks count: it means little across hosts whose clocks differ.
        """
        self.cancelled = False
        self._wake = wake

    def cancel(self) -> None:
        """Stop soon and give the pages back; an `EndEvent` still comes. No effect on a request that has ended."""
        self.cancelled = True
        self._wake()

    def result(self, timeout: float | None = None) -> tuple[tuple[int, ...], EndEvent]:
        """Take all events: the tokens and the end. Raises ``queue.Empty`` if none comes for ``timeout`` seconds."""
        tokens: list[int] = []
        while True:
            event = self.events.get(timeout=timeout)
            if isinstance(event, EndEvent):
                return tuple(tokens), event
            tokens.extend(event.token_ids)


@dataclass(eq=False)
class Job:
    """What an engine's thread keeps of a request."""

    handle: RequestHandle
    room: Any
    seed: int
    stops: frozenset[int]
    rows: Allocation | None = None
    cache: Any = None
    tokens: list[int] = field(default_factory=list)
    """The answer so far."""
    done: int = 0
    """Tokens of the prompt that are in the cache (prefill)."""
    sent: int = 0
    """Tokens of the prompt that were handed over (prefill)."""
    opened_at: float = field(default_factory=time.time)
    """When the clock of the room began (unix time)."""
    finished_at: float = 0.0
    """When the prefill engine handed over the last rows (unix time); 0 before."""
    shared_at: float = 0.0
    """When its cache was given to the other processes of the engine (monotonic time); 0 before (decode)."""
    others: Mapping[int, bytes] | None = None
    """What ranks in other processes hold of it (decode)."""
    ended: bool = False

    @property
    def request(self) -> GenerateRequest:
        """The request itself."""
        return self.handle.request

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.handle.request.input_ids)

    @property
    def cached(self) -> int:
        """Tokens in the cache while decoding: all but the last one chosen."""
        return self.prompt_tokens + len(self.tokens) - 1

    def note_transfer(self) -> None:
        """Keep the figures of the transfer."""
        self.handle.bytes_by_component = dict(self.room.bytes_by_component)
        if self.finished_at:
            self.handle.transfer_seconds = max(0.0, self.opened_at + self.room.seconds - self.finished_at)

    def emit(self, *tokens: int) -> None:
        """Pass tokens on."""
        self.handle.events.put(TokenEvent(tokens))

    def end(self, finish: Finish, matched: int | None = None, error: str = "", *, retry: bool = False) -> None:
        """Pass the end on, once."""
        if self.ended:
            return
        self.ended = True
        moved = self.handle.bytes_by_component
        metrics = {
            "bytes_by_component": dict(moved),
            "bytes": sum(moved.values()),
            "transfer_ms": self.handle.transfer_seconds * 1e3,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.tokens),
        }
        self.handle.events.put(EndEvent(finish, matched, error, retry, metrics))
