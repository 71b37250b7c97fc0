"""How a prefill rank reaches a decode rank: by the first transport that both have and that works."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from kvbaton.errors import TransportError
from kvbaton.layout import Coords, RankLayout
from kvbaton.protocol import Hello
from kvbaton.protocol.handshake import Accepted
from kvbaton.protocol.messages import AuxPath
from kvbaton.runtime.context import Context
from kvbaton.transport.base import RemotePeer, Transport
from kvbaton.transport.preference import preference

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 8.0
"""How long transports that do not work may take together until no other one is tried."""


class Reached(NamedTuple):
    """A decode rank that was connected to."""

    transport: Transport
    remote: RemotePeer
    aux: AuxPath
    """How aux data travel to it."""
    reason: str
    """Why this transport, and why not those before it; for people."""


class PeerRank(NamedTuple):
    """A rank of the other side that passed the handshake, as `Manager.peers` shows it."""

    instance: str
    coords: Coords
    transport: str
    """The name of the transport that carries the data of this pair."""
    aux: AuxPath
    """How its aux data travel."""
    reason: str
    """Why this transport and this way."""


def reach(context: Context, hello: Hello, accepted: Accepted) -> Reached:
    """Connect by the first of ``accepted.transports`` that works and reaches all memory that the pair needs. May block.

    Raises `TransportError` with the reason of each that did not.
    """
    tried: list[str] = []
    give_up = time.monotonic() + PATIENCE_SECONDS
    for name in accepted.transports:
        if time.monotonic() > give_up:
            tried.append(f"{name}: not tried, the others took more than {PATIENCE_SECONDS:g} s")
            continue
        transport = context.transports[name]
        try:
            remote = transport.connect(hello.transports[name])
        except TransportError as error:
            tried.append(f"{name}: {error}")
            continue
        out_of_reach = _out_of_reach(context, transport, accepted, remote, aux=False)
        if out_of_reach:
            tried.append(f"{name}: {out_of_reach}")
            transport.disconnect(remote)
            continue
        reasons = [preference(transport.capabilities).reason, *_others(accepted, tried, context)]
        aux: AuxPath = "control"
        if hello.aux == "fabric":
            aux_out_of_reach = _out_of_reach(context, transport, accepted, remote, aux=True)
            aux = "control" if aux_out_of_reach else "fabric"
            if aux_out_of_reach:
                reasons.append(f"aux data go over the control channel: {aux_out_of_reach}")
        reached = Reached(transport, remote, aux, f"{name}: {'; '.join(reasons)}")
        # Transports of one host fail between two, as they should; another one that both have is worth a look.
        failed = accepted.transports[: accepted.transports.index(name)]
        worth_a_look = any(context.transports[each].capabilities.cross_host for each in failed)
        level = logging.WARNING if worth_a_look else logging.INFO
        logger.log(level, "prefill: decode rank %s is reached by %s", accepted.layout.coords, reached.reason)
        return reached
    raise TransportError(
        f"prefill rank {context.layout.coords} cannot reach decode rank {accepted.layout.coords}: {'; '.join(tried)}"
    )


def _others(accepted: Accepted, tried: list[str], context: Context) -> list[str]:
    """What there is to say of transports that were not taken."""
    common = f"both have {', '.join(accepted.transports)}" if len(accepted.transports) > 1 else "both have no other"
    failed = [f"tried before, {each}" for each in tried]
    return [common, *failed, *(f"not here, {name}: {why}" for name, why in context.left_out.items())]


def _out_of_reach(context: Context, transport: Transport, accepted: Accepted, remote: RemotePeer, *, aux: bool) -> str:
    """A region that the pair moves data from or into and that is out of reach; empty if there is none."""
    sides: tuple[tuple[RankLayout, Callable[[int], bool], str], ...] = (
        (context.layout, transport.reads, "read region {} of this rank"),
        (accepted.layout, remote.reaches, "write into region {} of the decode rank"),
    )
    for layout, reaches, what in sides:
        for component in layout.components:
            if component.name not in accepted.plan.components or component.kind.aux is not aux:
                continue
            for tensor in component.tensors:
                if tensor.rows and not reaches(tensor.region):
                    return f"it cannot {what.format(tensor.region)} (component {component.name})"
    return ""
