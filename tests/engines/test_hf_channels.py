from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvbaton.engines.hf import ARCHITECTURES
from kvbaton.engines.hf.channels import Block, block_spans, channel_blocks
from kvbaton.errors import ShardError

QKV = (Block("q", 2, 16), Block("k", 2, 16), Block("v", 4, 16))


@pytest.mark.parametrize(
    ("name", "channels", "blocks"),
    [
        ("qwen3_5", 128, QKV),
        ("mamba2", 192, (Block("x", 8, 16), Block("B", 2, 16), Block("C", 2, 16))),
        ("falcon_h1", 192, (Block("x", 8, 16), Block("B", 2, 16), Block("C", 2, 16))),
        ("qwen3", 128, ()),
    ],
)
def test_blocks_are_what_the_config_says(name, channels, blocks):
    config = ARCHITECTURES[name]()
    assert channel_blocks(config, {channels}) == blocks
    # Convolutions of another width are not what the config tells of.
    assert channel_blocks(config, {channels, 64}) == channel_blocks(config, {channels + 1}) == ()


def test_a_config_that_says_nothing_has_no_blocks():
    assert channel_blocks(SimpleNamespace(hidden_size=64), {64}) == ()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_channel_is_on_as_many_ranks_as_share_its_head(size):
    held = [
        [
            channel
            for start, count in block_spans(QKV, rank, size, what="conv")
            for channel in range(start, start + count)
        ]
        for rank in range(size)
    ]
    for channel in range(128):
        heads = 4 if channel >= 64 else 2
        assert sum(channel in each for each in held) == max(1, size // heads)
    assert all(each == sorted(set(each)) for each in held)


def test_a_block_that_cannot_be_shared_is_named():
    with pytest.raises(ShardError, match="conv, block v: 4 heads cannot be spread evenly over 6 ranks"):
        block_spans((Block("q", 6, 2), Block("v", 4, 16)), 0, 6, what="conv")
