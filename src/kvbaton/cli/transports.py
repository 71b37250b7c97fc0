"""The option ``--transport`` of commands, as names of transports."""

from __future__ import annotations

from kvbaton.errors import ConfigurationError
from kvbaton.transport import AUTO, NAMES


def transport_names(text: str) -> list[str]:
    """The names in ``text``, separated by commas. Raises `ConfigurationError` unless they are known, or auto alone."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in (*NAMES, AUTO):
            raise ConfigurationError(f"--transport: there is no transport {name!r}; choose among {', '.join(NAMES)}")
    if not names or (AUTO in names and len(names) > 1):
        raise ConfigurationError(f"--transport {text!r}: name transports, or write {AUTO} alone")
    return names
