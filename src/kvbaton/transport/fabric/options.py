"""Options of a fabric transport: those that are the same over every library; the rest is the adapter's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from kvbaton.errors import ConfigurationError
from kvbaton.transport.executor import ExecutorOption, executor_option

ALIGNMENT = 4096
SlabMemory = Literal["host", "cuda"]
SLAB_MEMORY: tuple[SlabMemory, ...] = get_args(SlabMemory)
_SIZE = re.compile(r"(\d+)\s*(|[KMG]iB)")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def check_text(name: str, options: object) -> None:
    """Raise `ConfigurationError` if the ``options`` of the transport ``name`` are no mapping of text to text."""
    if not isinstance(options, Mapping):
        raise ConfigurationError(
            f'the options of {name} are {options!r}; they must be names with their values, both text: {{"slabs": "16"}}'
        )
    for option, value in options.items():
        if not isinstance(option, str):
            raise ConfigurationError(f"{name} has no option {option!r}; names of options are text")
        if not isinstance(value, str):
            raise ConfigurationError(
                f"the option {option} of {name} is {value!r}; values of options are text, in quotes"
            )


class FabricOptions(NamedTuple):
    """What a user may tune of any fabric transport.

    ``executor``: how writes go. "packed" also keeps all memory but the slabs from peers, which is what lets a living
    writer be fenced. ``slabs`` of ``slab_bytes`` each are there for peers to write into, at most ``slabs_per_peer`` for
    one connection; ``staging_slabs`` are what this process packs into: peers that stand still keep theirs, and hold up
    no other peer as long as they are not more than half as many. ``quarantine_seconds``: how long slabs stay unused
    whose writer went without a word, where its death cannot be proven from here. ``slab_memory``: the kind of memory
    that the slabs are; "cuda" is the device of the regions, and must be reached by the library.
    """

    executor: ExecutorOption = "auto"
    slabs: int = 64
    slabs_per_peer: int = 8
    staging_slabs: int = 32
    slab_bytes: int = 2 << 20
    quarantine_seconds: float = 600.0
    slab_memory: SlabMemory = "host"

    @classmethod
    def take(cls, options: Mapping[str, str]) -> tuple[FabricOptions, dict[str, str]]:
        """The generic options out of ``options``, and the others. Raises `ConfigurationError` for a bad value."""
        rest = dict(options)
        taken = cls(
            executor_option(rest.pop("executor", cls().executor)),
            _count("slabs", rest),
            _count("slabs_per_peer", rest),
            _count("staging_slabs", rest),
            _size("slab_bytes", rest),
            _seconds("quarantine_seconds", rest),
            _slab_memory(rest.pop("slab_memory", cls().slab_memory)),
        )
        return taken, rest

    @property
    def area_bytes(self) -> int:
        """Bytes of all slabs together."""
        return (self.slabs + self.staging_slabs) * self.slab_bytes


def _slab_memory(text: str) -> SlabMemory:
    for kind in SLAB_MEMORY:
        if text == kind:
            return kind
    raise ConfigurationError(f"slab_memory is {text!r}; it must be one of {', '.join(SLAB_MEMORY)}")


def _default(name: str) -> str:
    return str(getattr(FabricOptions(), name))


def _count(name: str, options: dict[str, str]) -> int:
    text = options.pop(name, _default(name))
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise ConfigurationError(f"{name} is {text!r}; it must be a number from 1 to 4096")
    return int(text)


def _size(name: str, options: dict[str, str]) -> int:
    text = options.pop(name, _default(name))
    match = _SIZE.fullmatch(text.strip())
    nbytes = int(match[1]) * _UNITS[match[2]] if match else 0
    if not ALIGNMENT <= nbytes <= 1 << 30 or nbytes % ALIGNMENT:
        raise ConfigurationError(
            f"{name} is {text!r}; it must be a multiple of {ALIGNMENT} bytes up to 1 GiB, as 2097152 or 2MiB"
        )
    return nbytes


def _seconds(name: str, options: dict[str, str]) -> float:
    text = options.pop(name, _default(name))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= 86_400.0:
        raise ConfigurationError(f"{name} is {text!r}; it must be a number of seconds from 0 to 86400")
    return seconds
