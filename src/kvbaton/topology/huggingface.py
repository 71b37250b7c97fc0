"""The caches of a model from the fields of its Hugging Face ``config.json``. Nothing of Transformers is imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvbaton.errors import ConfigurationError
from kvbaton.layout import PAGED, SLOT, Kind, compressed, tail, window
from kvbaton.layout.limits import MAX_BYTES, MAX_PAGE_SIZE, MAX_TENSORS
from kvbaton.topology.components import check_dtype, key_value
from kvbaton.topology.model import AxisModel, Block, ComponentModel, Model, TensorModel, evenly
from kvbaton.topology.parse import shown

LAYER_TYPES: dict[str, tuple[str, ...]] = {
    "full_attention": ("full",),
    "attention": ("full",),
    "chunked_attention": ("full",),
    "indexed_attention": ("full",),
    "sliding_attention": ("sliding",),
    "linear_attention": ("linear",),
    "mamba": ("mamba",),
    "mamba2": ("mamba",),
    "hybrid": ("full", "mamba"),
    "compressed_sparse_attention": ("sliding", "sparse"),
    "heavily_compressed_attention": ("sliding", "heavy"),
    "mlp": (),
    "moe": (),
}
"""What a layer of each type keeps."""

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}
"""Every how many layers one is full attention, where a config leaves it to its class."""


def read_config(config: Mapping[str, Any], title: str) -> Model:
    """The model that ``config`` describes; ``title`` begins errors.

    Raises `ConfigurationError`, naming the field, where a needed one is missing or a layer type is not known.
    """
    inner = config.get("text_config")
    fields = _Fields({**config, **inner} if isinstance(inner, Mapping) else config, title)
    count = fields.number("num_hidden_layers", most=MAX_TENSORS)
    kept: dict[str, list[int]] = {}
    for layer, layer_type in enumerate(_layer_types(fields, count)):
        if layer_type not in LAYER_TYPES:
            known = ", ".join(LAYER_TYPES)
            raise ConfigurationError(
                f"{title}: layer {layer} is of type {shown(layer_type)}, which is not known ({known})"
            )
        for what in LAYER_TYPES[layer_type]:
            kept.setdefault(what, []).append(layer)
    dtype = str(fields.get("dtype", fields.get("torch_dtype", "bfloat16")) or "bfloat16")
    check_dtype(dtype, f"{title}: dtype")
    layers = {what: tuple(listed) for what, listed in kept.items()}
    components = [component for what, own in layers.items() for component in _COMPONENTS[what](fields, own)]
    return Model(title, count, tuple(components), dtype)


class _Fields:
    """A config whose missing fields are named when they are asked for."""

    def __init__(self, values: Mapping[str, Any], title: str) -> None:
        self._values = values
        self.title = title

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def number(self, *names: str, default: int | None = None, least: int = 1, most: int = MAX_BYTES) -> int:
        """The first of ``names`` that the config has; raises `ConfigurationError` where it is no such number."""
        for name in names:
            value = self._values.get(name)
            if type(value) is int and least <= value <= most:
                return value
            if value is not None and value != "auto":
                raise ConfigurationError(
                    f"{self.title}: {name} is {shown(value)}, not a {'positive ' * (least == 1)}number up to {most}"
                )
        if default is None:
            raise ConfigurationError(f"{self.title}: has no {' or '.join(names)}, which its layers need")
        return default

    def listed(self, name: str) -> Sequence[Any]:
        """A list; empty where the config has none. Raises `ConfigurationError` for something else."""
        return self._of(name, list | tuple, "list") or []

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A mapping; empty where the config has none. Raises `ConfigurationError` for something else."""
        return self._of(name, Mapping, "mapping") or {}

    def _of(self, name: str, kind: Any, what: str) -> Any:
        value = self._values.get(name)
        if value is not None and not isinstance(value, kind):
            raise ConfigurationError(f"{self.title}: {name} is {shown(value)}, not a {what}")
        return value


