"""A script: what SGLang knows once the plug-in has registered itself. Ends well if all of it is right."""

from __future__ import annotations

import copy
import os
import pickle
import types

import pytest
import sglang_import

sglang_import.install()

import sglang.srt.arg_groups.overrides as overrides  # noqa: E402
import sglang.srt.arg_groups.pd_disaggregation_hook as arguments  # noqa: E402
import sglang.srt.disaggregation.utils as utils  # noqa: E402
from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

from kvbaton.engines.sglang import plugin, versions  # noqa: E402


def early_binding():
    """A module that has imported SGLang's names before plug-ins are run, as its queues have."""
    import sys

    early = types.ModuleType("early")
    exec("from sglang.srt.disaggregation.utils import get_kv_class, TransferBackend, KVClassType", early.__dict__)
    sys.modules["early"] = early
    return early


def unknown_version_registers_nothing():
    known, versions.KNOWN = versions.KNOWN, {"0.0.1": ""}
    plugin.register()
    versions.KNOWN = known
    assert "kvbaton" not in DISAGG_TRANSFER_BACKEND_CHOICES
    os.environ[versions.ANY_VERSION] = "1"
    assert versions.refusal("9.9", os.environ) == ""
    del os.environ[versions.ANY_VERSION]


def classes(early):
    from kvbaton.engines.sglang import (
        KvbatonKVBootstrapServer,
        KvbatonKVManager,
        KvbatonKVReceiver,
        KvbatonKVSender,
    )

    name = early.TransferBackend("kvbaton")
    assert name is utils.TransferBackend.KVBATON
    assert name in list(utils.TransferBackend)
    assert pickle.loads(pickle.dumps(name)) is name
    assert copy.deepcopy(name) is name
    kinds = early.KVClassType
    for lookup in (early.get_kv_class, utils.get_kv_class):
        assert lookup(name, kinds.MANAGER) is KvbatonKVManager
        assert lookup(name, kinds.SENDER) is KvbatonKVSender
        assert lookup(name, kinds.RECEIVER) is KvbatonKVReceiver
        assert lookup(name, kinds.BOOTSTRAP_SERVER) is KvbatonKVBootstrapServer
        assert lookup(name, kinds.KVARGS).__name__ == "KVArgs"
    fake = early.get_kv_class(early.TransferBackend.FAKE, kinds.SENDER)
    assert fake.__name__ == "FakeKVSender"


def options(**given):
    return types.SimpleNamespace(
        **{
            "disaggregation_transfer_backend": "kvbaton",
            "disaggregation_mode": "prefill",
            "tokenizer_worker_num": 1,
            **given,
        }
    )


def refused_options():
    original, overrides.resolving_view = overrides.resolving_view, lambda given: given
    with pytest.raises(ValueError, match="--tokenizer-worker-num 4"):
        arguments.handle_pd_disaggregation(options(tokenizer_worker_num=4))
    for other in ({}, {"disaggregation_transfer_backend": "nixl", "tokenizer_worker_num": 4}):
        assert plugin.check_arguments(options(**other)) is None
    assert plugin.check_arguments(options(disaggregation_mode="null", tokenizer_worker_num=4)) is None
    overrides.resolving_view = original


def tokens_are_told():
    receiver = types.SimpleNamespace(prompt_tokens=None)
    request = types.SimpleNamespace(kv_receiver=receiver)
    plugin.tell_tokens(None, request, range(29), 16, [], decode_prefix_len=16)
    assert receiver.prompt_tokens == 45
    fake = types.SimpleNamespace(kv_receiver=types.SimpleNamespace())
    plugin.tell_tokens(None, fake, range(29), 16)
    assert not hasattr(fake.kv_receiver, "prompt_tokens")


def main():
    early = early_binding()
    unknown_version_registers_nothing()
    plugin.register()
    plugin.register()
    HookRegistry.apply_hooks()
    assert DISAGG_TRANSFER_BACKEND_CHOICES.count("kvbaton") == 1, DISAGG_TRANSFER_BACKEND_CHOICES
    classes(early)
    refused_options()
    tokens_are_told()
    print("all of it is right")


main()
