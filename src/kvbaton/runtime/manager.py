"""The manager of one rank: registers its memory, owns its threads and sockets, and makes senders and receivers."""

from __future__ import annotations

import logging
import math
import operator
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Literal, Union

from kvbaton.address import advertised
from kvbaton.errors import ConfigurationError, KVBatonError, RoomError
from kvbaton.layout import RankLayout, check_layout
from kvbaton.memory import Region
from kvbaton.observe.base import Figures, ObservedRank, Observer
from kvbaton.observe.environment import observers_of_environment
from kvbaton.observe.log import FailureLog
from kvbaton.protocol.messages import MAX_AUX_BYTES, MAX_RANKS
from kvbaton.registry import HttpRegistry, Registration, RegistryClient
from kvbaton.runtime.announcer import Announcer, AnnouncerThread
from kvbaton.runtime.context import Context
from kvbaton.runtime.control import ControlPlane
from kvbaton.runtime.curve import keys_of
from kvbaton.runtime.decode import DecodeSide
from kvbaton.runtime.destinations import AT_ONCE
from kvbaton.runtime.digests import check_memory
from kvbaton.runtime.membership import Membership
from kvbaton.runtime.observation import Observation
from kvbaton.runtime.outbox import Outbox
from kvbaton.runtime.prefill import PrefillSide
from kvbaton.runtime.reach import PeerRank
from kvbaton.runtime.rooms import Receiver, Sender
from kvbaton.runtime.settings import Settings
from kvbaton.runtime.threads import Threads
from kvbaton.runtime.transports import instance_of, make_transports
from kvbaton.secret import Secret, SecretLike, check_exposure
from kvbaton.transport import Transport

logger = logging.getLogger(__name__)

MAX_ROOM = (1 << 63) - 1
MAX_MODEL_CHARACTERS = 512

Role = Literal["prefill", "decode"]


