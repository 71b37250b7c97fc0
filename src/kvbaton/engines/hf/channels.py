"""What the channels of a short convolution consist of, told by the model's config.

A convolution runs over several projections at once, which lie behind each other on its channel axis. Tensor parallelism
cuts each of them by itself, head by head: a rank that was given the first half of the bytes would hold the wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from kvbaton.layout.build import Spans, replicated_spans


class Block(NamedTuple):
    """One projection on the channel axis: ``heads`` heads (or groups) of ``width`` channels."""

    name: str
    heads: int
    width: int


def _gated_delta(config: Any) -> tuple[Block, ...]:
    keys, key_width = int(config.linear_num_key_heads), int(config.linear_key_head_dim)
    return (
        Block("q", keys, key_width),
        Block("k", keys, key_width),
        Block("v", int(config.linear_num_value_heads), int(config.linear_value_head_dim)),
    )


def _mamba(config: Any) -> tuple[Block, ...]:
    groups, width = int(config.n_groups), int(config.state_size)
    return (
        Block("x", int(config.num_heads), int(config.head_dim)),
        Block("B", groups, width),
        Block("C", groups, width),
    )


def _falcon(config: Any) -> tuple[Block, ...]:
    groups, width = int(config.mamba_n_groups), int(config.mamba_d_state)
    return (
        Block("x", int(config.mamba_n_heads), int(config.mamba_d_head)),
        Block("B", groups, width),
        Block("C", groups, width),
    )


_BY_FIELD: dict[str, Callable[[Any], tuple[Block, ...]]] = {
    "linear_num_key_heads": _gated_delta,
    "mamba_n_groups": _falcon,
    "n_groups": _mamba,
}
"""How the blocks are found, by a field that a config of the family has."""


def channel_blocks(config: Any, channels: Collection[int]) -> tuple[Block, ...]:
    """The blocks of a model whose convolutions have so many ``channels``.

    Empty where the config does not tell them, or tells others: the axis is then not cut.
    """
    for field, blocks_of in _BY_FIELD.items():
        if hasattr(config, field):
            blocks = blocks_of(config)
            if set(channels) == {sum(block.heads * block.width for block in blocks)}:
                return blocks
    return ()


def block_spans(blocks: tuple[Block, ...], rank: int, size: int, *, what: str) -> Spans:
    """The channels of ``rank``: of each block its heads, or one that several ranks hold where there are fewer.

    Raises `ShardError`, naming ``what``, the block and both numbers, where neither divides the other.
    """
    spans = []
    base = 0
    for block in blocks:
        ((first, count),) = replicated_spans(block.heads, rank, size, what=f"{what}, block {block.name}")
        spans.append((base + first * block.width, count * block.width))
        base += block.heads * block.width
    return tuple(spans)
