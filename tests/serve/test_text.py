from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.serve.text import Detokenizer, StopStrings


def decode_bytes(token_ids: object) -> str:
    return bytes(token_ids).decode("utf-8", "replace")  # type: ignore[call-overload, no-any-return]


def split(items: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[start:end] for start, end in itertools.pairwise(edges)]


@given(st.text(max_size=30), st.lists(st.integers(0, 100), max_size=10))
def test_pieces_make_the_whole_text(text: str, cuts: list[int]) -> None:
    text = text.encode("utf-8", "replace").decode()
    token_ids = list(text.encode())
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.add(chunk) for chunk in split(token_ids, cuts)]
    assert "".join(pieces) + detokenizer.finish() == text


@given(st.text(alphabet="é€𐍈", max_size=12))
def test_no_piece_has_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(decode_bytes)
    for token_id in text.encode():
        assert "\ufffd" not in detokenizer.add([token_id])


def test_a_space_that_depends_on_what_is_before_it_stays() -> None:
    words = {1: "the", 2: "cat", 3: "sat"}
    detokenizer = Detokenizer(lambda ids: " ".join(words[each] for each in ids))
    assert [detokenizer.add([each]) for each in (1, 2, 3)] == ["the", " cat", " sat"]


def test_bytes_that_never_make_a_character_are_given_out() -> None:
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.add([0xFF]) for _ in range(40)]
    assert "".join(pieces) + detokenizer.finish() == "\ufffd" * 40
    assert len([piece for piece in pieces if piece]) >= 4


def test_cost_does_not_grow_with_the_text() -> None:
    decoded = []

    def decode(ids: object) -> str:
        decoded.append(len(ids))  # type: ignore[arg-type]
        return decode_bytes(ids)

    detokenizer = Detokenizer(decode)
    for _ in range(500):
        detokenizer.add([0x61])
    assert max(decoded) <= 2


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "stop"),
    [
        ((), ["ab", "c"], "abc", None),
        (("x",), ["ab", "c"], "abc", None),
        (("c",), ["ab", "cd"], "ab", "c"),
        (("bc",), ["ab", "cd"], "a", "bc"),
        (("abcd",), ["ab", "c"], "abc", None),
        (("abcd",), ["a", "b", "c", "d"], "", "abcd"),
        (("aab",), ["a", "a", "a", "b"], "a", "aab"),
        (("cd", "bc"), ["abcd"], "a", "bc"),
        (("b", "bc"), ["abcd"], "a", "bc"),
        (("\n\n",), ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (("",), ["abc"], "abc", None),
    ],
)
def test_stop_strings(stops: tuple[str, ...], pieces: list[str], text: str, stop: str | None) -> None:
    finder = StopStrings(stops)
    out = ""
    found = None
    for piece in pieces:
        free, found = finder.add(piece)
        out += free
        if found:
            break
    else:
        out += finder.finish()
    assert (out, found) == (text, stop)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_string_is_found_where_find_finds_it(text: str, stops: list[str]) -> None:
    finder = StopStrings(stops)
    out = ""
    found = None
    for letter in text:
        free, found = finder.add(letter)
        out += free
        if found:
            break
    ends = [text.find(each) + len(each) for each in stops if each in text]
    if found is None:
        assert not ends
        assert out + finder.finish() == text
    else:
        # The first that is complete wins, however long another might have become.
        assert len(out) + len(found) == min(ends)
        assert text.startswith(out + found)
