"""What is derived from a config, against what the model itself keeps in its cache after a forward."""

import math

import pytest

from kvbaton.engines.hf import make_model
from kvbaton.engines.hf.caches import describe
from kvbaton.topology.huggingface import read_config

NAMES = ("qwen3", "qwen3_next", "qwen3_5", "gemma3", "gpt_oss", "mamba2", "falcon_h1", "deepseek_v32", "glm_moe_dsa")


@pytest.mark.parametrize("name", NAMES)
def test_elements_by_layer(name):
    model = make_model(name)
    kept = {}
    for place in describe(model).places:
        # Transformers keeps one column of a convolution more than is needed, and latents as keys and values.
        count = math.prod(place.shape) // (place.shape[-1] if place.stored.role == "conv" else 1)
        key = (place.component, place.layer)
        kept[key] = kept.get(key, 0) + count
    derived = {}
    names = {"latent": "kv"}
    for component in read_config(model.config.to_dict(), name).components:
        for layer in component.layers:
            for tensor in component.tensors:
                sizes = [axis.size for axis in tensor.axes if axis.name != "column" or tensor.role != "conv"]
                key = (names.get(component.name, component.name), layer)
                derived[key] = derived.get(key, 0) + math.prod(sizes)
    assert derived == kept
