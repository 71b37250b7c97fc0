"""Managers whose caches have other dtypes: cast on the way where the decode side allows it, refused otherwise."""

from dataclasses import replace

import numpy as np
import pytest
from rank_world import CANARY, FAST, World, succeeded, wait_released
from room_pairs import failed

import kvbaton as kb
from kvbaton.copy import numbers
from kvbaton.errors import DigestMismatch
from kvbaton.layout import AUX, PAGED, SLOT, Field, component, replicated_spans, required_bytes
from kvbaton.plan.boxes import CAST_DTYPES

HEADS, DIM, TOKENS = 4, 8, 19
LAYERS = (0, 2)
CASTS = replace(FAST, cast=True, digest=True)


def layout(dtype, rank=0, size=1, page_size=4, scaled=False, factor=1.0):
    """Keys and values, a state and aux data in ``dtype``; ``scaled``: the cache has a scale for each token and head."""
    spans = replicated_spans(HEADS, rank, size)
    cache = []
    for role in ("key", "value"):
        axes = ("token", page_size, None), ("head", HEADS, spans)
        cache.append(Field(role, dtype, (*axes, ("dim", DIM, None)), f"{role}_scale" if scaled else "", factor))
        cache += [Field(f"{role}_scale", "float32", axes)] if scaled else []
    state = [Field("state", dtype, (("head", HEADS, spans), ("column", 3, None)))]
    logits = [Field("logits", dtype, (("item", 5, None),))]
    parts = [component("kv", PAGED, cache, layers=LAYERS, rows=16, page_size=page_size, offset=64)]
    for name, kind, fields in (("state", SLOT, state), ("aux", AUX, logits)):
        offset = required_bytes(parts[-1:])[0] + 16
        parts.append(component(name, kind, fields, layers=(1,), rows=4, offset=offset))
    return kb.RankLayout(tuple(parts), kb.Coords(tp=(rank, size)))


def values(seed=3):
    """Values of the whole model, by component, role and layer; bfloat16 has each of them."""
    random = np.random.default_rng(seed)
    sizes = {("kv", role, layer): (TOKENS, HEADS, DIM) for role in ("key", "value") for layer in LAYERS}
    sizes |= {("state", "state", 1): (1, HEADS, 3), ("aux", "logits", 1): (1, 1, 5)}
    made = {}
    for name, size in sizes.items():
        wanted = random.normal(size=size) * np.exp2(random.integers(-5, 5, (*size[:2], 1)))
        made[name] = (wanted.astype(np.float32).view(np.uint32) >> 16 << 16).view(np.float32)
    return made


