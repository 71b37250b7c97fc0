"""The fuzzers: they find what is wrong when something is, and find nothing in what there is."""

import json
import mmap
import struct
import sys

import msgspec
import pytest

from kvbaton.check.fuzz import samples
from kvbaton.check.fuzz.decoders import all_decoders
from kvbaton.check.fuzz.mutate import Mutator, ValueMutator
from kvbaton.check.fuzz.report import plan, run
from kvbaton.check.fuzz.run import Count, fuzz, replay
from kvbaton.check.fuzz.target import Decoder, pure
from kvbaton.cli.main import main
from kvbaton.errors import ConfigurationError

LONG = 10_000_000


def findings(counts: list[Count]) -> list[str]:
    return [finding.text() for count in counts for finding in count.findings]


def test_nothing_is_found() -> None:
    """A little of everything, with a seed of its own in each release's tests; `test_ten_million` has more."""
    counts = run(120_000, 1, processes=2)
    assert findings(counts) == []
    assert sum(count.inputs for count in counts) == 120_000
    assert all(count.inputs for count in counts)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_million() -> None:
    counts = run(LONG, 2, processes=2)
    assert findings(counts) == []
    assert sum(count.inputs for count in counts) == LONG
    # Both of them are looked at: what is taken, and what is refused.
    judged = [count for count in counts if count.taken or count.refused]
    assert [count.target for count in judged if not (count.taken and count.refused)] == []


@pytest.mark.parametrize("decoder", all_decoders(), ids=lambda decoder: decoder.name)
def test_the_examples_are_valid(decoder: Decoder) -> None:
    """What the inputs are made of gets as far as it can: a fuzzer of refused examples would see little."""
    for example in decoder.examples:
        decoder.make()(example)


def read(data: bytes) -> int:
    """A decoder with a mistake: it believes a length."""
    if len(data) < 4:
        raise ValueError("cut")
    (length,) = struct.unpack_from("<I", data)
    if length > 1 << 20:
        raise ValueError("too long")
    return data[4 + length] if length else 0


def test_a_length_that_is_believed_is_found_and_can_be_replayed() -> None:
    decoder = Decoder("wrong", pure(read), (struct.pack("<I", 2) + b"abc",), (ValueError,))
    count = fuzz(decoder, 2000, "1")
    assert count.findings
    assert count.inputs == count.taken + count.refused + len(count.findings)
    finding = count.findings[0]
    assert "IndexError" in finding.error
    assert finding.data.hex() in finding.text()
    assert replay(decoder, finding.data).findings == [finding]
    assert replay(decoder, decoder.examples[0]).taken == 1


def test_a_value_that_is_believed_is_found() -> None:
    """Deep inside of a valid message: single bytes would hardly get there."""

    def feed(data: bytes) -> None:
        layout = msgspec.msgpack.decode(data)
        if layout[0][0][2][0][4] > 1 << 40:
            raise ZeroDivisionError

    errors = (msgspec.DecodeError, TypeError, IndexError, KeyError, UnicodeDecodeError, ValueError)
    example = msgspec.msgpack.encode(samples.layout())
    count = fuzz(Decoder("wrong", pure(feed), (example,), errors, "msgpack"), 20_000, "1")
    assert count.findings


def test_what_takes_long_and_what_takes_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr("kvbaton.check.fuzz.run.GROWTH_BYTES", 1 << 20)

    def hoards(data: bytes) -> None:
        # Mapped anew: a process that ran other tests before may have freed memory at hand.
        kept.append(mmap.mmap(-1, 1 << 18))
        kept[-1].write(b"x" * (1 << 18))

    hoard = Decoder("hoard", pure(hoards), (b"a",), ())
    assert "more memory" in fuzz(hoard, 200, "1").findings[-1].error
    slow = Decoder("slow", pure(lambda data: sum(range(200_000))), (b"a",), (), patience=1e-4)
    assert "it took" in fuzz(slow, 3, "1").findings[0].error


def test_the_same_seed_gives_the_same_inputs() -> None:
    examples = (b"0123456789" * 5, bytes(range(64)))
    runs = [[Mutator(seed, examples).next() for _ in range(1)] for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    first, second = Mutator("x", examples), Mutator("x", examples)
    assert [first.next() for _ in range(200)] == [second.next() for _ in range(200)]
    values = [ValueMutator("x", [[1, {"a": [2.5, "b"]}]]) for _ in range(2)]
    made = [[repr(each.next()) for _ in range(200)] for each in values]
    assert made[0] == made[1]
    assert len(set(made[0])) > 50


def test_every_cut_of_an_example_comes_first() -> None:
    example = b"abcdef"
    cuts = list(Mutator(1, (example,)).systematic())
    assert cuts[0] == example
    assert {example[:length] for length in range(6)} < set(cuts)


def test_inputs_are_shared_out_completely() -> None:
    shares = plan(1_000_003)
    assert sum(shares.decoders.values()) + sum(shares.ports.values()) == 1_000_003
    assert sum(shares.ports.values()) == 10_000
    assert plan(77, ["rows"]).decoders == {"rows": 77}
    assert plan(77, ["registry"]).ports == {"registry": 77}
    with pytest.raises(ConfigurationError, match="nothing to fuzz that is called 'nonsense'"):
        plan(1, ["nonsense"])


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["kvbaton", "check", "fuzz", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_the_command_prints_counts_and_replays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "--inputs", "500", "--seed", "7", "--only", "rows; address", "--json", "-") == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["inputs"], figures["seed"], figures["findings"]) == (500, 7, 0)
    assert [each["target"] for each in figures["targets"]] == ["rows", "address"]
    assert command(monkeypatch, "--only", "rows", "--replay", "00") == 0
    assert "1 inputs" in capsys.readouterr().out
    assert command(monkeypatch, "--replay", "00") == 2
    assert command(monkeypatch, "--only", "nonsense") == 2
