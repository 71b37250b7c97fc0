import itertools

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Rank, expected_regions, local_tokens, region_sizes, run_transfer, write_content
from worlds import grids, logical_models

from kvbaton.layout import check_layout
from kvbaton.plan import Pages, assign, compile_pair

MAX_TOKENS = 40
SLOTS = 2


def row_count(entry, page_size):
    """One page more than the longest request has, or slots."""
    return -(-MAX_TOKENS // page_size) + 1 if entry.kind in ("paged", "window") else SLOTS + 2


def give_rows(rank, tokens, first, generator):
    """Choose scattered rows of each component: pages for the local tokens from ``first`` on, or slots."""
    for component in rank.layout.components:
        registered = max((tensor.rows for tensor in component.tensors), default=0)
        free = generator.permutation(registered)
        if not component.kind.has_tokens:
            rank.rows[component.name] = free[: 1 if component.kind.aux else SLOTS]
            continue
        local = local_tokens(rank.layout.owned, tokens)
        before = len([token for token in local if token < first[component.name]])
        start = before // component.page_size * component.page_size
        pages = -(-(len(local) - start) // component.page_size)
        rank.rows[component.name] = free[: max(pages, 0)]
        rank.start[component.name] = start


@st.composite
def worlds(draw):
    model = draw(logical_models())
    sources, destinations = draw(grids(model, row_count)), draw(grids(model, row_count))
    tokens = draw(st.integers(0, MAX_TOKENS))
    prefix = draw(st.integers(0, tokens))
    cuts = sorted(draw(st.lists(st.integers(prefix, tokens), max_size=2)))
    return (
        model,
        sources,
        destinations,
        tokens,
        prefix,
        [prefix, *cuts, tokens],
        draw(st.booleans()),
        draw(st.integers(0)),
    )


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(worlds())
def test_every_element_arrives_and_no_other_byte_changes(world):
    model, source_layouts, destination_layouts, tokens, prefix, cuts, striped, seed = world
    generator = np.random.default_rng(seed % (1 << 32))
    kinds = {entry.name: entry.kind for entry in model}
    needed = {e.name: max(prefix, tokens - e.window) if e.kind == "window" else prefix for e in model}
    sources = [Rank(layout, 1) for layout in source_layouts]
    for rank in sources:
        check_layout(rank.layout, region_sizes(rank.layout))
        # The source may hold tokens from before the prefix on.
        give_rows(rank, tokens, {name: generator.integers(0, first + 1) for name, first in needed.items()}, generator)
        for component in rank.layout.components:
            held = [t for t in range(tokens) if t >= needed[component.name]]
            write_content(rank, component, held, rank.regions)
    for index, layout in enumerate(destination_layouts):
        check_layout(layout, region_sizes(layout))
        destination = Rank(layout, 2)
        give_rows(destination, tokens, needed, generator)
        wanted = {entry.name: range(needed[entry.name], tokens) for entry in model}
        expected = expected_regions(destination, wanted)
        untouched = [region.copy() for region in destination.regions]
        shares = assign(source_layouts, layout, destination_index=index, striped=striped)
        assert len(shares) == len(sources)
        for source, share in zip(sources, shares, strict=True):
            plan = compile_pair(source.layout, layout, share)
            assert share.empty == (not plan.components)
            for name in kinds:
                for transfer in bind_all(plan, name, kinds[name], cuts, needed[name], source, destination):
                    run_transfer(transfer, source, destination)
        for region, (found, right, before, writes) in enumerate(
            zip(destination.regions, expected, untouched, destination.writes, strict=True)
        ):
            assert np.array_equal(found, right), (region, np.flatnonzero(found != right)[:10])
            assert writes.max(initial=0) <= 1, "an element was sent twice"
            assert np.array_equal(found[writes == 0], before[writes == 0])


def bind_all(plan, name, kind, cuts, first, source, destination):
    if kind in ("slot", "aux"):
        return plan.bind_slots(name, source.rows[name], destination.rows[name])
    found = []
    pages = [Pages(rank.rows[name], rank.start[name]) for rank in (source, destination)]
    for begin, end in itertools.pairwise(cuts):
        found.extend(plan.bind(name, (max(begin, first), max(end, first)), *pages))
    return found
