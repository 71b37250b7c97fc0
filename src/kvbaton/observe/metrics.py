"""Prometheus metrics of managers. `docs/observability.md` has the table of them."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvbaton import errors
from kvbaton.errors import ConfigurationError, KVBatonError
from kvbaton.observe.base import Chunk, ObservedRank, ObservedRoom, Observer, PeerRecord

try:
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError as error:  # pragma: no cover - needs an environment without the extra
    raise ConfigurationError(f"metrics need prometheus-client ({error}): install kvbaton[metrics]") from error

FAST_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets of what takes a write."""
SLOW_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Buckets of what waits for engines."""
OTHER = "other"
"""The label of what a peer named and this rank does not know."""

_ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, KVBatonError)}


class Metrics(Observer):
    """Give one to every manager of the process: ``Manager(..., observers=[metrics])``.

    ``registry`` is where they are registered: by default prometheus-client's own, so that an engine which serves that
    already serves these too. Labels have few values: sides, components of this process's layouts, transports, errors.
    Raises `ConfigurationError` for a registry that has them already, and where prometheus-client is not installed.
    """

    content_type = prometheus_client.CONTENT_TYPE_LATEST
    """Of what `text` gives, for HTTP."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = prometheus_client.REGISTRY if registry is None else registry
        # Labels are few, and looking one up costs prometheus-client more than counting.
        self._child: Callable[..., Any] = functools.cache(lambda metric, *labels: metric.labels(*labels))
        try:
            self._make()
        except ValueError as error:
            raise ConfigurationError(
                f"this registry has metrics of kvbaton already ({error}): make one Metrics for it, and give that to "
                "every manager"
            ) from None

    def _make(self) -> None:
        def counter(name: str, text: str, *labels: str) -> prometheus_client.Counter:
            return prometheus_client.Counter(f"kvbaton_{name}", text, ("side", *labels), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> prometheus_client.Histogram:
            return prometheus_client.Histogram(
                f"kvbaton_{name}", text, ("side", *labels), registry=self.registry, buckets=buckets
            )

        self._opened = counter("rooms_opened", "Rooms that engines opened.")
        self._ended = counter(
            "rooms_ended", "Rooms that ended, by status, and by error if they failed.", "status", "error"
        )
        self._bytes = counter("transfer_bytes", "Bytes handed over.", "component", "transport")
        self._pieces = counter("transfer_pieces", "Contiguous runs written.", "component", "transport")
        self._chunks = counter("chunks", "Writes that ended, by outcome: ok or failed.", "transport", "outcome")
        self._chunk_seconds = histogram(
            "chunk_seconds", "A write, from its start to its end.", FAST_SECONDS, "transport"
        )
        self._stages = histogram(
            "room_stage_seconds",
            "Time in a stage: waiting (until both sides are known), transfer.",
            SLOW_SECONDS,
            "stage",
        )
        self._hand_over = histogram(
            "handover_seconds", "A room from its opening to its end, by status.", SLOW_SECONDS, "status"
        )
        self._held = histogram(
            "rows_held_seconds", "From the failure of a room to the release of its rows.", SLOW_SECONDS
        )
        self._peers_lost = counter("peers_lost", "Joined ranks of the other side that are gone.")
        self._refused = counter("handshakes_refused", "Handshakes that did not hold, by error.", "error")
        self._sampled = _Sampled()
        self.registry.register(self._sampled)

    def text(self) -> bytes:
        """Everything in the registry, as Prometheus reads it."""
        return bytes(prometheus_client.generate_latest(self.registry))

    def rank_started(self, rank: ObservedRank) -> None:
        """See `Observer`."""
        self._sampled.add(rank)

    def rank_closed(self, rank: ObservedRank) -> None:
        """See `Observer`."""
        self._sampled.remove(rank)

    def room_opened(self, room: ObservedRoom) -> None:
        """See `Observer`."""
        self._child(self._opened, room.side).inc()

    def room_ended(self, room: ObservedRoom) -> None:
        """See `Observer`."""
        self._child(self._ended, room.side, room.status.value, room.error_name).inc()
        if room.ended is None:
            return
        for stage, (begin, end) in room.stages().items():
            if end is not None:
                self._child(self._stages, room.side, stage).observe(end - begin)
        self._child(self._hand_over, room.side, room.status.value).observe(room.ended - room.opened)

    def rows_released(self, room: ObservedRoom) -> None:
        """See `Observer`."""
        if room.error is not None and room.ended is not None and room.released is not None:
            self._child(self._held, room.side).observe(room.released - room.ended)

    def chunk_written(self, room: ObservedRoom, chunk: Chunk) -> None:
        """See `Observer`."""
        self._child(self._chunks, room.side, chunk.transport, "failed" if chunk.error else "ok").inc()
        self._child(self._chunk_seconds, room.side, chunk.transport).observe(chunk.ended - chunk.started)
        if not chunk.error:
            self._count(self._bytes, room, chunk.transport, chunk.moved)
            self._count(self._pieces, room, chunk.transport, chunk.pieces)

    def part_delivered(self, room: ObservedRoom, chunk: Chunk) -> None:
        """See `Observer`."""
        self._count(self._bytes, room, chunk.transport, chunk.moved)

    def peer_lost(self, rank: ObservedRank, peer: PeerRecord, reason: str) -> None:
        """See `Observer`."""
        self._child(self._peers_lost, rank.side).inc()

    def handshake_refused(self, rank: ObservedRank, error: str, reason: str) -> None:
        """See `Observer`."""
        self._child(self._refused, rank.side, error if error in _ERRORS else OTHER).inc()

    def _count(
        self, counter: prometheus_client.Counter, room: ObservedRoom, transport: str, numbers: Mapping[str, int]
    ) -> None:
        for name, number in numbers.items():
            component = name if name in room.rank.components else OTHER
            self._child(counter, room.side, component, transport).inc(number)


class _Sampled(Collector):
    """What is asked of the managers when somebody reads: nothing is counted twice, and nothing drifts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: list[ObservedRank] = []
        self._past: Counter[tuple[str, ...]] = Counter()
        """The counters of ranks that are closed: a counter must not fall."""

    def add(self, rank: ObservedRank) -> None:
        with self._lock:
            self._ranks.append(rank)

    def remove(self, rank: ObservedRank) -> None:
        with self._lock:
            if rank in self._ranks:
                self._ranks.remove(rank)
                self._past.update(_counters(rank))

    def describe(self) -> Iterator[Metric]:
        """The names, so that no second one of them can be registered."""
        yield from _families({}, {})

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            counters: Counter[tuple[str, ...]] = Counter(self._past)
            gauges: Counter[tuple[str, ...]] = Counter()
            for rank in self._ranks:
                counters.update(_counters(rank))
                gauges.update(_gauges(rank))
        yield from _families(gauges, counters)


def _gauges(rank: ObservedRank) -> dict[tuple[str, ...], int]:
    figures, side = rank.figures(), rank.side
    found: dict[tuple[str, ...], int] = {
        ("quarantined_rooms", side): figures.quarantined_rooms,
        ("quarantined_rows", side): figures.quarantined_rows,
    }
    found |= {("rooms", side, state): figures.rooms.get(state, 0) for state in _STATES}
    found |= {("peers", side, transport): count for transport, count in figures.peers.items()}
    if side == "prefill":
        found |= {("tickets", side): figures.tickets, ("parked_offers", side): figures.parked_offers}
    else:
        found[("unfenced_peers", side)] = figures.unfenced_peers
    return found


def _counters(rank: ObservedRank) -> dict[tuple[str, ...], int]:
    figures, side = rank.figures(), rank.side
    found: dict[tuple[str, ...], int] = {("control_faults", side): figures.control_faults}
    found |= {("frames_dropped", side, kind): count for kind, count in figures.dropped_frames.items()}
    found |= {("messages_ignored", side, kind): count for kind, count in figures.ignored_messages.items()}
    return found


_STATES = ("waiting", "transferring", "success", "failed")
_FAMILIES: list[tuple[Any, str, str, tuple[str, ...]]] = [
    (GaugeMetricFamily, "rooms", "Rooms whose number is in use, by state.", ("side", "state")),
    (GaugeMetricFamily, "quarantined_rooms", "Rooms that failed and whose rows are not released yet.", ("side",)),
    (GaugeMetricFamily, "quarantined_rows", "Rows of those rooms, of all components.", ("side",)),
    (GaugeMetricFamily, "peers", "Ranks of the other side that are joined.", ("side", "transport")),
    (GaugeMetricFamily, "unfenced_peers", "Lost prefill ranks that may still write, as far as is proven.", ("side",)),
    (GaugeMetricFamily, "tickets", "Writes that are under way.", ("side",)),
    (GaugeMetricFamily, "parked_offers", "Offers for rooms that are not open yet.", ("side",)),
    (CounterMetricFamily, "frames_dropped", "Frames that could not be decoded, by error.", ("side", "kind")),
    (CounterMetricFamily, "messages_ignored", "Messages that did not fit the state of things.", ("side", "kind")),
    (CounterMetricFamily, "control_faults", "Errors of its own that a control thread survived.", ("side",)),
]


def _families(gauges: Mapping[tuple[str, ...], int], counters: Mapping[tuple[str, ...], int]) -> Iterator[Metric]:
    for kind, name, text, labels in _FAMILIES:
        family = kind(f"kvbaton_{name}", text, labels=labels)
        values = gauges if kind is GaugeMetricFamily else counters
        for (which, *said), number in sorted(values.items()):
            if which == name:
                family.add_metric(said, number)
        yield family
