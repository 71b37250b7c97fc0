"""Turns parsed YAML or JSON into the structs of `kvbaton.topology.spec`, and says in one line what does not fit."""

from __future__ import annotations

import difflib
from typing import TypeVar

import msgspec

from kvbaton.errors import ConfigurationError

T = TypeVar("T", bound=msgspec.Struct)


def convert(value: object, kind: type[T], where: str) -> T:
    """``value`` as a ``kind``. ``where`` is the path that errors begin with.

    Raises `ConfigurationError` for an unknown field (with the known names), a missing one and a value of another type.
    """
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where}: {_shown(value)} is no mapping of fields: {', '.join(_names(kind))}")
    for name in value:
        if name not in _names(kind):
            close = difflib.get_close_matches(str(name), _names(kind), 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigurationError(f"{where}: unknown field {name!r}{hint} (known: {', '.join(_names(kind))})")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        inside = path.rstrip("`")
        raise ConfigurationError(f"{where}{inside}: {reason[:1].lower()}{reason[1:]}") from None


def check_names(value: object, where: str) -> None:
    """Raise `ConfigurationError` for a key, anywhere in ``value``, that is no printable text: it could not be shown."""
    waiting, seen = [value], set[int]()
    while waiting:
        entry = waiting.pop()
        # YAML may refer to one value many times, and to a value inside itself.
        if not isinstance(entry, dict | list) or id(entry) in seen:
            continue
        seen.add(id(entry))
        waiting.extend(entry.values() if isinstance(entry, dict) else entry)
        for name in entry if isinstance(entry, dict) else ():
            if not isinstance(name, str) or not name or not name.isprintable():
                raise ConfigurationError(f"{where}: the key {_shown(name)} is no name; keys are printable text")


def _names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return kind.__struct_fields__


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
