"""How large a layout may be. Decoders enforce it before they take memory, `check_layout` on every layout.

What a layout costs to check and to plan with grows with its tensors and spans; numbers alone cost nothing.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_COMPONENTS = 256
MAX_TENSORS = 1 << 13
"""Tensors of all components together."""
MAX_AXES = 8
MAX_SPANS = 1024
"""Spans of one axis."""
MAX_SPANS_IN_ALL = 1 << 15
"""Spans of all axes of one rank, where tensors with equal axes count once."""
MAX_NAME = 128
MAX_PAGE_SIZE = 1 << 20
MAX_LAYER = 1 << 20
MAX_RANKS = 1 << 20
MAX_PERIOD = 1 << 20
"""Tokens after which the ownership of a rank repeats (``unit * modulus``)."""
MAX_BYTES = 1 << 50
"""Bound of every size, stride, offset and row count."""

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Size = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
PageSize = Annotated[int, Meta(ge=0, le=MAX_PAGE_SIZE)]
Layer = Annotated[int, Meta(ge=0, le=MAX_LAYER)]
Number = Annotated[int, Meta(ge=0, le=MAX_TENSORS)]
"""The number of a region."""
Rank = Annotated[int, Meta(ge=0, le=MAX_RANKS)]
Period = Annotated[int, Meta(ge=0, le=MAX_PERIOD)]
