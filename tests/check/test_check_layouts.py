"""The planner against the oracle on random pairs of layouts; and the oracle against planners with a fault in them."""

import numpy as np
import pytest

import kvbaton.plan.template
from kvbaton.check import check_layouts, examples, layouts
from kvbaton.check.coverage import FEATURES
from kvbaton.check.worlds import to_choices, world_of
from kvbaton.copy import fallback
from kvbaton.copy.numbers import scales_of
from kvbaton.plan import Pages, Share, assign, compile_pair
from kvbaton.plan.assign import overlap
from kvbaton.plan.boxes import CONVERT, QUANTISE
from kvbaton.plan.pair import Stream


def test_every_element_arrives_and_no_other_byte_changes():
    outcome = check_layouts(2000, 20)
    assert outcome.failure is None, outcome.failure.text()
    assert outcome.examples == 2000
    assert {name: outcome.covered[name] for name in FEATURES if outcome.covered[name] < 20} == {}


def common_pieces(change):
    real = kvbaton.plan.template.common_pieces
    return "kvbaton.plan.template.common_pieces", lambda *spans: change(real(*spans))


def transfers(change):
    """A plan whose transfers go through ``change``."""

    def compiled(*arguments, **options):
        plan = compile_pair(*arguments, **options)
        bind, bind_slots = plan.bind, plan.bind_slots
        plan.bind = lambda *given: [change(each) for each in bind(*given)]
        plan.bind_slots = lambda *given: [change(each) for each in bind_slots(*given)]
        return plan

    return "kvbaton.check.layouts.compile_pair", compiled


def swap_two(pieces):
    single = [(at + i, to + i, 1) for at, to, count in pieces for i in range(count)]
    if len(single) > 1:
        single[:2] = [(single[1][0], single[0][1], 1), (single[0][0], single[1][1], 1)]
    return single


def one_block(pieces):
    return [(*pieces[0][:2], sum(count for _, _, count in pieces))] if pieces else []


def one_byte_more(transfer):
    shape = transfer.boxes.shape.copy()
    shape[-1, 2] += 1
    return transfer._replace(boxes=transfer.boxes._replace(shape=shape))


def last_unit_twice(transfer):
    return transfer._replace(
        source_units=transfer.source_units[[*range(len(transfer.source_units)), -1]],
        destination_units=transfer.destination_units[[*range(len(transfer.source_units)), -1]],
    )


def without_a_stripe(sources, destination, *, striped, **options):
    shares = [*assign(sources, destination, striped=striped, **options)]
    full = [number for number, share in enumerate(shares) if not share.empty]
    if striped and len(full) > 1:
        shares[full[-1]] = Share()
    return tuple(shares)


def never_two_senders(sources, destination, *, cast, **options):
    """Every replica sends all that it holds."""
    return [overlap(source, destination, cast=cast) for source in sources]


def by_count(*arguments, **options):
    """Matches the last pages of both sides, wherever they begin."""
    plan = compile_pair(*arguments, **options)
    bind = plan.bind

    def matched(name, tokens, source, destination):
        if source.start != destination.start and len(source.rows) >= len(destination.rows):
            source = Pages(source.rows[: len(destination.rows)], destination.start)
        return bind(name, tokens, source, destination)

    plan.bind = matched
    return plan


def scales_of_the_next(transfer):
    cast = transfer.boxes.cast
    if cast is None:
        return transfer
    scale = cast.scale.copy()
    scale[scale[:, 0] != -1] = np.roll(scale[scale[:, 0] != -1], 1, axis=0)
    return transfer._replace(boxes=transfer.boxes._replace(cast=cast._replace(scale=scale)))


def without_scales(transfer):
    """The destination's scales are those of what comes after: nobody divides by them."""
    cast = transfer.boxes.cast
    if cast is None:
        return transfer
    how = cast.how.copy()
    how[how[:, 0] == QUANTISE, 0] = CONVERT
    return transfer._replace(boxes=transfer.boxes._replace(cast=cast._replace(how=how)))


