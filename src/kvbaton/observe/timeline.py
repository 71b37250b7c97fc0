"""Recorders of what happens at ranks: in memory, or in a file for each rank. `kvbaton.observe.perfetto` draws them."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from kvbaton.errors import ConfigurationError
from kvbaton.observe.base import Chunk, ObservedRank, ObservedRoom, Observer, PeerRecord

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of the files; in their first line."""
MAX_EVENTS = 1_000_000
"""Events of one rank that are kept; what follows is counted only."""
FLUSH_SECONDS = 0.2
Event = dict[str, Any]
"""``{"at": seconds, "event": name, ...}``; events of a room have its number as ``room``."""


class Recording(NamedTuple):
    """What one rank told."""

    head: dict[str, Any]
    """Who it is, and what ties its clock to the time of day."""
    events: list[Event]


class _Recorder(Observer, ABC):
    """Turns what observers hear into events."""

    @abstractmethod
    def _put(self, rank: ObservedRank, event: Event) -> None:
        """Keep an event."""

    def room_opened(self, room: ObservedRoom) -> None:
        """See `Observer`."""
        self._put_room(room, room.opened, "opened")

    def room_connected(self, room: ObservedRoom) -> None:
        self._put_room(room, room.connected, "connected")

    def room_offered(self, room: ObservedRoom) -> None:
        self._put_room(room, room.offered, "offered")

    def room_transferring(self, room: ObservedRoom) -> None:
        parts = [{"part": each.part, "rank": each.peer.coords, "transport": each.peer.transport} for each in room.parts]
        tokens = {"tokens": room.parts[0].tokens, "prefix": room.parts[0].prefix} if room.parts else {}
        self._put_room(room, room.transferring, "transferring", parts=parts, **tokens)

    def chunk_written(self, room: ObservedRoom, chunk: Chunk) -> None:
        self._put_room(room, chunk.ended, "chunk", pieces=sum(chunk.pieces.values()), **_chunk(chunk))

    def part_delivered(self, room: ObservedRoom, chunk: Chunk) -> None:
        self._put_room(room, chunk.ended, "delivered", **_chunk(chunk))

    def room_ended(self, room: ObservedRoom) -> None:
        self._put_room(
            room,
            room.ended,
            "ended",
            status=room.status.value,
            error=room.error_name,
            reason=room.reason,
            rows=room.rows,
        )

    def rows_released(self, room: ObservedRoom) -> None:
        self._put_room(room, room.released, "released")

    def peer_joined(self, rank: ObservedRank, peer: PeerRecord) -> None:
        self._put_now(rank, "peer joined", **peer._asdict())

    def peer_lost(self, rank: ObservedRank, peer: PeerRecord, reason: str) -> None:
        self._put_now(rank, "peer lost", reason=reason, **peer._asdict())

    def handshake_refused(self, rank: ObservedRank, error: str, reason: str) -> None:
        self._put_now(rank, "handshake refused", error=error, reason=reason)

    def frame_dropped(self, rank: ObservedRank, kind: str, reason: str) -> None:
        self._put_now(rank, "frame dropped", error=kind, reason=reason)

    def _put_room(self, room: ObservedRoom, at: float | None, event: str, **more: Any) -> None:
        self._put(room.rank, {"at": at, "event": event, "room": room.number, **more})

    def _put_now(self, rank: ObservedRank, event: str, **more: Any) -> None:
        self._put(rank, {"at": time.time() - rank.wall_offset, "event": event, **more})


