"""Digests: one number for the bytes of many pieces, made fast, and the same on both sides of a transfer.

A piece is what `kvbaton.plan.boxes` calls one: ``run`` bytes of a box in a unit. All arithmetic is modulo 2**64, and
all constants are the numbers of splitmix64, in order, from the state 0.

* The bytes of a piece, filled up with zeros to whole stripes of eight words of 64 bits (little endian), give a term for
  each word: with ``x`` and ``y`` the halves of ``word ^ key[lane]``, the term is ``(x + 2**32) * (y + 2**32)``.
* Each of the eight lanes has two sums: that of its terms, and that of their partial sums, in which a term counts once
  for each stripe from its own on. The value of a piece is the sum of all sixteen, the first ones times odd factors, the
  second ones times even factors.
* To that is added what says which piece it is: the number of its unit, the stream, and its offset in the packed unit,
  each times an odd factor. The last steps of splitmix64, which map no two numbers to the same, make a summand of it.
* The digest is the sum of the summands of all pieces. So it does not matter in which order, in how many parts, or by
  how many threads they are looked at.

What it finds: a change inside four bytes that lie in one half of a word changes the term, since a product of two
numbers below 2**33 is no multiple of 2**64; then the value, since the factor is odd; then the digest. So every flipped
bit, and every changed byte, is found for certain. Any other change, and pieces that were exchanged or lie at a wrong
place, remain unseen with a probability of about 2**-64. This is for accidents: whoever wants to can make two contents
of one digest.
"""

from __future__ import annotations

import numpy as np

from kvbaton.copy.implementation import kernel
from kvbaton.plan.boxes import Int64s


def digest(
    shape: Int64s, side: Int64s, units: Int64s, numbers: Int64s, bases: Int64s, *, stream: int = 0, threads: int = 1
) -> int:
    """The digest of the pieces of (shape, side, units): from 0 to 2**64 - 1, and 0 for none.

    ``numbers`` has one for each unit that says which it is, whatever the rows are called on this side; ``stream`` keeps
    tables of boxes apart whose digests are added. Digests of parts of the units add up, modulo 2**64. ``bases`` holds
    the address of each region; nothing is checked against their lengths. Releases the GIL for more than 64 KiB. Raises
    ``ValueError`` or ``TypeError`` for tables that are not as `kvbaton.plan.boxes` says.
    """
    made: int = kernel.digest(shape, side, units, numbers, bases, stream, threads)
    return made


def packed_side(shape: Int64s) -> Int64s:
    """A side table for a packed buffer, as region 0: unit ``i`` lies where `kvbaton.copy.gather` puts it."""
    nbytes = shape.prod(axis=1)
    side = np.zeros((len(shape), 7), np.int64)
    side[:, 1] = np.cumsum(nbytes) - nbytes
    side[:, 2] = nbytes.sum()
    side[:, 3] = 1
    side[:, 5] = shape[:, 1] * shape[:, 2]
    side[:, 6] = shape[:, 2]
    return side
