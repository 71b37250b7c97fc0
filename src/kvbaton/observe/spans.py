"""OpenTelemetry spans of rooms. Needs opentelemetry-api only: without an SDK of the user's nothing is recorded."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvbaton.errors import ConfigurationError
from kvbaton.observe.base import Chunk, ObservedRank, ObservedRoom, Observer
from kvbaton.protocol.status import Status

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, TraceFlags, TracerProvider
except ImportError as error:  # pragma: no cover - needs an environment without the library
    raise ConfigurationError(f"spans need opentelemetry-api ({error}): install kvbaton[spans]") from error

TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
ATTRIBUTE = "kvbaton"


class _Started(NamedTuple):
    """A room that goes on."""

    context: Context
    """The engine's, when it opened the room."""
    span: Span | None
    """None on a prefill rank that has not heard of the decode side."""


class Spans(Observer):
    """Makes a span ``kvbaton.decode.room`` or ``kvbaton.prefill.room`` for each room, and a child for each stage.

    The parent is the span that is current where the engine opens the room. The decode side sends its trace context with
    the offer: a prefill room whose engine has no span of its own becomes a child of the decode room; one that has gets
    a link to it. Prefill spans begin in the past for that, when the first offer came.

    ``tracer_provider`` is the global one by default. Raises `ConfigurationError` without opentelemetry-api.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("kvbaton", tracer_provider=tracer_provider)
        self._rooms: dict[ObservedRoom, _Started] = {}

    def rank_closed(self, rank: ObservedRank) -> None:
        """Forget rooms whose rows never came back."""
        for room in [room for room in list(self._rooms) if room.rank is rank]:
            self._rooms.pop(room, None)

    def room_opened(self, room: ObservedRoom) -> None:
        """Take the engine's context; begin the span of a decode room."""
        context = contexts.get_current()
        span = self._start(room, context) if room.side == "decode" else None
        self._rooms[room] = _Started(context, span)
        if span is not None:
            room.trace = traceparent(span.get_span_context())

    def room_connected(self, room: ObservedRoom) -> None:
        """The prefill ranks are there."""
        self._event(room, "connected", room.connected)

    def room_offered(self, room: ObservedRoom) -> None:
        """The rows are known."""
        self._event(room, "offered", room.offered)

    def room_transferring(self, room: ObservedRoom) -> None:
        """Begin the span of a prefill room: now its parent is known."""
        self._begun(room)

    def chunk_written(self, room: ObservedRoom, chunk: Chunk) -> None:
        """A span for each write."""
        span = self._begun(room)
        if span is None:
            return
        attributes: dict[str, str | int] = {"transport": chunk.transport, "part": chunk.part}
        attributes["pieces"] = sum(chunk.pieces.values())
        attributes |= {f"bytes.{name}": nbytes for name, nbytes in chunk.moved.items()}
        child = self._child(room, span, "chunk", chunk.started, attributes)
        if chunk.error:
            child.set_status(StatusCode.ERROR, chunk.error)
        child.end(room.rank.wall(chunk.ended))

    def part_delivered(self, room: ObservedRoom, chunk: Chunk) -> None:
        """One prefill rank has sent everything."""
        self._event(room, f"part {chunk.part} delivered", chunk.ended)

    def room_ended(self, room: ObservedRoom) -> None:
        """End the span of the room, with those of its stages."""
        span = self._begun(room)
        if span is None or room.ended is None:
            return
        for stage, (begin, end) in room.stages().items():
            if end is not None:
                self._child(room, span, stage, begin, {}).end(room.rank.wall(end))
        known = {name: number for name, number in room.moved.items() if name in room.rank.components}
        span.set_attributes({f"{ATTRIBUTE}.bytes.{name}": number for name, number in known.items()})
        span.set_attribute(f"{ATTRIBUTE}.status", room.status.value)
        if room.status is Status.FAILED:
            span.set_status(StatusCode.ERROR, room.reason)
            span.set_attribute("error.type", room.error_name)
        span.end(room.rank.wall(room.ended))

    def rows_released(self, room: ObservedRoom) -> None:
        """A span of its own for rows that were held back: that of the room has ended with it."""
        started = self._rooms.pop(room, None)
        if started is None or started.span is None or not room.held or room.ended is None or room.released is None:
            return
        child = self._child(room, started.span, "release", room.ended, {"rows": room.rows})
        child.end(room.rank.wall(room.released))

    def _begun(self, room: ObservedRoom) -> Span | None:
        """The span of a room; begun now where it waited for the other side."""
        started = self._rooms.get(room)
        if started is None or started.span is not None:
            return None if started is None else started.span
        span = self._start(room, started.context)
        self._rooms[room] = started._replace(span=span)
        return span

    def _start(self, room: ObservedRoom, context: Context) -> Span:
        parent, links = context, []
        remote = span_context(room.trace)
        if remote is not None:
            own = trace.get_current_span(context).get_span_context()
            if not own.is_valid:
                parent = trace.set_span_in_context(trace.NonRecordingSpan(remote), context)
            else:
                links = [Link(remote)]
        rank = room.rank
        attributes = {
            f"{ATTRIBUTE}.room": str(room.number),
            f"{ATTRIBUTE}.rank": str(rank.coords),
            f"{ATTRIBUTE}.instance": rank.instance,
        }
        # Numbers of rooms are random, up to 2^63: text, as not every backend keeps such integers.
        return self._tracer.start_span(
            f"kvbaton.{room.side}.room",
            parent,
            SpanKind.CONSUMER if room.side == "decode" else SpanKind.PRODUCER,
            attributes,
            links,
            rank.wall(room.opened),
        )

    def _child(self, room: ObservedRoom, span: Span, name: str, begin: float, attributes: dict[str, str | int]) -> Span:
        return self._tracer.start_span(
            f"kvbaton.{room.side}.{name}",
            trace.set_span_in_context(span, Context()),
            attributes={f"{ATTRIBUTE}.{key}": value for key, value in attributes.items()},
            start_time=room.rank.wall(begin),
        )

    def _event(self, room: ObservedRoom, name: str, at: float | None) -> None:
        started = self._rooms.get(room)
        if started is not None and started.span is not None and at is not None:
            started.span.add_event(name, timestamp=room.rank.wall(at))


def traceparent(context: SpanContext) -> str:
    """The W3C form of a span's context; empty for one that is not valid."""
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def span_context(text: str) -> SpanContext | None:
    """The context of a span of another process; None for text that is none."""
    match = TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    numbers = [int(each, 16) for each in match.groups()]
    context = SpanContext(numbers[0], numbers[1], is_remote=True, trace_flags=TraceFlags(numbers[2]))
    return context if context.is_valid else None
