"""OpenTelemetry spans of both sides are one trace, whichever engine has a span of its own."""

import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from rank_world import wait, wait_over, wait_released
from room_pairs import KV, Gate, hand_over, pair, start

import kvbaton as kb
from kvbaton import errors, protocol
from kvbaton.observe import Spans
from kvbaton.observe.spans import span_context, traceparent
from kvbaton.transport.loopback import LoopbackTransport


class Traced:
    """A provider, and what it exported."""

    def __init__(self):
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("an engine")

    def spans(self, name):
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def span(self, name):
        wait(lambda: self.spans(name), name)
        (found,) = self.spans(name)
        return found


@pytest.fixture
def traced():
    return Traced()


def test_engines_with_spans_of_one_trace_are_linked(world, traced):
    """Each room is a child of what its own engine does, and the prefill room says which decode room it served."""
    source, destination = pair(world, observers=[Spans(traced.provider)])
    with traced.tracer.start_as_current_span("the request") as request:
        sender, receiver = start(source, destination)
    sender.finish({"kv": [0, 1]}, (0, 8))
    wait_over(sender, receiver)
    decode, prefill = traced.span("kvbaton.decode.room"), traced.span("kvbaton.prefill.room")
    assert decode.parent.span_id == request.get_span_context().span_id
    assert prefill.parent.span_id == request.get_span_context().span_id
    assert [link.context.span_id for link in prefill.links] == [decode.context.span_id]
    assert decode.context.trace_id == prefill.context.trace_id == request.get_span_context().trace_id


def test_a_prefill_engine_without_a_span_joins_the_trace_of_decode(world, traced):
    source, destination = pair(world, observers=[Spans(traced.provider)])
    with traced.tracer.start_as_current_span("the request") as request:
        receiver = destination.manager.receiver(4)
        receiver.offer({"kv": [4, 5]}, 8)
    sender = source.manager.sender(4)
    sender.finish({"kv": [0, 1]}, (0, 8))
    wait_over(sender, receiver)
    decode, prefill = traced.span("kvbaton.decode.room"), traced.span("kvbaton.prefill.room")
    assert prefill.parent.span_id == decode.context.span_id
    assert prefill.parent.is_remote
    assert prefill.context.trace_id == request.get_span_context().trace_id
    assert prefill.links == ()


def test_stages_and_chunks_are_children_within_their_room(world, traced):
    source, destination = pair(world, observers=[Spans(traced.provider)])
    hand_over(source, destination, 6)
    for side, children in (
        ("decode", ("waiting", "transfer")),
        ("prefill", ("waiting", "transfer", "chunk")),
    ):
        room = traced.span(f"kvbaton.{side}.room")
        assert room.kind is (SpanKind.CONSUMER if side == "decode" else SpanKind.PRODUCER)
        assert room.attributes["kvbaton.room"] == "6"
        assert room.attributes["kvbaton.status"] == "success"
        assert room.attributes["kvbaton.bytes.kv"] > 0
        assert room.status.status_code is StatusCode.UNSET
        for name in children:
            child = traced.span(f"kvbaton.{side}.{name}")
            assert child.parent.span_id == room.context.span_id
            assert room.start_time <= child.start_time <= child.end_time <= room.end_time
        waiting, transfer = (traced.span(f"kvbaton.{side}.{name}") for name in ("waiting", "transfer"))
        assert waiting.start_time == room.start_time
        assert waiting.end_time == transfer.start_time
        assert transfer.end_time == room.end_time
    chunk = traced.span("kvbaton.prefill.chunk")
    assert chunk.attributes["kvbaton.transport"] == "loopback"
    assert chunk.attributes["kvbaton.bytes.kv"] == traced.span("kvbaton.decode.room").attributes["kvbaton.bytes.kv"]
    events = [event.name for event in traced.span("kvbaton.decode.room").events]
    assert sorted(events) == ["connected", "offered", "part 0 delivered"]


