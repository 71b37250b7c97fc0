"""Valid inputs, which the fuzzers change: small ones, with something in every field."""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton.layout import (
    AUX,
    PAGED,
    SLOT,
    Axis,
    Component,
    Coords,
    Ownership,
    RankLayout,
    Tensor,
    aux_fields,
    compressed,
    ring,
    window,
)
from kvbaton.protocol import (
    Abort,
    AbortAck,
    Done,
    Hello,
    Message,
    Offer,
    Ping,
    Pong,
    Refused,
    Rows,
    Welcome,
    make_hello,
    rows_to_bytes,
)
from kvbaton.registry import Registration

TOKEN = bytes(range(16))
ROWS = 8
REGION_BYTES = 1 << 14


def layout(rank: int = 0, size: int = 1, dtype: str = "bfloat16") -> RankLayout:
    """One rank of a small hybrid model: pages, a window, a ring, compressed entries, slots and aux data."""
    heads = 4 // size
    width = {"bfloat16": 2, "float32": 4}[dtype]

    def paged(role: str, layer: int, offset: int, tokens: int) -> Tensor:
        axes = (
            Axis("token", tokens, heads * 4 * width, ((0, tokens),)),
            Axis("head", 4, 4 * width, ((rank * heads, heads),)),
            Axis("dim", 4, width, ((0, 4),)),
        )
        return Tensor(role, layer, 0, offset, ROWS, tokens * heads * 4 * width, dtype, axes)

    conv = Axis("channel", 8, 4, ((0, 8),) if size == 1 else ((2 * rank, 2), (4 + 2 * rank, 2)))
    state = Tensor("conv", 1, 0, 8192, ROWS, 64, "float32", (conv,))
    components = (
        Component("kv", PAGED, (paged("key", 0, 0, 2), paged("value", 0, 1024, 2)), page_size=2),
        Component("near", window(4), (paged("key", 1, 2048, 2),), page_size=2, pool="p"),
        Component("last", ring(4), (paged("key", 2, 3072, 2),), page_size=2),
        Component("far", compressed(4), (paged("key", 3, 4096, 1),), page_size=4),
        Component("gdn", SLOT, (state,)),
        aux_fields({"first": ("int64", 1), "logits": ("float32", 3)}, rows=ROWS, offset=12288),
    )
    assert components[-1].kind == AUX
    return RankLayout(components, Coords(tp=(rank, size)), Ownership())


def quantised() -> RankLayout:
    """A layout with factors and scales, in units that ranks share."""
    axes = (Axis("token", 2, 32, ((0, 2),)), Axis("dim", 32, 1, ((0, 32),)))
    key = Tensor("key", 0, 0, 0, ROWS, 64, "float8_e4m3fn", axes, scale="key_scale", factor=0.5)
    scales = (Axis("token", 2, 8, ((0, 2),)), Axis("dim", 2, 4, ((0, 2),)))
    scale = Tensor("key_scale", 0, 0, 4096, ROWS, 16, "float32", scales)
    kv = Component("kv", PAGED, (key, scale), page_size=2, owned=Ownership(2, 2, 1))
    return RankLayout((kv,), Coords(cp=(1, 2)), Ownership(2, 2, 1))


def hello(own: RankLayout, sources: tuple[RankLayout, ...], **changes: Any) -> Hello:
    """A Hello of a decode rank to part 0."""
    message = make_hello(
        instance="decode-1",
        model="tiny",
        layout=own,
        destination_index=0,
        destinations=1,
        sources=sources,
        source_index=0,
        transports={"tcp": b"10.0.0.1:9", "shm": b"\x00\xff"},
        striped=True,
        cast=True,
        aux="fabric",
    )
    return msgspec.structs.replace(message, **changes)


def offer(room: int = 1, epoch: int = 1) -> Offer:
    """An Offer that fits `layout`."""
    rows = {
        "kv": Rows(rows_to_bytes([7, 2, 5, 1])),
        "near": Rows(rows_to_bytes([3, 4]), 4),
        "last": Rows(rows_to_bytes([1, 6])),
        "far": Rows(rows_to_bytes([2, 3])),
        "gdn": Rows(rows_to_bytes([5])),
    }
    return Offer(room, epoch, 8, rows, prefix=0, aux_row=3)


def messages() -> tuple[Message, ...]:
    """One message of each kind but Hello."""
    return (
        Welcome("prefill-1", "shm", b"\x01\x02", (0, 1), "fabric", "memory is mapped"),
        Refused("prefill-1", "axis head: 8 here, 4 there", "LayoutMismatch"),
        offer(),
        Done(1, 1, 0, 4, {"kv": 2**40, "gdn": 0}, b"\x00aux\xff"),
        Abort(1, 1, "the client went away", "TransferAborted", offered=True),
        AbortAck(1, 1, 0, drained=True),
        Ping(1),
        Pong(2**62),
    )


def registration() -> Registration:
    """What a prefill rank tells the registry."""
    return Registration("prefill-1", "tcp://10.0.0.1:7000", layout(0, 2), "tiny", "default")
