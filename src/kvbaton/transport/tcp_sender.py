"""The writing end of a tcp connection: packs slabs and sends them, and reads the acknowledgements."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque

from kvbaton.copy import gather
from kvbaton.errors import TransportError
from kvbaton.plan.boxes import Int64s, Transfer
from kvbaton.transport.base import RemotePeer
from kvbaton.transport.tcp_wire import SLAB, cut, encode_frame, read_ack
from kvbaton.transport.tickets import Tickets

DRAIN_SECONDS = 1.0
"""How long a disconnect waits for the peer to take what is on its way and to close its end."""


class TcpPeer(RemotePeer):
    """A connection to a peer's memory, with a thread that sends and one that reads acknowledgements.

    The kernel's socket buffer is what lets packing and the wire overlap: a slab is packed while the one before it is on
    its way. A full buffer blocks the sending thread, and nothing else.
    """

    def __init__(self, sock: socket.socket, instance: str, nbytes: Int64s, bases: Int64s, tickets: Tickets) -> None:
        self.instance = instance
        self.nbytes = nbytes
        self._bases = bases
        self._sock = sock
        self._tickets = tickets
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, list[Transfer]]] = deque()
        self._outstanding: set[int] = set()
        self._reason = ""
        self._finished = threading.Event()
        self._sender = threading.Thread(target=self._send, name=f"kvbaton-tcp-send-{instance}", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"kvbaton-tcp-acks-{instance}", daemon=True)
        self._sender.start()
        self._reader.start()

    def submit(self, ticket: int, transfers: list[Transfer]) -> None:
        """Queue a checked write. Raises `TransportError` if the connection has ended."""
        with self._changed:
            if self._reason:
                raise TransportError(f"{self._reason}; connect again")
            self._tickets.open(ticket)
            if transfers:
                self._outstanding.add(ticket)
                self._queue.append((ticket, transfers))
                self._changed.notify_all()
                return
        self._tickets.end(ticket)

    def stop(self, reason: str) -> None:
        """End the connection and its tickets; returns when both threads have left this process's memory alone."""
        with self._changed:
            self._reason = self._reason or reason
            idle = not self._outstanding
            self._changed.notify_all()
        if idle:
            self._cut_off()
        # The peer closes its end when its last slab is unpacked: only then do the tickets end.
        if not self._finished.wait(DRAIN_SECONDS):
            self._cut_off()
        if threading.current_thread() not in (self._sender, self._reader):
            self._reader.join()

    @property
    def alive(self) -> bool:
        """Whether writes can still be submitted."""
        with self._changed:
            return not self._reason

    def _cut_off(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _next(self) -> tuple[int, list[Transfer]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._reason)
            return None if self._reason else self._queue.popleft()

    def _send(self) -> None:
        slab = memoryview(bytearray(SLAB))
        try:
            while (job := self._next()) is not None:
                ticket, transfers = job
                frames = list(cut(transfers))
                for index, transfer in enumerate(frames):
                    self._send_frame(slab, transfer, ticket, index == len(frames) - 1)
                    if self._reason:
                        break
            # Half of the connection stays: the peer closes the other half when it has unpacked what is on its way.
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._fail(f"the connection to peer {self.instance} broke: {error}")
            self._cut_off()
        except Exception as error:  # a sender that dies would leave its tickets open for ever
            self._fail(f"packing for peer {self.instance} failed: {type(error).__name__}: {error}")
            self._cut_off()

    def _send_frame(self, slab: memoryview, transfer: Transfer, ticket: int, last: bool) -> None:
        boxes, units, _ = transfer
        more = getattr(socket, "MSG_MORE", 0)
        self._sock.sendall(encode_frame(transfer, ticket, last), more)
        total = transfer.nbytes
        for begin in range(0, total, SLAB):
            if self._reason:
                return
            part = slab[: min(SLAB, total - begin)]
            gather(boxes.shape, boxes.source, units, self._bases, part, begin=begin, cast=boxes.cast)
            self._sock.sendall(part)

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._reason = self._reason or reason
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            while True:
                ticket, error = read_ack(self._sock)
                with self._changed:
                    known = ticket in self._outstanding
                    self._outstanding.discard(ticket)
                if known:
                    self._tickets.end(ticket, f"peer {self.instance} refused the write: {error}" if error else "")
        except EOFError:
            self._fail(f"peer {self.instance} closed the connection")
        except (OSError, ValueError) as error:
            self._fail(f"the connection to peer {self.instance} broke: {error}")
        self._cut_off()
        self._sender.join()
        with self._changed:
            left, self._outstanding = sorted(self._outstanding), set()
            self._queue.clear()
        for ticket in left:
            self._tickets.end(ticket, self._reason)
        self._sock.close()
        self._finished.set()


def dial(host: str, port: int, timeout: float) -> socket.socket:
    """Connect, with the deadline on the handshake that follows too. Raises ``OSError``."""
    end = time.monotonic() + timeout
    sock = socket.create_connection((host, port), timeout=timeout)
    sock.settimeout(max(0.1, end - time.monotonic()))
    return sock


def tune(sock: socket.socket) -> None:
    """Blocking, no delay for small frames, and a dead host found out within half a minute."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", 30_000),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
