import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from rank_world import World


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()
