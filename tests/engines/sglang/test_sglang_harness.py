"""kvbaton in a harness that drives SGLang's managers as processes, and compares every byte at the destination."""

from __future__ import annotations

import json

import pytest
from sglang_here import HARNESS, needs_harness, needs_sglang, run

pytestmark = [needs_sglang, needs_harness, pytest.mark.long]


def measured(tmp_path, *arguments):
    """The rows of one run."""
    out = tmp_path / "out.json"
    run(
        HARNESS / "harness.py",
        *("--backend", "ext:kvbaton.engines.sglang:Kvbaton", "--reps", "1", "--json", str(out)),
        *("--log", str(tmp_path / "log"), *arguments),
    )
    return json.loads(out.read_text())


def check(cases):
    for case in cases:
        for row in [case["warm"], *case["rows"]]:
            assert row["bad"] == [], (case["case"], row["bad"])


def test_two_prefill_ranks_in_chunks(tmp_path):
    cases = measured(tmp_path, "--case", "smoke", "--chunk-pages", "3")
    check(cases)
    assert [len(case["rows"]) for case in cases] == [1]


@pytest.mark.parametrize("transport", ["tcp", "nixl", "mooncake"])
def test_every_grid_over_every_transport(tmp_path, monkeypatch, transport):
    if transport != "tcp":
        pytest.importorskip({"nixl": "nixl_cu13", "mooncake": "mooncake"}[transport], reason=f"{transport} is absent")
    monkeypatch.setenv("KVBATON_TRANSPORT", transport)
    check(measured(tmp_path, "--case", "gqa", "smoke", "cx", "d64", "--ntok", "256", "--nreq", "4"))


def test_aux_data_by_the_transport(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBATON_AUX", "fabric")
    check(measured(tmp_path, "--case", "smoke"))
