"""The control plane of one rank: one thread, a ZeroMQ ROUTER for peers that dial us, a DEALER for each that we dial.

Sockets are touched by the control thread only; any other thread hands it work with `ControlPlane.post`. A peer is known
by a text key: ``"out:<endpoint>#<n>"`` for those we dialled and ``"in:<identity>"`` for those that dialled us. Death of
a peer is seen by its connection (ZeroMQ's socket monitor and its heartbeats), not by a missing answer.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvbaton.address import Endpoint
from kvbaton.errors import AddressError, ConfigurationError
from kvbaton.protocol import MAX_FRAME_BYTES
from kvbaton.runtime.settings import Settings

logger = logging.getLogger(__name__)

FRAMES_PER_TURN = 256
"""Frames taken from one socket before timers and other sockets get their turn."""
CLOSE_LINGER_MILLISECONDS = 500
"""How long closing waits for the last frames to leave: they tell peers why their rooms failed."""
FAULT_PAUSE = 0.1
"""Seconds until timers are tried again that failed with an error of our own."""


class ControlHandler(Protocol):
    """What the control thread calls. None of it may block."""

    def on_frame(self, peer: str, frame: bytes) -> None:
        """A frame came from ``peer``."""

    def on_disconnected(self, peer: str, reason: str) -> None:
        """The connection of ``peer`` is gone; its key is never used again."""

    def on_turn(self, now: float) -> float | None:
        """Called at least once per turn of the loop; returns when it wants the next turn at the latest (seconds)."""


class _Dialled:
    """A DEALER and its monitor."""

    def __init__(self, key: str, endpoint: str, socket: zmq.Socket[bytes], connect_seconds: float) -> None:
        self.key = key
        self.endpoint = endpoint
        self.socket = socket
        self.give_up = time.monotonic() + connect_seconds
        self.monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)

    def close(self, linger_milliseconds: int) -> None:
        """Close both sockets."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_milliseconds)