class Timeline(_Recorder):
    """Keeps the events of all its ranks in memory. `recordings` gives them; `write` draws them for ui.perfetto.dev."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._max_events = max_events
        self._recordings: dict[ObservedRank, Recording] = {}
        self._lock = threading.Lock()
        self.dropped = 0
        """Events that were too many."""

    def rank_started(self, rank: ObservedRank) -> None:
        """See `Observer.rank_started`."""
        with self._lock:
            self._recordings[rank] = Recording(_head(rank), [])

    def recordings(self) -> list[Recording]:
        """What was heard so far, by rank."""
        with self._lock:
            return [Recording(head, list(events)) for head, events in self._recordings.values()]

    def write(self, path: str | Path) -> None:
        """Write a trace that ui.perfetto.dev opens."""
        from kvbaton.observe.perfetto import write_trace

        write_trace(self.recordings(), path)

    def _put(self, rank: ObservedRank, event: Event) -> None:
        events = self._recordings[rank].events
        if len(events) < self._max_events:
            events.append(event)
        else:
            self.dropped += 1


class TraceFolder(_Recorder):
    """Writes the events of each rank into a file of its own in a folder; `kvbaton trace merge` draws them.

    A process that is killed leaves what was told up to a moment before. Raises `ConfigurationError` for a folder that
    cannot be made. A file that cannot be written any more is closed, which is logged once.
    """

    def __init__(self, folder: str | Path, max_events: int = MAX_EVENTS) -> None:
        self.folder = Path(folder)
        self._max_events = max_events
        self._files: dict[ObservedRank, _File] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"the folder for traces, {folder}, cannot be made: {error}") from None

    def rank_started(self, rank: ObservedRank) -> None:
        """Open the rank's file."""
        name = re.sub(r"[^A-Za-z0-9]+", "-", f"{rank.side}-{rank.coords}-{rank.instance[:12]}-{os.getpid()}")
        try:
            file = _File((self.folder / f"{name}.jsonl").open("w", encoding="utf-8"), self._max_events)
        except OSError as error:
            logger.warning("no trace of this rank: %s", error)
            return
        self._files[rank] = file
        file.put(_head(rank))

    def rank_closed(self, rank: ObservedRank) -> None:
        """Close it."""
        file = self._files.pop(rank, None)
        if file is not None:
            file.close()

    def _put(self, rank: ObservedRank, event: Event) -> None:
        file = self._files.get(rank)
        if file is not None:
            file.put(event)


class _File:
    """Lines of JSON, written by several threads, and flushed now and then."""

    def __init__(self, file: TextIO, max_events: int) -> None:
        self._file = file
        self._left = max_events
        self._lock = threading.Lock()
        self._flushed = 0.0

    def put(self, event: Event) -> None:
        with self._lock:
            if self._left <= 0 or self._file.closed:
                return
            self._left -= 1
            now = time.monotonic()
            try:
                self._file.write(json.dumps(event) + "\n")
                if now - self._flushed > FLUSH_SECONDS:
                    self._flushed = now
                    self._file.flush()
            except OSError as error:
                self._left = 0
                logger.warning("the trace %s ends here: %s", self._file.name, error)

    def close(self) -> None:
        with self._lock:
            try:
                self._file.close()
            except OSError as error:
                logger.warning("the end of the trace %s is lost: %s", self._file.name, error)


def read_recording(path: str | Path) -> Recording:
    """Read a file of `TraceFolder`; a last line that is cut is left out.

    Raises `ConfigurationError` for a file that cannot be read or is none.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        head = json.loads(lines[0]) if lines else None
        if not isinstance(head, dict) or head.get("kvbaton_trace") != FORMAT:
            raise ConfigurationError(f"{path} is no trace of a rank: give files that {FORMAT_HINT} wrote")
        events = [json.loads(line) for line in lines[1:-1]]
        if len(lines) > 1:
            try:
                events.append(json.loads(lines[-1]))
            except ValueError:
                logger.info("the last line of %s is cut", path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is no trace of a rank: {error}") from None
    return Recording(head, events)


FORMAT_HINT = "KVBATON_TRACE=folder"


def _chunk(chunk: Chunk) -> dict[str, Any]:
    return {
        "ticket": chunk.ticket,
        "part": chunk.part,
        "transport": chunk.transport,
        "started": chunk.started,
        "bytes": dict(chunk.moved),
        "error": chunk.error,
    }


def _head(rank: ObservedRank) -> Event:
    return {
        "kvbaton_trace": FORMAT,
        "side": rank.side,
        "rank": str(rank.coords),
        "instance": rank.instance,
        "process": os.getpid(),
        "wall_offset": rank.wall_offset,
        "host": _host(),
    }


def _host() -> str:
    """What tells machines apart whose monotonic clocks differ; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
