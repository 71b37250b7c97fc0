"""The registry's nouns and its client interface: who the prefill ranks of a deployment are, and where."""

from __future__ import annotations

import abc
from collections.abc import Collection
from typing import Annotated

import msgspec

from kvbaton.errors import AuthenticationError, RegistryError
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


class FoundRooms(msgspec.Struct, frozen=True):
    """Which data-parallel replica opened each of some rooms; a room that none has announced is absent."""

    replicas: int
    """How many data-parallel replicas the deployment has."""
    rooms: dict[int, int]
    """The dp rank by room."""


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Why a registry refused, as it is said over HTTP."""

    type: str
    message: str
    returning_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class ErrorBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of every refusal; other servers' errors have another form, and are not taken for a registry's."""

    error: Problem


class RegistryUnreachable(RegistryError):
    """Nothing listens at the registry's address."""


class RegistryRefused(RegistryError):
    """The registry answered, and the answer was no: the same call will fail again until something changes.

    ``returning_seconds``: for so long ranks may still return, by themselves, to a registry that has just started; the
    same question may then have an answer.
    """

    def __init__(self, message: str, returning_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.returning_seconds = returning_seconds


class RegistryUnauthorized(RegistryRefused, AuthenticationError):
    """The registry and this client do not share a secret, or not the time of day."""


class UnknownDeployment(RegistryRefused):
    """No rank of that deployment is registered."""


class UnknownInstance(RegistryRefused):
    """The registry does not know that rank (any more): register again."""


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
    def topology(self, deployment: str = "default", dp_rank: int | None = None) -> Topology:
        """All ranks of a deployment, or those of one data-parallel replica.

        Refused if there are none, if some of them are missing (the message names their coords), and if there is no
        replica ``dp_rank`` (the message names how many there are).
        """

    @abc.abstractmethod
    def announce_rooms(
        self, instance: str, opened: Collection[int], closed: Collection[int], ended: Collection[int] = ()
    ) -> dict[int, int]:
        """Say which rooms the replica of a rank has closed, then which it has opened since.

        ``ended`` are those that it closed before they were over: who asks for one of them is sent there for some
        seconds more, and hears why, unless it is opened again. They need not have been announced before.

        The rank is the one that speaks for its replica: that with tp, pp and cp rank 0. Rooms are forgotten with its
        registration. Both may be said again. Returns the rooms that are not taken because another replica has
        announced them, with its dp rank. Raises `UnknownInstance` for a rank that must register first, and
        `RegistryRefused` if the registry is full; what was closed counts even then.
        """

    @abc.abstractmethod
    def find_rooms(
        self, deployment: str, rooms: Collection[int], wait_seconds: float = 0.0, asker: str = ""
    ) -> FoundRooms:
        """Which replicas have announced these rooms; every room belongs to the only replica where there is one.

        If none of the rooms is known, the answer may take ``wait_seconds``, or until the first of them is announced.
        A new call of the same ``asker`` (a name of the caller's choice) ends its earlier ones at once.
        """
