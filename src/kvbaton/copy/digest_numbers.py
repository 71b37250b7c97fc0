"""The arithmetic of digests in numpy, for the fallback: `kvbaton.copy.digests` says what it is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvbaton.copy.memory import INDEX_ELEMENTS, Bytes, view
from kvbaton.plan.boxes import Int64s

Words = npt.NDArray[np.uint64]

LANES = 8
STRIPE = 8 * LANES
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def _constants(count: int) -> list[int]:
    """The first numbers of splitmix64 from 0."""
    found, state = [], 0
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        found.append(int(_mixed(np.array([state], np.uint64))[0]))
    return found


def _mixed(values: Words) -> Words:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = values ^ (values >> np.uint64(31))
    return mixed


_NUMBERS = np.array(_constants(3 * LANES + 3), np.uint64)
_KEYS, _FIRST, _SECOND = (
    _NUMBERS[:LANES],
    _NUMBERS[LANES : 2 * LANES] | 1,
    _NUMBERS[2 * LANES : 3 * LANES] & ~np.uint64(1),
)
_NUMBER, _STREAM, _OFFSET = _NUMBERS[3 * LANES :] | 1


def digest_pieces(addresses: Int64s, runs: Int64s, numbers: Int64s, offsets: Int64s, stream: int) -> int:
    """The digest of pieces of ``runs`` bytes at ``addresses``, of units of these ``numbers`` at these ``offsets``."""
    memory, low = view((addresses, runs))
    seeds = numbers.astype(np.uint64) * _NUMBER + np.array([stream], np.uint64) * _STREAM
    seeds += offsets.astype(np.uint64) * _OFFSET
    values = np.empty(len(runs), np.uint64)
    for run in np.unique(runs).tolist():
        chosen = np.flatnonzero(runs == run)
        step = max(1, INDEX_ELEMENTS // run)
        for start in range(0, len(chosen), step):
            block = chosen[start : start + step]
            values[block] = _values(memory, addresses[block] - low, run)
    return int(_mixed(values + seeds).sum(dtype=np.uint64))


def _values(memory: Bytes, places: Int64s, run: int) -> Words:
    """The value of each piece of ``run`` bytes."""
    stripes = -(-run // STRIPE)
    values = np.zeros(len(places), np.uint64)
    # Some stripes at a time: a piece may be long.
    step = max(1, INDEX_ELEMENTS // STRIPE)
    for first in range(0, stripes, step):
        last = min(first + step, stripes)
        columns = np.arange(first * STRIPE, min(last * STRIPE, run))
        data = np.zeros((len(places), (last - first) * STRIPE), np.uint8)
        data[:, : len(columns)] = memory[places[:, None] + columns]
        words = data.view("<u8").astype(np.uint64, copy=False).reshape(len(places), last - first, LANES) ^ _KEYS
        low, high = words & _LOW, words >> _HALF
        terms = low * high + ((low + high) << _HALF)
        # A term counts in the second sum once for each stripe from its own on.
        times = np.arange(stripes - first, stripes - last, -1).astype(np.uint64)[:, None]
        values += (terms * (_FIRST + times * _SECOND)).sum(axis=(1, 2), dtype=np.uint64)
    return values
