"""The registry says how much it holds and what it was asked, with few labels."""

import asyncio

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvbaton.errors import ConfigurationError
from kvbaton.layout.nouns import Coords, RankLayout
from kvbaton.registry import Registration, RegistryTable
from kvbaton.registry.metrics_port import metrics_port
from kvbaton.registry.server import make_app
from kvbaton.secret import Secret


class Client:
    def __init__(self, app):
        self.app = app

    def ask(self, method, path, content=None):
        async def call():
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://registry") as client:
                return await client.request(method, path, content=content)

        return asyncio.run(call())

    def metrics(self):
        answer = self.ask("GET", "/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
def client(now):
    return Client(make_app(RegistryTable(ttl=10), clock=lambda: now[0]))


def rank(number):
    layout = RankLayout((), Coords(dp=(number, 2)))
    return msgspec.json.encode(Registration(f"i{number}", "tcp://127.0.0.1:7000", layout, "m"))


def test_what_it_holds(client, now):
    for number in range(2):
        assert client.ask("PUT", "/v1/ranks", rank(number)).status_code == 200
    assert client.ask("POST", "/v1/ranks/i0/rooms", b'{"opened": [5, 6, 7]}').status_code == 200
    held = client.metrics()
    assert held[("kvbaton_registry_ranks",)] == 2
    assert held[("kvbaton_registry_deployments",)] == 1
    assert held[("kvbaton_registry_rooms",)] == 3
    # Ranks that no longer say that they live are gone, also where nobody asked for them.
    now[0] += 11
    held = client.metrics()
    assert [held[(f"kvbaton_registry_{name}",)] for name in ("ranks", "deployments", "rooms")] == [0, 0, 0]


def test_what_it_was_asked_by_route_and_status(client):
    client.ask("PUT", "/v1/ranks", rank(0))
    client.ask("PUT", "/v1/ranks", b"nonsense")
    for number in range(30):
        client.ask("POST", f"/v1/ranks/nobody-{number}/heartbeat")
        client.ask("GET", f"/admin/{number}.php")
        client.ask(f"MADEUP{number}", "/v1/topology")
    asked = {key[1:]: value for key, value in client.metrics().items() if key[0] == "kvbaton_registry_requests_total"}
    assert asked[("PUT", "/v1/ranks", "200")] == 1
    assert asked[("PUT", "/v1/ranks", "400")] == 1
    assert asked[("POST", "/v1/ranks/{instance}/heartbeat", "404")] == 30
    assert asked[("GET", "other", "404")] == 30
    assert asked[("other", "/v1/topology", "405")] == 30
    assert sum(asked.values()) == 2 + 3 * 30
    assert {name for key in asked for name in key if "nobody" in name or "php" in name or "MADEUP" in name} == set()


def test_with_a_secret_metrics_have_a_port_of_their_own():
    client = Client(make_app(RegistryTable(), secret=Secret.of("a-secret-of-16-bytes")))
    assert client.ask("GET", "/metrics").status_code == 401
    with metrics_port(client.app, "127.0.0.1", 0) as port:
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False)
        # The request that was refused is counted.
        assert 'kvbaton_registry_requests_total{method="GET",route="other",status="401"} 1.0' in answer.text
        assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 404
        with pytest.raises(ConfigurationError, match=f"port {port}"), metrics_port(client.app, "127.0.0.1", port):
            pass
