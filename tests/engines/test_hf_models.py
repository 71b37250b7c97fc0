from __future__ import annotations

import pytest
import torch
from hf_pair import GREEDY, cached_model, prompt
from transformers import AutoTokenizer

from kvbaton.engines.base import Sampling
from kvbaton.engines.hf import ARCHITECTURES, generate_single, load_model, make_model, make_tokenizer, save_model
from kvbaton.engines.hf.models import INDEX_TOP_K, SLIDING_WINDOW, VOCAB_SIZE
from kvbaton.errors import ConfigurationError


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("tokens", [1, 50])
def test_greedy_text_is_varied(name, tokens):
    answer = generate_single(cached_model(name), prompt(tokens), Sampling(24, temperature=0.0, ignore_eos=True))
    assert len(set(answer.token_ids)) >= 12


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_are_small_and_ready(name):
    model = cached_model(name)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert model.config.vocab_size == VOCAB_SIZE


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, again, other = make_model("qwen3", 1), make_model("qwen3", 1), make_model("qwen3", 2)
    assert torch.equal(torch.rand(1), expected)
    weights = [model.get_output_embeddings().weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(("name", "size"), [("gemma3", SLIDING_WINDOW), ("deepseek_v32", INDEX_TOP_K)])
def test_windows_and_selections_matter(name, size):
    """A model that sees everything answers otherwise."""
    wide = make_model(name)
    ids = prompt(60)
    narrow = generate_single(cached_model(name), ids, GREEDY)
    for module in wide.modules():
        for attribute in ("sliding_window", "index_topk"):
            if getattr(module, attribute, None) == size:
                setattr(module, attribute, 1000)
    for attribute in ("sliding_window", "index_topk"):
        if getattr(wide.config, attribute, None) == size:
            setattr(wide.config, attribute, 1000)
    assert generate_single(wide, ids, GREEDY) != narrow


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_saved_models_load_by_path_and_answer_the_same(name, tmp_path):
    loaded = load_model(save_model(name, tmp_path / name))
    assert generate_single(loaded, prompt(30), GREEDY) == generate_single(cached_model(name), prompt(30), GREEDY)


def test_the_tokenizer_makes_one_token_of_each_character(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "recall: ab=12;\n\té~ x  y"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert max(ids) < VOCAB_SIZE
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == cached_model("qwen3").config.eos_token_id
    assert len(tokenizer.decode(list(range(4, VOCAB_SIZE)))) == VOCAB_SIZE - 4


def test_unknown_names_and_paths_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="qwen3_5"):
        make_model("qwen9")
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        load_model(tmp_path)
