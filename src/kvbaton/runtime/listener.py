"""The connections of peers that dial us: a ROUTER socket, its monitor, and who is connected by which descriptor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvbaton.address import Endpoint
from kvbaton.errors import ConfigurationError
from kvbaton.runtime.settings import Settings
from kvbaton.runtime.sockets import FRAMES_PER_TURN, Take, configure

CLOSED = "its control connection closed"


class Listener:
    """Listens on a free port of ``bind``; `endpoint` says which, at the host ``advertise``.

    A peer is known by the identity that the ROUTER gave it; its key is ``"in:<identity>"``. The monitor tells of
    descriptors only, so each frame is used to learn which peer a descriptor belongs to. ``lost`` is told, once for each
    peer, that its connection is gone, after its last frame was taken.

    Raises `ConfigurationError` if the address cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        settings: Settings,
        bind: str,
        advertise: str,
        lost: Callable[[str, str], None],
    ) -> None:
        self._queued_frames = settings.queued_frames
        self._lost = lost
        self._identity_of_descriptor: dict[int, bytes] = {}
        self._descriptor_of_identity: dict[bytes, int] = {}
        self._open_descriptors: set[int] = set()
        """Sockets of the connections that peers have open here, as the monitor tells."""
        self._leaving: dict[bytes, None] = {}
        """Peers whose connection is closed, and whose last frames are still to be read."""
        self.router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        configure(self.router, settings)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.router.bind(Endpoint(bind, 0).url.rpartition(":")[0] + ":*")
        except zmq.ZMQError as error:
            self.router.close(0)
            raise ConfigurationError(
                f"control plane: cannot bind {bind}: {error}; pass an address of this host"
            ) from None
        port = int(self.router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rsplit(":", 1)[1])
        self.endpoint = Endpoint(advertise, port).url
        self.monitor = self.router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    @property
    def busy(self) -> bool:
        """Whether `see_off` has something to do."""
        return bool(self._leaving)

    def send(self, peer: str, frame: bytes) -> None:
        """Queue a frame. Raises `zmq.ZMQError` if the peer is gone or its queue is full."""
        self.router.send_multipart([_identity(peer), frame], zmq.NOBLOCK)

    def read(self, socket: Any, take: Take) -> None:
        """Read ``socket``, one of the two, which is readable."""
        if socket is self.monitor:
            self._read_monitor()
        else:
            self._read_router(take, FRAMES_PER_TURN)

    def see_off(self, take: Take) -> None:
        """Report peers whose connection closed, after the frames that came before the end."""
        leaving = list(self._leaving)
        self._read_router(take, self._queued_frames)
        for identity in leaving:
            self.give_up(_key(identity), CLOSED)

    def give_up(self, peer: str, reason: str) -> None:
        """Report a peer as lost, if it was not reported before."""
        identity = _identity(peer)
        known = identity in self._leaving or identity in self._descriptor_of_identity
        self._leaving.pop(identity, None)
        descriptor = self._descriptor_of_identity.pop(identity, None)
        if descriptor is not None:
            self._identity_of_descriptor.pop(descriptor, None)
        if known:
            self._lost(peer, reason)

    def close(self, linger_milliseconds: int) -> None:
        """Close both sockets."""
        self.router.disable_monitor()
        self.monitor.close(0)
        self.router.close(linger_milliseconds)

    def _read_router(self, take: Take, limit: int) -> None:
        for _ in range(limit):
            try:
                frames = self.router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = frames[0].bytes
            if self._is_connected(identity, int(frames[0].get(zmq.SRCFD))):
                take(_key(identity), [frame.bytes for frame in frames[1:]])

    def _is_connected(self, identity: bytes, descriptor: int) -> bool:
        """Note which connection a peer has; False for a frame of a connection whose end was reported before."""
        if identity in self._leaving or self._identity_of_descriptor.get(descriptor) == identity:
            return True
        self._read_monitor()
        if identity in self._leaving:
            return True
        if descriptor not in self._open_descriptors:
            return False
        before = self._identity_of_descriptor.get(descriptor)
        if before is not None:
            # Its descriptor has another owner: it ended before its first frame was read.
            self.give_up(_key(before), CLOSED)
        self._identity_of_descriptor[descriptor] = identity
        self._descriptor_of_identity[identity] = descriptor
        return True

    def _read_monitor(self) -> None:
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open_descriptors.add(descriptor)
                continue
            self._open_descriptors.discard(descriptor)
            identity = self._identity_of_descriptor.pop(descriptor, None)
            if identity is not None:
                self._descriptor_of_identity.pop(identity, None)
                self._leaving[identity] = None


def _key(identity: bytes) -> str:
    return "in:" + identity.hex()


def _identity(peer: str) -> bytes:
    return bytes.fromhex(peer[3:])
