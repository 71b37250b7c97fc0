"""Reads `KVArgs`: parallel lists become buffers and states, and lists that do not fit each other are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

from kvbaton.errors import LayoutError
from kvbaton.memory import Region

MemoryKind = Literal["device", "host"]


class Buffer(NamedTuple):
    """One of the buffers that SGLang lists: ``nbytes`` bytes from ``address``, in rows of ``row_bytes`` bytes.

    ``kind`` and ``device`` are those of `Region`.
    """

    address: int
    nbytes: int
    row_bytes: int
    kind: str
    device: int

    @property
    def elided(self) -> bool:
        """Whether this rank keeps nothing here: the buffer holds its place in the list only."""
        return not self.nbytes or not self.row_bytes

    @property
    def rows(self) -> int:
        """How many rows can be addressed."""
        return 0 if self.elided else self.nbytes // self.row_bytes


@dataclass(frozen=True)
class State:
    """One state component: the lists of `KVArgs` at one place.

    ``type`` is SGLang's name on the wire, ``name`` that of the component here, different for each place. ``dims`` are
    the sizes of the axis that tensor parallelism cuts, 0 where every rank has the whole; ``groups`` the sizes of the
    blocks of that axis in the whole model; ``outers`` how many rows of the axis a slot has. All three may be empty.
    """

    type: str
    name: str
    buffers: tuple[Buffer, ...]
    dims: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...] | None, ...] = ()
    outers: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Arguments:
    """What `KVArgs` says, with what the decode side lacks as None."""

    page_size: int
    dtype: str
    kv_layout: str | None
    swa_layout: str | None
    kv: tuple[Buffer, ...]
    draft: tuple[Buffer, ...]
    kv_layers: tuple[int, ...]
    start_layer: int | None
    end_layer: int | None
    local_heads: int | None
    total_heads: int | None
    hybrid_mla: bool
    ratios: tuple[int, ...]
    states: tuple[State, ...]
    aux: tuple[Buffer, ...]

    def has(self, *types: str) -> bool:
        """Whether one of the states is of one of these types."""
        return any(state.type in types for state in self.states)


class Regions:
    """Collects the regions to register: each buffer once."""

    def __init__(self) -> None:
        self.listed: list[Region] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def number(self, buffer: Buffer) -> int:
        """The number of the buffer's region."""
        key = buffer.address, buffer.nbytes
        if key not in self._numbers:
            self._numbers[key] = len(self.listed)
            self.listed.append(Region(buffer.address, buffer.nbytes, buffer.kind, device=buffer.device))
        return self._numbers[key]


def read(args: Any, memory: MemoryKind, device: str) -> Arguments:
    """Read ``args``; see `describe`. Raises `LayoutError`."""
    page_size = getattr(args, "page_size", None)
    if not isinstance(page_size, int) or page_size < 1:
        refuse("kv", f"page_size is {page_size!r}, not a number of tokens")
    place = (device, int(getattr(args, "gpu_id", None) or 0) if device == "cuda" else 0)
    prefix = "" if memory == "device" else "host_"
    if prefix:
        place = ("host", 0)
    kv = _buffers(args, prefix + "kv", "kv", place)
    kinds = getattr(args, "kv_data_mem_kinds", None)
    if kinds and not prefix:
        kv = tuple(
            buffer._replace(kind="host", device=0) if kind == "DRAM" else buffer
            for buffer, kind in zip(kv, kinds, strict=True)
        )
    drafts = int(getattr(args, "num_draft_entries", 0) or 0)
    if not 0 <= drafts <= len(kv):
        refuse("draft", f"num_draft_entries is {drafts}, but {len(kv)} buffers are listed in all")
    layers = tuple(int(layer) for layer in getattr(args, "kv_layer_ids", None) or ())
    if layers and len(layers) != len(kv):
        refuse("kv", f"kv_layer_ids has {len(layers)} entries for {len(kv)} buffers; SGLang must give one for each")
    target = len(kv) - drafts
    return Arguments(
        page_size=page_size,
        dtype=str(getattr(args, "kv_cache_dtype_str", None) or ""),
        kv_layout=getattr(args, "kv_layout", None),
        swa_layout=getattr(args, "swa_kv_cache_layout", None),
        kv=kv[:target],
        draft=kv[target:],
        kv_layers=layers[:target],
        start_layer=_optional(args, "prefill_start_layer"),
        end_layer=_optional(args, "prefill_end_layer"),
        local_heads=_optional(args, "kv_head_num"),
        total_heads=_optional(args, "total_kv_head_num"),
        hybrid_mla=bool(getattr(args, "is_hybrid_mla_backend", False)),
        ratios=tuple(int(ratio) for ratio in getattr(args, "mla_compression_ratios", None) or ()),
        states=_states(args, prefix, place),
        aux=_buffers(args, "aux", "aux", ("host", 0)),
    )


