"""Kinds of components are data: what moves follows from a kind's numbers, also for kinds that have no name."""

from dataclasses import replace

import pytest
from rank_world import FAST, succeeded, wait_over

import kvbaton as kb
from kvbaton.errors import RowsError, TransferFailed
from kvbaton.layout import PAGED, TOKEN, Field, Kind, component, compressed, ring, tail, window

TOKENS = 50
CHECKED = replace(FAST, digest=True)


def layout(kind, page_size, rows=20):
    axes = ((TOKEN, page_size // kind.ratio, None), ("dim", 3, None))
    fields = [Field("state", "bfloat16", axes), Field("score", "float32", axes[:1])]
    return kb.RankLayout((component("c", kind, fields, layers=(1, 4), rows=rows, page_size=page_size, offset=24),))


# name: (kind and page size at prefill, kind and page size at decode, rows at prefill, rows at decode, tokens that move)
CASES = {
    "window ring, rings of unlike sizes": ((ring(13), 4), (ring(13), 3), 5, 7, (37, 50)),
    "window ring to linear pages": ((ring(13), 4), (Kind(window=13, reused=False), 5), 4, 3, (37, 50)),
    "linear pages to a window ring": ((Kind(window=13, reused=False), 4), (ring(13), 1), 13, 13, (37, 50)),
    "a ring that is one row of the request": ((ring(13), 16), (ring(13), 13), 1, 1, (37, 50)),
    "tail, rings of unlike sizes": ((tail(16), 16), (tail(16), 32), 1, 1, (48, 50)),
    "compressed entries": ((compressed(4), 8), (compressed(4), 32), 7, 2, (0, 48)),
    "nobody has named this: a window of entries in a ring": (
        (Kind(window=20, ratio=4, ring=True, reused=False), 8),
        (Kind(window=20, ratio=4, reused=False), 4),
        4,
        6,
        (28, 48),
    ),
    "nor this: a tail of paged tokens, never reused": (
        (Kind(tail=7, reused=False), 4),
        (Kind(tail=7, reused=False), 2),
        13,
        1,
        (49, 50),
    ),
}


@pytest.mark.parametrize("prefix", [0, 21])
@pytest.mark.parametrize("name", CASES)
def test_exactly_the_tokens_of_the_kind_move(any_world, name, prefix):
    (kind, size), (other_kind, other_size), rows, other_rows, moved = CASES[name]
    (source,) = any_world.prefill(layout(kind, size))
    (destination,) = any_world.decode(layout(other_kind, other_size), settings=CHECKED)
    given = [(7 * number + 3) % 20 for number in range(rows)]
    offered = [(3 * number + 1) % 20 for number in range(other_rows)]
    first = max(moved[0], prefix) if other_kind.reused else moved[0]
    # Pages that are not a ring begin with the first token that is needed at decode, with the first of all at prefill.
    start = 0 if other_kind.ring else first // other_size * other_size
    offered = offered if other_kind.ring else offered[: -(-TOKENS // other_size) - start // other_size]
    held = max(0, TOKENS - rows * size) if kind.ring else 0
    source.fill("c", given, (held, TOKENS))
    receiver, sender = destination.manager.receiver(1), source.manager.sender(1)
    receiver.offer({"c": offered}, TOKENS, prefix=prefix)
    if kind.ring:
        sender.finish({"c": given}, (0, TOKENS))
    else:
        for begin, end in ((0, 18), (18, 33), (33, TOKENS)):
            pages = given[begin // size : -(-end // size)]
            sender.send({"c": pages}, (begin, end))
        sender.finish()
    succeeded(sender, receiver)
    destination.check("c", offered, (first, moved[1]), start=start)
    destination.check_rest()
    entries = moved[1] // kind.ratio - first // kind.ratio
    assert receiver.bytes_by_component == {"c": entries * 2 * (3 * 2 + 4)}


@pytest.mark.parametrize(
    ("tokens", "prefix", "entries"), [(3, 0, 0), (18, 16, 0), (19, 18, 0), (20, 18, 1), (35, 8, 6)]
)
@pytest.mark.parametrize("given", [True, False])
def test_pages_without_a_complete_entry_may_be_given_or_left_out(world, tokens, prefix, entries, given):
    (source,) = world.prefill(layout(compressed(4), 16))
    (destination,) = world.decode(layout(compressed(4), 16), settings=CHECKED)
    pages = range(-(-tokens // 16))
    source.fill("c", [5 + page for page in pages], (0, tokens))
    receiver, sender = destination.manager.receiver(1), source.manager.sender(1)
    offered = [9 + page for page in pages[prefix // 16 :]] if given or entries else []
    receiver.offer({"c": offered}, tokens, prefix=prefix)
    sender.finish({"c": [5 + page for page in pages]}, (0, tokens))
    succeeded(sender, receiver)
    destination.check("c", [9 + page for page in pages[prefix // 16 :]], (prefix, tokens), start=prefix // 16 * 16)
    destination.check_rest()
    assert receiver.bytes_by_component.get("c", 0) == entries * 2 * (3 * 2 + 4)


def test_a_ring_that_is_too_small_is_refused_at_the_offer(world):
    (source,) = world.prefill(layout(ring(13), 4))
    (destination,) = world.decode(layout(ring(13), 4), settings=CHECKED)
    receiver, sender = destination.manager.receiver(1), source.manager.sender(1)
    with pytest.raises(RowsError, match="decode: component c: a ring of 3 rows holds 12 tokens, but 13 are needed"):
        receiver.offer({"c": [1, 2, 3]}, TOKENS)
    source.fill("c", [4, 5, 6, 7], (37, TOKENS))
    receiver.offer({"c": [1, 2, 3, 8]}, TOKENS)
    sender.finish({"c": [4, 5, 6, 7]}, (0, TOKENS))
    succeeded(sender, receiver)
    destination.check("c", [1, 2, 3, 8], (37, TOKENS))


@pytest.mark.parametrize("offer_first", [True, False])
def test_a_ring_that_lost_what_is_needed_fails_its_room(world, offer_first):
    """Each chunk fits into the ring of the source; the window that they make up together does not."""
    (source,) = world.prefill(layout(ring(13), 4))
    (destination,) = world.decode(layout(ring(13), 4), settings=CHECKED)
    receiver, sender = destination.manager.receiver(1), source.manager.sender(1)
    if offer_first:
        receiver.offer({"c": [1, 2, 3, 8]}, TOKENS)
    for begin, end in ((0, 30), (30, 42), (42, TOKENS)):
        sender.send({"c": [4, 5, 6]}, (begin, end))
    sender.finish()
    if not offer_first:
        receiver.offer({"c": [1, 2, 3, 8]}, TOKENS)
    wait_over(sender, receiver)
    for room in (sender, receiver):
        assert "source: component c: a ring of 3 rows holds 12 tokens, but tokens 37..50 are needed" in room.reason
    destination.check_rest()


@pytest.mark.parametrize("as_ring", [True, False])
def test_ranks_that_share_the_tokens_keep_only_those_of_the_window(world, as_ring):
    """Four ranks, a token in turn to each: their rows hold nothing but their own tokens of the window."""
    kind, windowed = (ring(8), window(8)) if as_ring else (window(8), ring(8))
    plain = layout(kind, 1)
    sources = world.prefill(
        *(kb.RankLayout(plain.components, kb.Coords(cp=(rank, 4)), kb.Ownership(1, 4, rank)) for rank in range(4))
    )
    (destination,) = world.decode(layout(windowed, 4), settings=CHECKED)
    receiver = destination.manager.receiver(1)
    receiver.offer({"c": [1, 2, 3]}, 18)
    senders = [source.manager.sender(1) for source in sources]
    for rank, (source, sender) in enumerate(zip(sources, senders, strict=True)):
        # Tokens 10 to 17, two of them on each rank, of the local ones.
        tokens = [token for token in range(10, 18) if token % 4 == rank]
        local = [token // 4 for token in tokens]
        rows = [9, 5]
        held = [rows[number % 2] for number in local] if as_ring else rows
        for token, row in zip(tokens, held, strict=True):
            source.fill("c", [row], (token, token + 1), start=token)
        sender.finish({"c": rows if as_ring else kb.Pages(rows, local[0])}, (0, 18))
    succeeded(receiver, *senders)
    start = 0 if not as_ring else 8
    destination.check("c", [1, 2, 3], (10, 18), start=start)
    destination.check_rest()


def test_kinds_that_hold_other_content_are_refused_with_both(world):
    (source,) = world.prefill(layout(compressed(4), 8))
    (destination,) = world.decode(layout(compressed(8), 8), settings=CHECKED)
    receiver, sender = destination.manager.receiver(1), source.manager.sender(1)
    receiver.offer({"c": [1, 2, 3, 4, 5, 6, 7]}, TOKENS)
    wait_over(receiver)
    assert "'paged, 1 entry for 4 tokens' at the source" in receiver.reason
    assert "'paged, 1 entry for 8 tokens' at the destination" in receiver.reason
    with pytest.raises(TransferFailed):
        receiver.raise_for_failure()
    destination.check_rest()
    sender.abort()


def test_names_of_kinds():
    assert [str(kind) for kind in (PAGED, window(8), ring(8), compressed(4), tail(4))] == [
        "paged",
        "window of 8 tokens",
        "window of 8 tokens, in a ring, never reused",
        "paged, 1 entry for 4 tokens",
        "tail after each 4 tokens, in a ring, never reused",
    ]
