"""One message of each kind, with every field set: the golden vectors are made of them."""

from kvbaton.layout import PAGED, SLOT, Axis, Component, Coords, Ownership, RankLayout, Tensor
from kvbaton.protocol import (
    Abort,
    AbortAck,
    Done,
    Hello,
    Offer,
    Ping,
    Pong,
    Refused,
    Rows,
    Welcome,
    rows_to_bytes,
)
from kvbaton.protocol.messages import PROTOCOL_VERSION
from kvbaton.protocol.packed import pack_layout


def small_layout(rank=0, size=1, rows=4):
    heads = Axis("head", 4, 8, ((rank * 4 // size, 4 // size),))
    axes = (Axis("token", 2, 8 * heads.local_size, ((0, 2),)), heads, Axis("dim", 4, 2, ((0, 4),)))
    tensor = Tensor("key", 0, 0, 0, rows, 16 * heads.local_size, "bfloat16", axes, factor=0.5)
    state = Tensor("conv", 1, 1, 64, rows, 32, "float32", (Axis("channel", 8, 4, ((0, 2), (4, 6))),))
    return RankLayout(
        (Component("kv", PAGED, (tensor,), page_size=2), Component("gdn", SLOT, (state,))),
        Coords(tp=(rank, size)),
        Ownership(2, 1, 0),
    )


EXAMPLES = {
    "hello": Hello(
        version=PROTOCOL_VERSION,
        instance="decode-1",
        model="tiny",
        layout=pack_layout(small_layout()),
        destination_index=1,
        destinations=2,
        sources=(pack_layout(small_layout(0, 2)), pack_layout(small_layout(1, 2))),
        source_index=1,
        transports={"shm": b"\x00\xff", "tcp": b"10.0.0.1:9"},
        striped=True,
        cast=True,
        aux="fabric",
    ),
    "welcome": Welcome("prefill-1", "shm", b"\x01\x02", (0, 1), "fabric", "memory is mapped", (3,)),
    "refused": Refused("prefill-1", "axis head: 8 here, 4 there", "LayoutMismatch"),
    "offer": Offer(
        room=2**63 - 1,
        epoch=3,
        tokens=4096,
        components={"kv": Rows(rows_to_bytes([7, 2**40, 9]), 1024), "gdn": Rows(rows_to_bytes([5])), "none": Rows(b"")},
        prefix=1030,
        aux_row=5,
        trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        digest=True,
    ),
    "done": Done(
        room=7,
        epoch=3,
        part=1,
        chunks=4,
        bytes={"kv": 2**40, "gdn": 0},
        aux=b"\x00aux\xff",
        digests={"kv": b"digest!!"},
    ),
    "abort": Abort(room=7, epoch=3, reason="the client went away", error="TransferAborted", offered=True),
    "abort_ack": AbortAck(room=7, epoch=3, part=1, drained=True),
    "ping": Ping(1),
    "pong": Pong(2**62),
}