def numpy_copies(name, fault):
    """The fallback of the copy kernel with a fault in it."""
    return {
        "kvbaton.copy.kernel": fallback,
        "kvbaton.copy.fallback.warn_once": lambda reason: None,
        f"kvbaton.copy.numbers.{name}": fault,
    }


def scale_of_one_element(values, dtype):
    return scales_of(values[:, :1], dtype)


CAST_FAULTS = {
    "casts truncate": numpy_copies("_rounded", lambda bits, places: bits >> places),
    "a scale of the next block": dict([transfers(scales_of_the_next)]),
    "made scales are not used": dict([transfers(without_scales)]),
    "a scale is made of one element": numpy_copies("scales_of", scale_of_one_element),
}


@pytest.mark.parametrize("faults", CAST_FAULTS.values(), ids=CAST_FAULTS.keys())
def test_faults_of_casts_are_caught_and_shown_small(faults, monkeypatch):
    for target, fault in faults.items():
        monkeypatch.setattr(target, fault)
    outcome = check_layouts(1000, 1)
    assert outcome.failure is not None
    assert "written with another content than the sender's" in outcome.failure.text()
    world = world_of(to_choices(outcome.failure.name))
    assert world.casts
    assert "stored as" in outcome.failure.example
    assert world.tokens <= 20
    assert len(world.model) == 1


def numbered_by_chunk(stream, side, first, last, pages, half=Stream.half):
    """A number for each unit that is right only if the chunk begins at the first token."""
    units, _ = half(stream, side, first, last, pages)
    return units, np.arange(len(units))


FAULTS = {
    "two heads change places": (*common_pieces(swap_two), "another content than the sender's"),
    "a state is cut as one block": (*common_pieces(one_block), None),
    "a stripe is missing": ("kvbaton.check.layouts.assign", without_a_stripe, "never written"),
    "replicas all send": ("kvbaton.check.layouts.assign", never_two_senders, "written more than once"),
    "one byte too many": (*transfers(one_byte_more), "written, but not part of what"),
    "a unit is sent twice": (*transfers(last_unit_twice), "written more than once"),
    "digests look at nothing": (
        "kvbaton.check.digests.digest_half",
        lambda half, bases, sizes: 0,
        "every digest is the same",
    ),
    "a chunk counts as another": ("kvbaton.plan.pair.Stream.half", numbered_by_chunk, "by their digests"),
    "pages are matched by count": ("kvbaton.check.layouts.compile_pair", by_count, None),
}


@pytest.mark.parametrize(("target", "fault", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_faults_are_caught_and_shown_small(target, fault, message, monkeypatch):
    monkeypatch.setattr(target, fault)
    outcome = check_layouts(400, 1)
    assert outcome.failure is not None
    text = outcome.failure.text()
    assert message is None or message in text
    world = world_of(to_choices(outcome.failure.name))
    assert world.text() == outcome.failure.example
    assert world.tokens <= 20
    assert len(world.model) == 1
    assert max(world.source.tp * world.source.pp, world.destination.tp * world.destination.pp) <= 4


def test_an_error_inside_the_planner_is_a_failure(monkeypatch):
    def broken(*arguments, **options):
        raise IndexError("no such thing")

    monkeypatch.setattr(layouts, "assign", broken)
    outcome = check_layouts(10, 1)
    assert outcome.examples == 0
    assert "IndexError: no such thing (" in outcome.failure.text()


def test_the_same_seed_gives_the_same_examples_in_any_number_of_processes(monkeypatch):
    monkeypatch.setattr(examples, "BATCH", 15)
    once, again, other = check_layouts(40, 4), check_layouts(40, 4, processes=2), check_layouts(40, 5)
    assert once == again
    assert once.examples == other.examples == 40
    assert once.nbytes != other.nbytes
