"""The writing end of tcp: a peer's connections, and the tickets that go over them frame by frame."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Sequence

from kvbaton.errors import TransportError
from kvbaton.plan.boxes import Int64s, Transfer
from kvbaton.transport import tcp_wire as wire
from kvbaton.transport.base import RemotePeer
from kvbaton.transport.table import RegionTable
from kvbaton.transport.tcp_stream import Stream
from kvbaton.transport.tickets import Tickets
from kvbaton.transport.wire import cut

DRAIN_SECONDS = 1.0
"""How long a disconnect waits for the peer to take what is on its way and to close its end."""


class Write:
    """One ticket: the frames that are left to hand out, and how many of the others are not over yet."""

    def __init__(self, transfers: Sequence[Transfer], streams: int) -> None:
        self.nbytes = sum(transfer.nbytes for transfer in transfers)
        share = self.nbytes // (2 * streams)
        self._frames = cut(transfers, max(wire.LEAST_FRAME, min(wire.FRAME_BYTES, share)))
        self._next = next(self._frames, None)
        self.error = ""
        self.sending = 0
        self.unacknowledged = 0

    @property
    def handed_out(self) -> bool:
        """Whether no frame is left to hand out."""
        return self._next is None

    @property
    def over(self) -> bool:
        """Whether every frame was sent and acknowledged."""
        return self.handed_out and not self.sending and not self.unacknowledged

    def next_frame(self) -> Transfer:
        """The next frame; there must be one."""
        frame = self._next
        if frame is None:
            raise RuntimeError("every frame of this write was handed out")
        self._next = next(self._frames, None)
        self.sending += 1
        self.unacknowledged += 1
        return frame


class TcpPeer(RemotePeer):
    """A peer's memory behind one or several connections; each takes the next frame when it has sent the one before.

    Tickets begin in the order of their writes. One connection that ends takes the others with it.
    """

    def __init__(
        self, socks: Sequence[socket.socket], instance: str, nbytes: Int64s, table: RegionTable, tickets: Tickets
    ) -> None:
        self.instance = instance
        self.nbytes = nbytes
        self._tickets = tickets
        self._changed = threading.Condition()
        """A write was queued, or all is over. Only sending threads wait for it."""
        self._queue: deque[tuple[int, Write]] = deque()
        self._outstanding: dict[int, Write] = {}
        self._reason = ""
        self._finished = threading.Event()
        self._streams = [Stream(sock, instance, number, table, self) for number, sock in enumerate(socks)]
        self._running = set(self._streams)
        for stream in self._streams:
            stream.start()

    def submit(self, ticket: int, transfers: list[Transfer]) -> None:
        """Queue a checked write. Raises `TransportError` if the connection has ended."""
        write = Write(transfers, len(self._streams))
        with self._changed:
            if self._reason:
                raise TransportError(f"{self._reason}; connect again")
            self._tickets.open(ticket)
            if not write.handed_out:
                self._outstanding[ticket] = write
                self._queue.append((ticket, write))
                self._changed.notify(1 + write.nbytes // wire.FRAME_BYTES)
                return
        self._tickets.end(ticket)

    def stop(self, reason: str) -> None:
        """End the connections and the tickets; returns when all threads have left this process's memory alone."""
        with self._changed:
            self._reason = self._reason or reason
            idle = not self._outstanding
            self._changed.notify_all()
        if idle:
            self._cut_off()
        # The peer closes its end when its last slab is unpacked: only then do the tickets end.
        if not self._finished.wait(DRAIN_SECONDS):
            self._cut_off()
        for stream in self._streams:
            stream.join()

    @property
    def alive(self) -> bool:
        """Whether writes can still be submitted."""
        return not self.over

    @property
    def over(self) -> bool:
        """As `Frames.over`."""
        with self._changed:
            return bool(self._reason)

    def next_frame(self) -> tuple[int, Transfer] | None:
        """As `Frames.next_frame`."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._reason)
            if self._reason:
                return None
            ticket, write = self._queue[0]
            frame = write.next_frame()
            if write.handed_out:
                self._queue.popleft()
            return ticket, frame

    def frame_sent(self, ticket: int) -> None:
        """As `Frames.frame_sent`."""
        with self._changed:
            write = self._outstanding[ticket]
            write.sending -= 1
        self._end_if_over(ticket, write)

    def frame_acknowledged(self, ticket: int, error: str) -> None:
        """As `Frames.frame_acknowledged`."""
        with self._changed:
            write = self._outstanding.get(ticket)
            if write is None or not write.unacknowledged:
                raise ValueError(f"an acknowledgement of ticket {ticket}, of which nothing was sent")
            write.unacknowledged -= 1
            write.error = write.error or error
        self._end_if_over(ticket, write)

    def broke(self, reason: str) -> None:
        """As `Frames.broke`."""
        with self._changed:
            self._reason = self._reason or reason
            self._changed.notify_all()

    def ended(self, stream: Stream) -> None:
        """As `Frames.ended`."""
        with self._changed:
            self._running.discard(stream)
            last = not self._running
        if not last:
            # The others end by themselves when the peer has unpacked what is on its way.
            if not self._finished.wait(DRAIN_SECONDS):
                self._cut_off()
            return
        with self._changed:
            left, self._outstanding = sorted(self._outstanding), {}
            self._queue.clear()
        self._finished.set()
        for ticket in left:
            self._tickets.end(ticket, self._reason)

    def _cut_off(self) -> None:
        for stream in self._streams:
            stream.cut_off()

    def _end_if_over(self, ticket: int, write: Write) -> None:
        with self._changed:
            if not write.over or self._outstanding.pop(ticket, None) is None:
                return
        self._tickets.end(ticket, f"peer {self.instance} refused the write: {write.error}" if write.error else "")
