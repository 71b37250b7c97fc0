"""Draws recordings as a trace in Chrome's JSON form, which ui.perfetto.dev and chrome://tracing open.

Each rank is a process. In it each room is a track: a slice from its opening to the release of its rows, inside it its
stages. Chunks have tracks of their own below it, as many as there were writes at a time. Failures, and what happens to
peers, are instants. All sides are on one clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvbaton.errors import ConfigurationError
from kvbaton.observe.timeline import Event, Recording

RANK_TRACK = 1
_STAGE_AFTER = {"opened": "waiting", "transferring": "transfer", "ended": "release"}
"""Which stage begins with an event; it ends the one before."""


def trace_of(recordings: Sequence[Recording]) -> dict[str, Any]:
    """The trace of these ranks, as JSON has it. Times are microseconds from the first event."""
    shifts = _shifts(recordings)
    starts = [
        (event["started"] if "started" in event else event["at"]) + shift
        for recording, shift in zip(recordings, shifts, strict=True)
        for event in recording.events
    ]
    zero = min(starts, default=0.0)
    drawn: list[dict[str, Any]] = []
    order = sorted(range(len(recordings)), key=lambda index: recordings[index].head["side"] != "prefill")
    for process, index in enumerate(order, start=1):
        drawn += _Process(process, recordings[index], shifts[index] - zero).draw()
    # Metadata first; stable, so that what happens at one time stays in its order.
    drawn.sort(key=lambda each: (each["ph"] != "M", each.get("ts", 0.0)))
    return {"traceEvents": drawn, "displayTimeUnit": "ms", "otherData": {"source": "kvbaton"}}


def write_trace(recordings: Sequence[Recording], path: str | Path) -> None:
    """Write the trace of these ranks. Raises `ConfigurationError` for a path that cannot be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(trace_of(recordings)), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"the trace cannot be written to {path}: {error}") from None


def _shifts(recordings: Sequence[Recording]) -> list[float]:
    """Seconds to add to the times of each recording, to have them all on the clock of the first one.

    Ranks of one machine have one monotonic clock: nothing is added between them. Between machines the times of day
    decide, and the error is theirs.
    """
    offsets: dict[str, float] = {}
    for number, recording in enumerate(recordings):
        offsets.setdefault(_clock(number, recording), recording.head["wall_offset"])
    base = next(iter(offsets.values()), 0.0)
    return [offsets[_clock(number, recording)] - base for number, recording in enumerate(recordings)]


def _clock(number: int, recording: Recording) -> str:
    return recording.head.get("host") or f"recording {number}"


class _Process:
    """One rank."""

    def __init__(self, process: int, recording: Recording, shift: float) -> None:
        self._process = process
        self._head, self._events = recording
        self._shift = shift
        self._last = max((event["at"] for event in self._events), default=0.0)
        self._tracks = RANK_TRACK

    def draw(self) -> list[dict[str, Any]]:
        """All its events."""
        head = self._head
        name = f"{head['side']} {head['rank']} ({head['instance'][:8]}, process {head['process']})"
        drawn = [self._name("process_name", name), self._name("process_sort_index", self._process)]
        drawn.append(self._name("thread_name", "peers", RANK_TRACK))
        rooms: dict[int, list[Event]] = {}
        for event in self._events:
            if "room" in event:
                rooms.setdefault(event["room"], []).append(event)
            else:
                drawn.append(self._instant(RANK_TRACK, event, event["event"]))
        for number, events in rooms.items():
            drawn += self._draw_room(number, events)
        return drawn

    def _draw_room(self, number: int, events: list[Event]) -> Iterator[dict[str, Any]]:
        track = self._new_track()
        yield self._name("thread_name", f"room {number}", track)
        yield self._name("thread_sort_index", track, track)
        stage = ""
        for event in events:
            what, at = event["event"], event["at"]
            if what == "opened":
                yield self._edge("B", track, at, f"room {number}", {"room": str(number)})
            if what in ("connected", "offered", "delivered"):
                yield self._instant(track, event, what)
            if what == "ended" and event["status"] == "failed":
                yield self._instant(track, event, f"failed: {event['error']}")
            if what == "released" or (what in _STAGE_AFTER and stage):
                yield self._edge("E", track, at, stage, {})
                stage = ""
            if what in _STAGE_AFTER:
                stage = _STAGE_AFTER[what]
                yield self._edge("B", track, at, stage, _arguments(event))
            if what == "released":
                yield self._edge("E", track, at, f"room {number}", {})
        if stage:
            # It was still going on when the recording ended.
            yield self._edge("E", track, self._last, stage, {"unfinished": True})
            yield self._edge("E", track, self._last, f"room {number}", {"unfinished": True})
        yield from self._draw_chunks(number, [event for event in events if event["event"] == "chunk"])

    def _draw_chunks(self, number: int, chunks: list[Event]) -> Iterator[dict[str, Any]]:
        """Each chunk on the first track that is free at its time."""
        free: list[tuple[int, float]] = []
        for chunk in sorted(chunks, key=lambda each: (each["started"], each["at"])):
            place = next((place for place, (_, until) in enumerate(free) if until <= chunk["started"]), len(free))
            if place == len(free):
                track = self._new_track()
                free.append((track, 0.0))
                yield self._name("thread_name", f"room {number} chunks", track)
                yield self._name("thread_sort_index", track, track)
            track = free[place][0]
            free[place] = (track, chunk["at"])
            name = f"chunk to {chunk['part']}"
            yield self._edge("B", track, chunk["started"], name, _arguments(chunk))
            yield self._edge("E", track, chunk["at"], name, {})
            if chunk["error"]:
                yield self._instant(track, chunk, "write failed")

    def _new_track(self) -> int:
        self._tracks += 1
        return self._tracks

    def _micros(self, at: float) -> float:
        return round((at + self._shift) * 1e6, 3)

    def _name(self, what: str, value: str | int, track: int = 0) -> dict[str, Any]:
        key = "sort_index" if what.endswith("sort_index") else "name"
        return {"ph": "M", "name": what, "pid": self._process, "tid": track, "args": {key: value}}

    def _edge(self, phase: str, track: int, at: float, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        category = {"cat": "kvbaton"} | ({"args": arguments} if arguments else {})
        return {"ph": phase, "name": name, "pid": self._process, "tid": track, "ts": self._micros(at), **category}

    def _instant(self, track: int, event: Event, name: str) -> dict[str, Any]:
        edge = self._edge("i", track, event["at"], name, _arguments(event))
        # Seen on its own track only.
        return {**edge, "s": "t"}


def _arguments(event: Event) -> dict[str, Any]:
    arguments = {name: value for name, value in event.items() if name not in ("at", "event", "started") and value != ""}
    # Numbers of rooms are larger than those that JavaScript has exactly.
    return arguments | ({"room": str(event["room"])} if "room" in event else {})


def rooms_of(recordings: Iterable[Recording]) -> dict[int, list[str]]:
    """On which sides each room was seen."""
    seen: dict[int, list[str]] = {}
    for recording in recordings:
        for number in dict.fromkeys(event["room"] for event in recording.events if "room" in event):
            seen.setdefault(number, []).append(recording.head["side"])
    return seen