def _layer_types(fields: _Fields, count: int) -> list[str]:
    listed = fields.listed("layer_types") or fields.listed("layers_block_type")
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        listed = [_LETTERS.get(letter, letter) for letter in pattern[: count + 1]]
    if listed:
        if len(listed) != count:
            raise ConfigurationError(
                f"{fields.title}: lists the types of {len(listed)} layers, but num_hidden_layers is {count}"
            )
        return [str(entry) for entry in listed]
    model_type = str(fields.get("model_type", ""))
    if fields.get("linear_num_value_heads"):
        every = fields.number("full_attention_interval", default=4)
        return ["full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(count)]
    if model_type == "falcon_h1":
        return ["hybrid"] * count
    if fields.get("attn_layer_indices") is not None:
        own = {layer for layer in fields.listed("attn_layer_indices") if isinstance(layer, int)}
        return ["attention" if layer in own else "mamba" for layer in range(count)]
    if model_type.startswith("mamba"):
        return ["mamba"] * count
    if fields.get("sliding_window") and fields.get("use_sliding_window", True):
        every = fields.number("sliding_window_pattern", default=_PATTERNS.get(model_type, count + 1))
        first = 0
        if fields.get("use_sliding_window"):
            first = fields.number("max_window_layers", default=0, least=0)
        return [
            "full_attention" if (layer + 1) % every == 0 or layer < first else "sliding_attention"
            for layer in range(count)
        ]
    return ["full_attention"] * count


def _head_dim(fields: _Fields) -> int:
    if fields.get("head_dim"):
        return fields.number("head_dim")
    return fields.number("hidden_size") // fields.number("num_attention_heads")


def _attention(fields: _Fields, name: str, kind: Kind, layers: tuple[int, ...]) -> ComponentModel:
    count = fields.number("num_key_value_heads", "num_attention_heads")
    dim = _head_dim(fields)
    tensors = key_value(count, dim, dim)
    # In this architecture a value is the same vector as its key, which is kept once.
    return ComponentModel(name, kind, layers, tensors[:1] if fields.get("compress_rates") else tensors)


def _full(fields: _Fields, layers: tuple[int, ...]) -> Iterator[ComponentModel]:
    if not fields.get("kv_lora_rank"):
        yield _attention(fields, "kv", PAGED, layers)
    else:
        yield _vector("latent", PAGED, layers, fields.number("kv_lora_rank") + fields.number("qk_rope_head_dim"))
    if fields.get("index_topk"):
        shared = fields.listed("indexer_types")
        own = tuple(layer for layer in layers if layer >= len(shared) or shared[layer] != "shared")
        yield _vector("index", PAGED, own, fields.number("index_head_dim"), "index_key")


def _sliding(fields: _Fields, layers: tuple[int, ...]) -> Iterator[ComponentModel]:
    yield _attention(fields, "window", window(fields.number("sliding_window")), layers)


def _linear(fields: _Fields, layers: tuple[int, ...]) -> Iterator[ComponentModel]:
    keys, values = fields.number("linear_num_key_heads"), fields.number("linear_num_value_heads")
    key_dim, value_dim = fields.number("linear_key_head_dim"), fields.number("linear_value_head_dim")
    blocks = (Block("q", keys * key_dim), Block("k", keys * key_dim), Block("v", values * value_dim))
    yield _conv(blocks, fields.number("linear_conv_kernel_dim"), layers)
    yield _recurrent(values, key_dim, value_dim, layers)


def _mamba(fields: _Fields, layers: tuple[int, ...]) -> Iterator[ComponentModel]:
    count = fields.number("mamba_n_heads", "mamba_num_heads", "num_heads")
    dim = _mamba_head_dim(fields, count)
    state = fields.number("mamba_d_state", "ssm_state_size", "state_size")
    groups = fields.number("mamba_n_groups", "n_groups", default=1)
    # B and C belong to groups of heads: with fewer groups than ranks, several ranks hold the same group.
    blocks = (Block("x", count * dim), Block("B", groups * state, groups), Block("C", groups * state, groups))
    yield _conv(blocks, fields.number("mamba_d_conv", "conv_kernel", default=4), layers)
    yield _recurrent(count, dim, state, layers)


def _mamba_head_dim(fields: _Fields, count: int) -> int:
    own = fields.number("mamba_d_head", "mamba_head_dim", default=0)
    # A model of nothing but Mamba layers names its heads without a prefix.
    own = own or (fields.number("head_dim", default=0) if fields.get("num_heads") else 0)
    if own:
        return own
    inner = fields.number("mamba_d_ssm", default=0)
    inner = inner or fields.number("mamba_expand", "expand", default=2) * fields.number("hidden_size")
    return inner // count


def _sparse(fields: _Fields, layers: tuple[int, ...]) -> Iterator[ComponentModel]:
    ratio, dim = _rate(fields, "compressed_sparse_attention", 4), _head_dim(fields)
    index = fields.number("index_head_dim")
    yield _vector("sparse", compressed(ratio), layers, dim, "compressed")
    yield _vector("index", compressed(ratio), layers, index, "index_key")
    yield _tail("sparse_tail", ratio, layers, {"compressed": dim, "index_key": index})


def _heavy(fields: _Fields, layers: tuple[int, ...]) -> Iterator[ComponentModel]:
    ratio, dim = _rate(fields, "heavily_compressed_attention", 128), _head_dim(fields)
    yield _vector("heavy", compressed(ratio), layers, dim, "compressed")
    yield _tail("heavy_tail", ratio, layers, {"compressed": dim})


def _rate(fields: _Fields, layer_type: str, default: int) -> int:
    rate = fields.mapping("compress_rates").get(layer_type, default)
    if type(rate) is not int or not 0 < rate <= MAX_PAGE_SIZE:
        raise ConfigurationError(
            f"{fields.title}: compress_rates.{layer_type} is {shown(rate)}, not a number from 1 to {MAX_PAGE_SIZE}"
        )
    return rate


def _tail(name: str, ratio: int, layers: tuple[int, ...], dims: dict[str, int]) -> ComponentModel:
    """The tokens that are not compressed yet: a row of ``ratio`` places for each request."""
    tensors = [
        TensorModel(f"{role}_{what}", (AxisModel("dim", dim),), "float32")
        for role, dim in dims.items()
        for what in ("input", "gate")
    ]
    return ComponentModel(name, tail(ratio), layers, tuple(tensors), ratio)


def _vector(name: str, kind: Kind, layers: tuple[int, ...], dim: int, role: str = "latent") -> ComponentModel:
    return ComponentModel(name, kind, layers, (TensorModel(role, (AxisModel("dim", dim),)),))


def _conv(blocks: tuple[Block, ...], kernel: int, layers: tuple[int, ...]) -> ComponentModel:
    channel = AxisModel("channel", sum(block.size for block in blocks), blocks)
    return ComponentModel("conv", SLOT, layers, (TensorModel("conv", (channel, AxisModel("column", kernel - 1))),))


def _recurrent(count: int, rows: int, columns: int, layers: tuple[int, ...]) -> ComponentModel:
    axes = (evenly(count), AxisModel("row", rows), AxisModel("column", columns))
    return ComponentModel("recurrent", SLOT, layers, (TensorModel("recurrent", axes, "float32"),))


_COMPONENTS = {
    "full": _full,
    "sliding": _sliding,
    "linear": _linear,
    "mamba": _mamba,
    "sparse": _sparse,
    "heavy": _heavy,
}
