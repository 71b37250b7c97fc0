"""A connection to a peer that we dialled: a DEALER socket and its monitor."""

from __future__ import annotations

import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvbaton.address import Endpoint
from kvbaton.errors import AddressError
from kvbaton.runtime.settings import Settings
from kvbaton.runtime.sockets import FRAMES_PER_TURN, Take, configure


class Dialled:
    """Connects at once, in the background. Raises `AddressError` for a text that is no ``tcp://host:port``."""

    def __init__(self, context: zmq.Context[Any], settings: Settings, endpoint: str, key: str) -> None:
        scheme, _, where = endpoint.partition("://")
        if scheme != "tcp" or Endpoint.parse(where).port is None:
            raise AddressError(f"control endpoint {endpoint!r} is not of the form tcp://host:port")
        self.key = key
        self.socket = context.socket(zmq.DEALER)
        configure(self.socket, settings)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
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

    def read(self, socket: Any, take: Take) -> str:
        """Read ``socket``, one of the two, which is readable. Returns why the connection is lost, or an empty text."""
        disconnected = False
        if socket is self.monitor:
            if recv_monitor_message(self.monitor)["event"] != zmq.EVENT_CONNECT_RETRIED:
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
        return f"its control connection {self._endpoint} closed" if disconnected and not self._closed else ""

    def close(self, linger_milliseconds: int) -> None:
        """Close both sockets."""
        self._closed = True
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_milliseconds)
