"""The transport over any fabric: packs into slabs, or writes pieces by themselves, whichever costs less.

A packed write gathers into a slab of this process, writes that slab in one piece into one that the peer granted, and
says over the side channel what lies in it; the peer checks that, puts it in place and acknowledges, which gives the
slab back. A direct write goes into the peer's rows without the peer's help, and ends with the fabric's word.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from kvbaton.address import Endpoint, advertised
from kvbaton.errors import ConfigurationError, TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.plan.boxes import Transfer
from kvbaton.transport.base import Capabilities, Completion, RemotePeer, Transport
from kvbaton.transport.dial import CONNECT_SECONDS, cut_off_after, listen, reach
from kvbaton.transport.executor import choose_for
from kvbaton.transport.fabric import side
from kvbaton.transport.fabric.area import Area, fabric_regions, numbers_of, on_host, pages
from kvbaton.transport.fabric.base import Fabric
from kvbaton.transport.fabric.direct import direct_writes
from kvbaton.transport.fabric.link import STOP_SECONDS, Link
from kvbaton.transport.fabric.loads import cut_loads, load_bytes
from kvbaton.transport.fabric.options import FabricOptions
from kvbaton.transport.fabric.outgoing import Remote
from kvbaton.transport.fabric.pump import Pump
from kvbaton.transport.fabric.receiver import FabricReceiver
from kvbaton.transport.process import ProcessKey
from kvbaton.transport.table import MAX_DESCRIPTOR, RegionTable, check_write
from kvbaton.transport.tickets import Tickets
from kvbaton.transport.wire import MAX_INSTANCE, TOKEN_BYTES, Dialect

HOST = frozenset({"host"})
REMEMBERED = 1024
"""Peers of which it is remembered what is over; an instance that does not come again needs it no more."""


class FabricTransport(Transport):
    """Writes over ``fabric``, which belongs to the transport from now on: `close` closes it.

    ``bind`` and ``advertise`` are those of the side channel, as for tcp. ``options`` are those of `FabricOptions`, as
    text; the adapter's own were given to it. ``allocate`` makes the memory of the slabs. Raises `ConfigurationError`
    for options that it does not know, `AddressError` for an address that cannot be used.
    """

    def __init__(
        self,
        instance: str,
        fabric: Fabric,
        *,
        bind: str = "127.0.0.1",
        advertise: str = "",
        options: Mapping[str, str] | None = None,
        allocate: Callable[[int], Region] = pages,
    ) -> None:
        self.options, unknown = FabricOptions.take(options or {})
        if unknown:
            raise ConfigurationError(
                f"{fabric.name} has no option {', '.join(sorted(unknown))}; known here are "
                f"{', '.join(FabricOptions._fields)}"
            )
        if not 1 <= len(instance.encode()) <= MAX_INSTANCE:
            raise ConfigurationError(f"an instance id has 1 to {MAX_INSTANCE} bytes, not {len(instance.encode())}")
        if "host" not in fabric.memory_kinds:
            raise TransportUnavailable(f"{fabric.name} does not reach host memory here, which its slabs need")
        if self.options.slab_bytes > fabric.limits.write_bytes:
            raise ConfigurationError(
                f"slab_bytes is {self.options.slab_bytes}, but {fabric.name} writes at most "
                f"{fabric.limits.write_bytes} bytes at a time"
            )
        self.name = fabric.name
        self.instance = instance
        self.fabric = fabric
        packed = self.options.executor == "packed"
        self.capabilities = Capabilities(
            mapped=False,
            cross_host=fabric.cross_host,
            memory_kinds=HOST if packed else fabric.memory_kinds,
            needs_shared_memory=False,
            one_sided=not packed,
            hardware=fabric.hardware,
            costs=fabric.costs,
            kept_sockets=fabric.kept_sockets,
        )
        address = Endpoint.parse(bind, default_port=0)
        self.host = advertised(address.host, advertise or None)
        listener = listen(address.host, address.port or 0)
        self.table = RegionTable()
        self._numbers = numbers_of(self.table.nbytes)
        self._host = on_host(())
        self._allocate = allocate
        self._area: Area | None = None
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._dialect = Dialect(fabric.name, f"KVB{fabric.name.upper():_<4.4}\n".encode(), side.VERSION)
        self._tickets = Tickets()
        self._pump = Pump(fabric, instance, self.options.staging_slabs)
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._numbers_of_connections = itertools.count()
        self._over: OrderedDict[str, deque[int]] = OrderedDict()
        """By peer: connections for which the library does nothing any more; the latest of them, and of the peers."""
        self._closed = False
        self.port: int = listener.getsockname()[1]
        self._receiver = FabricReceiver(
            listener, self._dialect, instance, self._token, fabric.revoke, self.options.quarantine_seconds
        )

    def register(self, regions: Sequence[Region]) -> None:
        """As `Transport.register`. With the executor "packed" the fabric learns of the slabs only."""
        self.table = RegionTable.of_kinds(regions, self.capabilities.memory_kinds, self.name)
        self._numbers = numbers_of(self.table.nbytes)
        self._host = on_host(region.kind for region in regions)
        self._area = Area.of(self._allocate(self.options.area_bytes), self.options)
        exposed = self.capabilities.one_sided
        self.fabric.register(fabric_regions(self._area, regions if exposed else ()))
        self._receiver.table = self.table
        self._receiver.set_up(self._area, self.fabric.describe(), exposed=exposed)

    def describe(self) -> bytes:
        """As `Transport.describe`. Raises `TransportError` if there are too many regions for a descriptor."""
        lengths = tuple(int(nbytes) for nbytes in self.table.nbytes)
        described = side.FabricDescriptor(self.name, self.instance, self.host, self.port, self._token, lengths)
        encoded = msgspec.msgpack.encode(described)
        if len(encoded) > MAX_DESCRIPTOR:
            raise TransportError(
                f"{len(lengths)} regions make a descriptor of {len(encoded)} bytes, more than {MAX_DESCRIPTOR}; "
                "register fewer, larger regions"
            )
        return encoded

    def connect(self, descriptor: bytes) -> RemotePeer:
        """As `Transport.connect`."""
        described = side.decode_descriptor(descriptor, self.name)
        if self._area is None:
            raise TransportError("nothing is registered yet; register the regions before connecting")
        limit = time.monotonic() + CONNECT_SECONDS
        where = described.host, described.port
        peer = described.instance
        sock = reach(self._dialect, *where, described.token, writer=self.instance, peer=peer, seconds=CONNECT_SECONDS)
        try:
            link = self._link(sock, described, self._area, limit)
        except BaseException:
            # The peer's slabs are free again at once.
            with contextlib.suppress(OSError):
                sock.sendall(side.FAREWELL)
            sock.close()
            raise
        with self._lock:
            if not self._closed:
                self._links.add(link)
                return link
        link.stop("the transport was closed")
        raise TransportError("the transport is closed; nothing can be connected any more")

    def _link(self, sock: socket.socket, described: side.FabricDescriptor, area: Area, limit: float) -> Link:
        """Say hello, before ``limit``, and connect the library."""
        connection = next(self._numbers_of_connections)
        over = self._over_of(described.instance)
        welcome = self._hello(sock, described.instance, connection, tuple(over), limit)
        if len(welcome.kinds) != len(described.regions):
            raise TransportError(
                f"peer {described.instance} has {len(described.regions)} regions, but told the kinds of "
                f"{len(welcome.kinds)} regions; get its new descriptor"
            )
        if self.options.executor == "direct" and not welcome.exposed:
            raise TransportUnavailable(
                f"peer {described.instance} takes packed writes only, but here executor is direct; set both to the same"
            )
        fabric_peer = self.fabric.connect(welcome.fabric, described.instance)
        nbytes = np.array(described.regions, dtype=np.int64)
        remote = Remote(
            described.instance,
            connection,
            fabric_peer,
            nbytes,
            numbers_of(nbytes),
            on_host(welcome.kinds),
            welcome.exposed,
            welcome.slabs,
            welcome.slab_bytes,
        )
        return Link(self._pump, sock, remote, area, self.table, self._tickets, over)

    def _over_of(self, instance: str) -> deque[int]:
        """Where the connections to that instance are noted that are over."""
        with self._lock:
            over = self._over.setdefault(instance, deque(maxlen=side.MAX_OVER))
            self._over.move_to_end(instance)
            if len(self._over) > REMEMBERED:
                self._over.popitem(last=False)
        return over

    def _hello(
        self, sock: socket.socket, peer: str, connection: int, over: tuple[int, ...], limit: float
    ) -> side.Welcome:
        process = None
        with contextlib.suppress(TransportUnavailable):
            process = ProcessKey.own()
        try:
            with cut_off_after(sock, max(0.0, limit - time.monotonic())):
                side.send(sock, side.Hello(self.capabilities.one_sided, process, connection, over))
                welcome = side.read(sock, side.Welcome, side.MAX_WELCOME)
        except (OSError, EOFError, ValueError) as error:
            raise TransportUnavailable(f"peer {peer} did not let this process in: {error}") from error
        if welcome.refusal:
            raise TransportUnavailable(f"peer {peer} has no room: {welcome.refusal}")
        if not welcome.slabs or not welcome.slab_bytes:
            raise TransportUnavailable(f"peer {peer} granted no slab; install the same kvbaton on both sides")
        return welcome

    def admit(self, descriptor: bytes) -> None:
        """As `Transport.admit`."""
        instance = side.decode_descriptor(descriptor, self.name).instance
        if self._receiver.gate.refuses(instance):
            raise TransportError(f"instance {instance} was fenced; a new process needs a new instance id")

    def write(self, peer: RemotePeer, transfers: Sequence[Transfer], ticket: int) -> None:
        """As `Transport.write`. Raises `TransportError` for memory that the chosen way cannot reach."""
        if not isinstance(peer, Link):
            raise TransportError(f"{peer!r} was not connected by the {self.name} transport")
        remote = peer.remote
        checked = check_write(transfers, self.table.nbytes, remote.regions, peer.instance)
        direct, packed = self._ways(remote, checked)
        slab = min(self.options.slab_bytes, remote.slab_bytes)
        loads = cut_loads(packed, load_bytes(sum(transfer.nbytes for transfer in packed), slab))
        peer.submit(ticket, direct_writes(direct, self._numbers, remote.numbers, self.fabric.limits), loads)

    def _ways(self, remote: Remote, transfers: list[Transfer]) -> tuple[list[Transfer], list[Transfer]]:
        """Those that go piece by piece, and those that go packed."""
        direct: list[Transfer] = []
        packed: list[Transfer] = []
        for transfer in transfers:
            boxes = transfer.boxes
            can_pack = self._host[boxes.source[:, 0]].all() and remote.host[boxes.destination[:, 0]].all()
            can_go_direct = self.capabilities.one_sided and remote.exposed and boxes.cast is None
            if not can_pack and not can_go_direct:
                raise TransportError(
                    f"a write to peer {remote.instance} moves device memory, which here goes piece by piece only: "
                    "both sides need the executor direct or auto, and no cast"
                )
            if can_pack and can_go_direct:
                can_go_direct = choose_for(transfer, self.capabilities, self.options.executor).name == "direct"
            (direct if can_go_direct else packed).append(transfer)
        return direct, packed

    def poll(self) -> list[Completion]:
        """As `Transport.poll`."""
        return self._tickets.drain()

    def set_waker(self, wake: Callable[[], None]) -> None:
        """As `Transport.set_waker`."""
        self._tickets.set_waker(wake)

    def disconnect(self, peer: RemotePeer) -> None:
        """As `Transport.disconnect`. Takes two seconds at most, one of which is for what is under way."""
        if isinstance(peer, Link):
            with self._lock:
                self._links.discard(peer)
            peer.stop(f"disconnected from peer {peer.instance} before the write was over")

    def fence(self, instance: str) -> bool:
        """As `Transport.fence`.

        True at once for writers that only pack. One that may write by itself is asked to stop: True when it said that
        its library has, when its process is proven dead, or when the fabric keeps it out by its own means.
        """
        return self._receiver.fence(instance)

    def readmit(self, instance: str) -> None:
        """As `Transport.readmit`."""
        self._receiver.gate.readmit(instance)

    def close(self) -> None:
        """As `Transport.close`. Lets go of all peers at a time, in two seconds at most."""
        with self._lock:
            closed, self._closed = self._closed, True
            links, self._links = list(self._links), set()
        if closed:
            return
        self._tickets.close()
        for link in links:
            link.ask_to_stop("the transport was closed before the write was over")
        limit = time.monotonic() + STOP_SECONDS
        for link in links:
            link.stop("the transport was closed before the write was over", max(0.0, limit - time.monotonic()))
        stopped = self._pump.stop(max(1.0, limit - time.monotonic()))
        self._receiver.close()
        if stopped:
            self.fabric.close()

    @property
    def counters(self) -> dict[str, int]:
        """How often the port refused something, by reason: as tcp's, and slabs."""
        return dict(self._receiver.counters)
