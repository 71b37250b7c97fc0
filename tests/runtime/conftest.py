import os

import pytest
from rank_world import World

MORE = os.environ.get("KVBATON_TEST_TRANSPORTS", "").split()
"""Transports that are tested only where their library is: see scripts/test-mori.sh."""


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


@pytest.fixture(params=["loopback", "shm", "tcp", "memory", *MORE])
def any_world(request):
    made = World(request.param)
    yield made
    made.close()
