"""A script: hands requests over between SGLang's own pools, described by what SGLang's own functions say of them.

Prints one JSON line for each case: its name, and what was wrong, or nothing.
"""

from __future__ import annotations

import json
import sys
import traceback
from types import SimpleNamespace

import numpy as np
import sglang_import
import torch
from sglang_handover import Handed, hand_over
from sglang_pools import Place, channels_of, heads_of, logical, slots_of

sglang_import.install()

import sglang.srt.disaggregation.utils as disaggregation  # noqa: E402
import sglang.srt.mem_cache.memory_pool as memory_pool  # noqa: E402
from sglang.srt.configs.mamba_utils import (  # noqa: E402
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.base.conn import KVArgs  # noqa: E402
from sglang.srt.disaggregation.minimax import minimax_index_transfer_pages  # noqa: E402
from sglang.srt.mem_cache import deepseek_v4_memory_pool  # noqa: E402
from sglang.srt.mem_cache.common import kv_to_page_indices  # noqa: E402
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from kvbaton.engines.sglang.layout import Ranks, describe  # noqa: E402

HEADS, TOKENS, PREFIX, WINDOW = 4, 45, 8, 20
CPU = {"device": "cpu", "enable_memory_saver": False}
SLOTS = 6


class Case:
    """One kind of pool. ``tensors`` are its buffers; `put` writes a request's content into them."""

    page_size, tokens, prefix, mla, stages = 4, TOKENS, PREFIX, False, 1

    def __init__(self, role, tp, place, stage=None):
        self.role, self.tp, self.place, self.stage = role, tp, place, stage
        self.heads = heads_of(HEADS, *tp)
        self.size = (place.total_pages - 1) * self.page_size
        self.first = self.prefix if role == "decode" else 0
        self.pool = self.build()

    def full(self, buffers, name, width):
        """Write the tokens of this side into ``[slots, heads, dim]`` buffers, one for each layer."""
        at = np.arange(self.first, self.tokens)
        slots = torch.from_numpy(slots_of(self.place.pages, self.page_size, at))
        for layer, buffer in enumerate(buffers):
            heads = HEADS if buffer.shape[1] == len(self.heads) and not self.mla else 1
            whole = logical(name, layer, shape=(self.tokens, heads, width), dtype=np.uint16)[at]
            held = whole[:, self.heads] if heads > 1 else whole
            buffer.view(torch.int16)[slots] = torch.from_numpy(held.view(np.int16))

    def indices(self):
        """SGLang's `req_to_token` row: the slot of every token, in a page of its own for what follows."""
        return torch.from_numpy(slots_of(self.place.pages, self.page_size, np.arange(self.tokens)))

    def states(self):
        return []


class Attention(Case):
    def build(self):
        return memory_pool.MHATokenToKVPool(
            self.size, self.page_size, torch.bfloat16, len(self.heads), 8, 3, v_head_dim=6, **CPU
        )

    def tensors(self):
        return [*self.pool.k_buffer, *self.pool.v_buffer]

    def put(self):
        self.full(self.pool.k_buffer, "key", 8)
        self.full(self.pool.v_buffer, "value", 6)


class Latent(Case):
    mla = True

    def build(self):
        return memory_pool.MLATokenToKVPool(self.size, self.page_size, torch.bfloat16, 16, 8, 3, **CPU)

    def tensors(self):
        return list(self.pool.kv_buffer)

    def put(self):
        self.full(self.pool.kv_buffer, "latent", 24)


class Window(Case):
    def build(self):
        heads = {"head_num": len(self.heads), "head_dim": 8, "swa_head_num": len(self.heads), "swa_head_dim": 4}
        return SWAKVPool(
            size=self.size,
            size_swa=self.size,
            page_size=self.page_size,
            dtype=torch.bfloat16,
            swa_attention_layer_ids=[1, 3],
            full_attention_layer_ids=[0, 2],
            device="cpu",
            **heads,
        )

    def tensors(self):
        full, swa = self.pool.full_kv_pool, self.pool.swa_kv_pool
        return [*full.k_buffer, *full.v_buffer, *swa.k_buffer, *swa.v_buffer]

    def put(self):
        self.full(self.pool.full_kv_pool.k_buffer, "key", 8)
        self.full(self.pool.full_kv_pool.v_buffer, "value", 8)
        begin, end = self.window()
        at = np.arange(begin, end)
        slots = torch.from_numpy(slots_of(self.place.swa_pages, self.page_size, at))
        for role, buffers in (("k", self.pool.swa_kv_pool.k_buffer), ("v", self.pool.swa_kv_pool.v_buffer)):
            for layer, buffer in enumerate(buffers):
                whole = logical("window", role, layer, shape=(64, HEADS, buffer.shape[-1]), dtype=np.uint16)
                buffer.view(torch.int16)[slots] = torch.from_numpy(whole[at][:, self.heads].view(np.int16))

    def window(self):
        """Whole pages, as SGLang sends them."""
        begin = max(self.prefix, self.tokens - WINDOW) // self.page_size * self.page_size
        return begin, -(-self.tokens // self.page_size) * self.page_size

    def states(self):
        begin, _ = self.window()
        slots = torch.from_numpy(slots_of(self.place.swa_pages, self.page_size, np.arange(begin, self.tokens)))
        return [kv_to_page_indices(slots, self.page_size)]


class Hybrid(Case):
    """Gated delta net layers 0, 1 and 3 beside attention in 2 and 5."""

    def shape(self):
        shape = Mamba2StateShape.create(
            tp_world_size=self.tp[1],
            intermediate_size=32,
            n_groups=4,
            num_heads=8,
            head_dim=4,
            state_size=4,
            conv_kernel=4,
            conv_shard_groups=[16, 16, 32],
        )
        return Mamba2CacheParams(shape=shape, layers=[0, 1, 3])

    def mamba_pool(self):
        return memory_pool.MambaPool(
            size=SLOTS, spec_state_size=0, cache_params=self.shape(), mamba_layer_ids=[0, 1, 3], device="cpu"
        )

    def build(self):
        return memory_pool.HybridLinearKVPool(
            self.size, torch.bfloat16, self.page_size, len(self.heads), 8, [2, 5], "cpu", self.mamba_pool()
        )

    def tensors(self):
        full, cache = self.pool.full_kv_pool, self.pool.mamba_pool.mamba_cache
        return [*full.k_buffer, *full.v_buffer, *cache.conv, cache.temporal]

    def put(self):
        self.full(self.pool.full_kv_pool.k_buffer, "key", 8)
        self.full(self.pool.full_kv_pool.v_buffer, "value", 8)
        cache, slot = self.pool.mamba_pool.mamba_cache, self.place.slot
        for layer in range(3):
            conv, state = self.logical_states(layer)
            for tensor, values in ((cache.conv[0][layer][slot], conv), (cache.temporal[layer][slot], state)):
                assert tensor.shape == values.shape, (tensor.shape, values.shape)
                flat = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
                tensor.view(-1).view(torch.uint8)[:] = torch.from_numpy(flat)

    def logical_states(self, layer):
        kind = np.uint16 if self.pool.mamba_pool.mamba_cache.conv[0].element_size() == 2 else np.float32
        conv = logical("conv", layer, shape=(64, 3), dtype=kind)[channels_of((16, 16, 32), *self.tp)]
        return conv, logical("state", layer, shape=(8, 4, 4), dtype=np.float32)[heads_of(8, *self.tp)]

    def states(self):
        return [[torch.tensor([self.place.slot]).numpy()]]


class Kimi(Hybrid):
    """The same with the convolution's rows outside of its channels."""

    def shape(self):
        shape = KimiLinearStateShape.create(tp_world_size=self.tp[1], num_heads=8, head_dim=4, conv_kernel_size=4)
        return KimiLinearCacheParams(shape=shape, layers=[0, 1, 3])

    def logical_states(self, layer):
        kind = np.uint16 if self.pool.mamba_pool.mamba_cache.conv[0].element_size() == 2 else np.float32
        conv = logical("conv", layer, shape=(3, 96), dtype=kind)[:, channels_of((32, 32, 32), *self.tp)]
        return conv, logical("state", layer, shape=(8, 4, 4), dtype=np.float32)[heads_of(8, *self.tp)]


class Sparse(Case):
    """Index keys beside latents; layer 1 has none of its own."""

    mla, page_size, tokens, prefix = True, 64, 150, 64

    def build(self):
        return memory_pool.DSATokenToKVPool(
            self.size, 64, 16, torch.bfloat16, 8, 3, "cpu", 128, False, 24, skip_topk_layers=[False, True, False]
        )

    def tensors(self):
        return [*self.pool.kv_buffer, *self.pool.index_k_with_scale_buffer]

    def put(self):
        self.full(self.pool.kv_buffer, "latent", 24)
        self.put_pages(self.pool.index_k_with_scale_buffer, "index")

    def put_pages(self, buffers, name):
        at = np.arange(self.first // self.page_size, -(-self.tokens // self.page_size))
        for layer, buffer in enumerate(buffers):
            if buffer.shape[0]:
                whole = logical(name, layer, shape=(8, buffer.shape[1]))
                buffer[torch.from_numpy(self.place.pages[at].astype(np.int64))] = torch.from_numpy(whole[at])

    def suffix(self):
        return kv_to_page_indices(self.indices()[self.prefix :], self.page_size)

    def states(self):
        return [self.suffix()]


class SparseTail(Sparse):
    """Index keys of pools of 4 tokens, and the tail that has none yet."""

    page_size, tokens, prefix = 256, 515, 256

    def build(self):
        extra = 2 if self.role == "prefill" else 4
        return memory_pool.DSATokenToKVPool(
            self.size,
            256,
            16,
            torch.bfloat16,
            8,
            3,
            "cpu",
            128,
            False,
            24,
            index_kpool=4,
            index_kpool_compress=True,
            tail_extra_slots=extra,
            max_running_requests=SLOTS,
        )

    def tensors(self):
        return [*super().tensors(), *self.pool._compress_tail_k, *self.pool._compress_tail_score]

    def put(self):
        super().put()
        for name, buffers in (("k", self.pool._compress_tail_k), ("score", self.pool._compress_tail_score)):
            for layer, buffer in enumerate(buffers):
                for token in range(self.tokens // 4 * 4, self.tokens):
                    whole = logical("tail", name, layer, token, shape=(128,), dtype=np.int16)
                    ring = buffer.shape[1]
                    buffer.view(torch.int16)[self.place.row, token % ring] = torch.from_numpy(whole)

    def states(self):
        # SGLang asks for the pool inside of a hybrid one, which a pool of this class alone does not have.
        hybrid = SimpleNamespace(use_dsa=True, full_kv_pool=self.pool)
        tail = disaggregation.get_dsa_tail_state_indices(hybrid, self.place.row, self.tokens)
        return [self.suffix(), tail]


class Scaled(Case):
    """MXFP8 with its block scales; pages of 128 tokens have them in another order than others."""

    interleaved = False

    def build(self):
        return memory_pool.MHATokenToKVPoolMXFP8(
            self.size, self.page_size, torch.float8_e4m3fn, len(self.heads), 32, 2, **CPU
        )

    def tensors(self):
        return [*self.values(), *self.scales()]

    def values(self):
        return [*self.pool.k_buffer, *self.pool.v_buffer]

    def scales(self):
        return [*self.pool.k_scale_buffer, *self.pool.v_scale_buffer]

    def put(self):
        at = np.arange(self.first, self.tokens)
        slots = torch.from_numpy(slots_of(self.place.pages, self.page_size, at))
        for number, buffer in enumerate(self.values()):
            whole = logical("value", number, shape=(self.tokens, HEADS, 32))[at][:, self.heads]
            buffer.view(torch.uint8)[slots] = torch.from_numpy(whole)
        # The scales of all pages of the request travel, those of its prefix too.
        pages = np.arange(-(-self.tokens // self.page_size))
        rows = torch.from_numpy(self.place.pages[pages].astype(np.int64))
        for number, buffer in enumerate(self.scales()):
            inner = buffer.shape[2:] if self.interleaved else (buffer.shape[-1],)
            shape = (8, HEADS, *inner) if self.interleaved else (64 * self.page_size, HEADS, *inner)
            whole = logical("scale", number, shape=shape)[:, self.heads]
            if self.interleaved:
                buffer.view(torch.uint8)[rows] = torch.from_numpy(whole[pages])
            else:
                every = np.arange(len(pages) * self.page_size)
                slots = torch.from_numpy(slots_of(self.place.pages, self.page_size, every))
                buffer.view(torch.uint8)[slots] = torch.from_numpy(whole[every])

    def states(self):
        return [kv_to_page_indices(self.indices(), self.page_size)]


class ScaledByHead(Scaled):
    page_size, tokens, prefix, interleaved = 128, 300, 128, True


class Quick(Hybrid):
    """Compressed index keys: what is pending of a group in a ring, and what is complete in pages."""

    page_size, tokens, prefix = 8, 45, 8

    def build(self):
        return QSATokenToKVPool(
            size=self.size,
            dtype=torch.bfloat16,
            page_size=8,
            head_num=len(self.heads),
            head_dim=8,
            full_attention_layer_ids=[2, 5],
            device="cpu",
            mamba_pool=self.mamba_pool(),
            qsa_index_kv_heads=1,
            qsa_index_head_dim=8,
            qsa_compress_ratio=4,
            qsa_token_topk=8,
            num_request_slots=SLOTS,
        )

    def tensors(self):
        pending = [*self.pool.qsa_key_state_buffer_pool, self.pool.qsa_rope_position_buffer]
        return [*super().tensors(), *pending, *self.pool.qsa_compressed_k_buffer_pool]

    def put(self):
        super().put()
        ring = slice(self.place.row * 4, self.place.row * 4 + 4)
        for layer, buffer in enumerate(self.pool.qsa_key_state_buffer_pool):
            whole = logical("pending", layer, shape=(4, 1, 8), dtype=np.int16)
            buffer.view(torch.int16)[ring] = torch.from_numpy(whole)
        self.pool.qsa_rope_position_buffer[ring] = torch.from_numpy(logical("rope", shape=(4, 3), dtype=np.int64))
        pages = np.arange(-(-self.tokens // 8))
        entries = slots_of(self.place.pages, 2, np.arange(len(pages) * 2))
        for layer, buffer in enumerate(self.pool.qsa_compressed_k_buffer_pool):
            whole = logical("compressed", layer, shape=(len(entries), 1, 8), dtype=np.int16)
            buffer.view(torch.int16)[torch.from_numpy(entries)] = torch.from_numpy(whole)

    def states(self):
        every = kv_to_page_indices(self.indices(), 8)
        return [*super().states(), np.array([self.place.row], np.int32), every]


class SparseLayers(Case):
    """MiniMax: dense layers 0 and 3, sparse ones with index keys 1 and 2."""

    def build(self):
        return memory_pool.MiniMaxSparseKVPool(
            self.size,
            self.page_size,
            torch.bfloat16,
            len(self.heads),
            8,
            12,
            dense_layer_ids=[0, 3],
            sparse_layer_ids=[1, 2],
            disable_value_sparse_layer_ids=[1, 2],
            start_layer=0,
            end_layer=4,
            **CPU,
        )

    def of_layers(self, layers):
        return [get(layer) for get in (self.pool.get_key_buffer, self.pool.get_value_buffer) for layer in layers]

    def tensors(self):
        return [*self.of_layers(range(4)), *self.pool.index_k_pool.k_buffer]

    def put(self):
        self.full(self.of_layers([1, 2]), "sparse", 8)
        # Pages move as a whole: those of the request in dense layers, those after the prefix among index keys.
        end = -(-self.tokens // self.page_size) * self.page_size
        for name, buffers, first in (("dense", self.of_layers([0, 3]), 0), ("index", self.index_keys(), self.prefix)):
            at = np.arange(first, end)
            slots = torch.from_numpy(slots_of(self.place.pages, self.page_size, at))
            for number, buffer in enumerate(buffers):
                heads = self.heads if name == "dense" else [0]
                whole = logical(name, number, shape=(end, HEADS, buffer.shape[-1]), dtype=np.int16)[at][:, heads]
                buffer.view(torch.int16)[slots] = torch.from_numpy(whole)

    def index_keys(self):
        return self.pool.index_k_pool.k_buffer

    def states(self):
        indices = self.indices()
        index = minimax_index_transfer_pages(indices, page_size=self.page_size, prefix_len=self.prefix)
        return [index, kv_to_page_indices(indices, self.page_size)]


class Compressed(Case):
    """DeepSeek V4: six layers of three ratios, of which each stage of a pipeline has three."""

    mla, page_size, tokens, prefix, stages = True, 256, 515, 256, 2
    ratios = (0, 4, 128, 4, 128, 4)

    def build(self):
        start, end = (None, None) if self.stage is None else (3 * self.stage, 3 * self.stage + 3)
        self.layers = range(start or 0, end or 6)
        return DeepSeekV4TokenToKVPool(
            max_num_reqs=SLOTS,
            swa_size=self.size,
            c4_size=self.size // 4,
            c128_size=self.size // 128,
            c4_state_pool_size=16 * 8,
            c128_state_pool_size=16 * 128,
            page_size=256,
            swa_page_size=256,
            dtype=torch.float8_e4m3fn,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=len(self.layers),
            compression_ratios=list(self.ratios),
            start_layer=start,
            end_layer=end,
            **CPU,
        )

    def by_page(self):
        """Buffers that the main page list addresses, each with what it is and the layer that it is of."""
        of_ratio = {ratio: [layer for layer in self.layers if self.ratios[layer] == ratio] for ratio in (4, 128)}
        yield from zip(["c4"] * 9, of_ratio[4], self.pool.kv_pools[4].kv_buffer, strict=False)
        yield from zip(
            ["c4 index"] * 9, of_ratio[4], self.pool.index_pools[4].contiguous_page_row_buffers(), strict=False
        )
        yield from zip(["c128"] * 9, of_ratio[128], self.pool.kv_pools[128].kv_buffer, strict=False)

    def by_window_page(self):
        yield from zip(["window"] * 9, self.layers, self.pool.swa_kv_pool.kv_buffer, strict=False)
        for name in ("compress_state_pools", "indexer_compress_state_pools"):
            for layer, states in enumerate(getattr(self.pool, name)):
                if states is not None and not states.request_scoped:
                    yield name, layer, states.kv_score_buffer.kv_score

    def by_request(self):
        for layer, states in enumerate(self.pool.compress_state_pools):
            if states is not None and states.request_scoped:
                yield "request", layer, states.kv_score_buffer.kv_score

    def tensors(self):
        return [tensor for made in (self.by_page, self.by_window_page, self.by_request) for _, _, tensor in made()]

    def put(self):
        listed = (
            (self.by_page, self.suffix()),
            (self.by_window_page, self.states()[0]),
            (self.by_request, self.states()[1]),
        )
        items = dict(zip(self.args.kv_data_ptrs, self.args.kv_item_lens, strict=True))
        for pointers, lengths in zip(self.args.state_data_ptrs, self.args.state_item_lens, strict=True):
            items |= dict(zip(pointers, lengths, strict=True))
        for buffers, rows in listed:
            for name, layer, tensor in buffers():
                item = items[tensor.data_ptr()]
                flat = tensor.view(-1).view(torch.uint8)
                view = flat[: flat.numel() // item * item].view(-1, item)
                content = logical(name, layer, shape=(len(rows), item))
                view[torch.from_numpy(np.asarray(rows, np.int64))] = torch.from_numpy(content)

    def suffix(self):
        return kv_to_page_indices(self.indices()[self.prefix :], self.page_size)

    def states(self):
        begin = max(self.prefix, self.tokens - 128) // self.page_size * self.page_size
        slots = torch.from_numpy(slots_of(self.place.swa_pages, self.page_size, np.arange(begin, self.tokens)))
        request = self.pool.request_state_transfer_indices(self.place.row, self.tokens)
        return [kv_to_page_indices(slots, self.page_size), request]


CASES = [
    Attention,
    Latent,
    Window,
    Hybrid,
    Kimi,
    Sparse,
    SparseTail,
    Scaled,
    ScaledByHead,
    Quick,
    SparseLayers,
    Compressed,
]


def rank(case, role, tp, place, aux, stage=None):
    """One rank: its pool, the pool's KVArgs made by SGLang's functions, and what its engine passes."""
    made = case(role, tp, place, stage)
    made.args = args = KVArgs()
    args.page_size, args.num_draft_entries, args.kv_cache_dtype_str = made.page_size, 0, "bfloat16"
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = disaggregation.get_kv_transfer_buf_infos(made.pool)
    args.kv_layer_ids = disaggregation.build_kv_layer_ids(
        token_to_kv_pool=made.pool, draft_token_to_kv_pool=None, num_draft_entries=0, num_hidden_layers=8
    )
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = aux.get_buf_infos()
    disaggregation.setup_state_kv_args(args, made.pool, None, 8)
    if role == "prefill":
        args.prefill_start_layer, args.prefill_end_layer = made.pool.start_layer, getattr(made.pool, "end_layer", None)
        if not case.mla:
            args.kv_head_num, args.total_kv_head_num = len(made.heads), HEADS
    args.kv_layout = disaggregation.get_pd_kv_layout(made.pool)
    pp = (0, 1) if stage is None else (stage, case.stages)
    ranks = Ranks(role=role, tp=tp, pp=pp, is_mla=case.mla, total_kv_heads=HEADS if role == "decode" else None)
    pages = kv_to_page_indices(made.indices()[case.prefix :], case.page_size)
    chunks = [(pages, case.prefix, (case.prefix, case.tokens))]
    return made, Handed(describe(args, ranks), chunks, made.states(), place.aux)


def bytes_of(tensors):
    return [tensor.contiguous().view(-1).view(torch.uint8).clone() for tensor in tensors]


def run(case, prefill, decode):
    rng = np.random.default_rng(7)
    places = [Place(rng, case.page_size, -(-case.tokens // case.page_size), 16, slots=SLOTS) for _ in range(2)]
    metadata = [disaggregation.MetadataBuffers(SLOTS, 16, torch.bfloat16, 32) for _ in range(2)]
    stages = [None] if case.stages == 1 else range(case.stages)
    sources = [
        rank(case, "prefill", (at, prefill), places[0], metadata[0], stage) for stage in stages for at in range(prefill)
    ]
    destinations = [rank(case, "decode", (at, decode), places[1], metadata[1]) for at in range(decode)]
    for made, _ in sources:
        noise(made.tensors(), rng)
        made.put()
    metadata[0].bootstrap_room[places[0].aux] = 77
    wanted = []
    for made, _ in destinations:
        noise(made.tensors(), rng)
        before = bytes_of(made.tensors())
        made.put()
        wanted.append(bytes_of(made.tensors()))
        for tensor, kept in zip(made.tensors(), before, strict=True):
            tensor.view(-1).view(torch.uint8)[:] = kept
    hand_over([handed for _, handed in sources], [handed for _, handed in destinations], case.tokens, case.prefix)
    for number, (made, _) in enumerate(destinations):
        found = bytes_of(made.tensors())
        wrong = [at for at, pair in enumerate(zip(found, wanted[number], strict=True)) if not torch.equal(*pair)]
        assert not wrong, f"decode rank {number}: buffers {wrong} of {len(found)} are not as wanted"
    assert int(metadata[1].bootstrap_room[places[1].aux][0]) == 77


def noise(tensors, rng):
    for tensor in tensors:
        flat = tensor.view(-1).view(torch.uint8)
        flat[:] = torch.from_numpy(rng.integers(0, 256, flat.numel(), np.uint8))


GRIDS = ((1, 1), (2, 1), (1, 2), (4, 2))


def main():
    # What SGLang's runtime configuration would say to these pools.
    kernel = SimpleNamespace(dsv4_attn_backend="flashmla", enable_deepseek_v4_fp4_indexer=False)
    features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
    deepseek_v4_memory_pool.get_exec = lambda: SimpleNamespace(kernel=kernel, features=features)
    deepseek_v4_memory_pool.get_spec = lambda: SimpleNamespace(speculative_algorithm=None)
    with get_parallel().override(attn_dcp_size=1):
        for case in CASES:
            for prefill, decode in GRIDS:
                problem = ""
                try:
                    run(case, prefill, decode)
                except Exception:
                    problem = traceback.format_exc(limit=-4)
                print(json.dumps([f"{case.__name__} {prefill}->{decode}", problem]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
