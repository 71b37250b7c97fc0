"""What the mori fabric can be told, by options and by the environment, which MORI-IO lets have the last word."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvbaton.devices import Choice
from kvbaton.errors import ConfigurationError
from kvbaton.transport.fabric.own_options import OwnOptions

_TRUE = ("1", "true", "on", "yes")
_XGMI_PORT = 1

OPTIONS = {
    "backends": "rdma, xgmi, or rdma,xgmi; rdma if not given",
    "devices": "RDMA devices: mlx5_0,mlx5_1, or ^mlx5_2 for all but that; MORI_RDMA_DEVICES, else all, if not given",
    "qp_per_transfer": "queue pairs that the writes to a peer are spread over; 1 if not given",
    "num_worker_threads": "threads of the library that post, at most one for each queue pair; 1, none, if not given",
    "poll_cq_mode": "polling or event; polling if not given",
    "port": "where the library listens for peers, on the host of bind; a free port if not given",
}


class Settings(NamedTuple):
    """The options as values, with the environment's word over them, as the library has it."""

    backends: tuple[str, ...]
    devices: str
    port: int
    queue_pairs: int
    workers: int
    event: bool
    depth: int
    """Messages that a queue pair takes at a time."""
    chunks: int
    """Messages that one write may become."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Settings:
        """Read options. Raises `ConfigurationError` for what is not known, or not survived."""
        own = OwnOptions("mori", options, OPTIONS)
        backends = tuple(sorted(set(options.get("backends", "rdma").split(","))))
        if not set(backends) <= {"rdma", "xgmi"}:
            raise ConfigurationError(f"backends={options['backends']!r} of mori must be {OPTIONS['backends']}")
        mode = own.one_of("poll_cq_mode", ("polling", "event"), "polling")
        port = own.number("port", 0, 65535, 0)
        if port == _XGMI_PORT:
            raise ConfigurationError("port is '1', which MORI-IO keeps for XGMI; mori takes 2 to 65535, or 0 for any")
        numbers = [
            _number(f"MORI_IO_{name.upper()}", own.number(name, 1, 64, 1))
            for name in ("qp_per_transfer", "num_worker_threads")
        ]
        if _true("MORI_IO_ENABLE_NOTIFICATION"):
            raise ConfigurationError(
                "MORI_IO_ENABLE_NOTIFICATION turns on notifications, which kvbaton does without and the library never "
                "forgets; unset it"
            )
        for name in ("MORI_IO_QP_TIMEOUT", "MORI_RDMA_QP_TIMEOUT"):
            if os.environ.get(name, "").strip() == "0":
                raise ConfigurationError(f"{name}=0 makes writes to a dead peer wait for ever; unset it, or say 14")
        chunks = _number("MORI_IO_MAX_CHUNKS", 64) if _true("MORI_IO_ENABLE_CHUNKING") else 1
        depth = _number("MORI_IO_QP_MAX_SEND_WR", 8192)
        devices = options.get("devices", "") or os.environ.get("MORI_RDMA_DEVICES", "")
        return cls(backends, devices, port, numbers[0], numbers[1], mode == "event", depth, chunks)


def devices_option(options: Mapping[str, str], near: Callable[[], Choice]) -> str:
    """The option ``devices`` for the RDMA devices that are near; empty where the environment says, or none is used."""
    told = "rdma" not in options.get("backends", "rdma") or os.environ.get("MORI_RDMA_DEVICES")
    return "" if told else ",".join(near().devices)


def _true(name: str) -> bool:
    """Whether MORI-IO takes the variable for a yes."""
    return os.environ.get(name, "").lower() in _TRUE


def _number(name: str, default: int) -> int:
    """The number that MORI-IO takes from the variable: a positive one, else ``default``."""
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdecimal() and int(text) > 0 else default
