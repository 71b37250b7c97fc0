"""What counts of a core's state: two states with one fingerprint behave alike from there on.

Every field of every object is looked at, those that are added later too. Left out is what decides nothing: times (the
clock of a search stands still, and a deadline is an event), the words of reasons, and counters for people.
"""

from __future__ import annotations

import enum
import types
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import is_dataclass
from typing import Any

import msgspec

from kvbaton.check.search.bounds import Bounds
from kvbaton.protocol import Deadlines
from kvbaton.protocol.failures import Failure
from kvbaton.protocol.timers import Timers

_PLAIN = (type(None), bool, int, str, bytes)
_LEFT_OUT = (float, Counter, Deadlines, Bounds, type, types.FunctionType, types.MethodType)


def fingerprint(value: object) -> Hashable:
    """A value that is equal for two objects if, and only if, nothing that counts differs between them.

    Two objects that are the same in one place and merely alike in another differ.
    """
    return _Fingerprint().of(value)


class _Fingerprint:
    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def of(self, value: Any) -> Hashable:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, _LEFT_OUT):
            return None
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, Failure):
            return "failure"
        if isinstance(value, Timers):
            return self._unordered(value._current)
        if isinstance(value, OrderedDict):
            return tuple((key, self.of(each)) for key, each in value.items())
        if isinstance(value, Mapping):
            return tuple((key, self.of(value[key])) for key in sorted(value, key=repr))
        if isinstance(value, (list, tuple)):
            return tuple(self.of(each) for each in value)
        if isinstance(value, (set, frozenset)):
            return self._unordered(value)
        return self._object(value)

    def _unordered(self, values: Any) -> Hashable:
        # Objects in sets stand in a table too, which comes first: here they are mere numbers.
        return tuple(sorted((self.of(each) for each in values), key=repr))

    def _object(self, value: Any) -> Hashable:
        if isinstance(value, msgspec.Struct):
            names: Any = value.__struct_fields__
            immutable = value.__struct_config__.frozen
        else:
            names = vars(value) if hasattr(value, "__dict__") else value.__slots__
            immutable = is_dataclass(value) and getattr(value, "__dataclass_params__").frozen  # noqa: B009
        if not immutable:
            number = self._numbers.get(id(value))
            if number is not None:
                return ("again", number)
            self._numbers[id(value)] = len(self._numbers)
        return (type(value).__name__, *((name, self.of(getattr(value, name))) for name in names))
