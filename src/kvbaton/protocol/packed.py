"""The layouts of a Hello, packed and unpacked. What they cost to unpack, check and plan with has a bound."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvbaton.errors import HandshakeError, LayoutError
from kvbaton.layout import RankLayout, check_layout
from kvbaton.protocol.messages import Hello

MAX_LAYOUT_BYTES = 1 << 20
"""Bytes of one packed layout: unpacking it takes some 30 ms at most, in which no other thread runs."""
MAX_GRID_TENSORS = 1 << 17
"""Tensors of all source ranks together."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RankLayout)


class Layouts(NamedTuple):
    """The layouts in a Hello: that of the decode rank, and those of the grid that it believes in."""

    own: RankLayout
    sources: tuple[RankLayout, ...]


def pack_layout(layout: RankLayout) -> msgspec.Raw:
    """``layout`` as it travels. Raises `HandshakeError` if it is too large."""
    packed = _encoder.encode(layout)
    _check_length(len(packed), f"the layout of rank {layout.coords}")
    return msgspec.Raw(packed)


def unpack_layout(packed: msgspec.Raw, where: str) -> RankLayout:
    """The layout in ``packed``, which is still to be checked. Raises `HandshakeError`, naming ``where``."""
    _check_length(len(packed), where)
    try:
        return _decoder.decode(packed)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise HandshakeError(f"{where} cannot be decoded: {error}") from None


def unpack_layouts(hello: Hello) -> Layouts:
    """All layouts of ``hello``, each of which has passed `check_layout`. Raises `HandshakeError` for one that fails."""
    where = f"the hello of decode rank {hello.destination_index}"
    own = _checked(hello.layout, f"the layout in {where}")
    sources: list[RankLayout] = []
    tensors = 0
    for number, packed in enumerate(hello.sources):
        sources.append(_checked(packed, f"the layout of part {number} in {where}"))
        tensors += sum(len(component.tensors) for component in sources[-1].components)
        if tensors > MAX_GRID_TENSORS:
            raise HandshakeError(
                f"{where} names {len(hello.sources)} prefill ranks that have more than {MAX_GRID_TENSORS} tensors "
                "together; use fewer ranks or layers"
            )
    return Layouts(own, tuple(sources))


def same_layout(packed: msgspec.Raw, layout: RankLayout) -> bool:
    """Whether ``packed`` is ``layout``, byte by byte as `pack_layout` makes it."""
    return bytes(packed) == _encoder.encode(layout)


def _checked(packed: msgspec.Raw, where: str) -> RankLayout:
    layout = unpack_layout(packed, where)
    try:
        check_layout(layout, None)
    except LayoutError as error:
        raise HandshakeError(f"{where} does not hold together: {error}") from None
    return layout


def _check_length(nbytes: int, where: str) -> None:
    if nbytes > MAX_LAYOUT_BYTES:
        raise HandshakeError(
            f"{where} has {nbytes} bytes when it is packed, at most {MAX_LAYOUT_BYTES} are allowed: give tensors that "
            "are alike the same axes, and use fewer tensors"
        )
