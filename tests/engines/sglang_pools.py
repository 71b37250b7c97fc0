"""Pools laid out as SGLang lays out its own, in numpy, and what their indices look like. Knows nothing of layouts.

A `Side` is the memory of one rank. Every buffer stands between canaries; what must be in it at the end is written to a
second copy, so that one comparison finds wrong bytes, missing ones and those that were not to be touched.
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np

GUARD = 64


def logical(*key, shape, dtype=np.uint8):
    """Bytes of a logical tensor of the request: a function of its name alone."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).view(dtype).reshape(shape)


def heads_of(total, rank, size):
    """The KV heads of a rank, as SGLang's models load them."""
    if total >= size:
        each = total // size
        return list(range(rank * each, (rank + 1) * each))
    return [rank // (size // total)]


def channels_of(blocks, rank, size):
    """The channels of a rank of blocks that are cut each by itself."""
    held, base = [], 0
    for block in blocks:
        each = block // size
        held += range(base + rank * each, base + (rank + 1) * each)
        base += block
    return held


class Place:
    """Where one side keeps a request: pages in token order, a slot, a row of the request pool, an aux row."""

    def __init__(self, rng, page_size, pages_needed, pages, *, slots=6):
        self.page_size, self.total_pages, self.slots = page_size, pages, slots
        self.pages = rng.permutation(np.arange(1, pages))[:pages_needed].astype(np.int32)
        self.swa_pages = rng.permutation(np.arange(1, pages))[:pages_needed].astype(np.int32)
        self.slot, self.row, self.aux = (int(rng.integers(1, slots)) for _ in range(3))


class Side:
    """One rank: its buffers, its KVArgs, and functions that put a request's logical content into a copy of them."""

    def __init__(self, seed, page_size, *, tp=(0, 1), **args):
        self.rng = np.random.default_rng(seed)
        self.tp, self.page_size = tp, page_size
        self.raw, self.wanted, self.puts = [], [], []
        self.args = SimpleNamespace(
            engine_rank=tp[0],
            page_size=page_size,
            kv_cache_dtype_str="bfloat16",
            gpu_id=0,
            kv_data_ptrs=[],
            kv_data_lens=[],
            kv_item_lens=[],
            kv_layer_ids=[],
            num_draft_entries=0,
            aux_data_ptrs=[],
            aux_data_lens=[],
            aux_item_lens=[],
            state_types=[],
            state_data_ptrs=[],
            state_data_lens=[],
            state_item_lens=[],
            state_dim_per_tensor=[],
            state_conv_shard_groups=[],
            state_slice_outer_counts=[],
            state_layer_ids=[],
            swa_kv_cache_layout=None,
            is_hybrid_mla_backend=False,
            mla_compression_ratios=None,
            **args,
        )

    def buffer(self, shape, dtype=np.uint8):
        """A buffer of its own, and the same in the copy: ``(here, wanted)``, filled alike with noise."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        noise = self.rng.integers(0, 256, nbytes + 2 * GUARD, np.uint8)
        pair = []
        for kept in (self.raw, self.wanted):
            whole = noise.copy()
            kept.append(whole)
            pair.append(whole[GUARD : GUARD + nbytes].view(dtype).reshape(shape))
        return tuple(pair)

    def wrong_buffers(self):
        """Numbers of the buffers, canaries included, that are not as wanted."""
        return [
            at
            for at, (raw, wanted) in enumerate(zip(self.raw, self.wanted, strict=True))
            if not np.array_equal(raw, wanted)
        ]

    def fill(self):
        """Prefill: have all that is wanted in place at once."""
        for raw, wanted in zip(self.raw, self.wanted, strict=True):
            raw[:] = wanted

    def kv(self, buffer, row_bytes, *, draft=False):
        """List a buffer of the main cache, or of the draft's."""
        self.list("kv", buffer, row_bytes)
        self.args.num_draft_entries += draft

    def aux(self, place, rows=6, widths=(64, 64, 64, 64, 128, 128, 64, 128, 96, 64), *, known=True):
        """SGLang's metadata buffers; ``known``: whether this rank has the request's."""
        for at, width in enumerate(widths):
            here, wanted = self.buffer((rows, width))
            self.list("aux", here, width)
            if known:
                wanted[place.aux] = logical("aux", at, shape=(width,))

    def list(self, prefix, buffer, row_bytes):
        """List a buffer in the lists of that name."""
        getattr(self.args, f"{prefix}_data_ptrs").append(buffer.ctypes.data)
        getattr(self.args, f"{prefix}_data_lens").append(buffer.nbytes)
        getattr(self.args, f"{prefix}_item_lens").append(row_bytes)

    def state(self, kind, buffers, row_bytes, *, dims=(), groups=(), outers=(), layers=()):
        """List a state component."""
        args = self.args
        args.state_types.append(kind)
        args.state_data_ptrs.append([buffer.ctypes.data for buffer in buffers])
        args.state_data_lens.append([buffer.nbytes for buffer in buffers])
        args.state_item_lens.append(list(row_bytes))
        args.state_dim_per_tensor.append(list(dims))
        args.state_conv_shard_groups.append(list(groups))
        args.state_slice_outer_counts.append(list(outers))
        args.state_layer_ids.append(list(layers))


def slots_of(pages, page_size, tokens):
    """The slot of each of ``tokens`` (positions), whose pages from token 0 are ``pages``."""
    tokens = np.asarray(tokens)
    return np.asarray(pages, np.int64)[tokens // page_size] * page_size + tokens % page_size


def mha(side, place, tokens, *, layers, heads, dims=(8, 8), draft=False, name="kv", dtype=np.uint16):
    """Keys of all layers, then values: ``[slots, heads, dim]``. ``tokens`` are the positions that are to be there."""
    held = heads_of(heads, *side.tp)
    for half, dim in enumerate(dims):
        for layer in layers:
            here, wanted = side.buffer((place.total_pages * side.page_size, len(held), dim), dtype)
            side.kv(here, here[0].nbytes * side.page_size, draft=draft)
            whole = logical(name, half, layer, shape=(max(tokens, default=0) + 1, heads, dim), dtype=dtype)
            wanted[slots_of(place.pages, side.page_size, tokens)] = whole[tokens][:, held]


def mla(side, place, tokens, *, layers, dim=24, draft=False, name="latent", dtype=np.uint16, page_size=None):
    """A latent for each token, the same on every rank. ``tokens``: positions, or (positions, local positions)."""
    local = tokens
    if isinstance(tokens, tuple):
        tokens, local = tokens
    size = page_size or side.page_size
    for layer in layers:
        here, wanted = side.buffer((place.total_pages * size, 1, dim), dtype)
        side.kv(here, here[0].nbytes * size, draft=draft)
        whole = logical(name, layer, shape=(max(tokens, default=0) + 1, 1, dim), dtype=dtype)
        wanted[slots_of(place.pages, size, local)] = whole[tokens]


def opaque(side, place, pages, *, widths, per_rank=False):
    """Rows of a page each, whatever is in them; ``pages`` are the places of the pages that are to be there."""
    for at, width in enumerate(widths):
        here, wanted = side.buffer((place.total_pages, width))
        side.kv(here, width)
        key = (at, side.tp) if per_rank else (at,)
        whole = logical("opaque", *key, shape=(max(pages, default=0) + 1, width))
        wanted[place.pages[pages]] = whole[pages]


def mamba(side, place, *, layers, blocks=(8, 8, 16), heads=4, outer=0, columns=3, replicated=0, given=True, ids=True):
    """Convolutions of all layers, recurrent states of all layers, then states that are not cut."""
    rank, size = side.tp
    held = channels_of(blocks, rank, size)
    made, dims, groups, outers = [], [], [], []
    for layer in layers:
        whole = logical("conv", layer, shape=(sum(blocks), columns), dtype=np.uint16)[held]
        whole = whole.T if outer else whole
        made.append(side.buffer((place.slots, *whole.shape), np.uint16))
        made[-1][1][place.slot] = whole
        dims.append(len(held))
        groups.append(list(blocks) if given else None)
        outers.append(columns if outer else 1)
    for layer in layers:
        made.append(side.buffer((place.slots, heads // size, 4, 2), np.float32))
        whole = logical("recurrent", layer, shape=(heads, 4, 2), dtype=np.float32)
        made[-1][1].view(np.uint8)[place.slot] = whole[heads_of(heads, rank, size)].view(np.uint8)
        dims.append(heads // size)
        groups.append(None)
        outers.append(1)
    for layer in list(layers)[:replicated]:
        made.append(side.buffer((place.slots, 12)))
        made[-1][1][place.slot] = logical("whole", layer, shape=(12,))
        dims.append(0)
        groups.append(None)
        outers.append(1)
    listed = [*layers, *layers, *list(layers)[:replicated]] if ids else []
    buffers = [here for here, _ in made]
    rows = [here[0].nbytes for here in buffers]
    side.state("mamba", buffers, rows, dims=dims, groups=groups, outers=outers, layers=listed)


def window(side, place, pages, *, layers, heads, dims=(8, 8), kind="swa", dtype=np.uint16):
    """Keys, then values, of sliding-window layers; ``pages`` are the places of those that move, whole."""
    held, made = heads_of(heads, *side.tp), []
    side.args.swa_kv_cache_layout = "nhd"
    for half, dim in enumerate(dims):
        for layer in layers:
            made.append(side.buffer((place.total_pages, side.page_size, len(held), dim), dtype))
            whole = logical(kind, half, layer, shape=(64, side.page_size, heads, dim), dtype=dtype)
            made[-1][1][place.swa_pages[pages]] = whole[pages][:, :, held]
    side.state(kind, [here for here, _ in made], [here[0].nbytes for here, _ in made])


def alike(side, kind, rows, *, count, row_bytes, total, elided=(), layers=(), per_rank=False):
    """Buffers whose ``rows`` (in the order of the request) hold the same on every rank."""
    made = []
    for at in range(count):
        gone = at in elided
        made.append(side.buffer((0 if gone else total, row_bytes)))
        if not gone:
            key = (at, side.tp) if per_rank else (at,)
            made[-1][1][np.asarray(rows, np.int64)] = logical(kind, *key, shape=(len(rows), row_bytes))
    sizes = [0 if at in elided else row_bytes for at in range(count)]
    side.state(kind, [here for here, _ in made], sizes, layers=layers)
