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
from kvbaton.layout.kinds import AUX, PAGED, SLOT, Kind, compressed, ring, tail, window
from kvbaton.layout.nouns import DTYPE_BYTES, TOKEN, Axis, Component, Coords, Ownership, RankLayout, Span, Tensor
from kvbaton.layout.scales import block_sizes

__all__ = [
    "AUX",
    "DTYPE_BYTES",
    "PAGED",
    "SLOT",
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
    "block_sizes",
    "check_layout",
    "component",
    "compressed",
    "conv_state",
    "dense_axes",
    "index_keys",
    "mla_latent",
    "paged_kv",
    "recurrent_state",
    "replicated_spans",
    "required_bytes",
    "ring",
    "shard",
    "sharded_spans",
    "tail",
    "whole",
    "window",
]
