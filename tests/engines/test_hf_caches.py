from __future__ import annotations

import pytest
import torch
from hf_pair import cached_model, prompt
from transformers import Gemma3TextConfig
from transformers.cache_utils import DynamicLayer

from kvbaton.engines.hf import make_model
from kvbaton.engines.hf.caches import describe, restore
from kvbaton.errors import ConfigurationError

# name: {component: (kind, layers that have it)}
EXPECTED = {
    "qwen3": {"kv": ("paged", [0, 1, 2, 3])},
    "qwen3_5": {"kv": ("paged", [1, 3]), "conv": ("slot", [0, 2]), "recurrent": ("slot", [0, 2])},
    "gemma3": {"kv": ("paged", [1, 3]), "window": ("window of 23 tokens", [0, 2])},
    # The third layer of the tiny GLM takes the selection of the second.
    "glm_moe_dsa": {"kv": ("paged", [0, 1, 2, 3]), "index": ("paged", [0, 1, 3])},
    "deepseek_v4": {
        "window": ("window of 7 tokens", [0, 1, 2, 3]),
        "compressed_8": ("paged, 1 entry for 8 tokens", [1]),
        "compressed_4": ("paged, 1 entry for 4 tokens", [2, 3]),
        "index": ("paged, 1 entry for 4 tokens", [2, 3]),
        "tail_8": ("tail after each 8 tokens, in a ring, never reused", [1]),
        "tail_4": ("tail after each 4 tokens, in a ring, never reused", [2, 3]),
        "overlap": ("slot", [2, 3]),
    },
    "mamba2": {"conv": ("slot", [0, 1, 2, 3]), "recurrent": ("slot", [0, 1, 2, 3])},
    "falcon_h1": {
        "kv": ("paged", [0, 1, 2, 3]),
        "conv": ("slot", [0, 1, 2, 3]),
        "recurrent": ("slot", [0, 1, 2, 3]),
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_components_and_their_layers(name):
    found: dict[str, tuple[str, list[int]]] = {}
    for place in describe(cached_model(name)).places:
        kind, layers = found.setdefault(place.component, (str(place.kind), []))
        assert kind == str(place.kind)
        if place.layer not in layers:
            layers.append(place.layer)
    assert found == EXPECTED[name]


def test_shapes_of_grouped_attention_latents_and_entries():
    shapes = {
        (name, place.layer, place.role): (place.axes, place.shape, place.rate)
        for name in ("qwen3", "deepseek_v32", "deepseek_v4", "qwen3_5")
        for place in describe(cached_model(name)).places
    }
    assert shapes["qwen3", 0, "key"] == (("head", "dim"), (2, 16), 1)
    # Latent attention keeps one latent of 32 values and the rotary part of 8 for all heads.
    assert shapes["deepseek_v32", 0, "key"] == (("head", "dim"), (1, 32), 1)
    assert shapes["deepseek_v32", 0, "value"] == (("head", "dim"), (1, 8), 1)
    assert shapes["deepseek_v32", 0, "index_key"] == (("dim",), (16,), 1)
    # An entry of 16 values stands for 8 tokens; those for which none stands yet are kept one by one.
    assert shapes["deepseek_v4", 1, "compressor"] == (("dim",), (16,), 8)
    assert shapes["deepseek_v4", 1, "compressor_buffer"] == (("dim",), (16,), 8)
    assert shapes["qwen3_5", 0, "conv"] == (("channel", "kernel"), (128, 4), 1)
    assert shapes["qwen3_5", 0, "recurrent"] == (("head", "row", "column"), (4, 16, 16), 1)


@pytest.mark.parametrize(
    ("name", "granularity", "can_pad"),
    [
        ("qwen3", 1, True),
        ("qwen3_5", 1, True),
        ("gemma3", 1, False),
        ("deepseek_v32", 1, False),
        ("deepseek_v4", 8, False),
    ],
)
def test_granularity_and_padding(name, granularity, can_pad):
    description = describe(cached_model(name))
    assert (description.granularity, description.can_pad) == (granularity, can_pad)


def test_windows_of_different_sizes_are_components_of_their_own():
    model = make_model("gemma3")
    description = describe(model)
    cache = description.new_cache()
    cache.layers[2].sliding_window = 9
    assert isinstance(model.config, Gemma3TextConfig)

    from kvbaton.engines.hf import caches

    with torch.no_grad():
        model(input_ids=torch.tensor([prompt(4)]), cache=cache, use_cache=True)
    places = [place for number in range(4) for place in caches._places(cache, number)]
    names = {(place.component, place.window) for place in caches._apart(places)}
    assert names == {("window_23", 23), ("window_8", 8), ("kv", 0)}


def test_a_cache_of_an_unknown_class_is_refused_by_name(monkeypatch):
    class StrangeLayer(DynamicLayer):
        pass

    monkeypatch.setattr("transformers.cache_utils.DYNAMIC_LAYER_TYPE_MAPPING", {"full_attention": StrangeLayer})
    with pytest.raises(ConfigurationError, match=r"StrangeLayer.*TABLE"):
        describe(cached_model("qwen3"))


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("tokens", [1, 8, 23, 24, 41])
def test_what_is_not_a_tensor_is_restored_from_the_number_of_tokens(name, tokens):
    model = cached_model(name)
    description = describe(model)
    original, copied = description.new_cache(), description.new_cache()
    with torch.no_grad():
        model(input_ids=torch.tensor([prompt(tokens)]), cache=original, use_cache=True)
    for place in description.places:
        place.set(copied, place.get(original))
    restore(copied, tokens)
    for expected, layer in zip(original.layers, copied.layers, strict=True):
        plain, restored = (
            {key: value for key, value in vars(entry).items() if not _holds_tensors(value)}
            for entry in (expected, layer)
        )
        assert restored == plain


def _holds_tensors(value: object) -> bool:
    if isinstance(value, dict):
        return any(_holds_tensors(entry) for entry in value.values())
    return isinstance(value, torch.Tensor)
