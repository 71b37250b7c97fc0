"""The check as an author of an engine calls it, with layouts of the author's own."""

import msgspec
import pytest

from kvbaton.check import check_pair
from kvbaton.errors import ConfigurationError
from kvbaton.layout import (
    Axis,
    Component,
    Coords,
    Kind,
    Ownership,
    RankLayout,
    Tensor,
    aux_fields,
    conv_state,
    mla_latent,
    paged_kv,
    replicated_spans,
    ring,
)

replace = msgspec.structs.replace


def hybrid(tp, *, page_size=16, order="NHD", rows=12):
    return [
        RankLayout(
            (
                paged_kv(
                    layers=(1, 3),
                    rows=rows,
                    page_size=page_size,
                    heads=2,
                    head_dim=4,
                    dtype="bfloat16",
                    head_spans=replicated_spans(2, rank, tp),
                    order=order,
                ),
                conv_state(
                    layers=(0, 2),
                    rows=3,
                    blocks={"q": 4, "k": 4, "v": 8},
                    columns=3,
                    dtype="float32",
                    rank=rank,
                    size=tp,
                    region=1,
                ),
                aux_fields({"token": ("int64", 1)}, rows=2, region=2),
            ),
            Coords(tp=(rank, tp)),
        )
        for rank in range(tp)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_own_layouts(seed):
    for source, destination in ((1, 4), (4, 1), (2, 2)):
        report = check_pair(
            hybrid(source), hybrid(destination, page_size=48, order="HND"), tokens=100, prefix=30, seed=seed
        )
        report.raise_if_failed()
        assert report.destinations == destination
        assert report.pairs >= max(source, destination)
        # 70 tokens of two layers, K and V of 2 heads; each head once for each rank that holds it.
        assert report.nbytes >= 70 * 2 * 2 * 2 * 4 * 2


def test_a_span_that_is_wrong_is_found_by_its_missing_elements():
    wrong = hybrid(2)
    kv = wrong[1].components[0]
    tensors = tuple(
        replace(tensor, axes=tuple(replace(a, spans=((0, 1),)) if a.name == "head" else a for a in tensor.axes))
        for tensor in kv.tensors
    )
    wrong[1] = replace(wrong[1], components=(replace(kv, tensors=tensors), *wrong[1].components[1:]))
    report = check_pair(wrong, hybrid(1), tokens=20)
    assert not report.ok
    assert "axis head: the destination needs 1..2 of 2, but no source holds it" in report.text()
    with pytest.raises(AssertionError, match="axis head"):
        report.raise_if_failed()


def test_a_layout_that_does_not_hold_together_is_a_problem():
    broken = mla_latent(layers=(0,), rows=4, page_size=4, latent_dim=4, dtype="uint8")
    broken = replace(broken, tensors=(replace(broken.tensors[0], row_stride=1),))
    report = check_pair([RankLayout((broken,))], [RankLayout((broken,))], tokens=4)
    assert "LayoutError: component latent" in report.text()


def test_too_few_rows_are_a_problem_with_both_numbers():
    report = check_pair(hybrid(1, rows=3), hybrid(1), tokens=100)
    assert "component kv: the request needs 7 rows, but 3 are registered" in report.text()


@pytest.mark.parametrize("prefix", [-1, 11])
def test_a_request_without_sense_is_refused(prefix):
    with pytest.raises(ConfigurationError, match=f"prefix is {prefix}, it must be from 0 to the 10 tokens"):
        check_pair(hybrid(1), hybrid(1), tokens=10, prefix=prefix)


def test_memory_beyond_reason_is_refused():
    huge = RankLayout((mla_latent(layers=(0,), rows=1 << 20, page_size=64, latent_dim=64, dtype="bfloat16"),))
    with pytest.raises(ConfigurationError, match="check layouts with fewer rows"):
        check_pair([huge], [huge], tokens=10)


def test_a_kind_that_nobody_has_named_needs_only_data():
    """Every third of the last 30 tokens, in a ring on one side; each of three ranks owns 6 tokens in turn."""
    kind = Kind(ratio=3, window=30, reused=False)

    def layout(page_size, rows, *, in_ring, owned=Ownership()):  # noqa: B008  (a frozen value)
        axes = (Axis("token", page_size // 3, 5, ((0, page_size // 3),)), Axis("dim", 4, 1, ((0, 4),)))
        tensor = Tensor("digest", 8, 0, 2, rows, 5 * page_size // 3 + 1, "uint8", axes)
        return RankLayout((Component("digests", replace(kind, ring=in_ring), (tensor,), page_size, owned),))

    sources = [layout(9, 7, in_ring=False, owned=Ownership(6, 3, rank)) for rank in range(3)]
    for seed in range(6):
        report = check_pair(sources, [layout(12, 5, in_ring=True)], tokens=55, prefix=40, seed=seed)
        report.raise_if_failed()
        # Entries 8 to 17: their last tokens, 26 to 53, are among the last 30 of 55.
        assert report.nbytes == 10 * 4


def test_rings_of_unlike_size():
    def layout(page_size, rows):
        component = mla_latent(layers=(0,), rows=rows, page_size=page_size, latent_dim=3, dtype="float16")
        return RankLayout((replace(component, kind=ring(12)),))

    for seed in range(4):
        report = check_pair([layout(16, 2)], [layout(4, 6)], tokens=45, seed=seed)
        report.raise_if_failed()
        assert report.nbytes == 12 * 6


def test_a_grid_is_a_list_of_layouts():
    (layout,) = hybrid(1)
    with pytest.raises(ConfigurationError, match=r"sources is one RankLayout; pass a list .* if it is alone"):
        check_pair(layout, layout, tokens=4)
    with pytest.raises(ConfigurationError, match=r"destinations\[1\] is of type Component, not a RankLayout"):
        check_pair([layout], [layout, layout.components[0]], tokens=4)
    with pytest.raises(ConfigurationError, match=r"sources\[0\] is of type NoneType, not a RankLayout"):
        check_pair(None, [layout], tokens=4)


def test_replicas_share_the_work_unless_told_otherwise():
    sources = [*hybrid(1), *hybrid(1)]
    assert check_pair(sources, hybrid(1), tokens=40).pairs == 2
    assert check_pair(sources, hybrid(1), tokens=40, striped=False).pairs == 1
