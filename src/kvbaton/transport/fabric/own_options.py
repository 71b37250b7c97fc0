"""The options of one adapter, read: what is not known or does not fit is refused with what would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbaton.errors import ConfigurationError


class OwnOptions:
    """Options that were ``given`` to the fabric ``name``, of those that are ``known``, with what each is for.

    Everything raises `ConfigurationError`, the constructor for an option that is not known.
    """

    def __init__(self, name: str, given: Mapping[str, str], known: Mapping[str, str]) -> None:
        unknown = sorted(given.keys() - known.keys())
        if unknown:
            listed = "; ".join(f"{option} ({text})" for option, text in known.items())
            raise ConfigurationError(f"{name} has no option {', '.join(unknown)}; it has {listed}")
        self._name = name
        self._given = given

    def one_of(self, option: str, allowed: Sequence[str], default: str) -> str:
        """A word out of those that are ``allowed``."""
        value = self._given.get(option, default)
        if value not in allowed:
            raise ConfigurationError(f"{option} is {value!r}; {self._name} takes {' or '.join(allowed)}")
        return value

    def number(self, option: str, least: int, most: int, default: int) -> int:
        """A number from ``least`` to ``most``."""
        text = self._given.get(option, str(default))
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ConfigurationError(f"{option} is {text!r}; {self._name} takes {least} to {most}")
        return int(text)

    def names(self, option: str) -> list[str]:
        """A list with commas between its items."""
        return [name.strip() for name in self._given.get(option, "").split(",") if name.strip()]
