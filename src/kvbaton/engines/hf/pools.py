"""Paged pools in shared memory, and the vectorised copies between them and the cache of one request.

A component has one free list; the rows of its tensors are indexed together. All slot components and the aux table share
one free list: the slot of a request is the same number in each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvbaton.engines.hf.caches import CacheDescription, Place, describe, restore
from kvbaton.errors import ConfigurationError, RowsError
from kvbaton.layout import (
    PAGED,
    SLOT,
    TOKEN,
    Component,
    Kind,
    RankLayout,
    Tensor,
    aux_fields,
    check_layout,
    dense_axes,
    required_bytes,
)
from kvbaton.memory import Region, SharedMemory

Rows = npt.NDArray[np.int64]

AUX = "aux"
_ALIGNMENT = 64


class Aux(NamedTuple):
    """What the decode side needs besides the cache: the row of the aux table."""

    first_token: int
    prompt_tokens: int
    finished_at: float
    """When the prefill engine handed over the last rows (unix time)."""


class FreeList:
    """Numbers from 0 to ``count`` - 1 that are taken and given back."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = deque(range(count))
        self._taken: set[int] = set()

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> Rows | None:
        """The next ``count`` numbers, those that were free longest first; None if there are not so many."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        self._taken.update(taken)
        return np.array(taken, dtype=np.int64)

    def give(self, rows: Iterable[int]) -> None:
        """Give numbers back. Raises `RowsError` for one that is not taken."""
        for row in rows:
            if int(row) not in self._taken:
                raise RowsError(f"row {int(row)} was given back, but it is not in use")
            self._taken.discard(int(row))
            self._free.append(int(row))


@dataclass
class Allocation:
    """The rows of one request of ``tokens`` tokens.

    ``pages[component]`` holds the pages in the order of the tokens; ``first[component]`` is the token, a multiple of
    the page size, with which the first page begins.
    """

    tokens: int
    slot: int
    pages: dict[str, Rows] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)


class Pools:
    """The pools of one engine: memory, layout, free lists and copies.

    Made for ``model`` with room for ``pool_tokens`` tokens and ``slots`` requests. The engine's thread alone uses it,
    but for `check_fits`. ``memory`` belongs to the pools; `close` gives it back.
    """

    def __init__(self, model: Any, *, page_size: int = 16, pool_tokens: int = 8192, slots: int = 16) -> None:
        if page_size < 1 or pool_tokens < page_size or slots < 1:
            raise ConfigurationError(
                f"pools need page_size >= 1, pool_tokens >= page_size and slots >= 1, "
                f"not {page_size}, {pool_tokens} and {slots}"
            )
        if torch.device(model.device).type != "cpu":
            raise ConfigurationError(
                f"these pools are in host memory, but the model is on {model.device}; move it to cpu"
            )
        self.description: CacheDescription = describe(model)
        self.page_size = page_size
        self.pool_tokens = pool_tokens
        self.slots = slots
        self.granularity = int(np.lcm(self.description.granularity, page_size))
        """Pages of whole multiples of so many tokens can be sent while prefill goes on."""
        components = self._components()
        self.layout = RankLayout(components)
        self.memory = SharedMemory(required_bytes(components)[0])
        self.regions = [Region.of(self.memory)]
        check_layout(self.layout, [self.memory.nbytes])
        self._components_by_name = {component.name: component for component in components}
        self._pages = {c.name: FreeList(c.tensors[0].rows) for c in components if c.kind.has_tokens}
        self._slots = FreeList(slots)
        bytes_ = torch.from_numpy(self.memory.array)
        tensors = {(c.name, t.role, t.layer): t for c in components for t in c.tensors}
        self._views = {
            (place.component, place.role, place.layer): _view(bytes_, tensors[place.component, place.role, place.layer])
            for place in self.description.places
        }
        self._aux = {t.role: self._aux_view(t) for t in self._components_by_name[AUX].tensors}

    # Layout

    def _components(self) -> tuple[Component, ...]:
        offset = 0
        components: list[Component] = []
        by_name: dict[str, list[Place]] = {}
        for place in self.description.places:
            by_name.setdefault(place.component, []).append(place)
        for name, places in by_name.items():
            first = places[0]
            rows = self._row_count(first)
            tensors = []
            for place in places:
                tensor, size = self._tensor(place, offset, rows)
                tensors.append(tensor)
                offset += -(-size * rows // _ALIGNMENT) * _ALIGNMENT
            page_size = self.page_size if first.kind.has_tokens else 1
            components.append(Component(name, first.kind, tuple(tensors), page_size))
        fields = {
            "first_token": ("int64", 1),
            "prompt_tokens": ("int64", 1),
            "finished_at": ("float64", 1),
        }
        components.append(aux_fields(fields, AUX, rows=self.slots, offset=offset))
        return tuple(components)

    def _row_count(self, place: Place) -> int:
        if not place.kind.has_tokens:
            return self.slots
        rows = self.pool_tokens // self.page_size
        return min(rows, self.slots * (-(-place.window // self.page_size) + 1)) if place.window else rows

    def _tensor(self, place: Place, offset: int, rows: int) -> tuple[Tensor, int]:
        dtype = str(place.dtype).removeprefix("torch.")
        axes = [(name, size, None) for name, size in zip(place.axes, place.shape, strict=True)]
        if place.kind.has_tokens:
            axes.insert(0, (TOKEN, self.page_size, None))
        made, size = dense_axes(axes, dtype)
        return Tensor(place.role, place.layer, 0, offset, rows, size, dtype, made), size

    # Rows

    def _needed(self, tokens: int) -> dict[str, tuple[int, int]]:
        """For each component with pages: (how many, the token that the first begins with)."""
        needed = {}
        for name in self._pages:
            component = self._components_by_name[name]
            first = component.kind.needed(tokens)[0] // self.page_size
            needed[name] = (-(-tokens // self.page_size) - first, first * self.page_size)
        return needed

    def check_fits(self, tokens: int) -> None:
        """Raise `RowsError`, with both numbers, if a request of ``tokens`` tokens can never get its pages."""
        for name, (count, _) in self._needed(tokens).items():
            total = self._pages[name].count
            if count > total:
                raise RowsError(
                    f"a request of {tokens} tokens needs {count} pages of component {name}, but the pool has {total} "
                    f"of {self.page_size} tokens; shorten the prompt or raise pool_tokens (now {self.pool_tokens})"
                )

    def allocate(self, tokens: int) -> Allocation | None:
        """Rows for a request of ``tokens`` tokens, or None while there are not enough of them."""
        needed = self._needed(tokens)
        if not len(self._slots) or any(count > len(self._pages[name]) for name, (count, _) in needed.items()):
            return None
        slot = self._slots.take(1)
        assert slot is not None
        allocation = Allocation(tokens, int(slot[0]))
        for name, (count, first) in needed.items():
            pages = self._pages[name].take(count)
            assert pages is not None
            allocation.pages[name], allocation.first[name] = pages, first
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Give the rows of a request back."""
        for name, pages in allocation.pages.items():
            self._pages[name].give(pages)
        self._slots.give([allocation.slot])

    def free_rows(self) -> dict[str, tuple[int, int]]:
        """Free rows and all rows of each component with pages, and of the slots (under ``slots``)."""
        counts = {name: (len(pages), pages.count) for name, pages in self._pages.items()}
        return {**counts, "slots": (len(self._slots), self._slots.count)}

    def pages_of(self, allocation: Allocation, kind: Kind, tokens: tuple[int, int]) -> dict[str, Rows]:
        """The pages of each component of ``kind`` that hold ``tokens`` (first, last)."""
        size = self.page_size
        return {
            name: pages[(tokens[0] - allocation.first[name]) // size : -(-(tokens[1] - allocation.first[name]) // size)]
            for name, pages in allocation.pages.items()
            if self._components_by_name[name].kind == kind
        }

    def windows(self) -> dict[str, int]:
        """The window, in tokens, of each component of kind ``window``."""
        return {name: c.kind.window for name, c in self._components_by_name.items() if c.kind.window}

    def slots_of(self, allocation: Allocation) -> dict[str, Rows]:
        """The slot of the request, for each component of kind ``slot``."""
        slot = np.array([allocation.slot], dtype=np.int64)
        return {name: slot for name, component in self._components_by_name.items() if component.kind == SLOT}

    # Copies

    def write_tokens(self, cache: Any, allocation: Allocation, tokens: tuple[int, int]) -> None:
        """Copy ``tokens`` (first, last) of every paged component from ``cache``, which holds the tokens up to last."""
        first, last = tokens
        for place in self.description.places:
            tensor = place.get(cache) if place.kind == PAGED else None
            if tensor is not None:
                start, end = first // place.rate * place.rate, last // place.rate * place.rate
                if end > start:
                    self._put(place, allocation, start, _by_token(place, tensor)[start:end])

    def write_state(self, cache: Any, allocation: Allocation) -> None:
        """Copy windows and states from ``cache``, which holds the whole request."""
        for place in self.description.places:
            tensor = place.get(cache) if place.kind != PAGED else None
            if tensor is None:
                continue
            if place.kind.window:
                values = _by_token(place, tensor)
                self._put(place, allocation, allocation.tokens - values.shape[0], values)
            elif place.extent == "remainder":
                self._view(place)[allocation.slot, : tensor.shape[1]] = tensor[0]
            else:
                self._view(place)[allocation.slot] = tensor[0]

    def read(self, allocation: Allocation) -> Any:
        """A new cache object with what the rows of ``allocation`` hold; it shares no memory with them."""
        cache = self.description.new_cache()
        tokens = allocation.tokens
        for place in self.description.places:
            if not place.kind.has_tokens:
                row = self._view(place)[allocation.slot]
                if place.extent == "remainder":
                    row = row[: tokens % place.rate]
                absent = place.extent == "closed" and tokens < place.rate
                place.set(cache, None if absent else row.clone().unsqueeze(0))
                continue
            first = max(0, tokens - place.window) if place.kind.window else 0
            values = self._take(place, allocation, first, tokens // place.rate * place.rate)
            place.set(cache, _by_cache(place, values))
        restore(cache, tokens)
        return cache

    def write_aux(self, allocation: Allocation, aux: Aux) -> None:
        """Fill the request's row of the aux table."""
        for name, value in aux._asdict().items():
            self._aux[name][allocation.slot] = value

    def read_aux(self, allocation: Allocation) -> Aux:
        """The request's row of the aux table."""
        values = {name: view[allocation.slot].item() for name, view in self._aux.items()}
        return Aux(**values)

    def scramble_page(self, allocation: Allocation, index: int) -> None:
        """Overwrite a page in every layer with random values: page ``index`` modulo their number, so -1 is the last."""
        for place in self.description.places:
            if place.kind.has_tokens:
                pages = allocation.pages[place.component]
                _scramble(self._view(place)[int(pages[index % len(pages)])])

    def scramble_state(self, allocation: Allocation) -> None:
        """Overwrite the request's slot in every layer with random values."""
        for place in self.description.places:
            if not place.kind.has_tokens:
                _scramble(self._view(place)[allocation.slot])

    def close(self) -> None:
        """Give the memory back. The pools must not be used afterwards."""
        self._views.clear()
        self._aux.clear()
        self.memory.close()

    def _view(self, place: Place) -> torch.Tensor:
        return self._views[place.component, place.role, place.layer]

    def _flat_index(self, place: Place, allocation: Allocation, first: int, last: int) -> torch.Tensor:
        token = np.arange(first, last) - allocation.first[place.component]
        pages = allocation.pages[place.component]
        return torch.from_numpy(pages[token // self.page_size] * self.page_size + token % self.page_size)

    def _put(self, place: Place, allocation: Allocation, first: int, values: torch.Tensor) -> None:
        index = self._flat_index(place, allocation, first, first + values.shape[0])
        self._view(place).flatten(0, 1).index_copy_(0, index, values)

    def _take(self, place: Place, allocation: Allocation, first: int, last: int) -> torch.Tensor:
        index = self._flat_index(place, allocation, first, last)
        return self._view(place).flatten(0, 1).index_select(0, index)

    def _aux_view(self, tensor: Tensor) -> npt.NDArray[Any]:
        view: npt.NDArray[Any] = np.ndarray(
            (tensor.rows,), tensor.dtype, self.memory.array.data, tensor.offset, (tensor.row_stride,)
        )
        return view


def _view(bytes_: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    """The tensor's rows: [rows, axes...]."""
    shape = (tensor.rows, *(axis.local_size for axis in tensor.axes))
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return bytes_[tensor.offset : tensor.offset + tensor.rows * tensor.row_stride].view(dtype).view(shape)


def _by_token(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """A cache tensor [1, ..., token, ...] as [tokens, ...]; an entry is spread over the tokens it stands for."""
    values = tensor[0].movedim(place.token_axis - 1, 0)
    return values.reshape(values.shape[0] * place.rate, *place.shape) if place.rate > 1 else values


def _by_cache(place: Place, values: torch.Tensor) -> torch.Tensor:
    """The reverse of `_by_token`, contiguous."""
    if place.rate > 1:
        values = values.reshape(values.shape[0] // place.rate, *place.shape[:-1], place.shape[-1] * place.rate)
    return values.movedim(0, place.token_axis - 1).unsqueeze(0).contiguous()


def _scramble(values: torch.Tensor) -> None:
    scale = values.float().abs().mean().clamp_min(1.0)
    generator = torch.Generator().manual_seed(values.numel())
    values.copy_(torch.randn(values.shape, generator=generator) * scale)
