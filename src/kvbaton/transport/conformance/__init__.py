"""The contract of `kvbaton.transport.base` as checks that run on any transport.

    suite = Conformance(lambda instance: MyTransport(instance))
    for outcome in suite.run_all():
        print(outcome.check, outcome.status, outcome.reason)

Both ends run in this process. What only another process can show (its death) is for the author's own tests.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvbaton.transport.conformance.case import Memory, NotApplicable, PromiseBroken
from kvbaton.transport.conformance.content import ContentChecks
from kvbaton.transport.conformance.life import LifeChecks
from kvbaton.transport.conformance.load import LoadChecks

__all__ = ["Conformance", "Memory", "NotApplicable", "Outcome", "PromiseBroken"]


class Outcome(NamedTuple):
    """How one check went."""

    check: str
    status: Literal["kept", "broken", "skipped"]
    reason: str = ""


class Conformance(ContentChecks, LifeChecks, LoadChecks):
    """The checks, each a method ``check_*``.

    ``make(instance)`` makes a transport that is not registered yet. ``memory(nbytes, shared)`` makes memory that it can
    reach (host memory by default). ``replace(old, instance)`` closes ``old`` and makes another transport behind the
    same address (by default: close, then make). ``timeout`` bounds each wait, in seconds.
    """

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all checks."""
        return tuple(name.removeprefix("check_") for name in sorted(dir(cls)) if name.startswith("check_"))

    def run(self, name: str) -> None:
        """Run one check. Raises `PromiseBroken`, or `NotApplicable` with what is missing."""
        getattr(self, f"check_{name}")()

    def outcome(self, name: str) -> Outcome:
        """Run one check and say how it went; never raises for a broken promise."""
        try:
            self.run(name)
        except NotApplicable as missing:
            return Outcome(name, "skipped", str(missing))
        except Exception as error:
            return Outcome(name, "broken", f"{type(error).__name__}: {error}")
        return Outcome(name, "kept")

    def run_all(self) -> list[Outcome]:
        """Run all checks; never raises for a broken promise."""
        return [self.outcome(name) for name in self.names()]
