"""What SGLang's `ModelConfig` says of the caches of a model, beyond what its `KVArgs` say."""

from __future__ import annotations

from typing import Any, NamedTuple

MAMBA_2 = ("falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "nemotron_h_puzzle")
"""Model types whose convolution runs over x, B and C, one after the other, each of them cut by itself."""
MAMBA_1 = ("falcon_mamba", "mamba")
"""Model types whose convolution runs over one block."""


class Facts(NamedTuple):
    """Arguments of `Ranks`, None or empty where the model has no such thing."""

    total_kv_heads: int | None
    swa_kv_heads: int | None
    conv_blocks: tuple[int, ...] | None
    layers: dict[str, tuple[int, ...]]
    model_dtype: str = ""


def facts_of(model_config: Any, stage: tuple[int, int] | None = None) -> Facts:
    """The facts of a model; ``stage`` are the first layer of this pipeline stage and the one after its last."""
    text = getattr(model_config, "hf_text_config", None)
    full = getattr(model_config, "full_attention_layer_ids", None)
    window = getattr(model_config, "swa_attention_layer_ids", None)
    layers: dict[str, tuple[int, ...]] = {}
    if full is not None and window is not None:
        layers = {"kv": _within(full, stage), "swa": _within(window, stage)}
        layers |= {"block_scale": layers["kv"], "block_scale_swa": layers["swa"]}
    total = _count(model_config.get_total_num_kv_heads())
    return Facts(
        total_kv_heads=total,
        # As SGLang makes the pools: what a config does not say of window layers is as in the others.
        swa_kv_heads=_count(_swa_heads(text)) or total,
        conv_blocks=_conv_blocks(model_config),
        layers=layers,
        model_dtype=str(getattr(model_config, "dtype", None) or "").removeprefix("torch."),
    )


def _within(layers: Any, stage: tuple[int, int] | None) -> tuple[int, ...]:
    return tuple(int(layer) for layer in layers if stage is None or stage[0] <= layer < stage[1])


def _count(value: Any) -> int | None:
    return int(value) if value else None


def _swa_heads(text: Any) -> Any:
    heads = getattr(text, "swa_num_key_value_heads", None)
    other = getattr(text, "attention_other_setting", None)
    return other.get("num_attention_groups") if heads is None and isinstance(other, dict) else heads


def _conv_blocks(model_config: Any) -> tuple[int, ...] | None:
    """The blocks of a Mamba convolution, as wide as SGLang's shapes of this rank's tensor parallelism make them."""
    for config in _configs(model_config):
        kind = getattr(config, "model_type", "")
        if kind not in MAMBA_2 + MAMBA_1:
            continue
        shape = getattr(getattr(config, "mamba2_cache_params", None), "shape", None)
        if shape is None:
            continue
        if kind in MAMBA_1:
            return (int(shape.conv_dim),)
        groups, rest = divmod(int(shape.conv_dim) - int(shape.intermediate_size), 2)
        return None if rest else (int(shape.intermediate_size), groups, groups)
    return None


def _configs(model_config: Any) -> list[Any]:
    whole = getattr(model_config, "hf_config", None)
    found = [whole, getattr(whole, "llm_config", None), getattr(model_config, "hf_text_config", None)]
    return [config for config in found if config is not None]
