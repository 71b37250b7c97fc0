"""The handshake: what both sides check before any byte moves. Pure; every refusal says what differs.

The decode rank sends `make_hello`. The prefill rank checks it with `answer_hello`, and sends `Accepted.welcome` or
`refuse`. The decode rank checks the answer with `check_welcome`, or makes the error that it names with `refusal`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvbaton.errors import HandshakeError, LayoutMismatch, SelfConnection, VersionMismatch
from kvbaton.layout import RankLayout
from kvbaton.plan import PairPlan, Share, assign, compile_pair
from kvbaton.protocol.messages import PROTOCOL_VERSION, AuxPath, Hello, Refused, Welcome, short_reason
from kvbaton.protocol.packed import Layouts, pack_layout, same_layout, unpack_layout, unpack_layouts
from kvbaton.protocol.shares import ComponentNeed, PeerShare

_REFUSALS = {error.__name__: error for error in (HandshakeError, LayoutMismatch, VersionMismatch, SelfConnection)}


@dataclass(frozen=True)
class Accepted:
    """The prefill side's view of a handshake that holds."""

    share: PeerShare
    """What `PrefillCore.peer_joined` must know."""
    plan: PairPlan
    """What moves to this decode rank."""
    parts: tuple[int, ...]
    """The source indices that will end with a Done."""
    transports: tuple[str, ...]
    """Those that both sides have, in the prefill side's order of preference; at least one."""
    layout: RankLayout
    """The decode rank's layout; it has passed `check_layout`."""

    def welcome(
        self, instance: str, transport: str, descriptor: bytes, *, aux: AuxPath = "control", reason: str = ""
    ) -> Welcome:
        """The answer, once ``transport`` and ``aux`` are settled; ``descriptor`` is our own for the transport."""
        return Welcome(instance, transport, descriptor, self.parts, aux, short_reason(reason))

    def share_with(self, aux: AuxPath) -> PeerShare:
        """``share``, once it is settled how aux data travel."""
        return replace(self.share, writes_aux=self.share.carries_aux and aux == "fabric")


def make_hello(
    *,
    instance: str,
    model: str,
    layout: RankLayout,
    destination_index: int,
    destinations: int,
    sources: Sequence[RankLayout],
    source_index: int,
    transports: Mapping[str, bytes],
    striped: bool = False,
    cast: bool = False,
    aux: AuxPath = "control",
    connection: int = 0,
    lost: Sequence[int] = (),
) -> Hello:
    """Say who asks prefill rank ``source_index`` of the grid ``sources``; ``transports`` has descriptors by name.

    ``connection`` and ``lost`` are as in `Hello`.
    Raises `HandshakeError` for a layout that is too large to travel.
    """
    return Hello(
        version=PROTOCOL_VERSION,
        instance=instance,
        model=model,
        layout=pack_layout(layout),
        destination_index=destination_index,
        destinations=destinations,
        sources=tuple(pack_layout(source) for source in sources),
        source_index=source_index,
        transports=dict(transports),
        striped=striped,
        cast=cast,
        aux=aux,
        connection=connection,
        lost=tuple(lost),
    )


def answer_hello(
    hello: Hello,
    *,
    instance: str,
    model: str,
    layout: RankLayout,
    transports: Sequence[str],
) -> Accepted:
    """Check everything that ``hello`` says against this prefill rank; ``transports`` in order of preference.

    Raises `VersionMismatch`, `SelfConnection`, `LayoutMismatch` or `HandshakeError`: `refuse` makes the answer of it.
    What costs much comes last: a Hello from a stranger mostly fails before that.
    """
    _check_parties(hello, instance, model, layout)
    common = common_transports(transports, hello.transports)
    layouts = unpack_layouts(hello)
    shares = _shares(hello, layouts)
    parts = expected_parts(shares)
    plan = compile_pair(layout, layouts.own, shares[hello.source_index], cast=hello.cast)
    return Accepted(_share(hello, layouts.own, plan, parts), plan, parts, common, layouts.own)


def refuse(instance: str, error: Exception) -> Refused:
    """The answer to a Hello that failed with ``error``."""
    name = type(error).__name__ if isinstance(error, HandshakeError) else HandshakeError.__name__
    return Refused(instance, short_reason(str(error)), name)


def expected_parts(shares: Sequence[Share]) -> tuple[int, ...]:
    """The parts that end with a Done: those that send something; part 0 alone if none does."""
    return tuple(index for index, share in enumerate(shares) if not share.empty) or (0,)


