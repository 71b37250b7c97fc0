"""SGLang's metadata buffers: one row of each for a request, sent last."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.engines.sglang.layout.arguments import Buffer, Regions, refuse
from kvbaton.engines.sglang.layout.ranks import Ranks
from kvbaton.engines.sglang.layout.tensors import elided, same, tensor
from kvbaton.layout import AUX, Component

FIRST = (
    "output_ids",
    "cached_tokens",
    "token_logprobs",
    "token_logprob_ids",
    "top_logprobs",
    "top_logprob_ids",
)
SAMPLING_MASK = ("sampling_mask_len", "sampling_mask_ids", "sampling_logprobs")
SPECULATIVE = ("topk_p", "topk_index", "hidden_states")
ROOM, CHECKSUM, INDICES = "bootstrap_room", "kv_checksum", "dsa_topk_indices"

SMALL_ROW = 64
"""Bytes of a row of the room and of the checksum."""


def describe_aux(buffers: Sequence[Buffer], ranks: Ranks, regions: Regions) -> Component:
    """The component ``aux``. Raises `LayoutError` for a list that has no known order.

    Optional buffers stand in the middle of the list. With a name for each, those of two sides that were started with
    other options do not take each other's place.
    """
    names = _names(buffers)
    if ranks.role == "prefill" and not ranks.last_stage:
        # Only the last stage has all of what comes out of the model.
        return Component("aux", AUX, tuple(elided(name, 0) for name in names))
    return Component(
        "aux",
        AUX,
        tuple(
            elided(name, 0) if buffer.elided else tensor("aux", name, 0, buffer, regions, same(buffer.row_bytes))
            for name, buffer in zip(names, buffers, strict=True)
        ),
    )


def _names(buffers: Sequence[Buffer]) -> tuple[str, ...]:
    count = len(buffers)
    least = len(FIRST) + len(SPECULATIVE) + 1
    extra = count - least
    mask = SAMPLING_MASK if extra >= len(SAMPLING_MASK) else ()
    extra -= len(mask)
    begin = FIRST + mask + SPECULATIVE
    if not 0 <= extra <= 2:
        refuse(
            "aux",
            f"{count} buffers; SGLang's metadata are {least}, and up to 5 more by its options: use a version of SGLang "
            "that is known",
        )
    if extra == 0:
        return (*begin, ROOM)
    if extra == 2:
        return (*begin, INDICES, ROOM, CHECKSUM)
    # One of the two: the room is followed by a checksum as small as itself, or comes after long rows of indices.
    return (*begin, ROOM, CHECKSUM) if buffers[-2].row_bytes == SMALL_ROW else (*begin, INDICES, ROOM)