class Manager:
    """One rank of an engine, as kvbaton sees it. Make one for each process that holds a part of the cache.

    ``layout`` describes the rank's memory and ``regions`` is that memory; ``Tensor.region`` counts in it. ``role`` says
    which side the rank is. ``registry`` is where prefill ranks register themselves, and where decode ranks find them
    unless `receiver` names another: a url, a `RegistryClient`, or None for a decode rank that always names one.
    ``model`` must be the same text on both sides. ``transports`` are names or ready `Transport` objects, in order of
    preference; the prefill side chooses. "auto" is every transport that works here, the best first: those that address
    the peer's memory, then those of network cards, then sockets. ``transport_options`` are options of transports given
    by name, as text: ``{"nixl": {"executor": "packed"}}``. ``bind`` is the host to listen on, and ``advertise`` the
    host that peers are told (needed when ``bind`` is a wildcard). ``destination_index`` of ``destinations`` says which
    of the decode ranks that serve one room together this one is; by default what its coords say: all of tp, pp and cp
    serve it together. ``secret`` is what all ranks and the registry share, 16 bytes or more; by default what
    ``KVBATON_SECRET`` or the file ``KVBATON_SECRET_FILE`` say. Without one ``bind`` and ``advertise`` must be loopback
    addresses (docs/security.md). ``observers`` hear what happens (`kvbaton.observe`); failed rooms are logged in any
    case.

    Raises `LayoutError` if the layout does not hold together, `ConfigurationError` for arguments that do not fit,
    `TransportUnavailable` if none of the transports can reach this memory, and `RegistryError` if a prefill rank
    cannot be registered. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        layout: RankLayout,
        regions: Sequence[Region],
        *,
        role: Role,
        registry: Union[RegistryClient, str, None] = None,  # noqa: UP007
        model: str = "",
        deployment: str = "default",
        transports: Union[str, Sequence[Union[str, Transport]]] = ("shm", "tcp"),  # noqa: UP007
        transport_options: Mapping[str, Mapping[str, str]] | None = None,
        bind: str = "127.0.0.1",
        advertise: str | None = None,
        destination_index: int | None = None,
        destinations: int | None = None,
        secret: SecretLike | None = None,
        settings: Settings | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        if role not in ("prefill", "decode"):
            raise ConfigurationError(f"role {role!r} is neither 'prefill' nor 'decode'")
        if role == "prefill" and registry is None:
            raise ConfigurationError("a prefill rank needs a registry to be found by decode ranks: pass registry=")
        if settings is not None and not isinstance(settings, Settings):
            raise ConfigurationError(f"settings is of type {type(settings).__name__}; pass a kvbaton.Settings(...)")
        _check_regions(regions)
        check_layout(layout, [region.nbytes for region in regions])
        if (destination_index is None) != (destinations is None):
            raise ConfigurationError("pass destination_index and destinations together, or neither of them")
        index = layout.coords.number if destination_index is None else destination_index
        count = layout.coords.ranks if destinations is None else destinations
        _check_limits(layout, model, index, count)
        settings = settings or Settings()
        if settings.digest and role == "decode":
            check_memory(regions)
        if isinstance(transports, str):
            transports = [transports]
        self.layout = layout
        self.role: Role = role
        self.instance = instance_of(transports)
        """Names this life of the rank: a restarted rank has another."""
        host = advertised(bind, advertise)
        self._secret = Secret.of(secret)
        check_exposure(role, (bind, host), self._secret, insecure=settings.insecure)
        keys = keys_of(self._secret)
        rank = ObservedRank(
            role,
            self.instance,
            layout.coords,
            frozenset(component.name for component in layout.components),
            time.time() - time.monotonic(),
            self._figures,
        )
        observation = Observation(rank, (FailureLog(), *observers, *observers_of_environment()), time.monotonic)
        self._closed = threading.Event()
        self._registry = HttpRegistry(registry, secret=self._secret) if isinstance(registry, str) else registry
        self._registry_name = registry if isinstance(registry, str) else "the given registry"
        self._clients: dict[str, RegistryClient] = {}
        self._transports, left_out = make_transports(
            transports, transport_options or {}, self.instance, regions, bind, host
        )
        try:
            listens = bind if role == "prefill" else None
            self._control = ControlPlane(role, settings, bind=listens, advertise=host, keys=keys)
        except BaseException:
            for transport in self._transports.values():
                transport.close()
            raise
        for transport in self._transports.values():
            transport.set_waker(self._control.waker)
        self._threads = Threads()
        self._context = Context(
            instance=self.instance,
            model=model,
            layout=layout,
            regions=tuple(regions),
            transports=self._transports,
            left_out=left_out,
            control=self._control,
            outbox=Outbox(self._control.send),
            settings=settings,
            executor=ThreadPoolExecutor(max_workers=AT_ONCE + 4, thread_name_prefix=f"kvbaton-{role}-handshake"),
            threads=self._threads,
            clock=time.monotonic,
            observation=observation,
        )
        self.side: PrefillSide | DecodeSide
        if role == "prefill":
            self.side = PrefillSide(self._context)
        else:
            self.side = DecodeSide(self._context, deployment, index, count)
        observation.started()
        self._control.start(self.side)
        self._membership: Membership | None = None
        self._heartbeat: threading.Thread | None = None
        self._announcer: AnnouncerThread | None = None
        self._beat_now = threading.Event()
        if role == "prefill" and self._registry is not None:
            membership = Membership(
                self._registry, Registration(self.instance, self._control.endpoint, layout, model, deployment)
            )
            try:
                membership.join()
            except KVBatonError:
                self.close()
                raise
            if isinstance(self.side, PrefillSide) and _speaks_for_its_replica(layout):
                announcer = Announcer(
                    self._registry,
                    self.instance,
                    settings,
                    refused=self.side.room_refused,
                    unknown=self._beat_now.set,
                    clock=self._context.now,
                )
                self._announcer = AnnouncerThread(announcer, settings.announce_seconds)
                self.side.announcer = membership.announcer = announcer
            self._membership = membership
            self._heartbeat = threading.Thread(target=self._beat, name="kvbaton-registry-heartbeat", daemon=True)
            self._heartbeat.start()

    @property
    def endpoint(self) -> str:
        """The control address of a prefill rank, as ``tcp://host:port``; empty on a decode rank."""
        return self._control.endpoint

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports in use, in order of preference."""
        return tuple(self._transports)

    @property
    def left_out(self) -> Mapping[str, str]:
        """Transports that are not used because this machine or this memory lacks what they need: why, by name."""
        return self._context.left_out

    @property
    def faults(self) -> int:
        """Errors of kvbaton's own that the control thread survived; each was logged. Always 0, if all is well."""
        return self._control.faults

    @property
    def peers(self) -> tuple[PeerRank, ...]:
        """The ranks of the other side that passed the handshake: by which transport each is reached, and why.

        On a decode rank they are there from the first room that names them.
        """
        return self.side.peers()

    def sender(self, room: int) -> Sender:
        """The sender of a room, on a prefill rank. Offers that came before are waiting for it.

        Raises `RoomError` if the room is in use, or if this is a decode rank.
        """
        room = _checked_room(room)
        if not isinstance(self.side, PrefillSide):
            raise RoomError(f"decode: room {room}: a decode rank has no senders; use receiver()")
        self._check_open()
        return self.side.open_room(room)

    def receiver(
        self, room: int, source: str | None = None, dp_rank: int | None = None, digest: bool | None = None
    ) -> Receiver:
        """The receiver of a room, on a decode rank. Starts to find the prefill ranks at once.

        ``source`` is the url of the registry of the prefill side (the manager's own by default). ``dp_rank`` says which
        data-parallel replica of the prefill side serves the room; the room fails if there is none of that rank. With
        None the registry is asked which replica opened it, until ``Deadlines.offer_wait``. ``digest`` says whether what
        came is compared with what was sent before the room succeeds (None: as ``Settings.digest`` says).
        Raises `RoomError` if the room is in use, or if this is a prefill rank, and `ConfigurationError`
        without a source, for a ``dp_rank`` that no replica can have, or for digests of a device's memory.
        """
        room = _checked_room(room)
        if not isinstance(self.side, DecodeSide):
            raise RoomError(f"prefill: room {room}: a prefill rank has no receivers; use sender()")
        self._check_open()
        dp_rank = _checked_dp_rank(room, dp_rank)
        if source is None:
            if self._registry is None:
                raise ConfigurationError(f"decode: room {room}: pass source=, the url of the prefill side's registry")
            return self.side.open_room(room, self._registry_name, self._registry, dp_rank, digest)
        client = self._clients.get(source)
        if client is None:
            client = self._clients.setdefault(source, HttpRegistry(source, secret=self._secret))
        return self.side.open_room(room, source, client, dp_rank, digest)

    def close(self) -> None:
        """Fail every room, tell the peers, leave the registry, and end all threads. Safe to call twice.

        Waits up to ``Settings.close_seconds`` for writes that are under way. Afterwards `rows_released` of each room
        says whether its rows are free; those that a live peer may still write over shared memory never are.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._beat_now.set()
        self.side.shut_down()
        # Writes that are under way end, and peers confirm that theirs have: only then are rows free, here and there.
        give_up = time.monotonic() + self._context.settings.close_seconds
        while not self.side.rooms.quiet() and time.monotonic() < give_up:
            time.sleep(0.001)
        if self._announcer is not None:
            self._announcer.stop()
        if self._heartbeat is not None and self._membership is not None:
            self._heartbeat.join()
            self._membership.leave()
        self._context.executor.shutdown(wait=True, cancel_futures=True)
        for transport in self._transports.values():
            transport.close()
        # That ended the tickets which had not: the last turn takes them in.
        self._control.post(self._last_turn)
        self._control.close()
        self._threads.join(max(0.0, give_up - time.monotonic()))
        self._context.observation.closed()

    def _figures(self) -> Figures:
        """How things stand, for observers. On any thread."""
        control, figures = self._control, self.side.figures()
        dropped = {**figures.dropped_frames, "not one frame": control.malformed}
        return replace(figures, dropped_frames=dropped, control_faults=control.faults)

    def _last_turn(self) -> None:
        self.side.on_turn(self._context.now())

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RoomError(f"{self.role}: the manager is closed")

    def _beat(self) -> None:
        """Keep the registration alive."""
        assert self._membership is not None
        while True:
            self._beat_now.wait(self._context.settings.registry_heartbeat_seconds)
            self._beat_now.clear()
            if self._closed.is_set():
                return
            self._membership.beat()


def _speaks_for_its_replica(layout: RankLayout) -> bool:
    """Whether this rank announces rooms: one of each data-parallel replica, if there are several."""
    coords = layout.coords
    return coords.dp[1] > 1 and coords.tp[0] == coords.pp[0] == coords.cp[0] == 0


def _checked_room(room: int) -> int:
    """The number as a plain int, whatever integer type it came as. Raises `RoomError`."""
    try:
        number = operator.index(room)
    except TypeError:
        raise RoomError(f"room {room!r} is not an integer") from None
    if not 0 <= number <= MAX_ROOM:
        raise RoomError(f"room {number} is not within 0..{MAX_ROOM}")
    return number


def _checked_dp_rank(room: int, dp_rank: int | None) -> int | None:
    """The data-parallel rank as a plain int, or None. Raises `ConfigurationError` for what can be none."""
    if dp_rank is None:
        return None
    try:
        number = operator.index(dp_rank)
    except TypeError:
        number = -1
    if not 0 <= number < MAX_RANKS:
        raise ConfigurationError(
            f"decode: room {room}: dp_rank {dp_rank!r} is not within 0..{MAX_RANKS - 1}; pass None to have it found"
        )
    return number


def _check_regions(regions: Sequence[Region]) -> None:
    for number, region in enumerate(regions):
        if not isinstance(region, Region):
            raise ConfigurationError(
                f"region {number} is of type {type(region).__name__}; pass kvbaton.Region.of(memory) for each"
            )


def _check_limits(layout: RankLayout, model: str, destination_index: int, destinations: int) -> None:
    """Raise `ConfigurationError` for what could not be said to a peer."""
    if len(model) > MAX_MODEL_CHARACTERS:
        raise ConfigurationError(f"model has {len(model)} characters; at most {MAX_MODEL_CHARACTERS} can be compared")
    if not 0 <= destination_index < destinations <= MAX_RANKS:
        raise ConfigurationError(
            f"destination_index {destination_index} of destinations {destinations}: the index counts from 0, and there "
            f"are at most {MAX_RANKS}"
        )
    tensors = [tensor for component in layout.components if component.kind.aux for tensor in component.tensors]
    nbytes = sum(tensor.itemsize * math.prod(axis.local_size for axis in tensor.axes) for tensor in tensors)
    if nbytes > MAX_AUX_BYTES:
        raise ConfigurationError(
            f"one aux row has {nbytes} bytes; it travels inside a message, and at most {MAX_AUX_BYTES} bytes fit: "
            "register large values as a component of kind slot"
        )
