"""What transports can do, by name: whether or not the libraries that they need are installed here."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.errors import ConfigurationError
from kvbaton.plan import Transfer
from kvbaton.transport import AUTO, NAMES, Capabilities
from kvbaton.transport.cuda.transport import CudaTransport
from kvbaton.transport.executor import (
    CAST_REASON,
    ExecutorName,
    ExecutorOption,
    choose_executor,
    choose_for,
    count_runs,
)
from kvbaton.transport.fabric import FABRICS, adapter_of
from kvbaton.transport.loopback import LoopbackTransport
from kvbaton.transport.shm import ShmTransport
from kvbaton.transport.tcp import TcpTransport

_HERE = {kind.name: kind.capabilities for kind in (LoopbackTransport, ShmTransport, CudaTransport, TcpTransport)}
_ONE_SIDED = Capabilities(False, True, frozenset({"host", "cuda"}), False, one_sided=True)
_FABRICS = {name: _ONE_SIDED._replace(costs=adapter_of(name).costs) for name in FABRICS}


def capabilities_of(name: str) -> Capabilities:
    """What the transport ``name`` can do. Raises `ConfigurationError` for an unknown one."""
    known = {**_HERE, **_FABRICS}
    if name == AUTO:
        raise ConfigurationError(
            f"transport {AUTO} is what works on a machine, which a topology does not know; write the transports that "
            "'kvbaton doctor' shows there instead, the best first: transport: [shm, nixl, tcp]"
        )
    if name not in known:
        raise ConfigurationError(f"there is no transport {name!r}; known are {', '.join(known)}")
    return known[name]


def available(name: str) -> bool:
    """Whether this release has it."""
    return name in NAMES


def executor_of(
    transfers: Sequence[Transfer], capabilities: Capabilities | None, wanted: ExecutorOption
) -> tuple[str, str]:
    """How ``transfers`` go, and why; both ways where some go directly and others packed."""
    if capabilities is None:
        return "none", "no transport in common"
    totals: dict[ExecutorName, list[int]] = {}
    casts = False
    for transfer in transfers:
        name = choose_for(transfer, capabilities, wanted).name
        pieces, nbytes = totals.get(name, (0, 0))
        totals[name] = [pieces + count_runs(transfer), nbytes + transfer.nbytes]
        casts |= transfer.boxes.cast is not None
    totals.pop("none", None)
    if not totals:
        return choose_executor(capabilities, 0, 0)
    reasons = []
    for name, (pieces, nbytes) in totals.items():
        found = choose_executor(capabilities, pieces, nbytes, wanted)
        told = CAST_REASON if casts and found.name != name else found.reason
        reasons.append(f"{name}: {told}" if len(totals) > 1 else told)
    return " and ".join(totals), "; ".join(reasons)
