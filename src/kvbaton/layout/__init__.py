"""The layout algebra: what each rank holds, and where. Pure data and pure functions."""

from kvbaton.layout.build import (
    Field,
    aux_fields,
    component,
    conv_state,
    dense_axes,
    index_keys,
    mla_latent,
    paged_kv,
    recurrent_state,
    replicated_spans,
    required_bytes,
    shard,
    sharded_spans,
    whole,
)
from kvbaton.layout.check import check_layout
from kvbaton.layout.nouns import DTYPE_BYTES, TOKEN, Axis, Component, Coords, Kind, Ownership, RankLayout, Span, Tensor

__all__ = [
    "DTYPE_BYTES",
    "TOKEN",
    "Axis",
    "Component",
    "Coords",
    "Field",
    "Kind",
    "Ownership",
    "RankLayout",
    "Span",
    "Tensor",
    "aux_fields",
    "check_layout",
    "component",
    "conv_state",
    "dense_axes",
    "index_keys",
    "mla_latent",
    "paged_kv",
    "recurrent_state",
    "replicated_spans",
    "required_bytes",
    "shard",
    "sharded_spans",
    "whole",
]