def places(rank, tensor, part, rows):
    """The byte addresses of ``[token, head, inside]``, and which heads of the whole model they are."""
    axes = {axis.name: axis for axis in tensor.axes}
    head = axes.get("head")
    inside = next((axis for axis in tensor.axes if axis.name not in ("token", "head")), None)
    count = TOKENS if part.kind.has_tokens else 1
    tokens = np.arange(count)
    step = axes["token"].stride if "token" in axes else 0
    at = tensor.offset + np.array(rows)[tokens // part.page_size] * tensor.row_stride + tokens % part.page_size * step
    heads = np.concatenate([np.arange(a, a + n) for a, n in head.spans]) if head else np.zeros(1, int)
    at = at[:, None, None] + (np.arange(len(heads)) * (head.stride if head else 0))[:, None]
    return at + np.arange(inside.local_size if inside else 1) * (inside.stride if inside else 0), heads


def tensors(rank):
    for part in rank.layout.components:
        for tensor in part.tensors:
            yield part, tensor


def words(memory, at, dtype):
    """The elements of ``dtype`` at these addresses, as float32."""
    size = kb.layout.DTYPE_BYTES[dtype]
    stored = memory[at[..., None] + np.arange(size)]
    return numbers.decode(CAST_DTYPES.index(dtype), stored.reshape(len(stored), -1)).reshape(at.shape)


def put(memory, at, dtype, wanted):
    stored = numbers.encode(CAST_DTYPES.index(dtype), wanted.reshape(len(wanted), -1))
    memory[at[..., None] + np.arange(kb.layout.DTYPE_BYTES[dtype])] = stored.reshape(*at.shape, -1)


def fill(rank, contents, rows):
    """Store ``contents`` as a source does; scales are powers of two that keep all elements inside."""
    own = {(tensor.role, tensor.layer): tensor for _, tensor in tensors(rank)}
    for part, tensor in tensors(rank):
        if (part.name, tensor.role, tensor.layer) not in contents:
            continue
        at, heads = places(rank, tensor, part, rows[part.name])
        wanted = contents[part.name, tensor.role, tensor.layer][:, heads] / np.float32(tensor.factor)
        if tensor.scale:
            scales = np.exp2(np.ceil(np.log2(np.abs(wanted).max(axis=2, keepdims=True) / 448))).astype(np.float32)
            where, _ = places(rank, own[tensor.scale, tensor.layer], part, rows[part.name])
            put(rank.memory.array, where, "float32", scales)
            wanted = wanted / scales
        put(rank.memory.array, at, tensor.dtype, wanted)


def read(rank, rows):
    """What the memory of a rank stands for, by name, with its heads and scales; marks what was looked at."""
    own = {(tensor.role, tensor.layer): tensor for _, tensor in tensors(rank)}
    found = {}
    for part, tensor in tensors(rank):
        at, heads = places(rank, tensor, part, rows[part.name])
        rank.touched[(at[..., None] + np.arange(tensor.itemsize)).reshape(-1)] = True
        scales = np.ones(1, np.float32)
        if tensor.scale:
            where, _ = places(rank, own[tensor.scale, tensor.layer], part, rows[part.name])
            scales = words(rank.memory.array, where, "float32")
        stands_for = words(rank.memory.array, at, tensor.dtype).astype(np.float64) * scales * tensor.factor
        found[part.name, tensor.role, tensor.layer] = heads, stands_for, scales
    return found


HERE = {"kv": [9, 3, 12, 0, 7], "state": [2], "aux": [3]}
THERE = {"kv": [5, 4, 11, 1, 8, 2, 15, 6], "state": [1], "aux": [0]}


def hand_over(sources, destinations, page_sizes):
    senders = [rank.manager.sender(1) for rank in sources]
    receivers = [rank.manager.receiver(1) for rank in destinations]
    rows = {"kv": HERE["kv"][: -(-TOKENS // page_sizes[0])], "state": HERE["state"]}
    for sender in senders:
        sender.send({"kv": HERE["kv"][:2]}, (0, 7))
        sender.finish({"kv": rows["kv"][7 // page_sizes[0] :], "state": rows["state"]}, (7, TOKENS), aux=HERE["aux"][0])
    for receiver in receivers:
        receiver.offer({"kv": THERE["kv"][: -(-TOKENS // page_sizes[1])], "state": THERE["state"]}, TOKENS, aux=0)
    succeeded(*senders, *receivers)
    wait_released(*senders, *receivers)
    return receivers


RELATIVE = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3fn": 2.0**-4}
ABSOLUTE = {"float32": 0.0, "bfloat16": 2.0**-134, "float16": 2.0**-25, "float8_e4m3fn": 2.0**-10}
CASES = {
    "bf16 to fp8 with scales": ({"dtype": "bfloat16"}, {"dtype": "float8_e4m3fn", "scaled": True}),
    "fp8 with scales to bf16": ({"dtype": "float8_e4m3fn", "scaled": True}, {"dtype": "bfloat16"}),
    "fp32 to bf16": ({"dtype": "float32"}, {"dtype": "bfloat16"}),
    "bf16 to fp16": ({"dtype": "bfloat16"}, {"dtype": "float16"}),
    "fp8 of another factor": ({"dtype": "float8_e4m3fn", "factor": 0.5}, {"dtype": "float8_e4m3fn", "factor": 0.25}),
}


@pytest.mark.parametrize("transport", ["shm", "tcp", "loopback"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_what_arrives_is_within_the_stated_bounds(case, ranks, transport):
    source, destination = CASES[case]
    world = World(transport)
    try:
        here = world.prefill(*(layout(rank=rank, size=ranks[0], **source) for rank in range(ranks[0])))
        there = world.decode(
            *(layout(rank=rank, size=ranks[1], page_size=3, **destination) for rank in range(ranks[1])), settings=CASTS
        )
        for rank in here:
            fill(rank, values(), HERE)
        receivers = hand_over(here, there, (4, 3))
        sent = {name: [] for name in values()}
        for rank in here:
            for name, (heads, exact, _) in read(rank, HERE).items():
                sent.setdefault(name, []).append((heads, exact))
        for rank, receiver in zip(there, receivers, strict=True):
            for name, (heads, found, scales) in read(rank, THERE).items():
                if name[1].endswith("_scale"):
                    continue
                tensor = next(each for part, each in tensors(rank) if (part.name, each.role, each.layer) == name)
                exact = np.empty_like(found)
                for held, values_ in sent[name]:
                    both = np.intersect1d(heads, held)
                    exact[:, np.searchsorted(heads, both)] = values_[:, np.searchsorted(held, both)]
                bound = np.maximum(
                    np.abs(exact) * RELATIVE[tensor.dtype], ABSOLUTE[tensor.dtype] * scales * tensor.factor
                )
                assert (np.abs(found - exact) <= bound + np.abs(exact) * 2.0**-22).all(), name
                assert np.abs(exact).max() > 0
            rank.check_rest()
            assert receiver.bytes_by_component["kv"] == TOKENS * rank.nbytes_per_token["kv"]
        for room in receivers:
            room.close()
        world.assert_no_faults()
    finally:
        world.close()


@pytest.mark.parametrize("component", ["kv", "state"])
def test_one_changed_byte_of_what_was_cast_is_found(world, component):
    """Digests are of the bytes as they are at the destination, also at the source, where they are others."""
    (here,) = world.prefill(layout("bfloat16"))
    (there,) = world.decode(layout("float8_e4m3fn", scaled=True), settings=CASTS)
    fill(here, values(), HERE)
    part = there.layout.component(component)
    at, _ = places(there, part.tensors[0], part, THERE[component])
    side = here.manager.side
    written = side._written

    def changing(completion, now):
        there.memory.array[at[0, 0, 0]] ^= 1
        written(completion, now)

    side._written = changing
    sender, receiver = here.manager.sender(1), there.manager.receiver(1)
    receiver.offer({"kv": THERE["kv"][:5], "state": THERE["state"]}, TOKENS, aux=0)
    sender.finish({"kv": HERE["kv"], "state": HERE["state"]}, (0, TOKENS), aux=HERE["aux"][0])
    failed(receiver, f"component {component}: the bytes in place", error=DigestMismatch)
    wait_released(sender, receiver)


def test_refused_where_the_decode_side_does_not_allow_it(world):
    """Both dtypes are named, nothing moves; what the prefill side would allow does not count."""
    (here,) = world.prefill(layout("bfloat16"), settings=CASTS)
    (there,) = world.decode(layout("float8_e4m3fn", scaled=True))
    fill(here, values(), HERE)
    receiver = there.manager.receiver(1)
    failed(receiver, "component kv, role key, layer 0", "bfloat16", "float8_e4m3fn with scales in key_scale (head 4)")
    assert "Settings(cast=True)" in receiver.reason
    receiver.close()
    assert (there.memory.array == CANARY).all()
    world.assert_empty()


def test_what_cannot_be_cast_is_refused_all_the_same(world):
    world.prefill(layout("bfloat16"))
    (there,) = world.decode(layout("int8"), settings=CASTS)
    receiver = there.manager.receiver(9)
    failed(receiver, "bfloat16", "int8", "casts are only between")
    receiver.close()
    (there,) = world.decode(layout("bfloat16"), settings=CASTS)
    fill(world.ranks[0], values(), HERE)
    hand_over([world.ranks[0]], [there], (4, 4))
