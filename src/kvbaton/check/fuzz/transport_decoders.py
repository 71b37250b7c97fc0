"""Decoders of transports: descriptors, greetings, frames and acknowledgements; of doctors too."""

from __future__ import annotations

import hashlib
import struct
import zlib

import msgspec
import numpy as np

from kvbaton.check.fuzz import samples
from kvbaton.check.fuzz.stream import as_socket
from kvbaton.check.fuzz.target import Decoder, pure
from kvbaton.copy import check_bounds, scatter
from kvbaton.doctor import wire as doctor
from kvbaton.errors import ProtocolError, RowsError, TransportError
from kvbaton.plan.boxes import Boxes, Transfer
from kvbaton.transport import shm, tcp_wire, wire
from kvbaton.transport.cuda import descriptor as cuda
from kvbaton.transport.fabric import descriptor, side
from kvbaton.transport.fabric.mooncake.descriptor import MooncakeDescriptor
from kvbaton.transport.fabric.mori import peer as mori
from kvbaton.transport.fabric.nixl.descriptor import NixlDescriptor, Place
from kvbaton.transport.process import ProcessKey

CANARY = 0xA5
GUARD = 4096
REGION = 1024
SLAB = 1 << 12

_ENDS = (EOFError, ValueError, OSError)
"""What ends a connection: see `Inbound`."""


def decoders() -> list[Decoder]:
    """All of them."""
    pack = msgspec.msgpack.encode
    process = ProcessKey(1234, 5678, "boot", "pid:[4026531836]")
    own = tcp_wire.TcpDescriptor("decode-1", "10.0.0.1", 7000, samples.TOKEN, (REGION, 0, 1 << 40))
    mapped = shm.ShmDescriptor("decode-1", process, (shm.ShmRegion(64, 0, 5, 1, 2, 64), shm.ShmRegion(9)))
    device = cuda.CudaDescriptor(
        "decode-1",
        process,
        cuda.Life(5, 1, 2, 1),
        bytes(16),
        (cuda.Shared(bytes(64), REGION),),
        (cuda.CudaRegion(64, 0, 64), cuda.CudaRegion(9, why="it is host memory")),
    )
    fabric = side.FabricDescriptor("nixl", "decode-1", "10.0.0.1", 7000, samples.TOKEN, (REGION,))
    mooncake = MooncakeDescriptor("10.0.0.1", 7000, "tcp", 4096, samples.TOKEN, bytes(16))
    nixl = NixlDescriptor("agent", b"metadata", 4096, samples.TOKEN, (Place(4096, 64, "host", 0),))
    greeting = tcp_wire.TCP.magic + struct.pack("<H64sB", tcp_wire.TCP.version, bytes(64), 8) + b"decode-1"
    hello = _lengthy(pack(side.Hello(True, process, 3, (1, 2))))
    welcome = _lengthy(pack(side.Welcome(b"fabric", True, SLAB, (0, 1), (3,))))
    transfer = _transfer()
    frame = tcp_wire.encode_frame(transfer, 7, True) + bytes(transfer.nbytes)
    payload = side.Header(side.WHOLE, 2, 2, 1, 7, 0, 0, transfer.nbytes).encode() + wire.encode_tables(transfer)
    acks = wire.encode_ack(wire.Ack(7)) + wire.encode_ack(wire.Ack(8, "outside"))
    ends = mori.Descriptor(b"engine", (b"memory",), (mori.Place(0, 64), mori.Place(-1, 0)), b"", ("rdma",))
    visit = [
        doctor.Greeting(1, ("tcp", "shm")),
        doctor.Offers(1, "host", {"a": "1"}, {"tcp": b"x"}, {"shm": "no"}),
        doctor.Admit("tcp", b"x"),
        doctor.Check(),
        doctor.Ping(),
        doctor.Answer("no", 7),
    ]
    said = tuple(struct.pack("<4sI", b"KVBD", len(pack(each))) + pack(each) for each in visit)
    told = (TransportError,)
    return [
        Decoder("tcp descriptor", pure(tcp_wire.decode_descriptor), (pack(own),), told, "msgpack", weight=4),
        Decoder("shm descriptor", pure(shm.decode_descriptor), (pack(mapped),), told, "msgpack", weight=4),
        Decoder("cuda descriptor", pure(cuda.decode_descriptor), (pack(device),), told, "msgpack", weight=4),
        Decoder("fabric descriptor", pure(_fabric_descriptor), (pack(fabric),), told, "msgpack", weight=4),
        Decoder("fabric's own descriptor", pure(_own), (mooncake.encode(),), told, weight=2),
        Decoder("nixl descriptor", pure(_nixl), (pack(nixl),), told, "msgpack", weight=3),
        Decoder("mooncake descriptor", pure(_mooncake), (pack(mooncake),), told, "msgpack", weight=3),
        Decoder("mori descriptor", pure(_mori), (pack(ends),), told, "msgpack", weight=3),
        Decoder("greeting", pure(_greeting), (greeting,), (ValueError, EOFError), weight=6),
        Decoder("tcp frame", _TcpFrames, (frame, frame + frame), _ENDS, weight=6),
        Decoder("side channel hello", pure(_side_hello), (hello,), _ENDS, "msgpack", 4, _lengthy, 3),
        Decoder("side channel welcome", pure(_side_welcome), (welcome,), _ENDS, "msgpack", 4, _lengthy, 3),
        Decoder("side channel frame", _SideFrames, (payload, payload + payload + side.FAREWELL), _ENDS, weight=5),
        Decoder("acknowledgement", pure(_acks), (acks,), (ValueError,), weight=6),
        Decoder("doctor", pure(_doctor), said, (ProtocolError, OSError), weight=5),
    ]


