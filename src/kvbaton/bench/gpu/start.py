"""Whether a GPU can be measured here at all."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.bench.report import Figure
from kvbaton.errors import ConfigurationError


def run(
    devices: tuple[int, int], against: Sequence[str], pieces: Sequence[int], megabytes: int, runs: int
) -> list[Figure]:
    """All figures. Raises `ConfigurationError` where torch, Triton or one of the two GPUs is missing."""
    try:
        import torch
    except ImportError as error:
        raise ConfigurationError(f"the benchmark needs torch and Triton: pip install kvbaton[gpu] ({error})") from error
    if torch.cuda.device_count() <= max(devices):
        raise ConfigurationError(
            f"there are {torch.cuda.device_count()} CUDA devices; number {max(devices)} cannot be measured"
        )
    from kvbaton.bench.gpu.run import Bench

    return Bench(devices, against, megabytes, runs).run(pieces)
