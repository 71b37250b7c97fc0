"""Words for sets of layers: ``"all"``, ``"0-29"``, ``"3::4"``, ``"0,2,5-7"``, a number, or a list of these."""

from __future__ import annotations

import bisect
import itertools
import re

from kvbaton.errors import ConfigurationError
from kvbaton.topology.parse import shown

MAX_WORDS = 1 << 13
"""Numbers, ranges and slices that may be listed."""

_NUMBER = re.compile(r"\d{1,18}")
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")
_SLICE = re.compile(r"(\d{0,18}):(\d{0,18})(?::(\d{1,18}))?")


def parse_layers(value: object, count: int, where: str) -> tuple[int, ...]:
    """The layers that ``value`` means in a model of ``count`` layers, ascending.

    Raises `ConfigurationError`, beginning with ``where``, for words that mean nothing and layers that do not exist.
    """
    found: set[int] = set()
    words = [word for item in (value if isinstance(value, list | tuple) else [value]) for word in str(item).split(",")]
    if len(words) > MAX_WORDS:
        raise ConfigurationError(f"{where}: lists {len(words)} ranges of layers, at most {MAX_WORDS} can be read")
    for word in words:
        named = _word(word.strip(), count, where)
        if named and named[-1] >= count:
            # YAML takes 3:48:4 without quotes for a number in base 60.
            hint = "; a slice such as '3:48:4' must be quoted" if isinstance(value, int) else ""
            first = named[bisect.bisect_left(named, count)]
            raise ConfigurationError(
                f"{where}: layer {first} is outside the model's {count} layers, 0 to {count - 1}{hint}"
            )
        found.update(named)
    if not found:
        raise ConfigurationError(f"{where}: {shown(value)} names no layer of {count}")
    return tuple(sorted(found))


def _word(word: str, count: int, where: str) -> range:
    if word == "all":
        return range(count)
    if _NUMBER.fullmatch(word):
        return range(int(word), int(word) + 1)
    if (match := _RANGE.fullmatch(word)) is not None:
        return range(int(match[1]), int(match[2]) + 1)
    match = _SLICE.fullmatch(word)
    if match is not None and match[3] != "0":
        return range(int(match[1] or 0), int(match[2] or count), int(match[3] or 1))
    raise ConfigurationError(f"{where}: {shown(word)} is no layers; write all, 5, 0-29, 3::4 or a list of these")


def show_layers(layers: tuple[int, ...]) -> str:
    """``layers`` (ascending) in those words, as short as one regular step makes them."""
    if len(layers) > 2:
        steps = {second - first for first, second in itertools.pairwise(layers)}
        if len(steps) == 1:
            step = steps.pop()
            return f"{layers[0]}-{layers[-1]}" if step == 1 else f"{layers[0]}:{layers[-1] + 1}:{step}"
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] == layer - 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
