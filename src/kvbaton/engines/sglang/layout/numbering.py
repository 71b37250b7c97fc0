"""Global layer numbers of buffers that SGLang lists in order."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.engines.sglang.layout.arguments import Arguments, refuse
from kvbaton.engines.sglang.layout.ranks import Ranks


def numbered(component: str, ranks: Ranks, count: int) -> Sequence[int]:
    """Numbers of ``count`` layers that SGLang lists without their numbers: their places, unless ``ranks`` says them.

    Raises `LayoutError` on a pipeline stage, whose first layer is not known.
    """
    given = ranks.layers.get(component)
    if given is not None and len(given) == count:
        return given
    if ranks.pp[1] > 1 and count:
        if given is not None:
            refuse(component, f"{len(given)} layers are given, but SGLang lists {count} on {where(ranks)}")
        refuse(
            component,
            f"SGLang does not tell which layers {where(ranks)} holds of it; use pp size 1, or pass their numbers as "
            f"layers[{component!r}]",
        )
    return range(count)


def kv_layers(args: Arguments, ranks: Ranks, count: int) -> Sequence[int]:
    """Numbers of the ``count`` layers of the main cache. Raises `LayoutError`."""
    if args.kv_layers:
        layers = args.kv_layers[:count]
        if args.kv_layers != layers * (len(args.kv_layers) // max(count, 1)):
            refuse("kv", f"kv_layer_ids {args.kv_layers[:8]} do not name the same layers for keys and values")
        return layers
    if args.has("swa", "minimax_index_k", "minimax_dense_kv") and not args.ratios:
        # The main cache has some of the layers only, and which is not said.
        return numbered("kv", ranks, count)
    start = first_layer("kv", args, ranks)
    return range(start, start + count)


def first_layer(component: str, args: Arguments, ranks: Ranks) -> int:
    """The first layer of this rank's stage. Raises `LayoutError` where nothing says it."""
    start = args.start_layer if ranks.start_layer is None else ranks.start_layer
    if start is not None:
        return start
    if ranks.pp[1] > 1:
        refuse(component, f"the first layer of {where(ranks)} is not known; pass start_layer, or use pp size 1")
    return 0


def where(ranks: Ranks) -> str:
    """The words that name a pipeline stage."""
    return f"pp rank {ranks.pp[0]} of {ranks.pp[1]} on the {ranks.role} side"