def frames_for_port() -> tuple[bytes, ...]:
    """What a writer says to a tcp port after its greeting: a frame that lands, and one that does not."""
    transfer = _transfer()
    frame = tcp_wire.encode_frame(transfer, 7, True) + bytes(transfer.nbytes)
    outside = transfer._replace(destination_units=np.array([1 << 40, 1], np.int64))
    return frame + frame, tcp_wire.encode_frame(outside, 8, True) + bytes(transfer.nbytes) + frame


def side_frames_for_port() -> tuple[bytes, ...]:
    """What a writer says to a side channel after its greeting: a hello, frames, and a goodbye."""
    hello = _lengthy(msgspec.msgpack.encode(side.Hello(False, None, 3, (1, 2))))
    transfer = _transfer()
    tables = wire.encode_tables(transfer)
    frames = [side.Header(side.WHOLE, 2, 2, slab, 7, 0, 0, transfer.nbytes).encode() + tables for slab in range(4)]
    return (*(hello + frame + side.FAREWELL for frame in frames), hello + b"".join(frames), hello + side.FAREWELL)


def _lengthy(said: bytes) -> bytes:
    return struct.pack("<I", len(said)) + said


def _transfer() -> Transfer:
    shape = np.array([[1, 2, 16], [2, 1, 8]], np.int64)
    there = np.array([[0, 0, 128, 1, 0, 0, 32], [0, 64, 128, 1, 0, 16, 0]], np.int64)
    units = np.array([5, 2], np.int64)
    return Transfer(Boxes(shape, there, there), units, units)


def _fabric_descriptor(data: bytes) -> None:
    side.decode_descriptor(data, "nixl")


def _sealed(data: bytes) -> bytes:
    """With the digest of `descriptor.encode`, which is no secret: who sends something else makes a new one."""
    packed = zlib.compress(data, 0)
    return hashlib.blake2b(packed, digest_size=16).digest() + packed


def _own(data: bytes) -> None:
    MooncakeDescriptor.decode(data, "decode-1")


def _nixl(data: bytes) -> None:
    descriptor.decode(NixlDescriptor, _sealed(data), "decode-1")


def _mooncake(data: bytes) -> None:
    described = MooncakeDescriptor.decode(_sealed(data), "decode-1")
    if (described.bases < 0).any():
        raise AssertionError("an address below 0")


def _mori(data: bytes) -> None:
    mori.Descriptor.decode(_sealed(data), "decode-1")


def _greeting(data: bytes) -> None:
    if wire.Reception(as_socket(data), tcp_wire.TCP, samples.TOKEN).read().authentic:
        raise AssertionError("it has no proof that it knows the token")


class _Guarded:
    """A region between guards, and the address and length of it as tables."""

    def __init__(self) -> None:
        self.memory = np.full(REGION + 2 * GUARD, CANARY, np.uint8)
        self.bases = np.array([self.memory.ctypes.data + GUARD], np.int64)
        self.nbytes = np.array([REGION], np.int64)

    def put(self, tables: wire.Tables, packed: bytes, begin: int = 0) -> None:
        """Put a payload in place, and look at the guards."""
        scatter(*tables, self.bases, packed, begin=begin)
        if (self.memory[:GUARD] != CANARY).any() or (self.memory[-GUARD:] != CANARY).any():
            raise AssertionError("bytes outside the registered memory were written")


class _TcpFrames(_Guarded):
    """What `TcpReceiver` does with a connection."""

    def __call__(self, data: bytes) -> None:
        sock = as_socket(data)
        while (frame := tcp_wire.read_frame(sock)) is not None:
            tables = wire.read_tables(sock, frame.boxes, frame.units)
            if tables is None:
                return
            try:
                total = check_bounds("destination", *tables, self.nbytes)
            except RowsError:
                total = None
            if total is not None and total != frame.payload:
                raise ValueError("the payload has another length")
            left = frame.payload
            while left:
                packed = sock.recv(min(left, tcp_wire.SLAB))
                if not packed:
                    return
                if total is not None:
                    self.put(tables, packed, begin=frame.payload - left)
                left -= len(packed)


class _SideFrames(_Guarded):
    """What `FabricReceiver` does with the frames of a connection."""

    def __call__(self, data: bytes) -> None:
        sock, slab = as_socket(data), bytes(SLAB)
        while (header := side.read_header(sock)) is not None and header.kind != side.GOODBYE:
            tables = wire.read_tables(sock, header.boxes, header.units)
            if tables is None:
                return
            if header.offset + header.payload > SLAB:
                raise ValueError("more than a slab has")
            try:
                total = check_bounds("destination", *tables, self.nbytes)
            except RowsError:
                continue
            if header.begin + header.payload > total:
                raise ValueError("the payload ends behind the boxes")
            self.put(tables, slab[header.offset : header.offset + header.payload], begin=header.begin)


def _acks(data: bytes) -> None:
    buffer = bytearray(data)
    wire.take_acks(buffer)
    if len(buffer) > 10 + wire.MAX_ERROR:
        raise AssertionError(f"{len(buffer)} bytes are kept of an acknowledgement")


def _side_hello(data: bytes) -> None:
    side.read(as_socket(data), side.Hello, side.MAX_HELLO)


def _side_welcome(data: bytes) -> None:
    side.read(as_socket(data), side.Welcome, side.MAX_WELCOME)


def _doctor(data: bytes) -> None:
    sock = as_socket(data)
    while doctor.receive(sock) is not None:
        pass
