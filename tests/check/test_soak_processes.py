"""The soak itself, for half a minute."""

import pytest

from kvbaton.check.soak.supervisor import Soak

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_half_a_minute(tmp_path):
    tally = Soak(("shm", "tcp"), 7, tmp_path).run(30.0)
    assert tally.broken() == []
    assert tally.faults.total() >= 25
    assert tally.succeeded > 100
