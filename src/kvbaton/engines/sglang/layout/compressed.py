"""Caches of compressed attention (DeepSeek V4), which SGLang lists by kind of buffer and not by layer."""

from __future__ import annotations

from kvbaton.engines.sglang.layout.arguments import Arguments, State, refuse
from kvbaton.engines.sglang.layout.numbering import first_layer, where
from kvbaton.engines.sglang.layout.ranks import Ranks

Places = list[tuple[str, int]]
"""Role and layer of each buffer."""


def kv_places(args: Arguments, ranks: Ranks) -> Places:
    """Of the main cache: latents and index keys of ratio 4, then latents of ratio 128.

    Latents have their rotary part apart where it is stored so. Raises `LayoutError` where a pipeline stage lists
    anything else.
    """
    four, many = _layers(args, ranks, 4), _layers(args, ranks, 128)
    plain = [*_group("c4", four), *_group("c4_index", four), *_group("c128", many)]
    apart = [
        *_group("c4", four),
        *_group("c4_rope", four),
        *_group("c4_index", four),
        *_group("c128", many),
        *_group("c128_rope", many),
    ]
    return _first_that_fits("kv", len(args.kv), ranks, plain, apart)


def state_places(state: State, args: Arguments, ranks: Ranks) -> Places:
    """Of one of its states. Raises `LayoutError`."""
    count = len(state.buffers)
    if state.name != state.type:
        # The draft's: all of its layers are on one stage.
        return _in_order("draft", count)
    four, every = _layers(args, ranks, 4), _stage(args, ranks)
    if state.type == "swa":
        windowed = max(count - 2 * len(four), 0)
        return _first_that_fits(
            state.name,
            count,
            ranks,
            [*_group("window", every[:windowed]), *_group("c4_state", four), *_group("c4_index_state", four)],
        )
    if state.type == "swa_ring":
        # Layers of a draft may be among the ratios, and not here.
        ringed = every[: count if count <= len(every) else count // 2]
        both = [*_group("ring", ringed), *_group("ring_rope", ringed)]
        return _first_that_fits(state.name, count, ranks, _group("ring", ringed), both)
    return _first_that_fits(state.name, count, ranks, _group("c128_state", _layers(args, ranks, 128)))


def _stage(args: Arguments, ranks: Ranks) -> list[int]:
    if ranks.pp[1] == 1:
        # The end that SGLang gives here is that of the last layer, or of the one before it.
        return list(range(len(args.ratios)))
    start = first_layer("kv", args, ranks)
    if args.end_layer is None:
        refuse("kv", f"the last layer of {where(ranks)} is not known; use pp size 1")
    return list(range(start, args.end_layer))


def _layers(args: Arguments, ranks: Ranks, ratio: int) -> list[int]:
    return [layer for layer in _stage(args, ranks) if layer < len(args.ratios) and args.ratios[layer] == ratio]


def _group(role: str, layers: list[int]) -> Places:
    return [(role, layer) for layer in layers]


def _in_order(role: str, count: int) -> Places:
    return [(role, place) for place in range(count)]


def _first_that_fits(component: str, count: int, ranks: Ranks, *choices: Places) -> Places:
    for places in choices:
        if len(places) == count:
            return places
    if ranks.pp[1] > 1:
        expected = " or ".join(str(len(places)) for places in choices)
        refuse(
            component,
            f"{count} buffers on {where(ranks)}, where {expected} are expected of its compression ratios; use pp size "
            "1",
        )
    # Another order than those above: equal on both sides, or the handshake finds a count that differs.
    return _in_order(f"buffer of {count}", count)
