"""A prefill rank's place in the registry: taken once, kept by heartbeats, and taken again after a restart."""

from __future__ import annotations

import logging

from kvbaton.errors import KVBatonError
from kvbaton.registry import Registration, RegistryClient, RegistryRefused
from kvbaton.runtime.interfaces import Announcements

logger = logging.getLogger(__name__)


class Membership:
    """Has no thread: who owns it calls `beat` every ``Settings.registry_heartbeat_seconds``. Every method may block."""

    def __init__(self, registry: RegistryClient, registration: Registration) -> None:
        self._registry = registry
        self._registration = registration
        self._failing = False
        self.replaced = False
        """Whether another instance had this rank's place when it was last looked at."""
        self.announcer: Announcements | None = None
        """Starts over when the registry has forgotten this rank."""

    def join(self) -> None:
        """Register. Raises `RegistryError` if that fails."""
        self._registry.register(self._registration)

    def leave(self) -> None:
        """Take the rank out, if the registry can be reached."""
        try:
            self._registry.remove(self._registration.instance)
        except KVBatonError as error:
            logger.warning("prefill: could not leave the registry: %s", error)

    def beat(self) -> None:
        """Keep the registration alive; a registry that lost it (a restart) gets it again."""
        try:
            if not self._registry.heartbeat(self._registration.instance):
                self._register_again()
            self._failing = False
        except KVBatonError as error:
            # Once for each time that it is away.
            level = logging.DEBUG if self._failing else logging.WARNING
            logger.log(level, "prefill: no heartbeat reached the registry: %s", error)
            self._failing = True

    def _register_again(self) -> None:
        """Back into a registry that lost this rank, but not into the place of one that replaced it."""
        registration = self._registration
        try:
            ranks = self._registry.topology(registration.deployment, registration.coords.dp[0]).ranks
        except RegistryRefused:
            ranks = ()
        others = [rank.instance for rank in ranks if rank.coords == registration.coords]
        if others and others != [registration.instance]:
            level = logging.DEBUG if self.replaced else logging.ERROR
            logger.log(level, "prefill: rank %s was replaced by instance %s", registration.coords, others[0])
            self.replaced = True
            return
        self.replaced = False
        logger.warning("prefill: the registry does not know this rank (any more); registering again")
        self._registry.register(registration)
        if self.announcer is not None:
            self.announcer.start_over()
