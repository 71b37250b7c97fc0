"""State components, by SGLang's types. Their rows are matched by their place in SGLang's lists, and move as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kvbaton.engines.sglang.layout import compressed
from kvbaton.engines.sglang.layout.arguments import Arguments, Buffer, Regions, State, refuse
from kvbaton.engines.sglang.layout.attention import key_value_places, key_value_slots, total_heads
from kvbaton.engines.sglang.layout.mamba import describe_mamba
from kvbaton.engines.sglang.layout.numbering import kv_layers, numbered
from kvbaton.engines.sglang.layout.ranks import Ranks
from kvbaton.engines.sglang.layout.tensors import AxisSpec, Heads, elided, per_rank, same, tensor
from kvbaton.layout import SLOT, Component, Tensor
from kvbaton.layout.limits import MAX_LAYER

TAIL_ENTRY_BYTES = 128 * 2
"""One entry of a tail of index keys: SGLang fixes 128 elements of bfloat16."""

INTERLEAVED_PAGE = 128
"""The page size at which SGLang orders the block scales of a page by head."""


def describe_state(state: State, args: Arguments, ranks: Ranks, regions: Regions) -> Component:
    """The component of one state. Raises `LayoutError` for a type that is not known, or cannot be described."""
    make = TYPES.get(state.type)
    if make is None:
        refuse(state.name, f"SGLang's state type {state.type!r} is not known; known are {', '.join(TYPES)}")
    if ranks.dcp[1] > 1 and state.type not in WHOLE_TYPES:
        refuse(
            state.name,
            f"its pages under decode context parallelism over {ranks.dcp[1]} ranks are not described; use dcp size 1",
        )
    if state.name != state.type or state.type in DRAFT_TYPES:
        # The second one of a type is the draft's.
        state = _without_draft(state, 0, ranks)
    return make(state, args, ranks, regions)


def _without_draft(state: State, target: int, ranks: Ranks) -> State:
    """The state with the buffers after ``target`` of them, those of a draft, left out if the draft is."""
    if ranks.has_draft:
        return state
    buffers = (buffer if at < target else buffer._replace(nbytes=0) for at, buffer in enumerate(state.buffers))
    return dataclasses.replace(state, buffers=tuple(buffers))


def _rows_alike(
    state: State, places: Sequence[tuple[str, int]], regions: Regions, axes: Callable[[int], list[AxisSpec]] = same
) -> Component:
    tensors: list[Tensor] = []
    for (role, layer), buffer in zip(places, state.buffers, strict=True):
        made = elided(role, layer) if buffer.elided else None
        tensors.append(made or tensor(state.name, role, layer, buffer, regions, axes(buffer.row_bytes)))
    return Component(state.name, SLOT, tuple(tensors))


def _heads(state: State, args: Arguments, ranks: Ranks, given: int | None, *, same_pool: bool = False) -> Heads:
    """Heads of keys and values in a pool beside the main one, which may have others."""
    if given is not None:
        return Heads.of(state.name, ranks, given)
    return Heads.of(state.name, ranks, total_heads(args, ranks), known=same_pool)


def _window(state: State, args: Arguments, ranks: Ranks, regions: Regions) -> Component:
    if args.ratios:
        return _rows_alike(state, compressed.state_places(state, args, ranks), regions)
    layout, mla = args.swa_layout, ranks.is_mla or args.hybrid_mla
    if ranks.unified or layout not in (None, "nhd") or (layout is None and not mla):
        # Pages in an order that cannot be cut: whole pages, between as many ranks in the same order.
        layers = numbered(state.name, ranks, len(state.buffers))
        order = layout or ("unified memory" if ranks.unified else "an order that is not told")
        places = [("page", layer) for layer in layers]
        return _rows_alike(state, places, regions, lambda nbytes: per_rank(nbytes, ranks.tp, order))
    if layout is None:
        layers = numbered(state.name, ranks, len(state.buffers))
        return _rows_alike(state, [("latent", layer) for layer in layers], regions)
    layers = numbered(state.name, ranks, len(state.buffers) // 2)
    heads = _heads(state, args, ranks, ranks.swa_kv_heads)
    return key_value_slots(state.name, args, state.buffers, layers, heads, regions)


def _of_compressed(state: State, args: Arguments, ranks: Ranks, regions: Regions) -> Component:
    return _rows_alike(state, compressed.state_places(state, args, ranks), regions)


def _index_keys(state: State, args: Arguments, ranks: Ranks, regions: Regions) -> Component:
    places = _index_places(state.buffers, args, ranks, ("index_key",))
    return _rows_alike(_without_draft(state, len(args.kv), ranks), places, regions)


def _index_places(
    buffers: Sequence[Buffer], args: Arguments, ranks: Ranks, roles: Sequence[str]
) -> list[tuple[str, int]]:
    """Buffers of each role for the layers of the main cache, then the same for those of a draft."""
    layers = kv_layers(args, ranks, len(args.kv))
    drafts, rest = divmod(len(buffers) - len(roles) * len(layers), len(roles))
    if drafts < 0 or rest:
        refuse(
            "dsa",
            f"{len(buffers)} buffers are not {len(roles)} for each of the {len(layers)} layers of the main cache, and "
            f"for those of a draft",
        )
    places = [(role, layer) for role in roles for layer in layers]
    return places + [(f"draft_{role}", layer) for role in roles for layer in range(drafts)]


def _tail(state: State, args: Arguments, ranks: Ranks, regions: Regions) -> Component:
    """One entry of a ring a row: the rings of both sides may have different sizes."""
    places = _index_places(state.buffers, args, ranks, ("tail_key", "tail_score"))
    state = _without_draft(state, 2 * len(args.kv), ranks)
    tensors: list[Tensor] = []
    for (role, layer), buffer in zip(places, state.buffers, strict=True):
        if buffer.elided:
            tensors.append(elided(role, layer))
            continue
        if buffer.row_bytes % TAIL_ENTRY_BYTES:
            refuse(
                state.name,
                f"role {role}, layer {layer}: a ring of {buffer.row_bytes} bytes has no entries of "
                f"{TAIL_ENTRY_BYTES} bytes (128 elements of bfloat16)",
            )
        entries = buffer._replace(row_bytes=TAIL_ENTRY_BYTES, nbytes=buffer.rows * buffer.row_bytes)
        tensors.append(tensor(state.name, role, layer, entries, regions, same(TAIL_ENTRY_BYTES)))
    return Component(state.name, SLOT, tuple(tensors))


def _by_layer_id(state: State, args: Arguments, ranks: Ranks, regions: Regions) -> Component:
    """Tensors with layer ids; those beyond every layer are of the whole model."""
    layers = state.layers or tuple(numbered(state.name, ranks, len(state.buffers)))
    if args.end_layer is not None and ranks.pp[1] > 1:
        # Layers beyond the stage's are those of a draft; they are listed last.
        own = [layer for layer in layers if layer < args.end_layer or layer > MAX_LAYER]
        state = _without_draft(state, len(own), ranks)
    places = [("state", layer) if layer <= MAX_LAYER else ("rope_positions", 0) for layer in layers]
    return _rows_alike(state, places, regions)


def _in_order(state: State, args: Arguments, ranks: Ranks, regions: Regions) -> Component:
    layers = numbered(state.name, ranks, len(state.buffers))
    return _rows_alike(state, [("state", layer) for layer in layers], regions)


def _of_draft(state: State, args: Arguments, ranks: Ranks, regions: Regions) -> Component:
    return _rows_alike(state, [("state", layer) for layer in range(len(state.buffers))], regions)


def _dense_kv(state: State, args: Arguments, ranks: Ranks, regions: Regions) -> Component:
    layers = numbered(state.name, ranks, len(state.buffers) // 2)
    heads = _heads(state, args, ranks, None, same_pool=True)
    return key_value_slots(state.name, args, state.buffers, layers, heads, regions)


def _scales(state: State, args: Arguments, ranks: Ranks, regions: Regions) -> Component:
    """Scales of keys, then of values: by head first in pages of 128 tokens, else by token first."""
    of_window = state.type.endswith("_swa")
    heads = _heads(state, args, ranks, ranks.swa_kv_heads if of_window else None, same_pool=not of_window)
    layers = numbered(state.name, ranks, len(state.buffers) // 2)
    if args.page_size != INTERLEAVED_PAGE:
        return key_value_slots(state.name, args, state.buffers, layers, heads, regions)
    places = key_value_places(state.name, state.buffers, layers)
    return _rows_alike(state, places, regions, lambda nbytes: heads.channels(nbytes, nbytes))


TYPES: dict[str, Callable[[State, Arguments, Ranks, Regions], Component]] = {
    "mamba": describe_mamba,
    "swa": _window,
    "swa_ring": _of_compressed,
    "c128_state": _of_compressed,
    "dsa": _index_keys,
    "dsa_tail": _tail,
    "qsa_pending": _by_layer_id,
    "qsa_compressed": _by_layer_id,
    "minimax_index_k": _in_order,
    "minimax_dense_kv": _dense_kv,
    "request_row": _of_draft,
    "block_scale": _scales,
    "block_scale_swa": _scales,
}
"""How each of SGLang's state types is described."""

DRAFT_TYPES = ("request_row",)
"""Those of a draft model alone."""

WHOLE_TYPES = ("mamba", "qsa_pending", "request_row", "c128_state", "dsa_tail", "dsa")
"""Those that every rank of decode context parallelism has whole."""
