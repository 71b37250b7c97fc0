"""The summary shows each figure that has a target, with its verdict."""

import pytest

from kvbaton.bench.report import Figure, absent, at_least, at_most, write_report
from kvbaton.bench.summary import summarise
from kvbaton.errors import ConfigurationError


def test_figures_with_targets_of_all_files(tmp_path):
    write_report(
        [
            at_least("fast", 10.0, "GiB/s", "slow", 2.0, 5.0),
            at_least("plain", 10.0, "GiB/s", "slow", 2.0, None),
            absent("alone", "GiB/s", "nobody", "no such library", 2.0, 7.0),
        ],
        tmp_path / "transfer.json",
    )
    write_report([at_most("late", 6.0, "us", "early", 1.0, 5.0)], tmp_path / "latency.json")
    write_report([Figure("other", 1.0, "s", target=2.0, met=True)], tmp_path / "plan.json")
    lines = summarise(tmp_path).splitlines()
    assert [line for line in lines if line.startswith("| ")][2:] == [
        "| fast | 10 GiB/s | slow | 5 | 5 x | met |",
        "| alone | 7 GiB/s | nobody |  | 2 x | not here |",
        "| late | 6 us | early | 6 | 5 x | **missed** |",
    ]
    assert lines[-1] == "1 met, 1 missed, 1 without their peer."


@pytest.mark.parametrize("text", [None, "{"])
def test_nothing_to_summarise(text, tmp_path):
    if text is not None:
        (tmp_path / "rooms.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"has none of|holds no figures"):
        summarise(tmp_path)
