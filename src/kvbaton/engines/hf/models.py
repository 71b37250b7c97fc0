"""Tiny models with random weights, one for each kind of cache, made from their Transformers configs when asked for.

They are for tests and for trying things: the weights are scaled so that greedy text is varied and depends on every page
and every state, and windows and sparse selections are smaller than an ordinary prompt. Nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from kvbaton.errors import ConfigurationError

VOCAB_SIZE = 256
HIDDEN_SIZE = 64
SLIDING_WINDOW = 24
INDEX_TOP_K = 12
CONTEXT_LENGTH = 4096

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 4,
    "max_position_embeddings": CONTEXT_LENGTH,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED: dict[str, Any] = {**_BASE, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
_GATED_DELTA: dict[str, Any] = {
    **_GROUPED,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_LATENT: dict[str, Any] = {
    **_BASE,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "first_k_dense_replace": 1,
    "index_topk": INDEX_TOP_K,
    "index_head_dim": 16,
    "index_n_heads": 4,
}


def _config(name: str, **values: Any) -> Any:
    config_class: Any = getattr(transformers, name)
    return config_class(**values)


def _qwen3() -> Any:
    return _config("Qwen3Config", **_GROUPED, head_dim=16)


def _qwen3_next() -> Any:
    return _config(
        "Qwen3NextConfig",
        **_GATED_DELTA,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )


def _qwen3_5() -> Any:
    return _config("Qwen3_5TextConfig", **_GATED_DELTA)


def _gemma3() -> Any:
    return _config(
        "Gemma3TextConfig",
        **_GROUPED,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=SLIDING_WINDOW,
        layer_types=_ALTERNATING,
    )


def _gpt_oss() -> Any:
    return _config(
        "GptOssConfig",
        **_GROUPED,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=SLIDING_WINDOW,
        layer_types=_ALTERNATING,
    )


def _deepseek_v32() -> Any:
    return _config("DeepseekV32Config", **_LATENT)


def _glm_moe_dsa() -> Any:
    return _config("GlmMoeDsaConfig", **_LATENT, indexer_types=["full", "full", "shared", "full"])


def _deepseek_v4() -> Any:
    return _config(
        "DeepseekV4Config",
        **_BASE,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        partial_rotary_factor=0.5,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=4,
        sliding_window=SLIDING_WINDOW // 3,
        num_nextn_predict_layers=0,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        layer_types=[
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "compressed_sparse_attention",
        ],
        mlp_layer_types=["moe"] * 4,
    )


def _mamba2() -> Any:
    values = {name: value for name, value in _BASE.items() if name != "max_position_embeddings"}
    return _config("Mamba2Config", **values, num_heads=8, head_dim=16, state_size=16, n_groups=2, chunk_size=32)


def _falcon_h1() -> Any:
    return _config(
        "FalconH1Config",
        **_GROUPED,
        mamba_d_ssm=128,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_chunk_size=32,
    )


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "qwen3": _qwen3,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "deepseek_v32": _deepseek_v32,
    "glm_moe_dsa": _glm_moe_dsa,
    "deepseek_v4": _deepseek_v4,
    "mamba2": _mamba2,
    "falcon_h1": _falcon_h1,
}
"""Name of each tiny model, and what makes its config."""

_GAINS: tuple[tuple[str, float], ...] = (
    # The first entry that ends the module's name decides. Queries and keys are large so that attention is sharp.
    ("embed_tokens", 0.0),
    ("embeddings", 0.0),
    ("lm_head", 4.0),
    ("q_proj", 2.5),
    ("k_proj", 2.5),
    ("q_b_proj", 2.5),
    ("kv_b_proj", 2.0),
    ("wq_b", 2.5),
    ("wk", 2.5),
    ("gate", 4.0),
    ("router", 4.0),
)
_DEFAULT_GAIN = 1.8
_SHARPNESS = 2.0


def make_model(name: str, seed: int = 0) -> Any:
    """The tiny model ``name`` of `ARCHITECTURES`: float32, on CPU, in evaluation mode; the same for the same seed.

    Raises `ConfigurationError` for a name that is not there.
    """
    if name not in ARCHITECTURES:
        raise ConfigurationError(f"no tiny model is named {name!r}; choose one of {', '.join(ARCHITECTURES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = ARCHITECTURES[name]()
        config.dtype = "float32"
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation="eager")
        _scale(model)
    model.generation_config.eos_token_id = config.eos_token_id
    return model.to(torch.float32).eval()


@torch.no_grad()
def _scale(model: Any) -> None:
    for name, parameter in model.named_parameters():
        module = name.rsplit(".", 1)[0].rsplit(".", 1)[-1]
        if module in ("q_norm", "k_norm"):
            # Gemma and Qwen3-Next store the weight less one.
            parameter.copy_(torch.full_like(parameter, _SHARPNESS - (0.0 if parameter.mean() > 0.5 else 1.0)))
        elif name.endswith("dt_bias"):
            # Small steps and slow decay: states remember more than the last few tokens.
            parameter.fill_(-2.0)
        elif name.endswith("A_log"):
            parameter.clamp_(max=math.log(2.0))
        elif parameter.dim() >= 2 and "conv" not in module:
            gain = next((value for ending, value in _GAINS if module == ending), _DEFAULT_GAIN)
            fan_in = parameter.shape[-1]
            parameter.normal_(0.0, gain / math.sqrt(fan_in) if gain else 1.0)
    if model.config.model_type.startswith("gemma"):
        # Gemma multiplies embeddings by the root of the hidden size: they would drown most that attention adds.
        model.get_input_embeddings().weight.div_(4.0)


def save_model(name: str, folder: str | Path, seed: int = 0) -> Path:
    """Write the tiny model ``name`` and a tokenizer of single characters to ``folder``; returns the folder.

    ``AutoModelForCausalLM`` and ``AutoTokenizer`` load it by path.
    """
    path = Path(folder)
    make_model(name, seed).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def make_tokenizer() -> Any:
    """A tokenizer whose tokens are the characters of Latin-1 that are not control codes, one token each."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    characters = ["\n", "\t", *(chr(code) for code in range(32, 127)), *(chr(code) for code in range(161, 256))]
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    for index in range(len(vocabulary), VOCAB_SIZE):
        vocabulary[chr(0x4E00 + index)] = index
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
