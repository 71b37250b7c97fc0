"""What SGLang runs at its start: makes ``--disaggregation-transfer-backend kvbaton`` known to it, by its own hooks."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from typing import Any

from kvbaton.engines import sglang as backend
from kvbaton.engines.sglang.versions import refusal

logger = logging.getLogger(__name__)

NAME = "kvbaton"
_CLASSES = {
    "MANAGER": "KvbatonKVManager",
    "SENDER": "KvbatonKVSender",
    "RECEIVER": "KvbatonKVReceiver",
    "BOOTSTRAP_SERVER": "KvbatonKVBootstrapServer",
}


def register() -> None:
    """The entry point ``sglang.srt.plugins``; once for each process. An unknown version of SGLang is only logged."""
    reason = refusal(_version(), os.environ)
    if reason:
        logger.error("%s", reason)
        return
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME.upper() in TransferBackend.__members__:
        return
    add_disagg_transfer_backend_choices([NAME])
    add_member(TransferBackend, NAME.upper(), NAME)
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", class_of_backend, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.arg_groups.pd_disaggregation_hook.handle_pd_disaggregation", check_arguments, HookType.BEFORE
    )
    decode = "sglang.srt.disaggregation.decode"
    if decode in sys.modules:
        # Only a scheduler needs it, and has imported it by now; elsewhere it would be imported too early.
        HookRegistry.register(f"{decode}.DecodePreallocQueue._send_kv_metadata", tell_tokens, HookType.BEFORE)


def class_of_backend(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """Around SGLang's choice of classes: ours for our name."""
    if transfer_backend.value != NAME or class_type.name not in _CLASSES:
        return original(transfer_backend, class_type)
    return getattr(backend, _CLASSES[class_type.name])


def check_arguments(server_args: Any) -> None:
    """Before SGLang looks at its own options: refuse what cannot work with us, by name. Raises ``ValueError``."""
    from sglang.srt.arg_groups.overrides import resolving_view

    options = resolving_view(server_args)
    if options.disaggregation_transfer_backend != NAME or options.disaggregation_mode == "null":
        return
    if options.tokenizer_worker_num > 1:
        raise ValueError(
            f"--disaggregation-transfer-backend {NAME} does not work with --tokenizer-worker-num "
            f"{options.tokenizer_worker_num}: SGLang's tokenizer workers load no plug-ins and do not know the "
            "back-end. Leave --tokenizer-worker-num at 1"
        )


def tell_tokens(queue: Any, decode_req: Any, kv_indices: Any, page_size: int, *rest: Any, **metadata: Any) -> None:
    """Before decode offers the pages of a request: its receiver learns how many tokens there are, not only pages.

    With that, prefill and decode may have pages of different sizes.
    """
    receiver = decode_req.kv_receiver
    if hasattr(receiver, "prompt_tokens"):
        receiver.prompt_tokens = int(metadata.get("decode_prefix_len") or 0) + len(kv_indices)


def add_member(kind: Any, name: str, value: str) -> Any:
    """A member of an enumeration that has been made already; the one that is there, if there is one."""
    if name in kind.__members__:
        return kind[name]
    member = object.__new__(kind)
    member._name_ = name
    member._value_ = value
    member._sort_order_ = len(kind._member_names_)
    member.__objclass__ = kind
    type.__setattr__(kind, name, member)
    kind._member_names_.append(name)
    kind._member_map_[name] = member
    kind._value2member_map_[value] = member
    if hasattr(kind, "_hashable_values_"):
        kind._hashable_values_.append(value)
    return member


def _version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return ""
