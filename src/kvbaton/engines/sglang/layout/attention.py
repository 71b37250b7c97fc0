"""The main cache and that of a draft model: keys and values, latents, and pages whose inside is not told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvbaton.engines.sglang.layout import compressed
from kvbaton.engines.sglang.layout.arguments import Arguments, Buffer, Regions, refuse
from kvbaton.engines.sglang.layout.numbering import kv_layers
from kvbaton.engines.sglang.layout.ranks import Ranks
from kvbaton.engines.sglang.layout.tensors import (
    BYTES,
    PLACE,
    AxisSpec,
    Heads,
    elided,
    per_rank,
    same,
    tensor,
)
from kvbaton.layout import DTYPE_BYTES, PAGED, SLOT, TOKEN, Component, Kind, Ownership, Tensor
from kvbaton.layout.limits import MAX_NAME

PLAIN_DTYPES = ("bfloat16", "float16", "float32")
"""KV cache dtypes whose elements stand for themselves. All others are moved as bytes, and never cast."""

WITHOUT_SCALES = ("fp4_mx_block16", "nvfp4")
"""KV cache dtypes whose block scales lie in buffers that SGLang does not list."""


class Paged(NamedTuple):
    """Components that the page lists of the main cache address, and whether their pages move as a whole only."""

    components: tuple[Component, ...]
    opaque: bool


def describe_kv(args: Arguments, ranks: Ranks, regions: Regions) -> Paged:
    """The main cache and the draft's. Raises `LayoutError`."""
    if not args.kv:
        return Paged((), opaque=False)
    mla = ranks.is_mla or args.hybrid_mla
    if ranks.kv_shard[1] > 1:
        refuse(
            "kv",
            f"{ranks.kv_shard[1]} ranks share its pages by page number, so that which tokens a rank holds differs from "
            "request to request; turn KV cache sharding off",
        )
    if ranks.dcp[1] > 1 and not mla:
        refuse("kv", f"decode context parallelism over {ranks.dcp[1]} ranks is described for MLA only")
    if ranks.unified and args.draft and ranks.has_draft:
        refuse("draft", "its pages are not those of the main cache under unified memory; describe it with draft=False")
    target, opaque = _target(args, ranks, regions, mla)
    drafts = [_draft(args, ranks, regions, mla)] if args.draft and ranks.has_draft else []
    return Paged((target, *drafts), opaque)


