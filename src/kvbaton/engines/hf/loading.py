"""From a model's path to a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from kvbaton.engines.base import Role
from kvbaton.engines.hf.base import Engine
from kvbaton.engines.hf.decode import DecodeEngine
from kvbaton.engines.hf.pools import Pools
from kvbaton.engines.hf.prefill import PrefillEngine
from kvbaton.errors import ConfigurationError
from kvbaton.protocol import Deadlines
from kvbaton.registry import RegistryClient
from kvbaton.runtime import Manager, Settings

OPTIONS: dict[Role, tuple[str, ...]] = {
    "prefill": ("chunk_tokens",),
    "decode": ("max_batch", "corrupt", "corrupt_page"),
}
"""What `open_engine` passes on to the engine of each role."""
COMMON_OPTIONS = (
    "page_size",
    "pool_tokens",
    "max_running_requests",
    "threads",
    "offer_wait_seconds",
    "manager_options",
)
"""What `open_engine` takes for both roles."""


def load_model(path: str | Path) -> Any:
    """Load a causal language model for evaluation on CPU, with the attention that every architecture has.

    Raises `ConfigurationError` if Transformers cannot load it.
    """
    try:
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_pretrained(path, attn_implementation="eager", dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot load a model from {path}: {error}") from error
    return model.eval()


def open_engine(
    model: Any,
    *,
    role: Role,
    registry: RegistryClient | str | None = None,
    served_model_name: str = "",
    page_size: int = 16,
    pool_tokens: int = 8192,
    max_running_requests: int = 16,
    threads: int | None = None,
    offer_wait_seconds: float = 60.0,
    manager_options: dict[str, Any] | None = None,
    **options: Any,
) -> Engine:
    """A running engine of ``role`` for ``model``, a path or a loaded model.

    ``registry`` is as for `kvbaton.runtime.Manager`, and ``manager_options`` are passed on to it (transports, bind,
    advertise, settings, ...). ``threads`` limits torch, in the whole process. ``offer_wait_seconds`` is how long a
    request waits until the other side is ready for it. ``options`` go to `PrefillEngine` (chunk_tokens) or
    `DecodeEngine` (max_batch, corrupt, corrupt_page). The engine owns manager and pools: `close` it.

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
    loaded = load_model(path) if path else model
    name = served_model_name or path or type(loaded).__name__
    pools = Pools(loaded, page_size=page_size, pool_tokens=pool_tokens, slots=max_running_requests)
    try:
        manager = Manager(
            pools.layout,
            pools.regions,
            role=role,
            registry=registry,
            model=fingerprint(loaded),
            **{"settings": Settings(deadlines=Deadlines(offer_wait=offer_wait_seconds)), **(manager_options or {})},
        )
    except BaseException:
        pools.close()
        raise
    try:
        return engine_class(loaded, pools, manager, model_path=path, served_model_name=name, **options)
    except BaseException:
        manager.close()
        pools.close()
        raise


def fingerprint(model: Any) -> str:
    """A text that two sides with the same model share: the class and the sizes that its config tells."""
    config = model.config.get_text_config()
    sizes = ("num_hidden_layers", "hidden_size", "vocab_size")
    return f"{type(model).__name__}(" + ", ".join(f"{name}={getattr(config, name, '?')}" for name in sizes) + ")"
