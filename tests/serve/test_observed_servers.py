"""A server shows its metrics, and its engine's managers are watched."""

import asyncio

import httpx
import pytest
from fake_engine import CharTokenizer, FakeEngine
from opentelemetry import trace

from kvbaton.observe import Metrics, Spans
from kvbaton.registry import RegistryTable
from kvbaton.registry.server import make_app as registry_app
from kvbaton.serve.app import make_app
from kvbaton.serve.launch import _with_observers
from kvbaton.serve.observing import add_metrics_of, server_metrics, server_observers


def ask(app, *requests):
    async def call():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return [await client.request(method, path, **more) for method, path, more in requests]

    return asyncio.run(call())


def test_the_metrics_of_a_server():
    app = make_app(FakeEngine("decode"), CharTokenizer(), metrics=server_metrics())
    body = {"text": "abc", "bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 5}
    reply, metrics = ask(app, ("POST", "/generate", {"json": body}), ("GET", "/metrics", {}))
    assert reply.status_code == 200, reply.text
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    lines = metrics.text.splitlines()
    assert "kvbaton_server_requests_total 1.0" in lines
    assert "kvbaton_server_requests_running 0.0" in lines
    for name in ("kvbaton_rooms", "kvbaton_quarantined_rows", "process_resident_memory_bytes"):
        assert any(line.startswith(f"# TYPE {name} gauge") for line in lines), name


@pytest.mark.parametrize("stream", [False, True])
def test_rooms_are_opened_in_the_trace_of_the_request(stream):
    engine = FakeEngine("decode")
    seen, submit = [], engine.submit
    engine.submit = lambda request: (seen.append(trace.get_current_span().get_span_context()), submit(request))[1]
    body = {"text": "abc", "bootstrap_host": "h", "bootstrap_port": 1, "stream": stream}
    headers = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    app = make_app(engine, CharTokenizer())
    ask(app, ("POST", "/generate", {"json": {**body, "bootstrap_room": 5}, "headers": headers}))
    ask(app, ("POST", "/generate", {"json": {**body, "bootstrap_room": 6}}))
    assert [f"{each.trace_id:032x} {each.span_id:016x}" for each in seen[:1]] == ["a" * 32 + " " + "b" * 16]
    assert [each.is_valid for each in seen] == [True, False]


def test_a_prefill_server_shows_the_metrics_of_its_registry():
    metrics = server_metrics()
    add_metrics_of(metrics, registry_app(RegistryTable()).state.metrics)
    assert "kvbaton_registry_ranks 0.0" in metrics.text().decode().splitlines()


def test_an_app_without_metrics_serves_none():
    (answer,) = ask(make_app(FakeEngine("decode"), CharTokenizer()), ("GET", "/metrics", {}))
    assert answer.status_code == 404


def test_observers_go_to_the_managers_beside_those_that_are_there():
    metrics, mine = server_metrics(), Spans()
    options = {"page_size": 4, "manager_options": {"bind": "h", "observers": [mine]}}
    given = _with_observers(options, [metrics])
    assert given == {"page_size": 4, "manager_options": {"bind": "h", "observers": [mine, metrics]}}
    assert _with_observers({}, [metrics]) == {"manager_options": {"observers": [metrics]}}
    assert [type(each) for each in server_observers(metrics)] == [Metrics, Spans]
