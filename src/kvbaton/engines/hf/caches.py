"""What is in the cache of a Transformers model, told by one table.

`TABLE` lists, for each class of cache layer, the tensors that it keeps: where they are, which axes they have and how
many tokens they hold. `describe` runs a short probe through a model and reads the sizes of its tensors off the result.
Whatever is not a tensor (lengths, flags, counts) follows from the number of tokens: `restore` puts it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from transformers import DynamicCache

from kvbaton.engines.hf.channels import Block, channel_blocks
from kvbaton.errors import ConfigurationError
from kvbaton.layout import PAGED, SLOT, Kind, compressed, tail, window

Extent = Literal["tokens", "window", "entries", "whole", "remainder", "closed"]
"""How much of the request a tensor holds after ``n`` tokens.

* ``tokens``: one item for each of the n tokens.
* ``window``: one item for each of the last min(n, window) tokens.
* ``entries``: one item for every ``rate`` tokens (n // rate).
* ``whole``: a state of fixed size.
* ``remainder``: one item for each of the n % rate tokens that no entry stands for yet.
* ``closed``: a state of fixed size that exists from the first entry on.
"""

ALL_STATES = "*"


@dataclass(frozen=True)
class Stored:
    """A tensor that a class of cache layer keeps: ``layer.<attribute>``, or ``layer.<attribute>[key]``.

    ``axes`` names its axes after the batch; ``"token"`` is the one that grows. With key `ALL_STATES` every state of the
    layer is stored, under the role and its number.
    """

    role: str
    component: str
    extent: Extent
    attribute: str
    axes: tuple[str, ...]
    key: str | int | None = None


_KEY_VALUE = ("head", "token", "dim")
_VECTOR = ("token", "dim")

_FULL = (
    Stored("key", "kv", "tokens", "keys", _KEY_VALUE),
    Stored("value", "kv", "tokens", "values", _KEY_VALUE),
)
_WINDOW = (
    Stored("key", "window", "window", "keys", _KEY_VALUE),
    Stored("value", "window", "window", "values", _KEY_VALUE),
)
_INDEX = (Stored("index_key", "index", "tokens", "indexer_keys", _VECTOR),)
_STATE = (
    Stored("conv", "conv", "whole", "conv_states", ("channel", "kernel"), ALL_STATES),
    Stored("recurrent", "recurrent", "whole", "recurrent_states", ("head", "row", "column"), ALL_STATES),
)


def _compressor(name: str, component: str) -> tuple[Stored, ...]:
    return (
        Stored(name, component, "entries", "compressed_kv", _VECTOR, name),
        Stored(f"{name}_buffer", "tail", "remainder", "buffer_kv", _VECTOR, name),
        Stored(f"{name}_buffer_gate", "tail", "remainder", "buffer_gate", _VECTOR, name),
    )


def _overlap(name: str) -> tuple[Stored, ...]:
    return (
        Stored(f"{name}_overlap", "overlap", "closed", "overlap_kv", ("position", "dim"), name),
        Stored(f"{name}_overlap_gate", "overlap", "closed", "overlap_gate", ("position", "dim"), name),
    )


# The values of these layers are the same tensor as their keys.
_HEAVILY_COMPRESSED = (_WINDOW[0], *_compressor("compressor", "compressed"))

TABLE: dict[str, tuple[Stored, ...]] = {
    "DynamicLayer": _FULL,
    "DynamicSlidingWindowLayer": _WINDOW,
    "DynamicIndexedLayer": _FULL + _INDEX,
    "LinearAttentionLayer": _STATE,
    "LinearAttentionAndFullAttentionLayer": _STATE + _FULL,
    "LinearAttentionAndSlidingWindowAttentionLayer": _STATE + _WINDOW,
    "DeepseekV4HCACache": _HEAVILY_COMPRESSED,
    "DeepseekV4CSACache": (
        *_HEAVILY_COMPRESSED,
        *_compressor("indexer", "index"),
        *_overlap("compressor"),
        *_overlap("indexer"),
    ),
    "DummyLayer": (),
}
"""The tensors of each class of cache layer, by its name."""


@dataclass(frozen=True)
class Place:
    """A stored tensor of one layer of one model, with its sizes.

    ``component`` is unique for a kind. ``axes`` and ``shape`` are the names and sizes of its axes without the token
    axis.
    ``rate`` counts the tokens of one entry (1 where there are none).
    """

    stored: Stored
    role: str
    component: str
    layer: int
    key: str | int | None
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    window: int = 0
    rate: int = 1

    @property
    def extent(self) -> Extent:
        """How much of the request it holds."""
        return self.stored.extent

    @property
    def kind(self) -> Kind:
        """The kind of its component."""
        if self.extent == "window":
            return window(self.window)
        if self.extent == "entries":
            return compressed(self.rate)
        if self.extent == "remainder":
            return tail(self.rate)
        return PAGED if self.extent == "tokens" else SLOT

    @property
    def streamed(self) -> bool:
        """Whether its entries stay as they are while the request grows, so that they can be sent as they are made."""
        return self.extent in ("tokens", "entries")

    def held(self, tokens: int) -> tuple[int, int]:
        """Which entries ``[first, last)`` of the request a cache of ``tokens`` tokens holds (0, 0: a state).

        They count tokens, but compressed entries where ``extent`` is ``entries``.
        """
        if self.extent == "entries":
            return 0, tokens // self.rate
        if self.token_axis < 0:
            return 0, 0
        return self.kind.needed(tokens) if tokens else (0, 0)

    @property
    def token_axis(self) -> int:
        """Which axis of the tensor, batch included, runs over tokens or entries; -1 where none does."""
        return self.stored.axes.index("token") + 1 if "token" in self.stored.axes else -1

    def get(self, cache: Any) -> torch.Tensor | None:
        """The tensor in ``cache``, with its batch axis; None where the layer has none (yet)."""
        holder = getattr(cache.layers[self.layer], self.stored.attribute)
        tensor: torch.Tensor | None = holder if self.key is None else holder[self.key]
        return tensor

    def set(self, cache: Any, tensor: torch.Tensor | None) -> None:
        """Put ``tensor`` into ``cache``."""
        layer = cache.layers[self.layer]
        if self.key is None:
            setattr(layer, self.stored.attribute, tensor)
        else:
            getattr(layer, self.stored.attribute)[self.key] = tensor


@dataclass(frozen=True)
class CacheDescription:
    """All that a cache of one model keeps, and how to make an empty one."""

    places: tuple[Place, ...]
    new_cache: Callable[[], Any]
    classes: tuple[str, ...]
    blocks: tuple[Block, ...] = ()
    """What the channels of its convolutions consist of; empty where that is not known."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the model is, and its caches are."""

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return len(self.classes)

    @property
    def granularity(self) -> int:
        """After a multiple of so many tokens no entry is half done."""
        return math.lcm(*(place.rate for place in self.places if place.extent == "entries"), 1)

    @property
    def can_pad(self) -> bool:
        """Whether requests of different lengths can be stacked behind a mask: full attention and states only."""
        return all(place.component == "kv" or place.extent == "whole" for place in self.places)


def describe(model: Any) -> CacheDescription:
    """Find what ``model`` keeps in its cache, by a forward of a few tokens.

    Raises `ConfigurationError` for a class of cache layer that `TABLE` does not have, or a tensor of another shape.
    """

    def new_cache() -> Any:
        return DynamicCache(config=model.config)

    cache = new_cache()
    for layer in cache.layers:
        if type(layer).__name__ not in TABLE:
            raise ConfigurationError(
                f"the cache of {type(model).__name__} has layers of class {type(layer).__name__}, which is not in "
                f"kvbaton.engines.hf.caches.TABLE; known are {', '.join(TABLE)}"
            )
    rates = [int(getattr(layer, "compress_rate", 1)) for layer in cache.layers]
    ids = torch.zeros((1, max(8, 2 * max(rates, default=1))), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=ids, cache=cache, use_cache=True)
    places = [place for number in range(len(cache.layers)) for place in _places(cache, number)]
    channels = {
        size for place in places for axis, size in zip(place.axes, place.shape, strict=True) if axis == "channel"
    }
    return CacheDescription(
        _apart(places),
        new_cache,
        tuple(type(layer).__name__ for layer in cache.layers),
        channel_blocks(model.config.get_text_config(), channels),
        torch.device(model.device),
    )


def _places(cache: Any, number: int) -> Iterator[Place]:
    layer = cache.layers[number]
    if getattr(layer, "indexer_position_ids", None) is not None:
        raise ConfigurationError(f"layer {number} keeps positions of its indexer, which kvbaton does not move yet")
    for stored in TABLE[type(layer).__name__]:
        holder = getattr(layer, stored.attribute)
        keys = tuple(holder) if stored.key == ALL_STATES else (stored.key,)
        for key in keys:
            tensor = holder if key is None else holder[key]
            if tensor is not None:
                role = stored.role if stored.key != ALL_STATES or key == 0 else f"{stored.role}_{key}"
                yield _place(stored, role, number, key, tensor, layer)


def _place(stored: Stored, role: str, number: int, key: str | int | None, tensor: torch.Tensor, layer: Any) -> Place:
    where = f"layer {number} ({type(layer).__name__}), {role}"
    axes = tuple(axis for axis in stored.axes if axis != "token")
    shape = tuple(size for axis, size in zip(stored.axes, tensor.shape[1:], strict=False) if axis != "token")
    if tensor.dim() != len(stored.axes) + 1:
        if stored.extent != "whole":
            raise ConfigurationError(
                f"{where}: shape {tuple(tensor.shape)} does not have the axes batch, {stored.axes}"
            )
        axes = tuple(f"axis_{index}" for index in range(tensor.dim() - 1))
        shape = tuple(tensor.shape[1:])
    rate = 1
    window = int(layer.sliding_window) - 1 if stored.extent == "window" else 0
    if stored.extent in ("entries", "remainder", "closed"):
        rate = int(layer.compress_rate)
    return Place(stored, role, stored.component, number, key, axes, shape, tensor.dtype, window, rate)


def _apart(places: list[Place]) -> tuple[Place, ...]:
    """Give each kind a component of its own where a component would have several (windows, rates)."""
    kinds: dict[str, set[Kind]] = {}
    for place in places:
        kinds.setdefault(place.component, set()).add(place.kind)
    return tuple(
        replace(place, component=f"{place.component}_{place.window or place.rate}")
        if len(kinds[place.component]) > 1
        else place
        for place in places
    )


def restore(cache: Any, tokens: int) -> None:
    """Set the lengths, counts and flags of ``cache``, whose tensors are in place, to those after ``tokens`` tokens."""
    for layer in cache.layers:
        if hasattr(layer, "conv_states"):
            for index, conv in layer.conv_states.items():
                recurrent = layer.recurrent_states[index]
                layer.is_conv_states_initialized[index] = conv is not None
                layer.is_recurrent_states_initialized[index] = recurrent is not None
                layer.has_previous_state[index] = True
                if conv is not None:
                    layer.conv_kernel_size[index] = conv.shape[-1]
                state = recurrent if conv is None else conv
                if state is not None:
                    layer.dtype, layer.device = state.dtype, state.device
        if getattr(layer, "keys", None) is not None:
            layer.is_initialized = True
            layer.device = layer.keys.device
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = tokens
            if layer.values is None:
                layer.values = layer.keys
        if getattr(layer, "indexer_keys", None) is not None:
            layer.is_indexer_initialized = True
            layer.indexer_dtype, layer.indexer_device = layer.indexer_keys.dtype, layer.indexer_keys.device
        if hasattr(layer, "entry_count"):
            layer.entry_count = dict.fromkeys(layer.entry_count, tokens // layer.compress_rate)
