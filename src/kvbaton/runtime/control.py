"""The control plane of one rank: one thread that carries frames between ranks, and runs what is posted to it.

Sockets are touched by the control thread only; any other thread hands it work with `ControlPlane.post`. A peer is known
by a text key: ``"out:<endpoint>#<n>"`` for those we dialled (`Dialled`) and ``"in:<identity>"`` for those that dialled
us (`Listener`). Death of a peer is seen by its connection (ZeroMQ's socket monitor and its heartbeats), not by a
missing answer.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from kvbaton.runtime.curve import Keys
from kvbaton.runtime.dialled import Dialled
from kvbaton.runtime.interfaces import ControlHandler
from kvbaton.runtime.listener import Listener
from kvbaton.runtime.settings import Settings
from kvbaton.runtime.wake import Wake

logger = logging.getLogger(__name__)

CLOSE_LINGER_MILLISECONDS = 500
"""How long closing waits for the last frames to leave: they tell peers why their rooms failed."""
COMMANDS_PER_TURN = 16
"""Posted commands that run before frames and finished writes get their turn."""
FAULT_PAUSE = 0.1
"""Seconds until timers are tried again that failed with an error of our own."""


class ControlPlane:
    """Carries frames between ranks and runs everything that is posted to it on one thread.

    ``bind`` is the host to listen on, or None for a rank that only dials. `endpoint` is the address to advertise. With
    ``keys`` (see `kvbaton.runtime.curve`) only peers that have one of these secrets are spoken with: the first is used,
    and the others are tried where it is refused.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        *,
        bind: str | None,
        advertise: str | None = None,
        keys: tuple[Keys, ...] = (),
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._context = zmq.Context(io_threads=1)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = Wake()
        self._stopping = False
        self._handler: ControlHandler | None = None
        self._numbers = itertools.count()
        self._poller = zmq.Poller()
        self._poller.register(self._wake.descriptor, zmq.POLLIN)
        self._dialled: dict[str, Dialled] = {}
        self._by_socket: dict[Any, Dialled | Listener] = {}
        self._listener: Listener | None = None
        self.malformed = 0
        """Messages dropped because they were not one frame of bounded size."""
        self.faults = 0
        """Errors of our own that the loop survived; each was logged."""
        if bind is not None:
            try:
                self._listener = Listener(self._context, settings, bind, advertise or bind, keys, self._tell_lost)
            except BaseException:
                self._release()
                raise
            self._watch(self._listener, *self._listener.sockets)
        self._thread = threading.Thread(target=self._run, name=f"kvbaton-control-{name}", daemon=True)

    @property
    def endpoint(self) -> str:
        """Where peers can dial us, as ``tcp://host:port``; empty for a rank that only dials."""
        return self._listener.endpoint if self._listener is not None else ""

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
        self._wake.set()

    @property
    def waker(self) -> Wake:
        """What transports wake the control thread by."""
        return self._wake

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
        key = f"out:{endpoint}#{next(self._numbers)}"
        self._begin(Dialled(self._context, self._settings, endpoint, key, self._keys))
        return key

    def send(self, peer: str, frame: bytes) -> None:
        """Queue ``frame`` for ``peer``. A peer that is gone, or that stopped reading, is reported as disconnected."""
        try:
            if peer.startswith("in:"):
                assert self._listener is not None
                self._listener.send(peer, frame)
            elif peer in self._dialled:
                self._dialled[peer].send(frame)
        except zmq.ZMQError as error:
            # Not from inside a handler's own send: it would re-enter its state machines.
            reason = f"cannot send to it: {error}"
            self.post(lambda: self._lost(peer, reason))

    def hang_up(self, peer: str, linger_milliseconds: int = 0) -> None:
        """Close the connection of a peer that we dialled; nothing is reported."""
        dialled = self._dialled.pop(peer, None)
        if dialled is not None:
            self._end(dialled, linger_milliseconds)

    def _begin(self, dialled: Dialled) -> None:
        self._dialled[dialled.key] = dialled
        self._watch(dialled, dialled.socket, dialled.monitor)

    def _end(self, dialled: Dialled, linger_milliseconds: int) -> None:
        for socket in (dialled.socket, dialled.monitor):
            self._poller.unregister(socket)
            del self._by_socket[socket]
        dialled.close(linger_milliseconds)

    def _watch(self, owner: Dialled | Listener, *sockets: Any) -> None:
        for socket in sockets:
            self._by_socket[socket] = owner
            self._poller.register(socket, zmq.POLLIN)

    def _take(self, peer: str, frames: list[bytes]) -> None:
        assert self._handler is not None
        if len(frames) == 1:
            self._handler.on_frame(peer, frames[0])
        else:
            self.malformed += 1

    def _lost(self, peer: str, reason: str) -> None:
        """A peer is gone: close what is left of its connection, and tell the handler if it was not told before."""
        if peer in self._dialled:
            self.hang_up(peer)
            self._tell_lost(peer, reason)
        elif self._listener is not None and peer.startswith("in:"):
            self._listener.give_up(peer, reason)

    def _refused(self, dialled: Dialled, reason: str) -> None:
        """A peer does not share the secret that was tried: try the next one, or give it up."""
        assert self._handler is not None
        self.hang_up(dialled.key)
        following = dialled.with_next_secret()
        if following is not None:
            self._begin(following)
        else:
            self._handler.on_refused(dialled.key, reason)

    def _tell_lost(self, peer: str, reason: str) -> None:
        assert self._handler is not None
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
        self._wake.clear()
        self._run_commands()
        for socket, _ in events:
            try:
                self._read(socket)
            except Exception:
                self._fault("an event failed")
        if self._listener is not None:
            self._listener.on_turn(time.monotonic())
            if self._listener.busy:
                self._listener.see_off(self._take)

    def _timeout(self, handler: ControlHandler) -> int:
        """Let time pass in the handler; returns the milliseconds to its next turn."""
        try:
            deadline = handler.on_turn(time.monotonic())
        except Exception:
            self._fault("a turn failed")
            deadline = time.monotonic() + FAULT_PAUSE
        if self._commands or (self._listener is not None and self._listener.busy):
            return 0
        timeout = 1000.0 if deadline is None else max(0.0, min(1000.0, (deadline - time.monotonic()) * 1000))
        # Rounded up: a turn just before the deadline would only be repeated.
        return int(timeout + 0.999)

    def _run_commands(self) -> None:
        for _ in range(min(len(self._commands), COMMANDS_PER_TURN)):
            command = self._commands.popleft()
            try:
                command()
            except Exception:
                self._fault("a command failed")

    def _read(self, socket: Any) -> None:
        # None: it was hung up since the poll, or it is the wake.
        owner = self._by_socket.get(socket)
        if isinstance(owner, Listener):
            owner.read(socket, self._take)
        elif owner is not None:
            reason = owner.read(socket, self._take)
            if reason and owner.refused:
                self._refused(owner, reason)
            elif reason:
                self._lost(owner.key, reason)

    def _release(self) -> None:
        for peer in list(self._dialled):
            self.hang_up(peer, CLOSE_LINGER_MILLISECONDS)
        if self._listener is not None:
            self._listener.close(CLOSE_LINGER_MILLISECONDS)
        self._context.term()
        self._wake.close()
        self._commands.clear()
