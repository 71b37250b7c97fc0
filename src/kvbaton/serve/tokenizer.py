"""A Transformers tokenizer, as the servers use it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbaton.errors import ConfigurationError
from kvbaton.serve.bodies import BadRequest

_TEMPLATE_OPTIONS_OF_OURS = frozenset(
    {"conversation", "tokenize", "add_generation_prompt", "chat_template", "return_dict", "return_tensors", "padding"}
)


class TransformersTokenizer:
    """A `kvbaton.engines.base.Tokenizer` from the files of a model; may be used from several threads."""

    def __init__(self, model_path: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigurationError(f"text needs Transformers ({error}): install kvbaton[serve]") from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"the tokenizer of {model_path} cannot be loaded: {error}") from error
        # Its Rust part may not be borrowed twice at a time.
        self._lock = threading.Lock()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end of text."""
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (int(eos),)

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text, with the special tokens that the model expects."""
        with self._lock:
            return [int(each) for each in self._tokenizer.encode(text)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        with self._lock:
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Sequence[int]:
        """Token ids of a conversation; raises `BadRequest` if the model has no template, or for an option of ours."""
        if not self._tokenizer.chat_template:
            raise BadRequest("this model has no chat template: ask /v1/completions or /generate")
        taken = sorted(_TEMPLATE_OPTIONS_OF_OURS.intersection(options))
        if taken:
            raise BadRequest(f"chat_template_kwargs may not set {', '.join(taken)}")
        with self._lock:
            token_ids = self._tokenizer.apply_chat_template(
                list(messages), tokenize=True, add_generation_prompt=True, return_dict=False, **options
            )
        return [int(each) for each in token_ids]


def load_tokenizer(model_path: str) -> TransformersTokenizer | None:
    """Load the tokenizer of a model; None for a folder that has none (its server then takes and gives token ids)."""
    folder = Path(model_path)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if folder.is_dir() and not any((folder / name).exists() for name in names):
        return None
    return TransformersTokenizer(model_path)