class ControlPlane:
    """Carries frames between ranks and runs everything that is posted to it on one thread.

    ``bind`` is the host to listen on, or None for a rank that only dials. `endpoint` is the address to advertise.
    """

    def __init__(self, name: str, settings: Settings, *, bind: str | None, advertise: str | None = None) -> None:
        self._settings = settings
        self._context = zmq.Context(io_threads=1)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._stopping = False
        self._handler: ControlHandler | None = None
        self._numbers = itertools.count()
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._dialled: dict[str, _Dialled] = {}
        self._by_socket: dict[Any, _Dialled] = {}
        self._identity_of_descriptor: dict[int, bytes] = {}
        self._descriptor_of_identity: dict[bytes, int] = {}
        self._open_descriptors: set[int] = set()
        """Sockets of the connections that peers have open here, as the monitor tells."""
        self._leaving: dict[bytes, None] = {}
        """Peers whose connection is closed, and whose last frames are still to be read."""
        self._router: zmq.Socket[bytes] | None = None
        self._router_monitor: zmq.Socket[bytes] | None = None
        self.malformed = 0
        """Messages dropped because they were not one frame of bounded size."""
        self.faults = 0
        """Errors of our own that the loop survived; each was logged."""
        self.endpoint = ""
        if bind is not None:
            try:
                self._bind(bind, advertise or bind)
            except BaseException:
                self._release()
                raise
        self._thread = threading.Thread(target=self._run, name=f"kvbaton-control-{name}", daemon=True)

    def _bind(self, bind: str, advertise: str) -> None:
        router = self._context.socket(zmq.ROUTER)
        self._configure(router)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            router.bind(Endpoint(bind, 0).url.rpartition(":")[0] + ":*")
        except zmq.ZMQError as error:
            router.close(0)
            raise ConfigurationError(
                f"control plane: cannot bind {bind}: {error}; pass an address of this host"
            ) from None
        port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rsplit(":", 1)[1])
        self.endpoint = Endpoint(advertise, port).url
        self._router = router
        self._router_monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(self._router_monitor, zmq.POLLIN)

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        milliseconds = int(self._settings.heartbeat_seconds * 1000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.SNDHWM, self._settings.queued_frames)
        socket.setsockopt(zmq.RCVHWM, self._settings.queued_frames)
        socket.setsockopt(zmq.HEARTBEAT_IVL, milliseconds)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._settings.peer_timeout_seconds * 1000))
        socket.setsockopt(zmq.IPV6, 1)

    def start(self, handler: ControlHandler) -> None:
        """Start the control thread. ``handler`` is called on it."""
        self._handler = handler
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Run ``command`` on the control thread, after everything posted before. From any thread; never blocks."""
        self._commands.append(command)
        self.wake()

    def wake(self) -> None:
        """Give the control thread a turn. From any thread, also after `close`; cheap."""
        # The lock keeps the descriptor from being closed, and its number from being used again, in between.
        with self._wake_lock:
            if self._wake_fd < 0:
                return
            # A full counter means that a turn is due anyway.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._wake_fd, 1)

    @property
    def on_control_thread(self) -> bool:
        """Whether the caller is the control thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Stop the thread and close every socket. What was posted before still runs. Safe to call twice."""
        if self._thread.is_alive():
            self.post(self._stop)
            if not self.on_control_thread:
                self._thread.join()
        elif not self._stopping:
            self._stopping = True
            self._release()

    # Below: control thread only.

    def dial(self, endpoint: str) -> str:
        """Open a connection to a peer's control endpoint and return the peer's key. Connecting goes on meanwhile.

        Raises `AddressError` for a text that is no ``tcp://host:port``.
        """
        scheme, _, where = endpoint.partition("://")
        if scheme != "tcp" or Endpoint.parse(where).port is None:
            raise AddressError(f"control endpoint {endpoint!r} is not of the form tcp://host:port")
        key = f"out:{endpoint}#{next(self._numbers)}"
        socket = self._context.socket(zmq.DEALER)
        self._configure(socket)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        dialled = _Dialled(key, endpoint, socket, self._settings.connect_seconds)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            dialled.close(0)
            raise AddressError(f"control endpoint {endpoint!r} cannot be dialled: {error}") from None
        self._dialled[key] = dialled
        self._by_socket[socket] = dialled
        self._by_socket[dialled.monitor] = dialled
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(dialled.monitor, zmq.POLLIN)
        return key

    def send(self, peer: str, frame: bytes) -> None:
        """Queue ``frame`` for ``peer``. A peer that is gone, or that stopped reading, is reported as disconnected."""
        try:
            if peer.startswith("in:"):
                assert self._router is not None
                self._router.send_multipart([bytes.fromhex(peer[3:]), frame], zmq.NOBLOCK)
            elif peer in self._dialled:
                self._dialled[peer].socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Not from inside a handler's own send: it would re-enter its state machines.
            reason = f"cannot send to it: {error}"
            self.post(lambda: self._lost(peer, reason))

    def hang_up(self, peer: str, linger_milliseconds: int = 0) -> None:
        """Close the connection of a peer that we dialled; nothing is reported."""
        dialled = self._dialled.pop(peer, None)
        if dialled is None:
            return
        for socket in (dialled.socket, dialled.monitor):
            self._poller.unregister(socket)
            del self._by_socket[socket]
        dialled.close(linger_milliseconds)

    def _lost(self, peer: str, reason: str) -> None:
        assert self._handler is not None
        if peer.startswith("in:"):
            identity = bytes.fromhex(peer[3:])
            descriptor = self._descriptor_of_identity.pop(identity, None)
            leaving = identity in self._leaving
            self._leaving.pop(identity, None)
            if descriptor is None and not leaving:
                return
            if descriptor is not None:
                self._identity_of_descriptor.pop(descriptor, None)
        elif peer not in self._dialled:
            return
        else:
            self.hang_up(peer)
        self._handler.on_disconnected(peer, reason)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        assert self._handler is not None
        while not self._stopping:
            try:
                self._turn(self._handler)
            except Exception:
                self._fault("an event failed")
        self._release()

    def _fault(self, what: str) -> None:
        # One bad event must not end every room of the rank. Handlers contain their own errors: this is a bug.
        self.faults += 1
        logger.exception("control plane: %s; the loop goes on", what)

    def _turn(self, handler: ControlHandler) -> None:
        events = self._poller.poll(self._timeout(handler))
        self._drain_wake()
        self._run_commands()
        for socket, _ in events:
            try:
                if socket is self._router:
                    self._read_router(handler)
                elif socket is self._router_monitor:
                    self._read_router_monitor()
                elif socket in self._by_socket:
                    self._read_dialled(self._by_socket[socket], socket, handler)
            except Exception:
                self._fault("an event failed")
        if self._leaving:
            self._see_off(handler)

    def _timeout(self, handler: ControlHandler) -> int:
        """Let time pass in the handler; returns the milliseconds to its next turn."""
        try:
            deadline = handler.on_turn(time.monotonic())
        except Exception:
            self._fault("a turn failed")
            deadline = time.monotonic() + FAULT_PAUSE
        if self._commands or self._leaving:
            return 0
        timeout = 1000.0 if deadline is None else max(0.0, min(1000.0, (deadline - time.monotonic()) * 1000))
        # Rounded up: a turn just before the deadline would only be repeated.
        return int(timeout + 0.999)

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _run_commands(self) -> None:
        for _ in range(len(self._commands)):
            command = self._commands.popleft()
            try:
                command()
            except Exception:
                self._fault("a command failed")

    def _read_router(self, handler: ControlHandler, limit: int = FRAMES_PER_TURN) -> None:
        assert self._router is not None
        for _ in range(limit):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = frames[0].bytes
            if not self._is_connected(identity, int(frames[0].get(zmq.SRCFD))):
                continue
            if len(frames) != 2:
                self.malformed += 1
                continue
            handler.on_frame("in:" + identity.hex(), frames[1].bytes)

    def _is_connected(self, identity: bytes, descriptor: int) -> bool:
        """Note which connection a peer has; False for a frame of a connection whose end was reported before."""
        if identity in self._leaving or self._identity_of_descriptor.get(descriptor) == identity:
            return True
        self._read_router_monitor()
        if identity in self._leaving:
            return True
        if descriptor not in self._open_descriptors:
            return False
        before = self._identity_of_descriptor.get(descriptor)
        if before is not None:
            # Its descriptor has another owner: it ended before its first frame was read.
            self._lost("in:" + before.hex(), "its control connection closed")
        self._identity_of_descriptor[descriptor] = identity
        self._descriptor_of_identity[identity] = descriptor
        return True

    def _read_router_monitor(self) -> None:
        assert self._router_monitor is not None
        while self._router_monitor.poll(0):
            event = recv_monitor_message(self._router_monitor)
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open_descriptors.add(descriptor)
                continue
            self._open_descriptors.discard(descriptor)
            identity = self._identity_of_descriptor.pop(descriptor, None)
            if identity is not None:
                self._descriptor_of_identity.pop(identity, None)
                self._leaving[identity] = None

    def _see_off(self, handler: ControlHandler) -> None:
        """Report peers whose connection closed, after the frames that came before the end."""
        leaving = list(self._leaving)
        self._read_router(handler, self._settings.queued_frames)
        for identity in leaving:
            self._lost("in:" + identity.hex(), "its control connection closed")

    def _read_dialled(self, dialled: _Dialled, socket: Any, handler: ControlHandler) -> None:
        closed = False
        if socket is dialled.monitor:
            if recv_monitor_message(dialled.monitor)["event"] != zmq.EVENT_CONNECT_RETRIED:
                closed = True
            elif time.monotonic() > dialled.give_up:
                self._lost(dialled.key, f"nothing answers at its control endpoint {dialled.endpoint}")
                return
        # After the news of the end, so that every frame that came before it is read.
        for _ in range(self._settings.queued_frames if closed else FRAMES_PER_TURN):
            if dialled.key not in self._dialled:
                return
            try:
                frames = dialled.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) != 1:
                self.malformed += 1
                continue
            handler.on_frame(dialled.key, frames[0])
        if closed:
            # The endpoint may belong to another process from now on: a new connection needs a new handshake.
            self._lost(dialled.key, f"its control connection {dialled.endpoint} closed")

    def _release(self) -> None:
        for peer in list(self._dialled):
            self.hang_up(peer, CLOSE_LINGER_MILLISECONDS)
        if self._router is not None and self._router_monitor is not None:
            self._router.disable_monitor()
            self._router_monitor.close(0)
            self._router.close(CLOSE_LINGER_MILLISECONDS)
        self._context.term()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
        self._commands.clear()
