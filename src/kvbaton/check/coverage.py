"""What an example covers, in words that can be counted."""

from __future__ import annotations

from collections.abc import Iterator

from kvbaton.check.grids import stage_of
from kvbaton.check.models import DRAFT_LAYERS, Format, ModelComponent, Placed, Side, World
from kvbaton.layout import DTYPE_BYTES

FEATURES = (
    "tp unequal",
    "tp not a power of two",
    "replicated heads at the source",
    "replicated heads at the destination",
    "replicated heads at both",
    "one head",
    "sub-blocks of unlike size",
    "pp unequal",
    "pp 3",
    "a stage without a component",
    "draft layers",
    "cp at the source",
    "cp at the destination",
    "cp N to M",
    "cp N to 1",
    "tokens owned otherwise than by the rank",
    "pages unequal",
    "pages of 48 or more",
    "paged",
    "window",
    "tail",
    "compressed",
    "compressed window",
    "never reused",
    "ring to ring",
    "ring to pages",
    "pages to ring",
    "block scales",
    "request rows",
    "aux",
    "elided",
    "items of 1 byte",
    "items of 2 bytes",
    "items of 4 bytes",
    "items of 8 bytes",
    "prefix",
    "chunks",
    "stripes",
    "no tokens",
    "formats alike on both sides",
    "casts",
    "factors",
    "scales at the source",
    "scales at the destination",
    "scales at both",
)


def covered(world: World) -> set[str]:
    """Those of `FEATURES` that ``world`` has."""
    source, destination = world.source, world.destination
    found = {
        name
        for name, has in (
            ("tp unequal", source.tp != destination.tp),
            ("tp not a power of two", 3 in (source.tp, destination.tp)),
            ("pp unequal", source.pp != destination.pp),
            ("pp 3", 3 in (source.pp, destination.pp)),
            ("cp at the source", source.cp > 1),
            ("cp at the destination", destination.cp > 1),
            ("cp N to M", source.cp > 1 and destination.cp > 1 and source.cp != destination.cp),
            ("cp N to 1", source.cp > 1 and destination.cp == 1),
            ("prefix", world.prefix > 0),
            ("chunks", any(0 < cut < world.tokens for cut in world.cuts)),
            ("stripes", world.striped),
            ("no tokens", world.tokens == 0),
        )
        if has
    }
    for formats in world.casts:
        found.update(_of_cast(*formats))
    if any(placed.format for placed in source.placed) and not world.casts:
        found.add("formats alike on both sides")
    for entry, *placed in zip(world.model, source.placed, destination.placed, strict=True):
        found.update(_of_component(world, entry))
        if entry.kind.has_tokens:
            found.update(_of_tokens(entry, placed))
    return found


def _of_cast(source: Format, destination: Format) -> Iterator[str]:
    yield "casts"
    if source.factors != destination.factors:
        yield "factors"
    scaled = bool(source.scales), bool(destination.scales)
    for has, where in zip((*scaled, all(scaled)), ("the source", "the destination", "both"), strict=True):
        if has:
            yield f"scales at {where}"


def _of_component(world: World, entry: ModelComponent) -> Iterator[str]:
    sides = world.source, world.destination
    for tensor in entry.tensors:
        yield f"items of {DTYPE_BYTES[tensor.dtype]} byte{'s' if DTYPE_BYTES[tensor.dtype] > 1 else ''}"
        replicated = [any(block < side.tp for block in tensor.blocks) for side in sides]
        for has, where in zip((*replicated, all(replicated)), ("the source", "the destination", "both"), strict=True):
            if has:
                yield f"replicated heads at {where}"
        if tensor.blocks == (1,):
            yield "one head"
        if len(set(tensor.blocks)) > 1:
            yield "sub-blocks of unlike size"
    if any(_empty_stage(world, side, entry) for side in sides):
        yield "a stage without a component"
    if any(layer >= DRAFT_LAYERS for layer in entry.layers):
        yield "draft layers"
    if entry.family == "scaled":
        yield "block scales"
    if entry.elided:
        yield "elided"
    if not entry.kind.has_tokens:
        yield "aux" if entry.kind.aux else "request rows"


def _empty_stage(world: World, side: Side, entry: ModelComponent) -> bool:
    held = {stage_of(layer, tensor, world.layers, side.pp) for layer in entry.layers for tensor in entry.tensors}
    return len(held) < side.pp


def _of_tokens(entry: ModelComponent, placed: list[Placed]) -> Iterator[str]:
    kind, (source, destination) = entry.kind, placed
    limit = "window" if kind.window else "tail" if kind.tail else ""
    yield "compressed window" if kind.ratio > 1 and limit else "compressed" if kind.ratio > 1 else limit or "paged"
    if not kind.reused:
        yield "never reused"
    if source.page_size != destination.page_size:
        yield "pages unequal"
    if max(source.page_size, destination.page_size) >= 48:
        yield "pages of 48 or more"
    if source.modulus or destination.modulus:
        yield "tokens owned otherwise than by the rank"
    if source.ring or destination.ring:
        yield f"{'ring' if source.ring else 'pages'} to {'ring' if destination.ring else 'pages'}"
