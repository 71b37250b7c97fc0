import os

import pytest
from driven_ranks import Process
from process_transports import LIBRARIES
from rank_world import World

from kvbaton.registry.server import RegistryServer
from kvbaton.runtime.decode import DecodeSide

MORE = os.environ.get("KVBATON_TEST_TRANSPORTS", "").split()
"""Transports that are tested only where their library is: see scripts/test-mori.sh."""


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


@pytest.fixture(params=["loopback", "shm", "tcp", "memory", *LIBRARIES, *MORE])
def any_world(request):
    made = World(request.param)
    yield made
    made.close()


@pytest.fixture
def start():
    processes = []
    with RegistryServer() as server:

        def make(role, transport, scale=1, tp=(), registry=server.url, **options):
            processes.append(Process(role, registry, transport, scale, tp, **options))
            return processes[-1]

        yield make
        for process in processes:
            process.close()


@pytest.fixture
def dones(monkeypatch):
    """Every Done that the decode side looks at."""
    seen = []
    inspect = DecodeSide._inspect

    def spy(self, number, done):
        seen.append(done)
        return inspect(self, number, done)

    monkeypatch.setattr(DecodeSide, "_inspect", spy)
    return seen
