"""What all control sockets have in common."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from kvbaton.protocol import MAX_FRAME_BYTES
from kvbaton.runtime.curve import OVERHEAD
from kvbaton.runtime.settings import Settings

FRAMES_PER_TURN = 64
"""Frames taken from one socket before timers and other sockets get their turn."""

Take = Callable[[str, list[bytes]], None]
"""Takes the frames of one message of a peer."""


def configure(socket: zmq.Socket[bytes], settings: Settings, *, encrypted: bool) -> None:
    """Bound what a socket takes and keeps, and let it find out that a peer is dead."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + (OVERHEAD if encrypted else 0))
    socket.setsockopt(zmq.SNDHWM, settings.queued_frames)
    socket.setsockopt(zmq.RCVHWM, settings.queued_frames)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(settings.heartbeat_seconds * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(settings.peer_timeout_seconds * 1000))
    socket.setsockopt(zmq.IPV6, 1)
