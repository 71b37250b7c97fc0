"""The registry's nouns and its client interface: who the prefill ranks of a deployment are, and where."""

from __future__ import annotations

import abc

import msgspec

from kvbaton.errors import RegistryError
from kvbaton.layout.nouns import Coords, RankLayout


class Registration(msgspec.Struct, frozen=True):
    """What one prefill rank tells the registry about itself.

    ``instance`` is new at each start of the process. ``endpoint`` is the control address, as ``tcp://host:port``.
    All ranks of one ``deployment`` have the same ``model`` and the same parallel sizes.
    """

    instance: str
    endpoint: str
    layout: RankLayout
    model: str
    deployment: str = "default"

    @property
    def coords(self) -> Coords:
        """Where the rank stands in its deployment."""
        return self.layout.coords


class Topology(msgspec.Struct, frozen=True):
    """All ranks of one deployment, ordered by dp, pp, cp, tp.

    ``generation`` grows whenever a rank joins, leaves, is replaced or is forgotten.
    """

    generation: int
    ranks: tuple[Registration, ...]


class RegistryRefused(RegistryError):
    """The registry answered, and the answer was no: the same call will fail again until something changes."""


class RegistryClient(abc.ABC):
    """How a rank speaks with the registry. Every method may block for as long as the client's timeout.

    Every method raises `RegistryRefused` for a refusal and `RegistryError` if the registry cannot be reached or
    answers nonsense. All methods may be called from any thread.
    """

    @abc.abstractmethod
    def register(self, registration: Registration) -> None:
        """Put a rank into its deployment, in place of an earlier instance with the same coords."""

    @abc.abstractmethod
    def heartbeat(self, instance: str) -> bool:
        """Keep a rank alive. False: the registry does not know it (any more); register again, or stop if replaced."""

    @abc.abstractmethod
    def remove(self, instance: str) -> None:
        """Take a rank out. A rank that is not there is no error."""

    @abc.abstractmethod
    def topology(self, deployment: str = "default") -> Topology:
        """All ranks of a deployment; refused if there are none or some are missing (the message names their coords)."""
