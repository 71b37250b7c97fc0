"""One connection of a writer: a thread that sends frames, and one that reads their acknowledgements."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Protocol

from kvbaton.copy import NATIVE, send_rows
from kvbaton.copy.movers import PackedBytes
from kvbaton.plan.boxes import Transfer
from kvbaton.transport import tcp_wire as wire
from kvbaton.transport.table import RegionTable

MORE = getattr(socket, "MSG_MORE", 0)


class Frames(Protocol):
    """Where the streams of a peer take frames from, and what they tell."""

    @property
    def over(self) -> bool:
        """Whether nothing more is to be sent, not even the rest of a frame."""

    def next_frame(self) -> tuple[int, Transfer] | None:
        """Wait for the next frame; its ticket and its bytes. None: nothing more is to be sent."""

    def frame_sent(self, ticket: int) -> None:
        """A frame of ``ticket`` was sent; its rows are not read any more."""

    def frame_acknowledged(self, ticket: int, error: str) -> None:
        """The peer has a frame of ``ticket`` in place, or refused it. Raises ``ValueError`` for one it never got."""

    def broke(self, reason: str) -> None:
        """A stream has ended; so must the others."""

    def ended(self, stream: Stream) -> None:
        """A stream leaves this process's memory alone from now on. Its last call."""


class Stream:
    """A connected socket and its two threads.

    The kernel's socket buffer is what lets packing and the wire overlap: a slab is packed while the one before it is on
    its way. A full buffer blocks the sending thread, and nothing else.
    """

    def __init__(self, sock: socket.socket, instance: str, number: int, table: RegionTable, frames: Frames) -> None:
        self._sock = sock
        self._instance = instance
        self._table = table
        self._frames = frames
        name = f"{instance}-{number}"
        self._sender = threading.Thread(target=self._send, name=f"kvbaton-tcp-send-{name}", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"kvbaton-tcp-acks-{name}", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        self._sender.start()
        self._reader.start()

    def cut_off(self) -> None:
        """Wake both threads; they end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait for the end of both threads, unless one of them asks."""
        if threading.current_thread() not in (self._sender, self._reader):
            self._reader.join()

    def _send(self) -> None:
        try:
            with self._table.movers.buffer(wire.SLAB) as slab:
                while (frame := self._frames.next_frame()) is not None:
                    ticket, transfer = frame
                    if not self._send_frame(slab, transfer, ticket):
                        break
                    self._frames.frame_sent(ticket)
            # Half of the connection stays: the peer closes the other half when it has unpacked what is on its way.
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._frames.broke(f"the connection to peer {self._instance} broke: {error}")
            self.cut_off()
        except Exception as error:  # a sender that dies would leave its tickets open for ever
            self._frames.broke(f"sending to peer {self._instance} failed: {type(error).__name__}: {error}")
            self.cut_off()

    def _send_frame(self, slab: memoryview, transfer: Transfer, ticket: int) -> bool:
        """Send a frame; False if the peer is let go of in the middle of it."""
        boxes, units, _ = transfer
        total = transfer.nbytes
        movers, bases = self._table.movers, self._table.bases
        direct = boxes.cast is None and NATIVE and movers.on_host(boxes.source) and wire.goes_direct(boxes.shape)
        step = wire.DIRECT_STEP if direct else wire.SLAB
        self._sock.sendall(wire.encode_frame(transfer, ticket, last=True), MORE)
        for begin in range(0, total, step):
            if self._frames.over:
                return False
            end = min(begin + step, total)
            if direct:
                send_rows(self._sock.fileno(), boxes.shape, boxes.source, units, bases, begin=begin, end=end)
            else:
                part = slab[: end - begin]
                movers.gather(
                    boxes.shape, boxes.source, units, bases, PackedBytes.of(part), begin=begin, cast=boxes.cast
                )
                self._sock.sendall(part)
        return True

    def _read(self) -> None:
        try:
            for ticket, refused in wire.read_acks(self._sock):
                self._frames.frame_acknowledged(ticket, refused)
        except EOFError:
            self._frames.broke(f"peer {self._instance} closed the connection")
        except (OSError, ValueError) as error:
            self._frames.broke(f"the connection to peer {self._instance} broke: {error}")
        self.cut_off()
        self._sender.join()
        self._sock.close()
        self._frames.ended(self)
