"""Words for sets of layers: ``"all"``, ``"0-29"``, ``"3::4"``, ``"0,2,5-7"``, a number, or a list of these."""

from __future__ import annotations

import itertools
import re

from kvbaton.errors import ConfigurationError

_RANGE = re.compile(r"(\d+)-(\d+)")
_SLICE = re.compile(r"(\d*):(\d*)(?::(\d+))?")


def parse_layers(value: object, count: int, where: str) -> tuple[int, ...]:
    """The layers that ``value`` means in a model of ``count`` layers, ascending.

    Raises `ConfigurationError`, beginning with ``where``, for words that mean nothing and layers that do not exist.
    """
    found: set[int] = set()
    for item in value if isinstance(value, list | tuple) else [value]:
        for word in str(item).split(","):
            found.update(_word(word.strip(), count, where))
    outside = [layer for layer in sorted(found) if layer >= count]
    if outside:
        # YAML takes 3:48:4 without quotes for a number in base 60.
        hint = "; a slice such as '3:48:4' must be quoted" if isinstance(value, int) else ""
        raise ConfigurationError(
            f"{where}: layer {outside[0]} is outside the model's {count} layers, 0 to {count - 1}{hint}"
        )
    if not found:
        raise ConfigurationError(f"{where}: {value!r} names no layer of {count}")
    return tuple(sorted(found))


def _word(word: str, count: int, where: str) -> range:
    if word == "all":
        return range(count)
    if word.isdecimal():
        return range(int(word), int(word) + 1)
    if (match := _RANGE.fullmatch(word)) is not None:
        return range(int(match[1]), int(match[2]) + 1)
    match = _SLICE.fullmatch(word)
    if match is not None and match[3] != "0":
        return range(int(match[1] or 0), int(match[2] or count), int(match[3] or 1))
    raise ConfigurationError(f"{where}: {word!r} is no layers; write all, 5, 0-29, 3::4 or a list of these")


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