def check_welcome(hello: Hello, welcome: Welcome, parts: tuple[int, ...] | None = None) -> None:
    """Check a prefill rank's answer to ``hello``, on the decode side.

    ``parts`` are the `expected_parts` of the grid, where they are known already: they are the same for all its ranks.
    Raises `SelfConnection` if we reached ourselves, and `HandshakeError` if the answer does not fit what was asked.
    """
    part = f"prefill part {hello.source_index}"
    if welcome.instance == hello.instance:
        raise SelfConnection(_self_connection(hello.instance))
    if welcome.transport not in hello.transports:
        raise HandshakeError(
            f"{part} chose transport {welcome.transport!r}, but it was offered {_listed(hello.transports)}: "
            "run the same release of kvbaton on both sides"
        )
    if welcome.aux == "fabric" and hello.aux != "fabric":
        raise HandshakeError(
            f"{part} wants to write aux data by the transport, but was not asked to: run the same release of "
            "kvbaton on both sides"
        )
    if parts is None:
        parts = expected_parts(_shares(hello, unpack_layouts(hello)))
    if welcome.parts != parts:
        raise HandshakeError(
            f"{part} says that parts {list(welcome.parts)} send, the decode rank computes {list(parts)}: "
            "run the same release of kvbaton on both sides"
        )


def refusal(hello: Hello, refused: Refused) -> HandshakeError:
    """The error that a refusal stands for; of the class that it names, where that is an error of the handshake."""
    if refused.instance == hello.instance:
        return SelfConnection(_self_connection(hello.instance))
    return _REFUSALS.get(refused.error, HandshakeError)(refused.reason)


def _shares(hello: Hello, layouts: Layouts) -> tuple[Share, ...]:
    return assign(
        layouts.sources,
        layouts.own,
        destination_index=hello.destination_index,
        striped=hello.striped,
        cast=hello.cast,
    )


def _share(hello: Hello, layout: RankLayout, plan: PairPlan, parts: tuple[int, ...]) -> PeerShare:
    moving = [component for component in layout.components if component.name in plan.components]
    return PeerShare(
        components={
            component.name: ComponentNeed(component.kind, layout.owned_of(component))
            for component in moving
            if not component.kind.aux
        },
        destination_index=hello.destination_index,
        destinations=hello.destinations,
        part=hello.source_index,
        sends=hello.source_index in parts,
        carries_aux=any(component.kind.aux for component in moving),
    )


def _check_parties(hello: Hello, instance: str, model: str, layout: RankLayout) -> None:
    if hello.version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the decode rank speaks version {hello.version} of the protocol, the prefill rank version "
            f"{PROTOCOL_VERSION}: run the same release of kvbaton on both sides"
        )
    if hello.instance == instance:
        raise SelfConnection(_self_connection(instance))
    if hello.model != model:
        raise HandshakeError(
            f"the decode rank serves model {hello.model!r}, the prefill rank {model!r}: "
            "send requests to engines of one model, or give both the same model="
        )
    if hello.destination_index >= hello.destinations:
        raise HandshakeError(
            f"the decode rank calls itself number {hello.destination_index} of {hello.destinations} decode ranks: "
            "destination_index counts from 0"
        )
    if hello.source_index >= len(hello.sources):
        raise HandshakeError(
            f"the decode rank takes this prefill rank for number {hello.source_index} of {len(hello.sources)}: "
            "the source index counts from 0"
        )
    packed = hello.sources[hello.source_index]
    if same_layout(packed, layout):
        return
    believed = unpack_layout(packed, f"the layout of part {hello.source_index} in the hello of the decode rank")
    if believed != layout:
        raise LayoutMismatch(
            f"the topology that the decode rank knows is stale: it takes part {hello.source_index} for a rank "
            f"({believed.coords}) with another layout than this prefill rank ({layout.coords}) has; "
            "ask the registry again"
        )


def common_transports(prefill: Sequence[str], decode: Iterable[str]) -> tuple[str, ...]:
    """The transports that both sides have, in the prefill side's order; raises `HandshakeError` if there is none."""
    offered = tuple(decode)
    common = tuple(name for name in prefill if name in offered)
    if not common:
        raise HandshakeError(
            f"no transport in common: the prefill rank has {_listed(prefill)}, the decode rank "
            f"{_listed(offered)}; enable one of them on both sides"
        )
    return common


def _listed(transports: Iterable[str]) -> str:
    return ", ".join(transports) or "none"


def _self_connection(instance: str) -> str:
    return (
        f"instance {instance!r} reached itself: the address that was advertised for the peer leads back here; "
        "pass advertise= with an address that only the peer has"
    )
