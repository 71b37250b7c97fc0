"""Engines whose model and pools are on a GPU: answers are those of one process on that GPU."""

import functools

import pytest
import torch
from hf_pair import GREEDY, Pair, prompt

from kvbaton.engines.hf import generate_single, make_model, open_engine
from kvbaton.engines.hf.loading import check_device
from kvbaton.errors import ConfigurationError
from kvbaton.registry import MemoryRegistry

NAMES = ["qwen3", "qwen3_5", "gemma3", "deepseek_v32", "deepseek_v4", "mamba2", "falcon_h1"]
needs_device = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a GPU")


@functools.cache
def model_on_device(name):
    return make_model(name).to("cuda:0")


class DevicePair(Pair):
    """Two engines of one model on the GPU."""

    def __init__(self, name, transports, chunk_tokens=None, **grid):
        registry, model = MemoryRegistry(), model_on_device(name)
        common = {
            "registry": registry,
            "pool_tokens": 1024,
            "max_running_requests": 8,
            "manager_options": {"transports": transports},
        }
        self.prefill = open_engine(model, role="prefill", chunk_tokens=chunk_tokens, **common, **grid)
        self.decode = open_engine(model, role="decode", max_batch=1, **common)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("transports", "chunk_tokens"), [(("cuda",), None), (("cuda",), 16), (("tcp",), 16)])
def test_answers_are_those_of_one_process_on_the_gpu(name, transports, chunk_tokens):
    prompts = [prompt(tokens) for tokens in (5, 48, 130)]
    with DevicePair(name, transports, chunk_tokens) as pair:
        answers = pair.answers(prompts)
        assert {peer.transport for peer in pair.decode.manager.managers[0].peers} == set(transports)
        pair.settle()
    assert answers == [generate_single(model_on_device(name), ids, GREEDY, chunk_tokens).token_ids for ids in prompts]


@pytest.mark.gpu
@needs_device
def test_ranks_that_share_heads_on_the_gpu():
    prompts = [prompt(tokens) for tokens in (7, 64)]
    with DevicePair("qwen3_5", ("cuda", "tcp"), 16, tp=2) as pair:
        answers = pair.answers(prompts)
        pair.settle()
    assert answers == [generate_single(model_on_device("qwen3_5"), ids, GREEDY, 16).token_ids for ids in prompts]


@pytest.mark.parametrize(
    ("device", "message"),
    [("quantum", "device 'quantum'"), ("meta", "none of cpu, cuda"), ("cuda:99", "'cuda:99' is not there")],
)
def test_a_device_that_is_none_is_refused(device, message):
    with pytest.raises(ConfigurationError, match=message):
        check_device(device)
