"""A connection to a peer that we dialled: a DEALER socket and its monitor."""

from __future__ import annotations

import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvbaton.errors import AddressError
from kvbaton.runtime.curve import FAILED_HANDSHAKES, Keys, refusal, secure_dialler
from kvbaton.runtime.endpoints import is_numeric
from kvbaton.runtime.settings import Settings
from kvbaton.runtime.sockets import FRAMES_PER_TURN, Take, configure


class Dialled:
    """Connects at once, in the background, by the first of ``keys`` if there are any.

    ``endpoint`` names no host but by its address, see `kvbaton.runtime.endpoints.numeric`: ZeroMQ would look names up
    in the thread in which it serves every connection. Raises `AddressError` for another one.
    """

    def __init__(
        self, context: zmq.Context[Any], settings: Settings, endpoint: str, key: str, keys: tuple[Keys, ...] = ()
    ) -> None:
        if not is_numeric(endpoint):
            raise AddressError(f"control endpoint {endpoint!r} was not looked up: it has the name of a host")
        self.key = key
        self.refused = False
        """Whether the peer does not share the secret that was tried."""
        self.socket = context.socket(zmq.DEALER)
        configure(self.socket, settings, encrypted=bool(keys))
        if keys:
            secure_dialler(self.socket, keys[0])
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED_HANDSHAKES
        )
        self._context = context
        self._settings = settings
        self._keys = keys
        self._unproven: list[bytes] | None = [] if len(keys) > 1 else None
        """What was sent before the peer has shown that it shares the secret, while another one may be tried."""
        self._greeted = False
        """Whether the handshake is over."""
        self._refusal = ""
        self._endpoint = endpoint
        self._give_up = time.monotonic() + settings.connect_seconds
        self._queued_frames = settings.queued_frames
        self._closed = False
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close(0)
            raise AddressError(f"control endpoint {endpoint!r} cannot be dialled: {error}") from None

    def send(self, frame: bytes) -> None:
        """Queue a frame. Raises `zmq.ZMQError` if the queue is full."""
        self.socket.send(frame, zmq.NOBLOCK)
        if self._unproven is not None:
            self._unproven.append(frame)

    def with_next_secret(self) -> Dialled | None:
        """A new connection by the next secret, with all that was sent; None if there is none.

        To be called once this one is closed.
        """
        if self._unproven is None:
            return None
        following = Dialled(self._context, self._settings, self._endpoint, self.key, self._keys[1:])
        for frame in self._unproven:
            following.send(frame)
        return following

    def read(self, socket: Any, take: Take) -> str:
        """Read ``socket``, one of the two, which is readable. Returns why the connection is lost, or an empty text."""
        disconnected = False
        if socket is self.monitor:
            event = recv_monitor_message(self.monitor)
            if event["event"] & FAILED_HANDSHAKES and self._greeted:
                return f"its control connection {self._endpoint} brought bytes that were changed on their way"
            if event["event"] & FAILED_HANDSHAKES:
                # What follows is the news of the end.
                self._refusal, self.refused = refusal(event["event"], event["value"], have_secret=bool(self._keys))
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._greeted, self._unproven = True, None
            elif event["event"] != zmq.EVENT_CONNECT_RETRIED:
                disconnected = True
            elif time.monotonic() > self._give_up:
                return f"nothing answers at its control endpoint {self._endpoint}"
        # After the news of the end, so that every frame that came before it is read.
        for _ in range(self._queued_frames if disconnected else FRAMES_PER_TURN):
            if self._closed:
                return ""
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            take(self.key, frames)
        # The endpoint may belong to another process from now on: a new connection needs a new handshake.
        if not disconnected or self._closed:
            return ""
        return self._refusal or f"its control connection {self._endpoint} closed"

    def close(self, linger_milliseconds: int) -> None:
        """Close both sockets."""
        self._closed = True
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_milliseconds)
