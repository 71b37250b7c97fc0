"""The loopback transport: many endpoints in one process. For tests, and for engines that share a process.

Tests of users can make it slow or broken: set ``delay`` (seconds before each write begins) or ``fail`` (gives the error
of a ticket, or an empty text) on the writer's side at any time.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable

import msgspec

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.transport.base import Capabilities
from kvbaton.transport.gate import Gate
from kvbaton.transport.mapped import MappedTransport
from kvbaton.transport.python_workers import Job, PythonWorkers
from kvbaton.transport.workers import MappedPeer

FENCE_WAIT = 1.0
"""Seconds that `fence` waits for a copy in progress before it answers False."""


class LoopbackDescriptor(msgspec.Struct, frozen=True, array_like=True, tag="loopback"):
    """Where a loopback endpoint is found."""

    hub: str
    instance: str


class Hub:
    """The endpoints that can find each other, by instance id."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._endpoints: weakref.WeakValueDictionary[str, LoopbackTransport] = weakref.WeakValueDictionary()

    def add(self, transport: LoopbackTransport) -> None:
        """Make an endpoint findable. Raises `TransportError` if its instance id is taken."""
        with self._lock:
            if transport.instance in self._endpoints:
                raise TransportError(f"instance {transport.instance} has a loopback endpoint already")
            self._endpoints[transport.instance] = transport

    def remove(self, transport: LoopbackTransport) -> None:
        """Forget an endpoint."""
        with self._lock:
            if self._endpoints.get(transport.instance) is transport:
                del self._endpoints[transport.instance]

    def find(self, instance: str) -> LoopbackTransport | None:
        """The endpoint of that instance, if there is one."""
        with self._lock:
            return self._endpoints.get(instance)


DEFAULT_HUB = Hub()
"""The hub of those that name none."""


class LoopbackPeer(MappedPeer):
    """Another endpoint of this process."""

    def __init__(self, writer: str, destination: LoopbackTransport) -> None:
        super().__init__(destination.instance, destination.table.bases, destination.table.nbytes)
        self._writer = writer
        self._gate = destination.gate
        self._refusals = destination.gate.refusals(writer)
        self._regions = destination.table.regions  # keeps the memory alive

    def enter(self) -> str:
        """As `MappedPeer.enter`."""
        if self._gate.enter(self._writer, self._refusals):
            return ""
        return f"peer {self.instance} is closed, or takes no more writes from {self._writer}"

    def leave(self) -> None:
        """As `MappedPeer.leave`."""
        self._gate.leave(self._writer)


class LoopbackTransport(MappedTransport):
    """Copies inside one process."""

    name = "loopback"
    capabilities = Capabilities(
        mapped=True, cross_host=False, memory_kinds=frozenset({"host"}), needs_shared_memory=False
    )

    def __init__(
        self,
        instance: str,
        *,
        hub: Hub | None = None,
        delay: float = 0.0,
        fail: Callable[[int], str] | None = None,
    ) -> None:
        # Its gate is Python's, and is passed with each chunk.
        self._copies = PythonWorkers("kvbaton-loopback-copy", 1, 0, self._prepare)
        super().__init__(instance, self._copies)
        self.delay = delay
        self.fail = fail
        self.gate = Gate()
        self._hub = hub or DEFAULT_HUB
        self._hub.add(self)

    def describe(self) -> bytes:
        """As `Transport.describe`."""
        return msgspec.msgpack.encode(LoopbackDescriptor(self._hub.token, self.instance))

    def _attach(self, descriptor: bytes) -> MappedPeer:
        where = _decode(descriptor)
        destination = self._hub.find(where.instance) if where.hub == self._hub.token else None
        if destination is None:
            raise TransportUnavailable(
                f"there is no loopback endpoint {where.instance} in this process; use shm or tcp between processes"
            )
        return LoopbackPeer(self.instance, destination)

    def admit(self, descriptor: bytes) -> None:
        """As `Transport.admit`."""
        instance = _decode(descriptor).instance
        if self.gate.refuses(instance):
            raise TransportError(f"instance {instance} was fenced; a new process needs a new instance id")

    def fence(self, instance: str) -> bool:
        """As `Transport.fence`."""
        self.gate.refuse(instance)
        return self.gate.wait_quiet(instance, FENCE_WAIT)

    def readmit(self, instance: str) -> None:
        """As `Transport.readmit`."""
        self.gate.readmit(instance)

    def close(self) -> None:
        """As `Transport.close`."""
        self._hub.remove(self)
        super().close()
        self.gate.shut()
        self.gate.wait_quiet(None, 60.0)

    def _prepare(self, job: Job) -> str:
        if self.delay > 0:
            self._copies.wait(job, self.delay)
        return self.fail(job.ticket) if self.fail else ""


def _decode(descriptor: bytes) -> LoopbackDescriptor:
    try:
        return msgspec.msgpack.decode(descriptor, type=LoopbackDescriptor)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"this is not a descriptor of the loopback transport: {error}") from error
