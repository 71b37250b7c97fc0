"""Frames as they were when the version of the protocol was settled, byte by byte.

A change of a message is a new PROTOCOL_VERSION; then the vectors are written anew, on purpose, by
``python tests/protocol/test_golden.py --write``.
"""

import json
import sys
from pathlib import Path

import pytest
from message_examples import EXAMPLES

from kvbaton.protocol import PROTOCOL_VERSION, Abort, Message, Ping, bundle, decode, encode

BUNDLED = (Ping(1), Abort(2, 3, "a reason"))
GOLDEN = Path(__file__).parent / "golden" / f"version_{PROTOCOL_VERSION}.json"


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_frame_is_the_golden_one(name):
    frame = bytes.fromhex(json.loads(GOLDEN.read_text())[name])
    assert encode(EXAMPLES[name]) == frame
    assert decode(frame) == (EXAMPLES[name],)


def test_bundle_is_the_golden_one():
    frame = bytes.fromhex(json.loads(GOLDEN.read_text())["bundle"])
    assert bundle([encode(message) for message in BUNDLED]) == [frame]
    assert decode(frame) == BUNDLED


def test_every_message_has_a_golden_frame():
    assert sorted(json.loads(GOLDEN.read_text())) == sorted([*EXAMPLES, "bundle"])
    assert {type(message) for message in EXAMPLES.values()} == set(Message.__args__)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    frames = {name: encode(message) for name, message in EXAMPLES.items()}
    (frames["bundle"],) = bundle([encode(message) for message in BUNDLED])
    GOLDEN.write_text(json.dumps({name: frame.hex() for name, frame in frames.items()}, indent=1) + "\n")
