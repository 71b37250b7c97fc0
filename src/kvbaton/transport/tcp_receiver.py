"""The receiving end of tcp: takes frames from peers, checks them, and unpacks them into the registered regions."""

from __future__ import annotations

import socket

from kvbaton.copy import NATIVE, check_bounds, receive_rows
from kvbaton.copy.movers import PackedBytes
from kvbaton.errors import RowsError
from kvbaton.transport import tcp_wire as wire
from kvbaton.transport.inbound import Connection, Inbound
from kvbaton.transport.wire import Ack, Tables, encode_ack, read_tables, receive_into


class TcpReceiver(Inbound):
    """Puts the frames of each connection in place."""

    def __init__(self, listener: socket.socket, instance: str, token: bytes) -> None:
        super().__init__(listener, wire.TCP, instance, token)

    def _receive(self, connection: Connection) -> None:
        with self.table.movers.buffer(wire.SLAB) as slab:
            self._take_frames(connection, slab)

    def _take_frames(self, connection: Connection, slab: memoryview) -> None:
        sock = connection.sock
        error = ""
        while (frame := wire.read_frame(sock)) is not None:
            tables = read_tables(sock, frame.boxes, frame.units)
            if tables is None:
                return
            refused = self._check(frame, tables)
            error = error or refused
            if not self._take_payload(connection, frame, tables, slab, discard=bool(refused)):
                return
            if frame.last:
                sock.sendall(encode_ack(Ack(frame.ticket, error)))
                error = ""

    def _check(self, frame: wire.Frame, tables: Tables) -> str:
        """Why the frame is refused; empty if it may land. Raises ``ValueError`` if its payload has the wrong length."""
        try:
            total = check_bounds("destination", *tables, self.table.nbytes)
            self.table.movers.of(tables.destination)
        except RowsError as error:
            self._count("bounds")
            return str(error)
        if total != frame.payload:
            raise ValueError(f"the payload has {frame.payload} bytes, the boxes {total}")
        return ""

    def _take_payload(
        self, connection: Connection, frame: wire.Frame, tables: Tables, slab: memoryview, *, discard: bool
    ) -> bool:
        """Receive a payload and put it in place; False if the connection ends or the instance is fenced."""
        movers = self.table.movers
        direct = not discard and NATIVE and movers.on_host(tables.destination) and wire.goes_direct(tables.shape)
        step = wire.DIRECT_STEP if direct else wire.SLAB
        for begin in range(0, frame.payload, step):
            end = min(begin + step, frame.payload)
            part = slab[: 0 if direct else end - begin]
            if not receive_into(connection.sock, part):
                return False
            if discard:
                continue
            if not self.gate.enter(connection.instance, connection.refusals):
                return False
            try:
                if direct:
                    received = receive_rows(connection.sock.fileno(), *tables, self.table.bases, begin=begin, end=end)
                    if received < end - begin:
                        return False
                else:
                    movers.scatter(*tables, self.table.bases, PackedBytes.of(part), begin=begin)
            finally:
                self.gate.leave(connection.instance)
        return True
