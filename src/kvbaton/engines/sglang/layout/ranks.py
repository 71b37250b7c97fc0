"""What a rank knows of itself and of its model that SGLang's `KVArgs` does not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvbaton.layout import Coords


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Coordinates are ``(rank, size)`` pairs.

    * ``tp``: attention tensor parallelism. ``state_tp``: that of linear attention, where it is another.
    * ``dcp``: decode context parallelism, which divides the attention ranks further.
    * ``is_mla``: every rank holds the whole latent.
    * ``total_kv_heads``: KV heads of the model; needed where `KVArgs` has no ``total_kv_head_num`` (the decode side)
      and ``tp`` has more than one rank. ``swa_kv_heads``: those of sliding-window layers, where they are others.
      ``draft_kv_heads``: those of a draft model; needed only where several ranks share a head.
    * ``conv_blocks``: channels of each block of a convolution state that tensor parallelism cuts by itself, for models
      of which SGLang does not tell them (Mamba 2).
    * ``start_layer``: the first layer of this pipeline stage, where `KVArgs` does not say it (the decode side).
    * ``layers``: global layer numbers by component, for pipelines of models of which SGLang does not tell them.
    * ``kv_shard``: ranks that share the pages of the main cache by page number (KV cache sharding); refused.
    * ``unified``: the pools share one region of page envelopes (unified memory).
    * ``kv_cache_layout``: the order inside pages of keys and values; None is what `KVArgs` says of the sliding-window
      pool, and "nhd" where it says nothing.
    * ``model_dtype``: what a KV cache dtype of "auto" stands for, such as "bfloat16".
    * ``draft``: whether the caches of a draft model are described. Leave it out where the prefill side has none.
    """

    role: Literal["prefill", "decode"]
    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)
    state_tp: tuple[int, int] | None = None
    is_mla: bool = False
    total_kv_heads: int | None = None
    swa_kv_heads: int | None = None
    draft_kv_heads: int | None = None
    conv_blocks: Sequence[int] | None = None
    start_layer: int | None = None
    layers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    kv_shard: tuple[int, int] = (0, 1)
    unified: bool = False
    kv_cache_layout: str | None = None
    model_dtype: str = ""
    draft: bool = True

    @property
    def coords(self) -> Coords:
        """Where the rank stands in kvbaton's grid."""
        return Coords(self.tp, self.pp, self.cp, self.dp)

    @property
    def last_stage(self) -> bool:
        """Whether what comes out of the model is here."""
        return self.pp[0] == self.pp[1] - 1

    @property
    def has_draft(self) -> bool:
        """Whether caches of a draft model are described. It runs on the last stage: those of others hold nothing."""
        return self.draft and (self.role == "decode" or self.last_stage)

    @property
    def of_states(self) -> tuple[int, int]:
        """Rank and size of the tensor parallelism that cuts linear attention."""
        return self.tp if self.state_tp is None else self.state_tp
