"""The pools of one rank: memory that is registered, and the copies between it and the cache of one request."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvbaton.engines.hf.caches import Place
from kvbaton.engines.hf.rows import Allocation, Aux
from kvbaton.engines.hf.shards import AUX, AUX_REGION, CACHE_REGION, Held, Shard
from kvbaton.layout import TOKEN, Component, RankLayout, Tensor, check_layout, required_bytes
from kvbaton.memory import Region, SharedMemory


class RankPools:
    """The memory of one rank that holds ``shard``, its cache on ``device``. `close` gives it back."""

    def __init__(self, shard: Shard, device: torch.device) -> None:
        self.shard = shard
        self.regions: list[Region] = []
        self.memory: list[torch.Tensor] = []
        """The bytes of each region."""
        self._shared: list[SharedMemory] = []
        for number, nbytes in enumerate(required_bytes(shard.layout.components)):
            self._allocate(max(1, nbytes), torch.device("cpu") if number == AUX_REGION else device)
        check_layout(self.layout, [region.nbytes for region in self.regions])
        self._components = {component.name: component for component in self.layout.components}
        self._views = {id(held): _view(self.memory[CACHE_REGION], held) for held in self._held()}
        self._aux = {t.role: self._aux_view(t) for t in self._components[AUX].tensors} if shard.has_aux else {}

    @property
    def layout(self) -> RankLayout:
        """The layout of this memory."""
        return self.shard.layout

    def view(self, held: Held) -> torch.Tensor:
        """All rows of a tensor: [rows, entries, axes...], or [rows, axes...] of a state."""
        return self._views[id(held)]

    # Copies

    def write(
        self, held: Held, cached: torch.Tensor, begin: int, allocation: Allocation, span: tuple[int, int]
    ) -> None:
        """Copy this rank's part of the entries ``span`` into the request's rows.

        ``cached`` [1, ..., token, ...] is the tensor of the whole cache; its first entry is number ``begin``.
        """
        numbers = held.numbers(*span)
        if numbers.size:
            index = self._index(held, numbers, allocation)
            held.cut(_by_entry(held.place, cached), self.view(held), index, held.positions(numbers, begin))

    def write_state(self, held: Held, cached: torch.Tensor, allocation: Allocation) -> None:
        """Copy this rank's part of a state, ``cached`` [1, axes...], into the request's slot."""
        held.cut_state(cached[0], self.view(held)[allocation.slot])

    def take(self, held: Held, allocation: Allocation) -> torch.Tensor:
        """What the request's rows hold: [entries, axes...] or [axes...]; a copy where it has entries."""
        if held.place.token_axis < 0:
            return self.view(held)[allocation.slot]
        numbers = held.numbers(*held.place.held(allocation.tokens))
        return self.view(held)[self._index(held, numbers, allocation)]

    def pack(self, allocation: Allocation) -> bytes:
        """All that this rank holds of the request, in the order of its layout; `unpack` is the reverse."""
        parts = [
            self.take(held, allocation).contiguous().view(torch.uint8).cpu().numpy().tobytes() for held in self._held()
        ]
        parts += [view[allocation.slot : allocation.slot + 1].tobytes() for view in self._aux.values()]
        return b"".join(parts)

    def write_aux(self, allocation: Allocation, aux: Aux) -> None:
        """Fill the request's row of the aux table, if this rank has one."""
        for name, view in self._aux.items():
            view[allocation.slot] = getattr(aux, name)

    def read_aux(self, allocation: Allocation) -> Aux:
        """The request's row of the aux table; this rank must have one."""
        return Aux(**{name: view[allocation.slot].item() for name, view in self._aux.items()})

    def scramble_page(self, allocation: Allocation, index: int) -> None:
        """Overwrite page ``index`` (modulo their number) in every layer with random values."""
        for name, pages in allocation.pages[self.shard.coords.cp[0]].items():
            if len(pages.rows) and not self._kind_is_state(name):
                for held in self.shard.held.get(name, ()):
                    _scramble(self.view(held)[int(pages.rows[index % len(pages.rows)])])

    def scramble_state(self, allocation: Allocation) -> None:
        """Overwrite what the request has once, states and tails, in every layer with random values."""
        for name, each in self.shard.held.items():
            if self._kind_is_state(name):
                pages = allocation.pages[self.shard.coords.cp[0]].get(name)
                for held in each:
                    _scramble(self.view(held)[allocation.slot if pages is None else int(pages.rows[0])])

    def close(self) -> None:
        """Give the memory back. The pools must not be used afterwards."""
        self._views.clear()
        self._aux.clear()
        self.regions.clear()
        self.memory.clear()
        for shared in self._shared:
            shared.close()

    def _allocate(self, nbytes: int, device: torch.device) -> None:
        """Add a region of zeros: memory that other processes can map."""
        if device.type == "cpu":
            shared = SharedMemory(nbytes)
            self._shared.append(shared)
            self.memory.append(torch.from_numpy(shared.array))
            self.regions.append(Region.of(shared))
        else:
            self.memory.append(torch.zeros(nbytes, dtype=torch.uint8, device=device))
            self.regions.append(Region.of(self.memory[-1]))

    def _held(self) -> list[Held]:
        return [held for each in self.shard.held.values() for held in each]

    def _kind_is_state(self, name: str) -> bool:
        kind = self._components[name].kind if name in self._components else None
        return kind is not None and (not kind.has_tokens or kind.tail > 0)

    def _index(
        self, held: Held, numbers: npt.NDArray[np.int64], allocation: Allocation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and place in it of each of the entries ``numbers``, all of which this rank holds."""
        component: Component = self._components[held.place.component]
        owned, size = held.entries, component.entries_per_row
        local = numbers // (owned.unit * owned.modulus) * owned.unit + numbers % owned.unit
        rows, start = allocation.pages[self.shard.coords.cp[0]][component.name]
        page = local // size
        page = page % max(1, len(rows)) if component.kind.ring else page - start // component.page_size
        return torch.from_numpy(rows[page]), torch.from_numpy(local % size)

    def _aux_view(self, tensor: Tensor) -> npt.NDArray[Any]:
        view: npt.NDArray[Any] = np.ndarray(
            (tensor.rows,), tensor.dtype, self.memory[AUX_REGION].numpy().data, tensor.offset, (tensor.row_stride,)
        )
        return view


def unpack(shard: Shard, packed: bytes, tokens: int) -> tuple[list[tuple[Held, torch.Tensor]], Aux | None]:
    """What `RankPools.pack` made on the rank that holds ``shard``, for a request of ``tokens`` tokens.

    Raises ``ValueError`` where the bytes are not as many as that rank holds.
    """
    memory = bytearray(packed)
    found = []
    at = 0
    for held in (held for each in shard.held.values() for held in each):
        shape = held.shape
        if held.place.token_axis >= 0:
            shape = (len(held.numbers(*held.place.held(tokens))), *shape)
        count = int(np.prod(shape))
        nbytes = count * held.tensor.itemsize
        if at + nbytes > len(memory):
            break
        if count:
            values = torch.frombuffer(memory, dtype=held.place.dtype, count=count, offset=at).view(shape)
            found.append((held, values))
        at += nbytes
    fields = [np.dtype(t.dtype) for t in shard.layout.component(AUX).tensors] if shard.has_aux else []
    if at + sum(field.itemsize for field in fields) != len(memory):
        raise ValueError(
            f"{len(memory)} bytes came of rank {shard.coords}, which holds another number of {tokens} tokens"
        )
    if not fields:
        return found, None
    numbers = []
    for field in fields:
        numbers.append(np.frombuffer(memory, field, 1, at)[0].item())
        at += field.itemsize
    return found, Aux(*numbers)


def _by_entry(place: Place, cached: torch.Tensor) -> torch.Tensor:
    """A tensor of the cache [1, ..., token, ...] as [entries, axes...], without a copy."""
    return cached[0].movedim(place.token_axis - 1, 0)


def _view(bytes_: torch.Tensor, held: Held) -> torch.Tensor:
    """The rows of a tensor by the order of the place's axes, whatever their order in memory is."""
    tensor = held.tensor
    token = [axis for axis in tensor.axes if axis.name == TOKEN]
    axes = [*token, *held.axes]
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    typed = bytes_[tensor.offset : tensor.offset + tensor.rows * tensor.row_stride].view(dtype)
    strides = [stride // tensor.itemsize for stride in (tensor.row_stride, *(axis.stride for axis in axes))]
    return typed.as_strided((tensor.rows, *(axis.local_size for axis in axes)), strides, typed.storage_offset())


def _scramble(values: torch.Tensor) -> None:
    scale = values.float().abs().mean().clamp_min(1.0).cpu()
    generator = torch.Generator().manual_seed(values.numel())
    values.copy_(torch.randn(values.shape, generator=generator) * scale)
