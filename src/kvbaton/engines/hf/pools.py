"""The pools of an engine: those of each of its ranks, the rows of each request, and its cache in them and out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvbaton.engines.hf.caches import CacheDescription, Place, describe, restore
from kvbaton.engines.hf.grid import Grid
from kvbaton.engines.hf.rank_pools import RankPools, unpack
from kvbaton.engines.hf.rows import Allocation, Allocator, Aux, Rows
from kvbaton.engines.hf.shards import Held, Shard, groups_of
from kvbaton.errors import ConfigurationError
from kvbaton.runtime.later import Event

DEVICES = ("cpu", "cuda")
"""Kinds of device that pools can be on."""
RankRows = list[dict[str, Rows]]
"""Rows by component, for each rank of this process."""


class Pools:
    """Pools for ``model`` with room for ``pool_tokens`` tokens and ``slots`` requests, over the ranks of ``grid``.

    ``ranks`` are the numbers of those that this process holds; None is all of them. The engine's thread alone uses the
    pools, but for `check_fits`. The memory belongs to the pools; `close` gives it back.

    Raises `ConfigurationError` for sizes that cannot be, and `ShardError` where the model cannot be cut so.
    """

    def __init__(
        self,
        model: Any,
        grid: Grid | None = None,
        *,
        pool_tokens: int = 8192,
        slots: int = 16,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.grid = grid or Grid()
        self.page_size = self.grid.page_size
        if pool_tokens < self.page_size or slots < 1:
            raise ConfigurationError(
                f"pools need pool_tokens >= page_size ({self.page_size}) and slots >= 1, not {pool_tokens} and {slots}"
            )
        if torch.device(model.device).type not in DEVICES:
            raise ConfigurationError(
                f"the model is on {model.device}; pools can be on {' or '.join(DEVICES)}: move it there"
            )
        self.description: CacheDescription = describe(model)
        self.grid.check_layers(self.description.layers)
        numbers = self.grid.chosen(ranks)
        self.pool_tokens = pool_tokens
        self.slots = slots
        groups = groups_of(self.description, self.grid)
        self._streamed = {group.name: group for group in groups if group.streamed}
        self._latest = {group.name: group for group in groups if group.kind.has_tokens and not group.streamed}
        self._states = {group.name for group in groups if not group.kind.has_tokens}
        self.granularity = self.grid.component_page_size([self.description.granularity])
        """Pages of whole multiples of so many tokens can be sent while prefill goes on."""
        self._allocator = Allocator(
            groups,
            self.grid,
            pool_tokens=pool_tokens,
            slots=slots,
            cp_ranks={self.grid.coords(number).cp[0] for number in numbers},
        )
        self.shards = [
            Shard(self.description, self.grid, number, groups, self._allocator.counts)
            for number in range(self.grid.size)
        ]
        """What each rank of the grid holds, also those of other processes."""
        self.ranks = [RankPools(self.shards[number], self.description.device) for number in numbers]

    @property
    def complete(self) -> bool:
        """Whether all ranks are in this process."""
        return len(self.ranks) == self.grid.size

    # Rows

    def check_fits(self, tokens: int) -> None:
        """Raise `RowsError`, with both numbers, if a request of ``tokens`` tokens can never get its pages."""
        self._allocator.check_fits(tokens)

    def allocate(self, tokens: int) -> Allocation | None:
        """Rows for a request of ``tokens`` tokens, or None while there are not enough of them."""
        return self._allocator.allocate(tokens)

    def free(self, allocation: Allocation) -> None:
        """Give the rows of a request back."""
        self._allocator.free(allocation)

    def free_rows(self) -> dict[str, tuple[int, int]]:
        """Free rows and all rows of each component with pages, and of the slots (under ``slots``)."""
        return self._allocator.free_rows()

    def streamed_rows(self, allocation: Allocation, tokens: tuple[int, int]) -> RankRows:
        """The pages that hold ``tokens`` (first, last), of the components that are sent while prefill goes on."""
        return [self._rows(rank, allocation, self._streamed, tokens) for rank in self.ranks]

    def latest_rows(self, allocation: Allocation) -> dict[tuple[int, int], RankRows]:
        """The rows of the components that hold the end of the request only, by the tokens that they hold."""
        by_tokens: dict[tuple[int, int], dict[str, Any]] = {}
        for name, group in self._latest.items():
            by_tokens.setdefault(group.kind.needed(allocation.tokens), {})[name] = group
        return {
            tokens: [self._rows(rank, allocation, groups, tokens) for rank in self.ranks]
            for tokens, groups in by_tokens.items()
            if tokens[0] < tokens[1]
        }

    def state_rows(self, allocation: Allocation) -> RankRows:
        """The slot of the request, for each component whose rows hold no tokens."""
        slot = torch.tensor([allocation.slot]).numpy()
        return [{name: slot for name in rank.shard.held if name in self._states} for rank in self.ranks]

    def all_rows(self, allocation: Allocation) -> RankRows:
        """All rows of the request."""
        parts = [self.streamed_rows(allocation, (0, allocation.tokens)), *self.latest_rows(allocation).values()]
        return merged(*parts, self.state_rows(allocation))

    def aux_slots(self, allocation: Allocation) -> list[int | None]:
        """The slot of the request in the aux table of each rank; None for a rank without one."""
        return [allocation.slot if rank.shard.has_aux else None for rank in self.ranks]

    def _rows(
        self, rank: RankPools, allocation: Allocation, groups: Mapping[str, Any], tokens: tuple[int, int]
    ) -> dict[str, Rows]:
        held = {name: group for name, group in groups.items() if name in rank.shard.held}
        return self._allocator.rows_of(allocation, rank.shard.coords.cp[0], held, tokens)

    # Copies

    def write_tokens(self, cache: Any, allocation: Allocation, tokens: tuple[int, int]) -> None:
        """Copy ``tokens`` (first, last) of every streamed component from ``cache``, which holds those up to last."""
        first, last = tokens
        for rank, held in self._each(self._streamed):
            tensor = held.place.get(cache)
            if tensor is not None:
                span = first // held.place.rate, last // held.place.rate
                if held.place.extent == "tokens":
                    span = first, last
                rank.write(held, tensor, 0, allocation, span)

    def write_state(self, cache: Any, allocation: Allocation) -> None:
        """Copy the end of the request (windows, tails) and its states from ``cache``, which holds all of it."""
        for rank, held in self._each(self._latest):
            tensor = held.place.get(cache)
            if tensor is not None:
                span = held.place.held(allocation.tokens)
                rank.write(held, tensor, span[0], allocation, span)
        for rank, held in self._each(self._states):
            tensor = held.place.get(cache)
            if tensor is not None:
                rank.write_state(held, tensor, allocation)

    def read(self, allocation: Allocation, others: Mapping[int, bytes] | None = None) -> Any:
        """A new cache object with what the rows of ``allocation`` hold; it shares no memory with them.

        ``others`` are what `pack` made in the other processes, by the number of the rank.
        """
        tokens = allocation.tokens
        parts = [
            (held, rank.take(held, allocation))
            for rank in self.ranks
            for each in rank.shard.held.values()
            for held in each
        ]
        for number, packed in (others or {}).items():
            there = unpack(self.shards[number], packed, tokens)[0]
            parts += [(held, values.to(self.description.device)) for held, values in there]
        cache, whole = self._empty_cache(tokens)
        for held, values in parts:
            place = held.place
            target = whole.get((place.component, place.role, place.layer))
            if target is None:
                continue
            if place.token_axis < 0:
                held.join(values, target, None)
            else:
                first, last = place.held(tokens)
                held.join(values, target, held.positions(held.numbers(first, last), first))
        restore(cache, tokens)
        if self.description.device.type == "cuda":
            # The rows may be given to another request as soon as this one is over, whatever became of it.
            torch.cuda.current_stream(self.description.device).synchronize()
        return cache

    def written(self) -> Event | None:
        """An event after all that was written so far, for `Sender.send`; None where nothing is to be waited for."""
        if self.description.device.type != "cuda":
            return None
        event: Event = torch.cuda.current_stream(self.description.device).record_event()
        return event

    def pack(self, allocation: Allocation) -> dict[int, bytes]:
        """What the ranks of this process hold of a request, for `read` and `read_aux` in another process."""
        return {rank.shard.number: rank.pack(allocation) for rank in self.ranks}

    def write_aux(self, allocation: Allocation, aux: Aux) -> None:
        """Fill the request's row of the aux tables."""
        for rank in self.ranks:
            rank.write_aux(allocation, aux)

    def read_aux(self, allocation: Allocation, others: Mapping[int, bytes] | None = None) -> Aux:
        """The request's row of the aux table; that of another process if no rank here has one."""
        for rank in self.ranks:
            if rank.shard.has_aux:
                return rank.read_aux(allocation)
        found = (unpack(self.shards[number], packed, allocation.tokens)[1] for number, packed in (others or {}).items())
        aux = next((each for each in found if each is not None), None)
        if aux is None:
            raise ConfigurationError("no rank with the aux table is here, and none of those that others hold came")
        return aux

    def scramble_page(self, allocation: Allocation, index: int) -> None:
        """Overwrite a page in every layer with random values, on every rank: page ``index`` modulo their number."""
        for rank in self.ranks:
            rank.scramble_page(allocation, index)

    def scramble_state(self, allocation: Allocation) -> None:
        """Overwrite the states and tails of a request in every layer with random values, on every rank."""
        for rank in self.ranks:
            rank.scramble_state(allocation)

    def close(self) -> None:
        """Give the memory back. The pools must not be used afterwards."""
        for rank in self.ranks:
            rank.close()

    def _each(self, names: Mapping[str, Any] | set[str]) -> list[tuple[RankPools, Held]]:
        return [
            (rank, held)
            for rank in self.ranks
            for name, each in rank.shard.held.items()
            if name in names
            for held in each
        ]

    def _empty_cache(self, tokens: int) -> tuple[Any, dict[tuple[str, str, int], torch.Tensor]]:
        """A cache whose tensors have the shapes of ``tokens`` tokens, and each of them as [entries, axes...]."""
        cache = self.description.new_cache()
        whole = {}
        for place in self.description.places:
            if place.extent == "closed" and tokens < place.rate:
                place.set(cache, None)
                continue
            tensor = _empty(place, tokens, self.description.device)
            place.set(cache, tensor)
            seen = tensor[0] if place.token_axis < 0 else tensor[0].movedim(place.token_axis - 1, 0)
            whole[place.component, place.role, place.layer] = seen
        return cache, whole


def merged(*parts: RankRows) -> RankRows:
    """The rows of several components in one mapping for each rank."""
    return [{name: rows for each in rank for name, rows in each.items()} for rank in zip(*parts, strict=True)]


def _empty(place: Place, tokens: int, device: torch.device) -> torch.Tensor:
    shape = list(place.shape)
    if place.token_axis >= 0:
        first, last = place.held(tokens)
        shape.insert(place.token_axis - 1, last - first)
    return torch.empty((1, *shape), dtype=place.dtype, device=device)
