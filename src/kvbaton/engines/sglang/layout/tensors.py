"""Tensors over SGLang's buffers, and how their rows are cut over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbaton.engines.sglang.layout.arguments import Buffer, Regions, refuse
from kvbaton.engines.sglang.layout.ranks import Ranks
from kvbaton.layout import Span, Tensor, dense_axes, replicated_spans, whole
from kvbaton.layout.limits import MAX_NAME

AxisSpec = tuple[str, int, "tuple[Span, ...] | None"]
"""Name, size in the whole model, and spans held here; None is all of it."""

BYTES = "uint8"
"""The dtype of what is moved as it is."""

PLACE = "place"
"""The axis over the tokens of a page whose pages are matched by their place in the list."""


def tensor(
    component: str,
    role: str,
    layer: int,
    buffer: Buffer,
    regions: Regions,
    axes: Sequence[AxisSpec],
    dtype: str = BYTES,
) -> Tensor:
    """A tensor whose rows are those of ``buffer``, dense in ``axes`` with the last one innermost.

    Raises `LayoutError` where the axes do not fill a row.
    """
    built, nbytes = dense_axes(axes, dtype)
    if nbytes != buffer.row_bytes:
        refuse(component, f"role {role}, layer {layer}: a row has {buffer.row_bytes} bytes, its axes fill {nbytes}")
    return Tensor(role, layer, regions.number(buffer), 0, buffer.rows, buffer.row_bytes, dtype, built)


def elided(role: str, layer: int, axes: Sequence[AxisSpec] = ()) -> Tensor:
    """A tensor that this rank leaves out: it holds its place and moves nothing."""
    return Tensor(role, layer, 0, 0, 0, 0, BYTES, dense_axes(axes, BYTES)[0])


def same(nbytes: int, order: str = "") -> list[AxisSpec]:
    """Rows of ``nbytes`` bytes that every rank has alike. ``order`` names what lies inside, where there are several."""
    return [(byte_axis(order), nbytes, None)]


def per_rank(nbytes: int, tp: tuple[int, int], order: str = "") -> list[AxisSpec]:
    """Rows of which each rank has its own, cut in a way that is not known: both sides must have as many ranks."""
    rank, size = tp
    return [("attention_tp", size, ((rank, 1),)), (byte_axis(order), nbytes, None)]


def byte_axis(order: str) -> str:
    """The name of the axis over the bytes of a row."""
    return f"byte of {order}"[:MAX_NAME] if order else "byte"


@dataclass(frozen=True)
class Heads:
    """How the heads of keys and values are cut over the ranks.

    ``spans`` are the heads of this rank out of ``total``; both are None where one rank has them all and nobody says how
    many they are. ``known`` is False where they are taken over from another component and several ranks would share
    one: then which of them hold the same is not certain.
    """

    component: str
    tp: tuple[int, int]
    total: int | None
    span: Span | None
    known: bool = True

    @classmethod
    def of(cls, component: str, ranks: Ranks, total: int | None, *, known: bool = True) -> Heads:
        """Cut ``total`` heads. Raises `LayoutError`."""
        rank, size = ranks.tp
        if total is None:
            if size > 1:
                refuse(
                    component,
                    f"attention tp has {size} ranks, and how many KV heads the model has is not known on the "
                    f"{ranks.role} side; pass total_kv_heads, the number of KV heads in the model's config",
                )
            return cls(component, ranks.tp, None, None)
        if total < 1:
            refuse(component, f"the number of KV heads is {total}; pass that of the model's config")
        (span,) = replicated_spans(total, rank, size, what=f"component {component}, KV heads")
        return cls(component, ranks.tp, total, span, known or total >= size)

    def channels(self, local: int, nbytes: int) -> list[AxisSpec]:
        """Axes of ``local`` channels (the heads of this rank, one after the other) that take ``nbytes`` bytes.

        Raises `LayoutError` where the channels do not divide over the heads.
        """
        if not self.known:
            return per_rank(nbytes, self.tp)
        if self.total is None or self.span is None:
            return [("channel", local, whole(local))]
        start, count = self.span
        if local % count:
            refuse(
                self.component,
                f"{local} channels of a token do not divide over the {count} of {self.total} KV heads that rank "
                f"{self.tp[0]} of {self.tp[1]} holds; pass the number of KV heads of these layers",
            )
        head = local // count
        return [("channel", head * self.total, ((start * head, local),))]
