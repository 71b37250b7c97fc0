"""What the ranks of a hand-over hold: pages of keys and values, states and an aux row, and what is in them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint16]

HEAD_DIM = 128
CONV_BLOCKS = {"query": 512, "key": 512, "value": 1024}
CONV_COLUMNS = 3
STATE_HEADS = 8
STATE_SHAPE = (64, 64)
AUX_FIELDS = {
    "ids": ("int32", 16),
    "cached": ("int32", 16),
    "logprob": ("float32", 16),
    "logprob_id": ("int32", 16),
    "top_logprobs": ("float32", 128),
    "top_ids": ("int32", 128),
    "draft": ("float32", 16),
    "draft_id": ("int64", 16),
    "hidden": ("bfloat16", 4096),
    "room": ("int64", 8),
}


class Case(NamedTuple):
    """``requests`` of ``tokens`` tokens each, in ``layers`` layers, from ``prefill_tp`` ranks to ``decode_tp`` ranks.

    ``heads`` counts the KV heads of the whole model, of 128 bfloat16 elements each. ``state_layers`` layers have a
    convolution and a recurrent state instead; with them every request has an aux row too. The pages of all requests
    together are shuffled, on both sides.
    """

    layers: int = 32
    page_size: int = 1
    tokens: int = 4096
    requests: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1
    heads: int = 8
    order: str = "NHD"
    state_layers: int = 0
    head_dim: int = HEAD_DIM

    @property
    def pages(self) -> int:
        """Pages of one request."""
        return -(-self.tokens // self.page_size)

    @property
    def rows(self) -> int:
        """Pages of the pool; the first is never used."""
        return self.pages * self.requests + 1

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values of all requests, counted once."""
        return self.tokens * self.requests * self.layers * 2 * self.heads * self.head_dim * 2

    def chosen(self, seed: int) -> list[npt.NDArray[np.int64]]:
        """The rows of each request, shuffled."""
        rows = 1 + np.random.default_rng(seed).permutation(self.rows - 1).astype(np.int64)
        return [rows[first * self.pages : (first + 1) * self.pages] for first in range(self.requests)]

    @classmethod
    def read(cls, described: dict[str, Any]) -> Case:
        """From what the parent sent."""
        return cls(**described)


def page_words(case: Case, request: int, layer: int, value: bool, heads: range) -> Words:
    """What each token of a request holds: ``[tokens, heads, head_dim]``, by global indices."""
    base = request * 7927 + layer * 10477 + value * 12983
    tokens = np.arange(case.tokens, dtype=np.uint32) * np.uint32(40507) + np.uint32(base)
    inner = np.arange(heads.start, heads.stop, dtype=np.uint32)[:, None] * np.uint32(25171)
    inner = inner + np.arange(case.head_dim, dtype=np.uint32)[None, :] * np.uint32(13841)
    words: Words = tokens.astype(np.uint16)[:, None, None] + inner.astype(np.uint16)[None, :, :]
    return words


def state_words(request: int, layer: int, entries: npt.NDArray[np.int64], width: int) -> Words:
    """What a state holds for each of the global indices ``entries``: ``[entries, width]``."""
    start = (entries * 257 + request * 911 + layer * 5003).astype(np.uint32)
    words: Words = (start[:, None] + np.arange(width, dtype=np.uint32) * np.uint32(31)).astype(np.uint16)
    return words
