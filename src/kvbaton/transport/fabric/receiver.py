"""The receiving end of a fabric transport: grants slabs, and puts in place what was written into them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from kvbaton.copy import check_bounds
from kvbaton.errors import RowsError
from kvbaton.transport import wire
from kvbaton.transport.dial import cut_off_after
from kvbaton.transport.fabric import side
from kvbaton.transport.fabric.area import Area
from kvbaton.transport.fabric.slabs import Death, Departed, Guest, Slabs
from kvbaton.transport.inbound import FENCE_WAIT, Connection, Inbound

GOODBYE_WAIT = 0.25
"""Seconds that the first fence of an instance waits for its goodbye."""
HELLO_SECONDS = 5.0
"""How long a writer may take from its greeting until it has its welcome."""


class FabricReceiver(Inbound):
    """Serves the side channels of writers. `set_up` comes before the first of them knows where to connect.

    ``revoke`` is `Fabric.revoke`; ``quarantine_seconds`` as in `FabricOptions`. ``counters`` also counts slabs: writers
    for whom there were none.
    """

    def __init__(
        self,
        listener: socket.socket,
        dialect: wire.Dialect,
        instance: str,
        token: bytes,
        revoke: Callable[[str], bool],
        quarantine_seconds: float,
    ) -> None:
        self._area: Area | None = None
        self._described = b""
        self._exposed = False
        self._ways: tuple[int, ...] = ()
        self._slabs = Slabs(0, 1)
        self._changed = threading.Condition()
        """Guards guests and slabs; notified when a guest leaves."""
        self._guests: dict[Connection, Guest] = {}
        self._departed = Departed(quarantine_seconds)
        self._revoke = revoke
        super().__init__(listener, dialect, instance, token)

    def set_up(self, area: Area, described: bytes, ways: tuple[int, ...], *, exposed: bool) -> None:
        """Give the slabs to grant, what writers need of the fabric, and which ``ways`` lead into each region.

        ``exposed`` is whether any is exposed to the fabric.
        """
        with self._changed:
            self._area, self._described, self._ways, self._exposed = area, described, ways, exposed
            self._slabs = Slabs(area.options.slabs, area.options.slabs_per_peer)

    def fence(self, instance: str) -> bool:
        """Keep ``instance`` out; True when nothing of it is put in place any more, nor can be by its library.

        A writer that reaches regions by itself is asked to stop: its goodbye is the proof, or its death.
        """
        known = self.gate.refuses(instance)
        self.gate.refuse(instance)
        quiet = self.gate.wait_quiet(instance, FENCE_WAIT)
        # Only now does the writer learn of it: nothing of it is put in place any more.
        for connection in self.connections_of(instance):
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)
        with self._changed:
            silent = self._changed.wait_for(lambda: not self._may_write(instance), 0 if known else GOODBYE_WAIT)
        if not quiet or silent:
            return quiet
        if not self._revoke(instance):
            return False
        with self._changed:
            self._slabs.give_back(self._departed.forgive(instance))
        return True

    def close(self) -> None:
        """As `Inbound.close`."""
        super().close()
        with self._changed:
            self._departed.close()

    @property
    def free_slabs(self) -> int:
        """How many slabs can be granted now."""
        with self._changed:
            self._slabs.give_back(self._departed.settle())
            return self._slabs.free

    def _may_write(self, instance: str) -> bool:
        """Whether a library may still write into regions for that instance."""
        self._slabs.give_back(self._departed.settle())
        open_guests = (guest for guest in self._guests.values() if guest.instance == instance)
        return any(guest.direct for guest in open_guests) or self._departed.may_write(instance)

    def _receive(self, connection: Connection) -> None:
        with cut_off_after(connection.sock, HELLO_SECONDS):
            guest = self._welcome(connection, side.read(connection.sock, side.Hello, side.MAX_HELLO))
        if guest is None:
            return
        fenced = False
        while (header := side.read_header(connection.sock)) is not None:
            if header.kind == side.GOODBYE:
                guest.left = True
                return
            tables = wire.read_tables(connection.sock, header.boxes, header.units)
            if tables is None:
                return
            if fenced:
                # What still comes is read away, up to the goodbye.
                continue
            outside = self._check(guest, header, tables)
            if outside:
                connection.sock.sendall(wire.encode_ack(wire.Ack(header.ticket, outside)))
            elif not self._put_in_place(connection, header, tables):
                fenced = True
                continue
            if header.kind == side.WHOLE:
                connection.sock.sendall(wire.encode_ack(wire.Ack(header.slab)))

    def _welcome(self, connection: Connection, hello: side.Hello) -> Guest | None:
        """Grant slabs and say so. None if there are none, or if the instance was fenced meanwhile."""
        area = self._area
        if area is None:
            raise ValueError("a writer came before anything was registered")
        with self._changed:
            self._slabs.give_back(self._departed.forgive(connection.instance, hello.over))
            for guest in self._guests.values():
                guest.left |= guest.instance == connection.instance and guest.connection in hello.over
            self._slabs.give_back(self._departed.settle())
            slabs = self._slabs.grant()
            if slabs:
                direct = hello.direct and self._exposed
                guest = Guest(connection.instance, hello.connection, direct, slabs, Death(hello.process))
                self._guests[connection] = guest
            waiting = self._departed.slabs
        if not slabs:
            self._count("slabs")
            side.send(connection.sock, self._refusal(waiting))
            return None
        # Known first, asked after: a fence that comes in between finds the guest, or is found.
        if not self.gate.enter(connection.instance, connection.refusals):
            guest.left = True
            return None
        try:
            welcome = side.Welcome(self._described, self._exposed, area.options.slab_bytes, slabs, self._ways)
            side.send(connection.sock, welcome)
        finally:
            self.gate.leave(connection.instance)
        return guest

    def _refusal(self, waiting: int) -> side.Welcome:
        why = f"all {self._slabs.count} slabs are granted to other connections"
        if waiting:
            why += f", {waiting} of them to writers that went without a word and may still write"
        return side.Welcome(b"", False, 0, (), (), f"{why}; set the option slabs of its transport higher")

    def _over(self, connection: Connection) -> None:
        with self._changed:
            guest = self._guests.pop(connection, None)
            if guest is None:
                return
            if guest.left:
                self._slabs.give_back(guest.slabs)
                guest.death.close()
            else:
                self._departed.add(guest)
            self._changed.notify_all()

    def _check(self, guest: Guest, header: side.Header, tables: wire.Tables) -> str:
        """Why a frame is refused; empty if it may land. Raises ``ValueError`` if it lies about its slab."""
        area = self._area
        if area is None or header.slab not in guest.slabs:
            raise ValueError(f"slab {header.slab} was not granted to this connection")
        if header.offset + header.payload > area.options.slab_bytes:
            raise ValueError(f"{header.payload} bytes from {header.offset} are more than a slab has")
        try:
            total = check_bounds("destination", *tables, self.table.nbytes)
            self.table.movers.of(tables.destination)
        except RowsError as error:
            self._count("bounds")
            return str(error)
        if header.begin + header.payload > total:
            raise ValueError(f"the payload ends at byte {header.begin + header.payload} of {total}")
        return ""

    def _put_in_place(self, connection: Connection, header: side.Header, tables: wire.Tables) -> bool:
        """Spread a payload over the rows; False if the instance is fenced."""
        area = self._area
        assert area is not None
        if not self.gate.enter(connection.instance, connection.refusals):
            return False
        try:
            begin = area.landing(header.slab) + header.offset
            packed = area.packed(begin, header.payload)
            self.table.movers.scatter(*tables, self.table.bases, packed, begin=header.begin)
        finally:
            self.gate.leave(connection.instance)
        return True
