"""The connections of peers that dial us: a ROUTER socket, its monitor, and who is connected by which descriptor."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvbaton.address import Endpoint
from kvbaton.errors import AddressError, ConfigurationError
from kvbaton.runtime.curve import FAILED_HANDSHAKES, Doorkeeper, Keys, breach
from kvbaton.runtime.door import Door
from kvbaton.runtime.settings import Settings
from kvbaton.runtime.sockets import FRAMES_PER_TURN, Take, configure

logger = logging.getLogger(__name__)

CLOSED = "its control connection closed"


class Listener:
    """Listens on a free port of ``bind``; `endpoint` says which, at the host ``advertise``.

    A peer is known by the identity that the ROUTER gave it; its key is ``"in:<identity>"``. The monitor tells of
    descriptors only, so each frame is used to learn which peer a descriptor belongs to. ``lost`` is told, once for each
    peer, that its connection is gone, after its last frame was taken. With ``keys`` only those come in who have one of
    these secrets; `refused` counts the others, by reason.

    Raises `ConfigurationError` if the address cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        settings: Settings,
        bind: str,
        advertise: str,
        keys: tuple[Keys, ...],
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
        configure(self.router, settings, encrypted=bool(keys))
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.refused: Counter[str] = Counter()
        self._doorkeeper = Doorkeeper(context, self.router, keys) if keys else None
        try:
            self._door = Door(self.router, bind)
        except (zmq.ZMQError, AddressError) as error:
            self.router.close(0)
            if self._doorkeeper is not None:
                self._doorkeeper.close()
            raise ConfigurationError(
                f"control plane: cannot bind {bind}: {error}; pass an address of this host"
            ) from None
        self.endpoint = Endpoint(advertise, self._door.port).url
        self.monitor = self.router.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPT_FAILED | FAILED_HANDSHAKES
        )

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """What is to be polled, and then given to `read`."""
        door = () if self._doorkeeper is None else (self._doorkeeper.socket,)
        return (self.router, self.monitor, *door)

    @property
    def busy(self) -> bool:
        """Whether `see_off` has something to do."""
        return bool(self._leaving)

    def on_turn(self, now: float) -> None:
        """To be called at least once a second."""
        self._door.on_turn(now)

    def send(self, peer: str, frame: bytes) -> None:
        """Queue a frame. Raises `zmq.ZMQError` if the peer is gone or its queue is full."""
        self.router.send_multipart([_identity(peer), frame], zmq.NOBLOCK)

    def read(self, socket: Any, take: Take) -> None:
        """Read ``socket``, one of `sockets`, which is readable."""
        if socket is self.monitor:
            self._read_monitor()
        elif self._doorkeeper is not None and socket is self._doorkeeper.socket:
            self._doorkeeper.answer()
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
        """Close all sockets."""
        self.router.disable_monitor()
        self.monitor.close(0)
        self.router.close(linger_milliseconds)
        self._door.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()

    def _read_router(self, take: Take, limit: int) -> None:
        for _ in range(limit):
            try:
                frames = self.router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = frames[0].bytes
            if self._is_connected(identity, _descriptor(frames[0])):
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
            if event["event"] & FAILED_HANDSHAKES:
                self._count_refusal(breach(event["event"], event["value"], have_secret=self._doorkeeper is not None))
                continue
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPT_FAILED:
                self._door.shut(time.monotonic())
                continue
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open_descriptors.add(descriptor)
                continue
            self._open_descriptors.discard(descriptor)
            identity = self._identity_of_descriptor.pop(descriptor, None)
            if identity is not None:
                self._descriptor_of_identity.pop(identity, None)
                self._leaving[identity] = None

    def _count_refusal(self, reason: str) -> None:
        self.refused[reason] += 1
        # The first of each kind is worth a line; strangers could fill the log with the rest.
        level = logging.WARNING if self.refused[reason] == 1 else logging.DEBUG
        logger.log(level, "control plane: somebody at %s was not let in: %s", self.endpoint, reason)


def _descriptor(frame: zmq.Frame) -> int:
    """The descriptor of the connection that a frame came on; -1 where ZeroMQ knows none (odd bytes from a stranger)."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _key(identity: bytes) -> str:
    return "in:" + identity.hex()


def _identity(peer: str) -> bytes:
    return bytes.fromhex(peer[3:])
