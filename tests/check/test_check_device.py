"""Which devices the checks of layouts can be asked for."""

import pytest
from typer.testing import CliRunner

from kvbaton.check.on_device import check_device
from kvbaton.cli.check import app
from kvbaton.errors import ConfigurationError


def test_a_device_that_is_not_known_is_refused():
    check_device("")
    with pytest.raises(ConfigurationError, match="--device tpu: it must be cuda, or nothing"):
        check_device("tpu")


def test_a_device_that_is_not_here_is_refused_before_anything_runs():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = CliRunner().invoke(app, ["layouts", "--examples", "1", "--device", "cuda"])
    assert isinstance(done.exception, ConfigurationError)
    assert "CUDA device" in str(done.exception) or "kvbaton[gpu]" in str(done.exception)
