from __future__ import annotations

import pytest

from kvbaton.engines.sglang import environment
from kvbaton.engines.sglang.environment import Timeouts
from kvbaton.engines.sglang.versions import ANY_VERSION, KNOWN, refusal
from kvbaton.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", "auto"), ("auto", "auto"), ("tcp", ["tcp"]), (" nixl, tcp ", ["nixl", "tcp"]), ("cuda", ["cuda"])],
)
def test_transports(text, expected):
    assert environment.transports({"KVBATON_TRANSPORT": text}) == expected
    assert environment.transports({}) == "auto"


def test_devices_are_told_to_the_fabrics_that_may_be_used():
    assert environment.device_options("auto", "") == {}
    assert environment.device_options(["tcp"], "mlx5_0") == {}
    assert environment.device_options(["nixl", "tcp"], "mlx5_0, mlx5_1") == {"nixl": {"devices": "mlx5_0,mlx5_1"}}
    assert set(environment.device_options("auto", "mlx5_0")) == {"nixl", "mooncake", "mori"}


def test_prefill_is_limited_while_it_waits_for_offers_only():
    deadlines = environment.settings("prefill", Timeouts(bootstrap=7, waiting=11), {}).deadlines
    assert deadlines.offer_wait == 7
    assert deadlines.transfer == environment.UNLIMITED


def test_decode_is_limited_after_its_offer_only():
    deadlines = environment.settings("decode", Timeouts(bootstrap=7, waiting=11), {}).deadlines
    assert deadlines.offer_wait == environment.UNLIMITED
    assert deadlines.transfer == 11


def test_proof_that_pages_are_free_comes_before_sglang_takes_them_back():
    assert environment.settings("decode", Timeouts(release=30), {}).deadlines.drain < 30


def test_a_silent_peer_counts_as_lost_after_sglangs_time():
    made = environment.settings("decode", Timeouts(lost=2.0), {})
    assert made.peer_timeout_seconds == 2.0
    assert made.heartbeat_seconds <= 0.5


@pytest.mark.parametrize("value", ["control", "fabric"])
def test_how_aux_data_travel(value):
    assert environment.settings("decode", Timeouts(), {"KVBATON_AUX": value}).aux == value


def test_another_way_of_aux_data_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="KVBATON_AUX is 'pigeon'; it must be one of control, fabric"):
        environment.settings("decode", Timeouts(), {"KVBATON_AUX": "pigeon"})


@pytest.mark.parametrize("version", [*KNOWN, "0.5.23+cu130"])
def test_a_known_version_of_sglang_is_taken(version):
    assert refusal(version, {}) == ""


@pytest.mark.parametrize("version", ["0.5.22", "0.6.0", "0.5.230", ""])
def test_another_version_of_sglang_is_refused_with_what_to_do(version):
    reason = refusal(version, {})
    assert ", ".join(KNOWN) in reason
    assert f"{ANY_VERSION}=1" in reason
    assert refusal(version, {ANY_VERSION: "1"}) == ""
