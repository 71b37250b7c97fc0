"""The library's engine in this process: found, started, given memory, and ended in the order that it survives."""

from __future__ import annotations

import itertools
import secrets
from types import ModuleType
from typing import Any

from kvbaton.errors import TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport.fabric.mori import guards
from kvbaton.transport.fabric.mori.settings import Settings
from kvbaton.transport.fabric.scratch import Scratch

_XGMI_ONLY_PORT = 1


class Engine:
    """An engine that listens on ``host``, under a key that no other engine ever had.

    Memory 0 is a scratch, where there is RDMA: a token first, then room for the tokens of peers. Raises
    `TransportUnavailable`, `AddressError` or `ConfigurationError` where the library would end the process.
    """

    def __init__(self, instance: str, settings: Settings, host: str) -> None:
        self.settings = settings
        self.io = io = _library()
        self.rdma = "rdma" in settings.backends
        self.memory_kinds = frozenset(["host"] * self.rdma + ["cuda"] * _has_amd_gpu())
        if not self.memory_kinds:
            raise TransportUnavailable("XGMI joins AMD GPUs, and torch sees none here; use backends=rdma")
        self._copies = max(1, len(guards.prepare_rdma(settings.devices, settings.workers))) if self.rdma else 1
        self.engine: Any = io.IOEngine(
            f"{instance}/{secrets.token_hex(8)}", io.IOEngineConfig(host=host, port=settings.port)
        )
        with guards.held_port(host, settings.port), guards.environment({"MORI_RDMA_DEVICES": settings.devices}):
            self._create_backends()
        self.memories: list[Any] = []
        self.kept: list[Any] = []
        """Statuses that nobody waits for any more; the library may still write into them."""
        self.aliases = itertools.count()
        self.scratch = Scratch()
        self._owners: list[Region] = []
        if self.rdma:
            self.add([self.scratch.region])

    @property
    def token(self) -> bytes:
        """What peers find in memory 0; empty without RDMA."""
        return self.scratch.token if self.rdma else b""

    def add(self, regions: list[Region]) -> dict[int, int]:
        """Register ``regions``; the number of the memory at each address. Empty regions have none.

        Regions that begin at one address share a registration, for the library takes one for the other. It only books
        them, and pins memory when a session needs it. Raises `TransportUnavailable` for what cannot be registered.
        """
        guards.require_pinnable(regions, self._copies)
        longest: dict[int, Region] = {}
        for region in regions:
            if region.nbytes > longest.get(region.address, Region(0, 0)).nbytes:
                longest[region.address] = region
        kinds = self.io.MemoryLocationType
        numbers = {address: len(self.memories) + number for number, address in enumerate(longest)}
        for region in longest.values():
            where, device = (kinds.CPU, -1) if region.kind == "host" else (kinds.GPU, region.device)
            self.memories.append(self.engine.register_memory(region.address, region.nbytes, device, where))
            self._owners.append(region)
        return numbers

    def failures(self) -> list[tuple[str, str]]:
        """Keys of peers that the library has found to fail, with the reason. Versions before 1.2.4 tell nothing."""
        pop = getattr(self.engine, "pop_peer_failure", lambda: None)
        failures = iter(pop, None)
        return [(failure.remote_engine_key, f"{failure.reason.name} {failure.detail}".strip()) for failure in failures]

    def close(self) -> None:
        """End the library's threads and queue pairs. There must be no sessions any more: they use the engine."""
        for memory in self.memories:
            self.engine.deregister_memory(memory)
        for backend in self.settings.backends:
            self.engine.remove_backend(getattr(self.io.BackendType, backend.upper()))
        self.engine, self.memories, self.kept, self._owners = None, [], [], []

    def _create_backends(self) -> None:
        io, settings = self.io, self.settings
        configs = {"xgmi": io.XgmiBackendConfig()}
        if self.rdma:
            configs["rdma"] = io.RdmaBackendConfig(
                qp_per_transfer=settings.queue_pairs,
                num_worker_threads=settings.workers,
                poll_cq_mode=io.PollCqMode.EVENT if settings.event else io.PollCqMode.POLLING,
                enable_notification=False,
            )
        try:
            for backend in settings.backends:
                self.engine.create_backend(getattr(io.BackendType, backend.upper()), configs[backend])
            if self.rdma and self.engine.get_engine_desc().port == _XGMI_ONLY_PORT:
                raise RuntimeError("it fell back to XGMI alone (MORI_DISABLE_AUTO_XGMI=0)")
        except RuntimeError as error:
            raise TransportUnavailable(
                f"MORI-IO cannot be used over {', '.join(settings.backends)}: {error}; RDMA devices here: "
                f"{', '.join(guards.devices_present()) or 'none'}"
            ) from error


def _library() -> ModuleType:
    """The vendor's module. Raises `TransportUnavailable` where there is none, or not all that it links to."""
    try:
        from mori import io
    except (ImportError, OSError) as error:
        raise TransportUnavailable(
            f"mori.io cannot be imported ({error}); it needs ROCm, torch, and a Python that it has a wheel for (3.10 "
            "or 3.12): pip install 'kvbaton[mori]'"
        ) from error
    return io  # type: ignore[no-any-return]


def _has_amd_gpu() -> bool:
    """Whether torch, which MORI-IO imports anyway, is a ROCm build that sees a device."""
    import torch

    return bool(getattr(getattr(torch, "version", None), "hip", None)) and torch.cuda.is_available()
