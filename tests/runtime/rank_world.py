"""Ranks of a small model for tests of the runtime: memory with known content, and checks of every byte of it."""

import itertools
import math
import time
from dataclasses import dataclass, field

import msgspec
import numpy as np

import kvbaton as kb
from kvbaton.layout import TOKEN, build

CANARY = 0xA5
DEADLINE = 8.0
"""Seconds after which a test gives up waiting; nothing waits that long when all is well."""

FAST = kb.Settings(heartbeat_seconds=0.2, peer_timeout_seconds=1.0, connect_seconds=0.5, handshake_seconds=5.0)


def wait(condition, what="it", seconds=DEADLINE):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.001)


def wait_over(*rooms):
    for room in rooms:
        wait(lambda room=room: room.poll().terminal, f"room {room.room} to end")


def wait_released(*rooms):
    for room in rooms:
        wait(lambda room=room: room.rows_released, f"the rows of room {room.room}")


def succeeded(*rooms):
    wait_over(*rooms)
    assert [(room.poll(), room.reason) for room in rooms] == [(kb.Status.SUCCESS, "")] * len(rooms)


@dataclass(frozen=True)
class Model:
    """The whole model. ``parts`` are the components that it has."""

    parts: tuple = ("kv",)
    layers: int = 2
    heads: int = 4
    dim: int = 4
    window: int = 10
    dtype: str = "bfloat16"

    def layout(self, rank=0, size=1, page_size=4, rows=16, slots=4, order="NHD", dim=None, layers=None, dp=(0, 1)):
        layers = range(self.layers) if layers is None else layers
        made, offset = [], 3 * 64
        for name in self.parts:
            common = {"layers": layers, "offset": offset}
            heads = build.replicated_spans(self.heads, rank, size)
            if name in ("kv", "window"):
                part = build.paged_kv(
                    name, rows=rows, page_size=page_size, heads=self.heads, head_dim=dim or self.dim,
                    dtype=self.dtype, head_spans=heads, order=order,
                    window=self.window if name == "window" else 0, **common,
                )  # fmt: skip
            elif name == "latent":
                part = build.mla_latent(name, rows=rows, page_size=page_size, latent_dim=6, dtype=self.dtype, **common)
            elif name == "conv":
                blocks = {"q": 8, "k": 8, "v": 16}
                part = build.conv_state(
                    name, rows=slots, blocks=blocks, columns=3, dtype=self.dtype, rank=rank, size=size, **common
                )
            elif name == "recurrent":
                part = build.recurrent_state(
                    name, rows=slots, heads=4, shape=(2, 3), dtype="float32", rank=rank, size=size, **common
                )
            else:
                part = build.aux_fields({"token": ("int64", 1), "logits": ("float32", 3)}, rows=8, offset=offset)
            made.append(part)
            offset = max(offset, -(-build.required_bytes([part])[0] // 64) * 64) + 64
        return kb.RankLayout(tuple(made), kb.Coords(tp=(rank, size), dp=dp))


def _elements(tensor):
    """Byte offsets in a row (without the token axis), a number for each of them, and the token's stride."""
    stride = next((axis.stride for axis in tensor.axes if axis.name == TOKEN), 0)
    offsets, numbers = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for axis in sorted(tensor.axes, key=lambda axis: axis.name):
        if axis.name == TOKEN:
            continue
        local = np.arange(axis.local_size) * axis.stride
        whole = np.concatenate([np.arange(start, start + count) for start, count in axis.spans])
        offsets = (offsets[:, None] + local).reshape(-1)
        numbers = (numbers[:, None] * axis.size + whole).reshape(-1)
    byte = np.arange(tensor.itemsize)
    return (offsets[:, None] + byte).reshape(-1), (numbers[:, None] * 8 + byte).reshape(-1), stride


def _content(seed, component, tensor, position, numbers):
    """The bytes of one token (or slot) of one tensor; the same on every rank that holds them. Never the canary."""
    key = (seed * 31 + sum(map(ord, component.name + tensor.role)) * 7 + tensor.layer * 101 + position * 13) % 65521
    value = ((numbers + 1) * 40503 + key * 2654435761) % 4294967291 % 255
    return np.where(value >= CANARY, value + 1, value).astype(np.uint8)


@dataclass
class Rank:
    """One rank: its memory, and its manager once `start` was called."""

    layout: kb.RankLayout
    memory: kb.SharedMemory = None
    manager: kb.Manager = None
    touched: np.ndarray = field(default=None, repr=False)

    def __post_init__(self):
        nbytes = build.required_bytes(self.layout.components)[0] + 100
        self.memory = kb.SharedMemory(nbytes)
        self.memory.array[:] = CANARY
        self.touched = np.zeros(nbytes, bool)

    def start(self, role, registry, **options):
        options.setdefault("settings", FAST)
        options.setdefault("transports", ["loopback"])
        self.manager = kb.Manager(self.layout, [kb.Region.of(self.memory)], role=role, registry=registry, **options)
        return self

    def close(self):
        if self.manager is not None:
            self.manager.close()
        self.memory.close()

    def _places(self, name, rows, tokens, start, seed):
        component = self.layout.component(name)
        for tensor in component.tensors:
            offsets, numbers, stride = _elements(tensor)
            if not component.kind.has_tokens:
                positions = [(index, row, 0) for index, row in enumerate(rows)]
            else:
                ratio, size = component.kind.ratio, component.entries_per_row
                entries = range(tokens[0] // ratio, tokens[1] // ratio)
                pages = [(entry - start // ratio) // size for entry in entries]
                if component.kind.ring:
                    pages = [page % len(rows) for page in pages]
                positions = [(entry, rows[page], entry % size) for entry, page in zip(entries, pages, strict=True)]
            for position, row, inside in positions:
                at = tensor.offset + row * tensor.row_stride + inside * stride + offsets
                yield at, _content(seed, component, tensor, position, numbers)

    def fill(self, name, rows, tokens=(0, 0), start=0, seed=1):
        """Write the content of a request into ``rows``, whose first one holds token ``start``."""
        for at, content in self._places(name, rows, tokens, start, seed):
            self.memory.array[at] = content

    def check(self, name, rows, tokens=(0, 0), start=0, seed=1):
        """The content of a request must be in ``rows``; `check_rest` is about all other bytes."""
        for at, content in self._places(name, rows, tokens, start, seed):
            where = f"{name} at {self.layout.coords}"
            np.testing.assert_array_equal(self.memory.array[at], content, err_msg=where)
            self.touched[at] = True

    def check_rest(self):
        """No byte that no `check` looked at has changed."""
        np.testing.assert_array_equal(np.flatnonzero((self.memory.array != CANARY) & ~self.touched), [])

    @property
    def nbytes_per_token(self):
        return {
            component.name: sum(
                tensor.itemsize * math.prod(axis.local_size for axis in tensor.axes if axis.name != TOKEN)
                for tensor in component.tensors
            )
            for component in self.layout.components
        }


class World:
    """Prefill and decode ranks with one registry. ``transport`` is what both sides use."""

    def __init__(self, transport="loopback"):
        self.registry = kb.MemoryRegistry()
        self.transport = transport
        self.ranks = []

    def prefill(self, *layouts, **options):
        return self._start("prefill", layouts, options)

    def decode(self, *layouts, **options):
        options.setdefault("destinations", len(layouts))
        return [
            self._start("decode", [layout], {"destination_index": index, **options})[0]
            for index, layout in enumerate(layouts)
        ]

    def _start(self, role, layouts, options):
        options.setdefault("transports", [self.transport])
        options.setdefault("registry", self.registry)
        made = []
        for layout in layouts:
            rank = Rank(layout)
            self.ranks.append(rank)
            made.append(rank.start(role, **options))
        return made

    def close(self):
        for rank in reversed(self.ranks):
            rank.close()

    def assert_empty(self):
        """Every table of every rank is empty, but for the connections themselves."""
        for rank in self.ranks:
            wait(lambda rank=rank: not kept(rank.manager), f"{rank.manager.role} to forget: {kept(rank.manager)}")

    def assert_no_faults(self):
        for rank in self.ranks:
            assert rank.manager._control.faults == 0
            assert not rank.manager.side.core.unexpected
            assert not rank.manager.side.malformed


def kept(manager):
    """What a manager keeps for rooms and tickets, by table, without what is empty."""
    side = manager.side
    sizes = {name: size for name, size in side.core.table_sizes().items() if name not in ("peers", "remembered")}
    sizes["side_rooms"] = len(side.rooms)
    if manager.role == "prefill":
        sizes |= {"writes": len(side._writes), "handshakes": len(side._destinations._handshakes)}
        sizes["digests"] = len(side._digests)
        sizes["announced"] = len(side.announcer or ())
    else:
        sources = side._sources
        sizes |= {"lost": len(sources._lost), "retired": len(sources._retired), "sought": len(side._finder)}
        sizes["digests"] = len(side._digests)
        sizes["rooms_of_sources"] = sum(len(source.rooms) for source in sources._current.values())
    return {name: size for name, size in sizes.items() if size}


def in_region(layout, name, region):
    """The layout, but one component lies in another region, at the same offsets."""
    components = []
    for component in layout.components:
        if component.name == name:
            tensors = tuple(msgspec.structs.replace(tensor, region=region) for tensor in component.tensors)
            component = msgspec.structs.replace(component, tensors=tensors)
        components.append(component)
    return msgspec.structs.replace(layout, components=tuple(components))


def pages_of(tokens, page_size, rows):
    """Rows for ``tokens`` tokens, taken from an iterator of free rows."""
    return list(itertools.islice(rows, -(-tokens // page_size)))
