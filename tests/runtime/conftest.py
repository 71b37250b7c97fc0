import pytest
from rank_world import World


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


@pytest.fixture(params=["loopback", "shm", "tcp", "memory"])
def any_world(request):
    made = World(request.param)
    yield made
    made.close()
