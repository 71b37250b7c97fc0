"""The same work for every contender: pages of one token in shuffled rows of 64 tensors, in a pool twice as large."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

LAYERS = 32
TENSORS = 2 * LAYERS


class Work(NamedTuple):
    """``pages`` rows of ``piece`` bytes in each of ``TENSORS`` tensors."""

    piece: int
    pages: int

    @classmethod
    def of(cls, piece: int, nbytes: int) -> Work:
        """About ``nbytes`` in pieces of ``piece`` bytes; at least one page."""
        return cls(piece, max(1, nbytes // (TENSORS * piece)))

    @property
    def nbytes(self) -> int:
        """Bytes that are moved."""
        return TENSORS * self.pages * self.piece

    @property
    def pieces(self) -> int:
        """Pieces that are moved."""
        return TENSORS * self.pages

    @property
    def rows(self) -> int:
        """Rows of each tensor: twice as many as are moved."""
        return 2 * self.pages

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool of one side."""
        return TENSORS * self.rows * self.piece

    def chosen(self, role: str) -> Int64s:
        """The rows that one side gives its request, shuffled, the same at every call."""
        return np.random.default_rng(1 if role == "source" else 2).permutation(self.rows)[: self.pages].astype(np.int64)

    def indices(self, role: str) -> Int64s:
        """The pieces, tensor by tensor, as indices of rows of the whole pool."""
        tensors = np.arange(TENSORS, dtype=np.int64)[:, None] * self.rows
        return (tensors + self.chosen(role)[None, :]).reshape(-1)

    def fill(self, pool: Bytes) -> None:
        """Random bytes, or zeros where nothing shall be taken for them: 0 never occurs in the first."""
        pool[:] = np.random.default_rng(3).integers(1, 256, len(pool), dtype=np.uint8)

    def checksum(self, pool: Bytes, role: str) -> int:
        """Of the request's rows in their order, in every tensor."""
        rows = self.chosen(role)
        tensors = pool.reshape(TENSORS, self.rows, self.piece)
        value = 0
        for tensor in tensors:
            value = zlib.crc32(np.ascontiguousarray(tensor[rows]).data, value)
        return value

    @classmethod
    def read(cls, described: dict[str, Any]) -> Work:
        """From what the parent sent."""
        return cls(int(described["piece"]), int(described["pages"]))
