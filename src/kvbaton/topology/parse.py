"""Parses the files that a topology is read from. All that their text may stand for has a bound."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from kvbaton.errors import ConfigurationError

MAX_YAML_BYTES = 1 << 17
"""Bytes that a topology file may have."""
MAX_JSON_BYTES = 1 << 24
"""Bytes that a config.json may have."""
MAX_VALUES = 1 << 16
"""Values that a file may hold, where each alias counts as all that it stands for."""
MAX_SHOWN = 60
"""Characters of a value that are shown in an error."""


def parse_yaml(path: Path) -> object:
    """What a YAML file says; raises `ConfigurationError`, one line that begins with ``path``, where it cannot be."""
    import yaml

    text = _read(path, MAX_YAML_BYTES, "YAML")
    loader = None
    try:
        # The C parser of some versions does not bound how deep it goes.
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node, path)
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigurationError(f"{path}: is no YAML: {_reason(error)}") from None
    finally:
        if loader is not None:
            loader.dispose()


def parse_json(path: Path) -> object:
    """What a JSON file says; raises `ConfigurationError`, one line that begins with ``path``, where it cannot be."""
    text = _read(path, MAX_JSON_BYTES, "JSON")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: is no JSON: {_reason(error)}") from None


def check_values(value: object, where: str) -> None:
    """Raise `ConfigurationError` for what no file should hold, anywhere in ``value``.

    That is text that cannot be printed, a key that is no text, a number of more than 64 bits, a value that is none of
    the plain types, and more than `MAX_VALUES` values. YAML may refer to one value many times, and to a value inside
    itself: each time counts.
    """
    waiting, count = [value], 1
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, dict):
            for name in entry:
                if not isinstance(name, str) or not name or not name.isprintable():
                    raise ConfigurationError(f"{where}: the key {shown(name)} is no name; keys are printable text")
        elif not isinstance(entry, list):
            _check_scalar(entry, where)
            continue
        inside = entry.values() if isinstance(entry, dict) else entry
        count += len(inside)
        if count > MAX_VALUES:
            raise ConfigurationError(f"{where}: holds {_TOO_MANY}")
        waiting.extend(inside)


def printable(text: str) -> str:
    """``text``, which is no part of a file (the name of one), with ? for each character that cannot be printed."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def shown(value: object) -> str:
    """``value`` in an error: the beginning of how it is written, whatever it holds."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    try:
        text = _SHORT.repr(value)
    except ValueError:
        # Python writes no number of thousands of digits.
        text = f"a {type(value).__name__} with a very large number in it"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = MAX_SHOWN
_TOO_MANY = f"more than {MAX_VALUES:,} values (each alias counts as all that it stands for)"


def _read(path: Path, most: int, what: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise ConfigurationError(f"{path}: has more than {most:,} bytes, too many to describe a model")
        return content.decode()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: is no {what}: {error}") from None


def _check_nodes(root: Any, path: Path) -> None:
    """Raise `ConfigurationError` for a document that would be too large once aliases and merges are resolved."""
    waiting, count = [root], 1
    while waiting:
        node = waiting.pop()
        if not isinstance(node.value, list):
            continue
        # A mapping lists pairs of nodes.
        inside = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
        count += len(inside)
        if count > 2 * MAX_VALUES:
            raise ConfigurationError(f"{path}: holds {_TOO_MANY}")
        waiting.extend(inside)


def _reason(error: Exception) -> str:
    """The error in one line, without the advice that Python gives to those who want longer numbers."""
    return " ".join(str(error).partition("; use sys.")[0].split())


def _check_scalar(value: object, where: str) -> None:
    if value is None or isinstance(value, float):
        return
    if isinstance(value, str):
        if not value.isprintable():
            raise ConfigurationError(f"{where}: the text {shown(value)} is no line of printable text")
    elif not isinstance(value, int):
        raise ConfigurationError(f"{where}: {shown(value)} is a {type(value).__name__}, not text, a number or a list")
    elif value.bit_length() > 63:
        raise ConfigurationError(f"{where}: {shown(value)} is too large; at most 63 are read")