def _optional(args: Any, name: str) -> int | None:
    value = getattr(args, name, None)
    return None if value is None else int(value)


def _buffers(args: Any, prefix: str, component: str, place: tuple[str, int]) -> tuple[Buffer, ...]:
    names = (f"{prefix}_data_ptrs", f"{prefix}_data_lens", f"{prefix}_item_lens")
    lists = [getattr(args, name, None) for name in names]
    for name, listed in zip(names, lists, strict=True):
        if listed is None:
            refuse(component, f"{name} is not given")
    return _zipped(component, names, [list(listed or ()) for listed in lists], place)


def _zipped(component: str, names: Sequence[str], lists: list[list[int]], place: tuple[str, int]) -> tuple[Buffer, ...]:
    if len({len(listed) for listed in lists}) > 1:
        counts = ", ".join(f"{name} has {len(listed)}" for name, listed in zip(names, lists, strict=True))
        refuse(component, f"the lists of its buffers differ in length: {counts}")
    buffers = []
    for address, nbytes, row_bytes in zip(*lists, strict=True):
        buffer = Buffer(int(address), int(nbytes), int(row_bytes), *place)
        if not buffer.elided and buffer.nbytes < buffer.row_bytes:
            refuse(component, f"a buffer of {nbytes} bytes is smaller than one row of {row_bytes} bytes")
        buffers.append(buffer)
    return tuple(buffers)


def _states(args: Any, prefix: str, place: tuple[str, int]) -> tuple[State, ...]:
    types = [str(getattr(kind, "value", kind)) for kind in getattr(args, "state_types", None) or ()]
    names = [f"{prefix}state_data_ptrs", f"{prefix}state_data_lens", f"{prefix}state_item_lens"]
    lists = [list(getattr(args, name, None) or ()) for name in names]
    states: list[State] = []
    for place_in_list, kind in enumerate(types):
        turn = types[:place_in_list].count(kind)
        name = kind if not turn else f"{kind}_{turn + 1}"
        if any(len(listed) <= place_in_list for listed in lists):
            refuse(name, f"state {place_in_list} of state_types has no entry in {', '.join(names)}")
        buffers = _zipped(name, names, [list(listed[place_in_list]) for listed in lists], place)
        states.append(
            State(
                kind,
                name,
                buffers,
                dims=tuple(int(dim) for dim in _parallel(args, "state_dim_per_tensor", place_in_list, name, buffers)),
                groups=tuple(
                    None if group is None else tuple(int(size) for size in group)
                    for group in _parallel(args, "state_conv_shard_groups", place_in_list, name, buffers)
                ),
                outers=tuple(
                    int(count) for count in _parallel(args, "state_slice_outer_counts", place_in_list, name, buffers)
                ),
                layers=tuple(int(layer) for layer in _parallel(args, "state_layer_ids", place_in_list, name, buffers)),
            )
        )
    return tuple(states)


def _parallel(args: Any, name: str, at: int, component: str, buffers: tuple[Buffer, ...]) -> list[Any]:
    """The entry ``at`` of an optional list of lists, which is empty or has one value for each buffer."""
    lists = getattr(args, name, None) or ()
    listed = list(lists[at] or ()) if at < len(lists) else []
    if listed and len(listed) != len(buffers):
        refuse(component, f"{name} has {len(listed)} values for {len(buffers)} buffers")
    return listed


def refuse(component: str, reason: str) -> NoReturn:
    """Raise the `LayoutError` of a component."""
    raise LayoutError(f"component {component}: {reason}")
