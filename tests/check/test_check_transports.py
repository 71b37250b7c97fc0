"""`kvbaton check transports`: what ran, what was skipped, what is broken, and what is not there."""

import json

import pytest

from kvbaton.check.transport_report import check_transports
from kvbaton.check.transports import run, subject_of, subjects
from kvbaton.errors import ConfigurationError, TransportUnavailable
from kvbaton.transport import NAMES
from kvbaton.transport.conformance import Conformance
from kvbaton.transport.loopback import LoopbackTransport

QUICK = ["visible_content", "fence_of_a_writer", "garbage_descriptor"]


class Forgetful(LoopbackTransport):
    """Drops every write."""

    def write(self, peer, transfers, ticket):
        super().write(peer, [], ticket)


def absent(instance):
    raise TransportUnavailable("the device is missing")


def test_all_names_are_subjects_and_each_fabric_with_each_executor():
    names = [subject.name for subject in subjects()]
    assert [name for name in names if "," not in name] == ["loopback", "shm", "tcp"]
    assert [name for name in names if name.startswith("nixl")] == ["nixl, auto", "nixl, packed", "nixl, direct"]
    assert {name.partition(",")[0] for name in names} == set(NAMES)
    assert [subject.name for subject in subjects(["mori"], {"executor": "packed"})] == ["mori, packed"]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"'pigeon'; choose among loopback, .*memory"):
        subjects(["pigeon"])
    with pytest.raises(ConfigurationError, match=r"no check nonsense; choose among both_ways"):
        run(subjects(["loopback"])[0], ["nonsense"])


def test_every_check_runs_where_none_are_named():
    told = []
    found = run(subjects(["loopback"])[0], progress=told.append)
    assert tuple(outcome.check for outcome in found.outcomes) == Conformance.names() == tuple(told)
    assert not found.broken


def test_results_as_json_say_what_was_kept_and_skipped(tmp_path):
    target = tmp_path / "results.json"
    assert check_transports(["shm", "memory"], QUICK, {"executor": "packed"}, json_to=str(target))
    shm, memory = json.loads(target.read_text())
    assert [shm["transport"], memory["transport"]] == ["shm", "memory, packed"]
    by_check = {outcome[0]: outcome[1:] for outcome in shm["outcomes"]}
    assert by_check["visible_content"] == ["kept", ""]
    assert by_check["fence_of_a_writer"][0] == "skipped"
    assert "process" in by_check["fence_of_a_writer"][1]
    assert [outcome[1] for outcome in memory["outcomes"]] == ["kept"] * 3


def test_a_broken_promise_fails_the_run_and_is_named(capsys):
    assert not check_transports([], ["visible_content"], {}, factory=f"{__name__}:Forgetful")
    assert "visible_content broken: PromiseBroken" in capsys.readouterr().out.replace("\n", " ")


def test_what_is_missing_fails_only_where_it_was_asked_for(capsys):
    assert check_transports([], QUICK, {}, factory=f"{__name__}:absent")
    assert "the device is missing" in capsys.readouterr().out


def test_options_reach_fabrics():
    with pytest.raises(ConfigurationError, match="slab_bytes is 'none'"):
        check_transports(["memory"], QUICK, {"slab_bytes": "none"})


def test_an_option_that_one_of_them_does_not_take_ends_it_before_any_check(monkeypatch):
    ran = []
    monkeypatch.setattr(Conformance, "outcome", lambda self, check: ran.append(check))
    with pytest.raises(ConfigurationError, match=r"memory, packed: memory has no option colour.*every fabric"):
        check_transports(["shm", "memory"], QUICK, {"executor": "packed", "colour": "red"})
    assert not ran


@pytest.mark.parametrize("factory", ["nonsense", "no.such.module:make", f"{__name__}:nothing", f"{__name__}:QUICK"])
def test_a_factory_that_is_none_is_refused(factory):
    with pytest.raises(ConfigurationError, match="--factory"):
        subject_of(factory)
