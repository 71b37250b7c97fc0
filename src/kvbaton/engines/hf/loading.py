"""From a model's path to a running engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from kvbaton.engines.base import Role
from kvbaton.engines.hf.base import Engine
from kvbaton.engines.hf.decode import DecodeEngine
from kvbaton.engines.hf.grid import Grid, Order
from kvbaton.engines.hf.pools import DEVICES, Pools
from kvbaton.engines.hf.prefill import PrefillEngine
from kvbaton.engines.hf.ranks import RankGroup
from kvbaton.errors import ConfigurationError
from kvbaton.protocol import Deadlines
from kvbaton.registry import RegistryClient
from kvbaton.runtime import Manager, Settings

OPTIONS: dict[Role, tuple[str, ...]] = {
    "prefill": ("chunk_tokens",),
    "decode": ("max_batch", "corrupt", "corrupt_page", "exchange"),
}
"""What `open_engine` passes on to the engine of each role."""
COMMON_OPTIONS = (
    "page_size",
    "pool_tokens",
    "max_running_requests",
    "tp",
    "pp",
    "cp",
    "cp_unit",
    "order",
    "window_ring",
    "ranks",
    "threads",
    "device",
    "offer_wait_seconds",
    "manager_options",
)
"""What `open_engine` takes for both roles."""


def check_device(device: str) -> torch.device:
    """The device of that name. Raises `ConfigurationError` where it is none, or is not there."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"device {device!r}: {error}") from error
    if found.type not in DEVICES:
        raise ConfigurationError(f"device {device!r} is none of {', '.join(DEVICES)}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"device {device!r} is not there; torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device(found.type, found.index or 0) if found.type == "cuda" else found


def load_model(path: str | Path, device: str = "cpu") -> Any:
    """Load a causal language model for evaluation, with the attention that every architecture has.

    Raises `ConfigurationError` if Transformers cannot load it, or there is no such ``device``.
    """
    where = check_device(device)
    try:
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_pretrained(path, attn_implementation="eager", dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot load a model from {path}: {error}") from error
    return model.to(where).eval()


def open_engine(
    model: Any,
    *,
    role: Role,
    registry: RegistryClient | str | None = None,
    served_model_name: str = "",
    page_size: int = 16,
    pool_tokens: int = 8192,
    max_running_requests: int = 16,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    cp_unit: int | None = None,
    order: Order = "NHD",
    window_ring: bool = False,
    ranks: Sequence[int] | None = None,
    threads: int | None = None,
    device: str = "cpu",
    offer_wait_seconds: float = 60.0,
    manager_options: dict[str, Any] | None = None,
    **options: Any,
) -> Engine:
    """A running engine of ``role`` for ``model``, a path or a loaded model.

    ``registry`` is as for `kvbaton.runtime.Manager`, and ``manager_options`` are passed on to it (transports, bind,
    advertise, settings, ...). ``threads`` limits torch, in the whole process. A model that is loaded here is put on
    ``device``, "cpu" or "cuda:<number>"; the pools are where the model is. ``offer_wait_seconds`` is how long a
    request waits until the other side is ready for it. ``options`` go to `PrefillEngine` (chunk_tokens) or
    `DecodeEngine` (max_batch, corrupt, corrupt_page, exchange). The engine owns managers and pools: `close` it.

    ``tp``, ``pp``, ``cp``, ``order`` ("NHD" or "HND") and ``window_ring`` spread the cache over virtual ranks, as
    `Grid` says: each has pools and a manager of its own, and the model itself runs whole. ``cp_unit`` None is a page at
    prefill and 1 at decode. ``ranks`` are those that this process holds (all by default); processes that hold the
    others are opened alike, and on the decode side joined by ``exchange`` (see `StoreExchange`).

    Raises `ConfigurationError` for a model or an option that cannot be used, and what `Manager` raises.
    """
    if role not in ("prefill", "decode"):
        raise ConfigurationError(f"role {role!r} is neither 'prefill' nor 'decode'")
    if threads is not None:
        torch.set_num_threads(threads)
    engine_class = PrefillEngine if role == "prefill" else DecodeEngine
    known = OPTIONS[role]
    if options.keys() - set(known):
        unknown = ", ".join(sorted(options.keys() - set(known)))
        listed = ", ".join((*known, *COMMON_OPTIONS))
        raise ConfigurationError(f"a {role} engine has no option {unknown}; it has {listed}")
    path = str(model) if isinstance(model, (str, Path)) else ""
    loaded = load_model(path, device) if path else model
    name = served_model_name or path or type(loaded).__name__
    unit = cp_unit if cp_unit is not None else page_size if role == "prefill" else 1
    grid = Grid(tp, pp, cp, unit, page_size, order, window_ring)
    pools = Pools(loaded, grid, pool_tokens=pool_tokens, slots=max_running_requests, ranks=ranks)
    given = {"settings": Settings(deadlines=Deadlines(offer_wait=offer_wait_seconds)), **(manager_options or {})}
    try:
        manager = open_ranks(pools, role=role, registry=registry, model=fingerprint(loaded), **given)
    except BaseException:
        pools.close()
        raise
    try:
        return engine_class(loaded, pools, manager, model_path=path, served_model_name=name, **options)
    except BaseException:
        manager.close()
        pools.close()
        raise


def open_ranks(pools: Pools, *, role: Role, **options: Any) -> RankGroup:
    """The managers of the ranks that ``pools`` hold; ``options`` are those of `Manager`, the same for each.

    Raises what `Manager` raises, and `ConfigurationError` for ready transports where there are several ranks.
    """
    ready = [each for each in options.get("transports", ()) if not isinstance(each, str)]
    if ready and len(pools.ranks) > 1:
        raise ConfigurationError(
            f"{len(pools.ranks)} ranks cannot share the {ready[0].name} transport that was given; pass names instead"
        )

    def make(index: int) -> Manager:
        rank = pools.ranks[index]
        return Manager(rank.layout, rank.regions, role=role, **options)

    return RankGroup(make, [rank.shard.coords for rank in pools.ranks])


def fingerprint(model: Any) -> str:
    """A text that two sides with the same model share: the class and the sizes that its config tells."""
    config = model.config.get_text_config()
    sizes = ("num_hidden_layers", "hidden_size", "vocab_size")
    return f"{type(model).__name__}(" + ", ".join(f"{name}={getattr(config, name, '?')}" for name in sizes) + ")"
