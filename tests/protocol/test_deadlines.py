import dataclasses

import pytest

from kvbaton.errors import ConfigurationError
from kvbaton.protocol import Deadlines


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Deadlines)])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_every_deadline_must_be_above_zero(name, value):
    with pytest.raises(ConfigurationError, match=name):
        Deadlines(**{name: value})
