"""What a peer needs to map the device memory of a process."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvbaton.cuda.base import HANDLE_BYTES, UUID_BYTES
from kvbaton.errors import TransportError
from kvbaton.transport.process import ProcessKey
from kvbaton.transport.table import MAX_DESCRIPTOR

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Uuid = Annotated[bytes, msgspec.Meta(min_length=UUID_BYTES, max_length=UUID_BYTES)]
Handle = Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]

OUT_OF_REACH = -1


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """An allocation that can be opened."""

    handle: Handle
    nbytes: Number


class CudaRegion(msgspec.Struct, frozen=True, array_like=True):
    """Where a region lies in an allocation; ``allocation`` -1: it cannot be written to, for the reason ``why``."""

    nbytes: Number
    allocation: Annotated[int, msgspec.Meta(ge=OUT_OF_REACH, lt=1 << 16)] = OUT_OF_REACH
    offset: Number = 0
    why: Annotated[str, msgspec.Meta(max_length=512)] = ""


class Life(msgspec.Struct, frozen=True, array_like=True):
    """A file that the transport holds open as long as it lives: driver and mappings tell nothing of its end."""

    descriptor: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    device: Annotated[int, msgspec.Meta(ge=0)]
    inode: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Number


class CudaDescriptor(msgspec.Struct, frozen=True, array_like=True, tag="cuda1"):
    """The memory of a process on one device."""

    instance: str
    process: ProcessKey
    life: Life
    device: Uuid
    allocations: tuple[Shared, ...]
    regions: tuple[CudaRegion, ...]


def encode_descriptor(described: CudaDescriptor) -> bytes:
    """The bytes. Raises `TransportError` if there are too many regions for a descriptor."""
    encoded = msgspec.msgpack.encode(described)
    if len(encoded) > MAX_DESCRIPTOR:
        raise TransportError(
            f"{len(described.regions)} regions make a descriptor of {len(encoded)} bytes, more than {MAX_DESCRIPTOR}; "
            "register fewer, larger regions"
        )
    return encoded


def decode_descriptor(descriptor: bytes) -> CudaDescriptor:
    """Decode a descriptor. Raises `TransportError` for anything else."""
    try:
        described = msgspec.msgpack.decode(descriptor, type=CudaDescriptor)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"this is not a descriptor of the cuda transport: {error}") from error
    for number, region in enumerate(described.regions):
        if region.allocation == OUT_OF_REACH:
            continue
        if region.allocation >= len(described.allocations):
            raise TransportError(
                f"region {number} of peer {described.instance} lies in allocation {region.allocation}, but there are "
                f"{len(described.allocations)}"
            )
        nbytes = described.allocations[region.allocation].nbytes
        if region.offset + region.nbytes > nbytes:
            raise TransportError(
                f"region {number} of peer {described.instance} ends at byte {region.offset + region.nbytes}, "
                f"but its allocation has {nbytes}"
            )
    return described
