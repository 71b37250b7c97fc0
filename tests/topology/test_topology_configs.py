"""Caches from the fields of a config."""

import json
from pathlib import Path

import pytest

from kvbaton.errors import ConfigurationError
from kvbaton.layout import AUX, PAGED, SLOT, compressed, tail, window
from kvbaton.topology.huggingface import read_config

BASE = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
RECALL = Path(__file__).parents[2] / "models" / "recall" / "config.json"


def shown(config):
    """Kind, layers and the axes of the tensors, by component."""
    return {
        component.name: (
            component.kind,
            component.layers,
            {tensor.role: [(axis.name, axis.size) for axis in tensor.axes] for tensor in component.tensors},
        )
        for component in read_config(config, "c").components
    }


def test_grouped_queries():
    axes = {role: [("head", 2), ("dim", 16)] for role in ("key", "value")}
    assert shown(BASE) == {"kv": (PAGED, (0, 1, 2, 3), axes)}
    assert shown({"text_config": BASE, "num_hidden_layers": 9})["kv"][1] == (0, 1, 2, 3)


def test_windows():
    sliding = {**BASE, "sliding_window": 24}
    assert {name: layers for name, (_, layers, _) in shown({**sliding, "model_type": "gpt_oss"}).items()} == {
        "window": (0, 2),
        "kv": (1, 3),
    }
    assert shown(sliding)["window"][:2] == (window(24), (0, 1, 2, 3))
    assert "window" not in shown({**sliding, "use_sliding_window": False})
    assert shown({**sliding, "use_sliding_window": True, "max_window_layers": 3})["window"][1] == (3,)
    assert shown({**sliding, "sliding_window_pattern": 4})["kv"][1] == (3,)


def test_the_trained_hybrid_of_this_repository():
    config = json.loads(RECALL.read_text())
    config = config.get("text_config", config)
    found = shown(config)
    full = tuple(i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention")
    linear = tuple(i for i, kind in enumerate(config["layer_types"]) if kind == "linear_attention")
    assert full
    assert linear
    assert found["kv"][:2] == (PAGED, full)
    assert found["conv"][:2] == (SLOT, linear)
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    columns = config["linear_conv_kernel_dim"] - 1
    assert found["conv"][2] == {"conv": [("channel", 2 * keys + values), ("column", columns)]}
    assert found["recurrent"][2]["recurrent"][0] == ("head", config["linear_num_value_heads"])


def test_latents_and_index_keys():
    config = {**BASE, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "index_topk": 12, "index_head_dim": 16}
    assert shown(config) == {
        "latent": (PAGED, (0, 1, 2, 3), {"latent": [("dim", 40)]}),
        "index": (PAGED, (0, 1, 2, 3), {"index_key": [("dim", 16)]}),
    }
    shared = {**config, "indexer_types": ["full", "full", "shared", "full"]}
    assert shown(shared)["index"][1] == (0, 1, 3)


def test_state_space_models():
    mamba = {"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 64, "num_heads": 8, "head_dim": 16}
    found = shown({**mamba, "state_size": 16, "n_groups": 2, "conv_kernel": 4})
    assert found["conv"] == (SLOT, (0, 1), {"conv": [("channel", 128 + 2 * 2 * 16), ("column", 3)]})
    assert found["recurrent"][2] == {"recurrent": [("head", 8), ("row", 16), ("column", 16)]}
    falcon = {**BASE, "model_type": "falcon_h1", "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_n_groups": 1}
    found = shown({**falcon, "mamba_d_head": "auto", "mamba_d_state": 16})
    assert found["recurrent"][2] == {"recurrent": [("head", 8), ("row", 16), ("column", 16)]}
    assert found["kv"][1] == found["conv"][1] == (0, 1, 2, 3)
    pattern = {
        **BASE,
        "hybrid_override_pattern": "M-*E",
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
    }
    found = shown(pattern)
    assert (found["conv"][1], found["kv"][1]) == ((0,), (2,))


def test_compressed_entries_and_their_tails():
    config = {
        **BASE,
        "num_key_value_heads": 1,
        "sliding_window": 8,
        "index_head_dim": 4,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "compressed_sparse_attention",
        ],
    }
    found = shown(config)
    assert {name: entry[:2] for name, entry in found.items()} == {
        "window": (window(8), (0, 1, 2, 3)),
        "heavy": (compressed(8), (1,)),
        "heavy_tail": (tail(8), (1,)),
        "sparse": (compressed(4), (2, 3)),
        "index": (compressed(4), (2, 3)),
        "sparse_tail": (tail(4), (2, 3)),
    }
    assert list(found["window"][2]) == ["key"], "a value is the same vector as its key"
    assert AUX not in {kind for kind, _, _ in found.values()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "c: has no num_hidden_layers, which its layers need"),
        ({"num_key_value_heads": -1}, "c: num_key_value_heads is -1, not a positive number"),
        ({"layer_types": ["full_attention"] * 3}, "c: lists the types of 3 layers, but num_hidden_layers is 4"),
        ({"layer_types": ["retention"] * 4}, "c: layer 0 is of type 'retention', which is not known (full_attention,"),
        ({"layer_types": ["linear_attention"] * 4}, "c: has no linear_num_key_heads, which its layers need"),
        ({"torch_dtype": "int3"}, "c: dtype: 'int3' is no dtype"),
    ],
)
def test_configs_that_say_too_little(change, words):
    with pytest.raises(ConfigurationError) as error:
        read_config({**BASE, **change}, "c")
    assert words in str(error.value)
