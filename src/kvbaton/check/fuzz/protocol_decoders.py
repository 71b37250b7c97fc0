"""Decoders of the control plane: frames, layouts, rows, the cores behind them, and what an Offer makes of memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np

from kvbaton import copy
from kvbaton.address import Endpoint
from kvbaton.check.fuzz import samples
from kvbaton.check.fuzz.target import Decoder, pure
from kvbaton.errors import AddressError, HandshakeError, LayoutError, ProtocolError, RowsError, TransportError
from kvbaton.layout import check_layout, required_bytes
from kvbaton.plan import Pages, Transfer
from kvbaton.protocol import (
    Accepted,
    Action,
    DecodeCore,
    Done,
    Hello,
    Offer,
    PrefillCore,
    Rows,
    Send,
    SendDone,
    StartWrite,
    answer_hello,
    bundle,
    decode,
    encode,
    rows_from_bytes,
    rows_to_bytes,
)
from kvbaton.protocol.codec import HEAD_BYTES
from kvbaton.protocol.packed import pack_layout, unpack_layout
from kvbaton.runtime.destinations import Connection, Destination
from kvbaton.runtime.reach import PeerRank
from kvbaton.runtime.writes import Writes
from kvbaton.transport.base import RemotePeer, Transport
from kvbaton.transport.table import check_write

CANARY = 0xA5
GUARD = 4096
"""Bytes before and after a region that nobody may touch."""


def decoders() -> list[Decoder]:
    """All of them."""
    own, wide = samples.layout(), samples.layout(dtype="float32")
    grid = (samples.layout(0, 2), samples.layout(1, 2))
    hellos = (
        samples.hello(own, (own,)),
        samples.hello(own, (samples.layout(0, 1), samples.layout(0, 1))),
        samples.hello(wide, (own,)),
    )
    layouts = tuple(bytes(pack_layout(each)) for each in (own, *grid, samples.quantised()))
    frames = tuple(map(encode, (*samples.messages(), hellos[0])))
    bundled = bundle(frames[2:8])
    head = frames[0][:HEAD_BYTES]

    def wrap(body: bytes) -> bytes:
        return head + body

    addresses = (
        "10.0.0.1:8998",
        "[2001:db8::1]:8998",
        "2001:db8::1",
        "node-3:8998",
        "fe80::1%eth0",
        "a.b.c.",
    )
    return [
        Decoder(
            "frame", pure(decode), (*frames, *bundled), (ProtocolError, HandshakeError), "msgpack", HEAD_BYTES, wrap, 24
        ),
        Decoder("layout", pure(_layout), layouts, (HandshakeError, LayoutError), "msgpack", weight=12),
        Decoder(
            "hello",
            _Answer,
            tuple(map(encode, hellos)),
            (ProtocolError, HandshakeError),
            "msgpack",
            HEAD_BYTES,
            wrap,
            3,
        ),
        Decoder("rows", pure(rows_from_bytes), (rows_to_bytes([7, 2**40, 9]), bytes(64)), (RowsError,), weight=8),
        Decoder("prefill core", _Prefill, frames[:-1], (ProtocolError, HandshakeError), "msgpack", HEAD_BYTES, wrap, 6),
        Decoder("decode core", _Decode, frames[:-1], (ProtocolError, HandshakeError), "msgpack", HEAD_BYTES, wrap, 6),
        Decoder(
            "offer to memory", _Memory, frames[2:3], (ProtocolError, HandshakeError), "msgpack", HEAD_BYTES, wrap, 5
        ),
        Decoder("address", pure(_address), tuple(text.encode() for text in addresses), (AddressError,), weight=10),
    ]


def _layout(data: bytes) -> None:
    check_layout(unpack_layout(msgspec.Raw(data), "a layout"), None)


def _address(data: bytes) -> None:
    parsed = Endpoint.parse(data.decode("latin-1"))
    again = Endpoint.parse(str(parsed))
    if again != parsed:
        raise AssertionError(f"{parsed} is printed as {again}")


class _Answer:
    """A prefill rank that answers Hellos."""

    def __init__(self) -> None:
        self._layout = samples.layout()

    def __call__(self, data: bytes) -> None:
        for message in decode(data):
            if isinstance(message, Hello):
                answer_hello(
                    message, instance="prefill-1", model="tiny", layout=self._layout, transports=("shm", "tcp", "nixl")
                )


class _Prefill:
    """A core with rooms in every state, which hears messages; at the end nothing may be left in it."""

    rounds = 200

    def __init__(self) -> None:
        self._share = _accepted().share_with("fabric")
        self._times = itertools.count()
        self._begin()

    def __call__(self, data: bytes) -> None:
        turn = next(self._times)
        if turn % self.rounds == self.rounds - 1:
            self._end()
            self._begin()
        for message in decode(data):
            self._carry_out(self.core.handle("abc"[turn % 3], message, turn * 0.01))

    def _begin(self) -> None:
        self.core = PrefillCore()
        self.tickets: list[int] = []
        for peer in "ab":
            self.core.peer_joined(peer, self._share)
        self._carry_out(self.core.open(1, 0.0))
        self._carry_out(self.core.open(2, 0.0))
        self._carry_out(self.core.submit(1, 1, {"kv": (0, 8)}, 0.0))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartWrite):
                self.tickets.append(action.ticket)
            elif isinstance(action, Send):
                encode(action.message)
            elif isinstance(action, SendDone):
                encode(action.done)

    def _end(self) -> None:
        for room in (1, 2):
            self._carry_out(self.core.close(room, 1e6))
        for ticket in self.tickets:
            self.core.written(ticket, "", 1e6)
        for peer in "ab":
            self.core.peer_lost(peer, "gone", 1e6)
        self.core.tick(2e6)
        left = {name: size for name, size in self.core.table_sizes().items() if size}
        if left:
            raise AssertionError(f"the prefill core keeps {left}")


class _Decode:
    """As `_Prefill`, for the other side."""

    rounds = 200

    def __init__(self) -> None:
        self._times = itertools.count()
        self._begin()

    def __call__(self, data: bytes) -> None:
        turn = next(self._times)
        if turn % self.rounds == self.rounds - 1:
            self._end()
            self._begin()
        for message in decode(data):
            for action in self.core.handle("abc"[turn % 3], message, turn * 0.01):
                if isinstance(action, Send):
                    encode(action.message)

    def _begin(self) -> None:
        self.core = DecodeCore(inspect=self._inspect)
        for part, peer in enumerate("ab"):
            self.core.peer_joined(peer, part, (0, 1))
        for room in (1, 2):
            self.core.open(room, "ab", 0.0)
        self.core.offer(1, {"kv": Rows(bytes(8))}, 8, 0.0)

    @staticmethod
    def _inspect(room: int, done: Done) -> str:
        return "too long" if len(done.aux) > 100 else ""

    def _end(self) -> None:
        for room in (1, 2):
            self.core.close(room, 1e6)
        for peer in "ab":
            self.core.peer_lost(peer, "gone", 1e6)
            self.core.peer_fenced(peer, 1e6)
        left = {name: size for name, size in self.core.table_sizes().items() if size}
        if left:
            raise AssertionError(f"the decode core keeps {left}")


def _accepted() -> Accepted:
    own = samples.layout()
    hello = samples.hello(own, (own,))
    return answer_hello(hello, instance="prefill-1", model="tiny", layout=own, transports=("shm",))


class _Memory:
    """What a prefill rank does with an Offer, up to the bytes: it may write registered rows only.

    The memory of the decode rank lies between guards.
    """

    def __init__(self) -> None:
        own = samples.layout()
        self._accepted = _accepted()
        nbytes = required_bytes(own.components)[0]
        self._source = np.full(nbytes, 0x11, np.uint8)
        self._target = np.full(nbytes + 2 * GUARD, CANARY, np.uint8)
        self._lengths = np.array([nbytes], np.int64)
        self._from = np.array([self._source.ctypes.data], np.int64)
        self._to = np.array([self._target.ctypes.data + GUARD], np.int64)
        self._chunk = {
            "kv": Pages(np.array([0, 1, 2, 3]), 0),
            "near": Pages(np.array([4, 5]), 4),
            "last": Pages(np.array([1, 2]), 0),
            "far": Pages(np.array([6, 7]), 0),
            "gdn": Pages(np.array([2]), 0),
        }

    def __call__(self, data: bytes) -> None:
        for message in decode(data):
            if isinstance(message, Offer):
                self._take(msgspec.structs.replace(message, room=1))

    def _take(self, offer: Offer) -> None:
        core = PrefillCore()
        core.peer_joined("a", self._accepted.share_with("fabric"))
        core.open(1, 0.0)
        tokens = {"kv": (0, 8), "near": (4, 8), "last": (0, 8), "far": (0, 8)}
        core.finish(1, 1, 8, tokens, {"gdn"}, True, 0.0)
        for action in core.handle("a", offer, 0.0):
            if isinstance(action, StartWrite):
                try:
                    self._write(action, core.offer(1, "a"))
                except (RowsError, TransportError):
                    # As the runtime has it: the room fails.
                    core.written(action.ticket, "refused", 0.0)

    def _write(self, action: StartWrite, offer: Offer) -> None:
        plan = self._accepted.plan
        aux: dict[str, list[Transfer]] = {}
        if action.aux:
            aux["aux"] = plan.bind_slots("aux", np.array([1]), np.array([offer.aux_row]))
        transport, peer = cast(Transport, self), cast(RemotePeer, None)
        rank = PeerRank("decode-1", self._accepted.layout.coords, "here", "fabric", "")
        destination = Destination(plan, transport, peer, rank, 0, Connection(rank.instance, 0))
        Writes().start(action, destination, self._chunk, offer, aux)

    def write(self, peer: RemotePeer, transfers: Sequence[Transfer], ticket: int) -> None:
        """As `Transport.write`, at once."""
        for transfer in check_write(transfers, self._lengths, self._lengths, "decode-1"):
            copy.copy_boxes(transfer, self._from, self._to)
        if any((guard != CANARY).any() for guard in (self._target[:GUARD], self._target[-GUARD:])):
            raise AssertionError("bytes outside the registered memory were written")
