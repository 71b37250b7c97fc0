from __future__ import annotations

import asyncio
import threading

import pytest

import kvbaton as kb
from kvbaton.errors import RegistryError
from kvbaton.layout import paged_kv
from kvbaton.registry import HttpRegistry, Registration
from kvbaton.registry.server import make_app
from kvbaton.registry.table import RegistryTable
from kvbaton.secret import Secret

web = pytest.importorskip("aiohttp.web", reason="aiohttp is not installed")
from kvbaton.engines.sglang.mounted import mount  # noqa: E402

SECRET = "0123456789abcdef0123456789abcdef"


class Server:
    """An aiohttp server with a route of its own and the registry below /kvbaton."""

    def __init__(self, secret=None):
        self._loop = asyncio.new_event_loop()
        self._secret = secret
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(20)

    def _run(self):
        asyncio.set_event_loop(self._loop)
        server = web.Application()
        server.router.add_get("/own", self._own)
        mount(server, "/kvbaton", make_app(RegistryTable(), secret=self._secret))
        runner = web.AppRunner(server)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    @staticmethod
    async def _own(request):
        return web.Response(text="own")

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)


@pytest.fixture
def serve():
    servers = []

    def start(secret=None):
        servers.append(Server(None if secret is None else Secret.of(secret)))
        return f"http://127.0.0.1:{servers[-1].port}/kvbaton"

    yield start
    for server in servers:
        server.close()


def registration(layers=1):
    kv = paged_kv(layers=range(layers), rows=8, page_size=16, heads=2, head_dim=8, dtype="float16")
    return Registration("one", "tcp://127.0.0.1:1", kb.RankLayout((kv,)), "m")


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_registry_below_a_path_serves_as_one_of_its_own(serve, secret):
    client = HttpRegistry(serve(secret), secret=secret)
    client.register(registration())
    assert client.heartbeat("one")
    assert not client.heartbeat("another of an 'odd' name?")
    assert [rank.instance for rank in client.topology("default", dp_rank=0).ranks] == ["one"]
    client.announce_rooms("one", [7], [])
    assert client.find_rooms("default", [7]).rooms == {7: 0}
    client.remove("one")
    with pytest.raises(RegistryError, match="default"):
        client.topology()


def test_a_large_registration_arrives_whole(serve):
    client = HttpRegistry(serve())
    sent = registration(layers=4000)
    client.register(sent)
    assert client.topology().ranks == (sent,)


def test_who_has_no_secret_is_refused(serve):
    with pytest.raises(RegistryError, match="wants a secret"):
        HttpRegistry(serve(SECRET)).register(registration())


def test_the_servers_own_routes_stay(serve):
    import urllib.request

    url = serve().replace("/kvbaton", "/own")
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.read() == b"own"