def _target(args: Arguments, ranks: Ranks, regions: Regions, mla: bool) -> tuple[Component, bool]:
    order = ranks.kv_cache_layout or args.swa_layout or "nhd"
    if ranks.unified:
        return _opaque(args, ranks, regions, [("envelope", 0)], "unified memory"), True
    if args.ratios:
        places = compressed.kv_places(args, ranks)
        return _opaque(args, ranks, regions, places, args.kv_layout or "", alike=True), True
    if not mla and args.kv_layers and len(set(args.kv_layers)) == len(args.kv):
        # One row of a page for each layer, keys and values packed inside.
        return _opaque(args, ranks, regions, [("page", layer) for layer in args.kv_layers], "packed"), True
    if args.dtype in WITHOUT_SCALES:
        refuse(
            "kv",
            f"SGLang does not list the block scales of a {args.dtype} cache, and without them its elements are of no "
            "use; choose another KV cache dtype",
        )
    dtype = _dtype(args, ranks)
    if mla:
        layers = kv_layers(args, ranks, len(args.kv))
        places = [("latent", layer) for layer in layers]
        return _by_token("kv", args.kv, places, regions, _latent, args.page_size, dtype), False
    places = key_value_places("kv", args.kv, kv_layers(args, ranks, len(args.kv) // 2))
    if order != "nhd":
        return _opaque(args, ranks, regions, places, order), True
    heads = _target_heads(args, ranks)
    return _by_token("kv", args.kv, places, regions, heads.channels, args.page_size, dtype), False


def _dtype(args: Arguments, ranks: Ranks) -> str:
    """The name of the dtype of the main cache, "" where it is not known."""
    named = {"auto": ranks.model_dtype, "bf16": "bfloat16"}
    return named.get(args.dtype, args.dtype)


def total_heads(args: Arguments, ranks: Ranks) -> int | None:
    """KV heads of the model, where anybody says them."""
    return args.total_heads if ranks.total_kv_heads is None else ranks.total_kv_heads


def _target_heads(args: Arguments, ranks: Ranks) -> Heads:
    total = total_heads(args, ranks)
    heads = Heads.of("kv", ranks, total)
    if args.local_heads is not None and heads.span is not None and args.local_heads != heads.span[1]:
        refuse(
            "kv",
            f"kv_head_num is {args.local_heads}, but rank {ranks.tp[0]} of {ranks.tp[1]} holds {heads.span[1]} of "
            f"{total} KV heads; pass the attention tp and the KV heads that the pool was made with",
        )
    return heads


def _draft(args: Arguments, ranks: Ranks, regions: Regions, mla: bool) -> Component:
    """The draft's cache. It is on one stage of a pipeline, whole, so that its layers are counted from 0."""
    buffers = args.draft
    if mla:
        # Shared by token, the draft's cache is whole on each rank, in pages of as many tokens as all ranks together.
        size, owned = args.page_size * ranks.dcp[1], Ownership() if ranks.dcp[1] > 1 else None
        # A latent is as wide as the target's; anything else is cut over the ranks in a way that SGLang does not tell.
        widths = {token_bytes("draft", size, buffer) for buffer in buffers}
        alike = widths <= {token_bytes("kv", args.page_size, buffer) for buffer in args.kv} | {0}
        places = [("latent" if alike else "page", layer) for layer in range(len(buffers))]

        def axes(local: int, nbytes: int) -> list[AxisSpec]:
            return _latent(local, nbytes) if alike else per_rank(nbytes, ranks.tp)

        return _by_token("draft", buffers, places, regions, axes, size, owned=owned)
    places = key_value_places("draft", buffers, range(len(buffers) // 2))
    if ranks.draft_kv_heads is not None:
        heads = Heads.of("draft", ranks, ranks.draft_kv_heads)
    else:
        # How many heads the draft has is not told. Where several ranks would share one, it is not guessed.
        heads = Heads.of("draft", ranks, total_heads(args, ranks), known=False)
    return _by_token("draft", buffers, places, regions, heads.channels, args.page_size)


def key_value_places(component: str, buffers: Sequence[Buffer], layers: Sequence[int]) -> list[tuple[str, int]]:
    """Role and layer of each of ``buffers``: keys of all layers, then values. Raises `LayoutError`."""
    if len(buffers) % 2:
        refuse(component, f"{len(buffers)} buffers are not keys and values of as many layers each")
    return [(role, layer) for role in ("key", "value") for layer in layers]


def key_value_slots(
    name: str, args: Arguments, buffers: Sequence[Buffer], layers: Sequence[int], heads: Heads, regions: Regions
) -> Component:
    """Pages of keys and values, ``[token, head, dim]``, that are matched by their place in the list."""
    places = key_value_places(name, buffers, layers)
    tensors: list[Tensor] = []
    for (role, layer), buffer in zip(places, buffers, strict=True):
        if buffer.elided:
            tensors.append(elided(role, layer))
            continue
        local = token_bytes(name, args.page_size, buffer)
        axes = [(PLACE, args.page_size, None), *heads.channels(local, local)]
        tensors.append(tensor(name, role, layer, buffer, regions, axes))
    return Component(name, SLOT, tuple(tensors))


def token_bytes(component: str, page_size: int, buffer: Buffer) -> int:
    """Bytes of one token of a page. Raises `LayoutError` where they do not divide."""
    if buffer.row_bytes % page_size:
        refuse(component, f"a page of {buffer.row_bytes} bytes does not divide over its {page_size} tokens")
    return buffer.row_bytes // page_size


def _latent(count: int, nbytes: int) -> list[AxisSpec]:
    return [("dim", count, None)]


def _by_token(
    name: str,
    buffers: Sequence[Buffer],
    places: Sequence[tuple[str, int]],
    regions: Regions,
    axes: Callable[[int, int], list[AxisSpec]],
    page_size: int,
    dtype: str = "",
    *,
    owned: Ownership | None = None,
) -> Component:
    """Pages whose tokens lie one after the other.

    ``axes`` gives those of a token, of its elements and its bytes. ``dtype`` is SGLang's name of that of the elements,
    "" where it is not known.
    """
    tensors: list[Tensor] = []
    for (role, layer), buffer in zip(places, buffers, strict=True):
        if buffer.elided:
            tensors.append(elided(role, layer, [(TOKEN, page_size, None)]))
            continue
        nbytes = token_bytes(name, page_size, buffer)
        element = dtype if dtype in PLAIN_DTYPES and nbytes % DTYPE_BYTES[dtype] == 0 else BYTES
        inner = axes(nbytes // DTYPE_BYTES[element], nbytes)
        if element == BYTES and dtype:
            # Bytes of one dtype must not be taken for those of another one.
            inner = [(f"{axis} of {dtype}"[:MAX_NAME], size, spans) for axis, size, spans in inner]
        tensors.append(tensor(name, role, layer, buffer, regions, [(TOKEN, page_size, None), *inner], element))
    return Component(name, PAGED, tuple(tensors), page_size, owned)


def _opaque(
    args: Arguments,
    ranks: Ranks,
    regions: Regions,
    places: Sequence[tuple[str, int]],
    order: str,
    *,
    alike: bool = False,
) -> Component:
    """Pages that move as a whole: what lies in them is not told. ``alike``: every rank holds the same."""
    if len(places) != len(args.kv):
        refuse("kv", f"{len(args.kv)} buffers where {len(places)} are expected of {order or 'this cache'}")
    if ranks.dcp[1] > 1:
        refuse("kv", f"pages of {order or 'opaque'} caches cannot be shared by {ranks.dcp[1]} ranks token by token")
    tensors: list[Tensor] = []
    for (role, layer), buffer in zip(places, args.kv, strict=True):
        entry: list[AxisSpec] = [(TOKEN, 1, None)]
        if buffer.elided:
            tensors.append(elided(role, layer, entry))
            continue
        inner = same(buffer.row_bytes, order) if alike else per_rank(buffer.row_bytes, ranks.tp, order)
        tensors.append(tensor("kv", role, layer, buffer, regions, [*entry, *inner]))
    return Component("kv", Kind(ratio=args.page_size), tuple(tensors), args.page_size)