def test_a_room_that_fails_is_an_error_and_its_held_rows_a_span(world, traced):
    gate = Gate()
    spans = Spans(traced.provider)
    (source,) = world.prefill(KV.layout(), transports=[LoopbackTransport("gated", fail=gate)], observers=[spans])
    (destination,) = world.decode(KV.layout(), observers=[spans])
    sender, receiver = start(source, destination)
    sender.finish({"kv": [0, 1]}, (0, 8))
    gate.wait_entered()
    sender.abort("enough")
    wait_over(sender, receiver)
    prefill = traced.span("kvbaton.prefill.room")
    assert prefill.status.status_code is StatusCode.ERROR
    assert prefill.status.description == "enough"
    assert prefill.attributes["error.type"] == "TransferAborted"
    assert traced.spans("kvbaton.prefill.release") == []
    gate.open()
    wait_released(sender, receiver)
    for side in ("prefill", "decode"):
        release, room = traced.span(f"kvbaton.{side}.release"), traced.span(f"kvbaton.{side}.room")
        assert release.parent.span_id == room.context.span_id
        assert release.start_time == room.end_time
        assert release.attributes["kvbaton.rows"] == 2
    assert spans._rooms == {}


def test_a_room_that_never_heard_of_the_other_side_has_a_span_too(world, traced):
    source, _ = pair(world, observers=[Spans(traced.provider)])
    with traced.tracer.start_as_current_span("the request") as request:
        sender = source.manager.sender(1)
    sender.close()
    wait_over(sender)
    room = traced.span("kvbaton.prefill.room")
    assert room.parent.span_id == request.get_span_context().span_id
    assert room.attributes["kvbaton.status"] == "failed"
    assert traced.span("kvbaton.prefill.waiting").parent.span_id == room.context.span_id
    assert traced.spans("kvbaton.prefill.transfer") == []


def test_without_an_sdk_nothing_is_recorded_or_sent(world):
    spans = Spans()
    source, destination = pair(world, observers=[spans])
    hand_over(source, destination)
    wait(lambda: spans._rooms == {})


def test_the_trace_context_travels_only_where_somebody_observes(world, traced):
    offers = []
    source, destination = pair(world)
    core, handle = source.manager.side.core, source.manager.side.core.handle
    core.handle = lambda peer, message, now: (offers.append(message), handle(peer, message, now))[1]
    hand_over(source, destination, 1)
    (other,) = world.decode(KV.layout(), observers=[Spans(traced.provider)])
    hand_over(source, other, 2)
    decode = traced.span("kvbaton.decode.room")
    said = [message.trace for message in offers if isinstance(message, protocol.Offer)]
    assert said == ["", traceparent(decode.context)]
    assert span_context(said[1]).span_id == decode.context.span_id


GOOD = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@pytest.mark.parametrize("trace", ["", GOOD])
def test_an_offer_takes_a_traceparent(trace):
    offer = protocol.Offer(1, 1, 8, {}, trace=trace)
    assert protocol.decode(protocol.encode(offer)) == (offer,)


BAD = {
    "free text": "who is there",
    "another version": "01" + GOOD[2:],
    "upper case": GOOD.upper(),
    "longer": GOOD + "0",
    "a line end": GOOD + "\n",
    "only a line end": "\n",
    "shorter": GOOD[:-1],
}


@pytest.mark.parametrize("name", BAD)
def test_an_offer_takes_no_other_text(name):
    with pytest.raises(errors.ProtocolError):
        protocol.decode(protocol.encode(protocol.Offer(1, 1, 8, {}, trace=BAD[name])))
    assert span_context(BAD[name]) is None


def test_a_context_of_zeros_is_none():
    assert span_context("00-" + "0" * 32 + "-" + "b" * 16 + "-01") is None


def test_spans_need_the_api_and_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "kvbaton.observe.spans", raising=False)
    with pytest.raises(errors.ConfigurationError, match=r"kvbaton\[spans\]"):
        _ = kb.observe.Spans
