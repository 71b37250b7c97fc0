"""The planner against the oracle on random pairs of layouts; and the oracle against planners with a fault in them."""

import pytest

import kvbaton.plan.template
from kvbaton.check import check_layouts, examples, layouts
from kvbaton.check.coverage import FEATURES
from kvbaton.check.worlds import to_choices, world_of
from kvbaton.plan import Pages, Share, assign, compile_pair
from kvbaton.plan.assign import overlap


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

    def compiled(*arguments):
        plan = compile_pair(*arguments)
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


def never_two_senders(sources, destination, **options):
    """Every replica sends all that it holds."""
    return [overlap(source, destination) for source in sources]


def by_count(*arguments):
    """Matches the last pages of both sides, wherever they begin."""
    plan = compile_pair(*arguments)
    bind = plan.bind

    def matched(name, tokens, source, destination):
        if source.start != destination.start and len(source.rows) >= len(destination.rows):
            source = Pages(source.rows[: len(destination.rows)], destination.start)
        return bind(name, tokens, source, destination)

    plan.bind = matched
    return plan


FAULTS = {
    "two heads change places": (*common_pieces(swap_two), "another content than the sender's"),
    "a state is cut as one block": (*common_pieces(one_block), "never written"),
    "a stripe is missing": ("kvbaton.check.layouts.assign", without_a_stripe, "never written"),
    "replicas all send": ("kvbaton.check.layouts.assign", never_two_senders, "written more than once"),
    "one byte too many": (*transfers(one_byte_more), "written, but not part of what"),
    "a unit is sent twice": (*transfers(last_unit_twice), "written more than once"),
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
