"""The plot is of the figures that it is given, and nothing lies outside it."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from kvbaton.bench.plot import HEIGHT, WIDTH, draw_file, lines_of
from kvbaton.errors import ConfigurationError

SVG = "{http://www.w3.org/2000/svg}"
RESULTS = [
    {"name": "shm, 2 KiB pieces", "value": 9.0},
    {"name": "shm: 2 KiB pieces, 256 MiB", "value": 8.0},
    {"name": "shm: 256 B pieces, 64 MiB", "value": 4.0},
    {"name": "shm: 128 KiB pieces, 256 MiB", "value": 12.5},
    {"name": "NIXL over tcp: 256 B pieces, 64 MiB", "value": 0.02},
    {"name": "NIXL over tcp: 128 KiB pieces, 256 MiB", "value": 12.4},
    {"name": "Mooncake over tcp: 256 B pieces, 64 MiB", "value": None},
]


def test_lines_are_of_one_contender_each_and_sorted():
    assert lines_of(RESULTS) == [
        ("kvbaton over shm", ((256, 4.0), (2048, 8.0), (131072, 12.5))),
        ("NIXL over tcp", ((256, 0.02), (131072, 12.4))),
    ]


def test_the_picture(tmp_path):
    (tmp_path / "transfer.json").write_text(json.dumps({"results": RESULTS}))
    draw_file(tmp_path / "transfer.json", tmp_path / "deep" / "transfer.svg")
    root = ElementTree.fromstring((tmp_path / "deep" / "transfer.svg").read_text())
    assert "NIXL over tcp: 0.02 GiB/s at 256 B, 12.4 GiB/s at 128 KiB" in root.findtext(f"{SVG}desc")
    circles = [(float(each.get("cx")), float(each.get("cy"))) for each in root.iter(f"{SVG}circle")]
    assert len(circles) == 5
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in circles)
    assert sorted(circles)[0][1] != sorted(circles)[1][1]
    # The faster of two at the same size stands higher.
    by_line = dict(zip(("shm", "nixl"), (circles[:3], circles[3:]), strict=True))
    assert by_line["shm"][0][1] < by_line["nixl"][0][1]
    labels = {each.text: float(each.get("y")) for each in root.iter(f"{SVG}text")}
    assert abs(labels["kvbaton over shm"] - labels["NIXL over tcp"]) > 14
    assert {"256 B", "2 KiB", "128 KiB", "0.01", "10"} <= set(labels)


@pytest.mark.parametrize("text", ["", "[]", '{"results": []}', '{"results": [{"name": "x", "value": 1}]}'])
def test_what_cannot_be_drawn_is_refused(text, tmp_path):
    (tmp_path / "transfer.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"transfer\.json holds no"):
        draw_file(tmp_path / "transfer.json", tmp_path / "x.svg")
