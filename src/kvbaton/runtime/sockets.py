"""What all control sockets have in common."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from kvbaton.protocol import MAX_FRAME_BYTES
from kvbaton.runtime.curve import OVERHEAD
from kvbaton.runtime.settings import Settings

FRAMES_PER_TURN = 64
"""Frames taken from one socket before timers and other sockets get their turn."""
FRAMES_AHEAD = 64
"""Frames of one peer that are taken in before they are looked at; what else it sends waits at its own side. A frame may
be large, so this bounds the memory that a stranger can fill."""
LEAST_HANDSHAKE_MILLISECONDS = 2000
"""Until then a connection must speak ZeroMQ; one that does not holds a descriptor."""

Take = Callable[[str, list[bytes]], None]
"""Takes the frames of one message of a peer."""


def configure(socket: zmq.Socket[bytes], settings: Settings, *, encrypted: bool) -> None:
    """Bound what a socket takes and keeps, and let it find out that a peer is dead."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + (OVERHEAD if encrypted else 0))
    socket.setsockopt(zmq.SNDHWM, settings.queued_frames)
    socket.setsockopt(zmq.RCVHWM, min(FRAMES_AHEAD, settings.queued_frames))
    patience = max(LEAST_HANDSHAKE_MILLISECONDS, int(settings.connect_seconds * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, patience)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(settings.heartbeat_seconds * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(settings.peer_timeout_seconds * 1000))
    socket.setsockopt(zmq.IPV6, 1)
