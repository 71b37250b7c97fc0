"""Turns parsed YAML or JSON into the structs of `kvbaton.topology.spec`, and says in one line what does not fit."""

from __future__ import annotations

import difflib
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from kvbaton.errors import ConfigurationError
from kvbaton.topology.parse import shown

T = TypeVar("T", bound=msgspec.Struct)


def convert(value: object, kind: type[T], where: str) -> T:
    """``value`` as a ``kind``. ``where`` is the path that errors begin with.

    Raises `ConfigurationError` for an unknown field (with the known names), a missing one and a value of another type.
    """
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where}: {shown(value)} is no mapping of fields: {', '.join(_names(kind))}")
    for name in value:
        if name not in _names(kind):
            close = difflib.get_close_matches(str(name), _names(kind), 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigurationError(f"{where}: unknown field {shown(name)}{hint} (known: {', '.join(_names(kind))})")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        inside = path.rstrip("`")
        known = _choices(kind, inside) if reason.startswith("Invalid enum value") else ""
        raise ConfigurationError(f"{where}{inside}: {reason[:1].lower()}{reason[1:]}{known}") from None


def _names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return kind.__struct_fields__


def _choices(kind: type[msgspec.Struct], path: str) -> str:
    """The texts that the field at ``path`` (".order") may be, to go on with; "" where it is no choice."""
    hint = get_type_hints(kind).get(path.lstrip("."))
    found = [word for part in (hint, *get_args(hint)) if get_origin(part) is Literal for word in get_args(part)]
    return f" (known: {', '.join(found)})" if found else ""
