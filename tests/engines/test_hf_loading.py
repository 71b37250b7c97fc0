from __future__ import annotations

import inspect

import pytest
from hf_pair import GREEDY, WAIT_SECONDS, cached_model, prompt, single

from kvbaton.engines.base import Engine, GenerateRequest, Handle
from kvbaton.engines.hf import DecodeEngine, PrefillEngine, make_model, open_engine, save_model
from kvbaton.engines.hf.loading import OPTIONS, fingerprint
from kvbaton.errors import ConfigurationError, KVBatonError
from kvbaton.registry import MemoryRegistry


def test_engines_open_by_path_and_say_what_they_are(tmp_path):
    folder, registry = str(save_model("qwen3_5", tmp_path)), MemoryRegistry()
    prefill = open_engine(folder, role="prefill", registry=registry, served_model_name="tiny", chunk_tokens=16)
    decode = open_engine(folder, role="decode", registry=registry, page_size=8, pool_tokens=512, max_running_requests=3)
    try:
        info = decode.info()
        assert (info.role, info.model_path, info.served_model_name) == ("decode", folder, folder)
        assert (info.page_size, info.pool_tokens, info.max_running_requests) == (8, 512, 3)
        assert (info.vocab_size, info.context_length) == (256, 4096)
        assert (prefill.info().role, prefill.info().served_model_name) == ("prefill", "tiny")
        assert (prefill.healthy(), decode.healthy()) == ("", "")
        request = GenerateRequest("one", prompt(40), 5, GREEDY)
        prefill.submit(request)
        assert decode.submit(request).result(WAIT_SECONDS)[0] == single("qwen3_5", prompt(40), split=16).token_ids
    finally:
        decode.close()
        prefill.close()


def test_engines_and_handles_are_what_the_servers_need():
    engine = open_engine(cached_model("qwen3"), role="prefill", registry=MemoryRegistry())
    try:
        assert isinstance(engine, Engine)
        handle = engine.submit(GenerateRequest("one", prompt(4), 6, GREEDY))
        assert {name for name in vars(Handle) if not name.startswith("_")} <= set(dir(handle))
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("role", "options", "message"),
    [
        ("decode", {"chunk_tokens": 4}, "decode engine has no option chunk_tokens; it has max_batch"),
        ("prefill", {"max_batch": 4}, "prefill engine has no option max_batch"),
        ("prefill", {"model_path": "x"}, "no option model_path"),
        ("prefill", {"chunk_tokens": 0}, "chunk_tokens is 0"),
        ("decode", {"max_batch": 0}, "max_batch is 0"),
        ("other", {}, "'other' is neither"),
        ("prefill", {"page_size": 0}, "page_size is 0"),
        ("prefill", {"registry": None}, "registry"),
    ],
)
def test_options_that_cannot_be_used_are_refused(role, options, message):
    with pytest.raises(ConfigurationError, match=message):
        open_engine(cached_model("qwen3"), role=role, **{"registry": MemoryRegistry(), **options})


@pytest.mark.parametrize(("role", "engine"), [("prefill", PrefillEngine), ("decode", DecodeEngine)])
def test_every_option_of_an_engine_can_be_given(role, engine):
    parameters = set(inspect.signature(engine.__init__).parameters)
    assert set(OPTIONS[role]) == parameters - {"self", "model", "pools", "manager", "model_path", "served_model_name"}


def test_models_that_differ_are_refused_with_both_names():
    registry = MemoryRegistry()
    # Their caches look the same.
    prefill = open_engine(cached_model("gemma3"), role="prefill", registry=registry)
    decode = open_engine(cached_model("gpt_oss"), role="decode", registry=registry)
    try:
        end = decode.submit(GenerateRequest("one", prompt(4), 7, GREEDY)).result(WAIT_SECONDS)[1]
        assert end.finish == "error"
        assert "Gemma3ForCausalLM" in end.error
        assert "GptOssForCausalLM" in end.error
    finally:
        decode.close()
        prefill.close()


def test_fingerprints():
    assert fingerprint(make_model("qwen3", 1)) == fingerprint(make_model("qwen3", 2))
    assert fingerprint(cached_model("qwen3")) == "Qwen3ForCausalLM(num_hidden_layers=4, hidden_size=64, vocab_size=256)"


def test_a_decode_engine_without_a_source_says_so():
    engine = open_engine(cached_model("qwen3"), role="decode")
    try:
        with pytest.raises(KVBatonError, match="source"):
            engine.submit(GenerateRequest("one", prompt(4), 8, GREEDY))
    finally:
        engine.close()
