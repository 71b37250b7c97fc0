"""Bytes in the place of a socket, for what reads from one."""

from __future__ import annotations

import socket
from typing import cast


class Stream:
    """A connection on which ``data`` came, and then its end. What is sent is dropped."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        """See `socket.socket.recv`."""
        part = bytes(self._data[self._at : self._at + nbytes])
        self._at += len(part)
        return part

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """See `socket.socket.recv_into`."""
        part = self._data[self._at : self._at + (nbytes or len(view))]
        view[: len(part)] = part
        self._at += len(part)
        return len(part)

    def settimeout(self, seconds: float | None) -> None:
        """Nothing ever waits here."""

    def sendall(self, data: bytes) -> None:
        """See `socket.socket.sendall`."""


def as_socket(data: bytes) -> socket.socket:
    """A `Stream` as what the functions that read from sockets are declared to take."""
    return cast(socket.socket, Stream(data))
