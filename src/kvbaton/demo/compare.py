"""The other side of the comparison: the same questions, answered by this process alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from kvbaton.demo.ask import Answer
from kvbaton.demo.cases import Question
from kvbaton.demo.tasks import check
from kvbaton.engines.base import Sampling
from kvbaton.engines.hf import generate_single, load_model
from kvbaton.errors import ConfigurationError
from kvbaton.serve.tokenizer import load_tokenizer


def quiet_transformers() -> None:
    """Keep Transformers' progress bars and advice out of the demo's tables."""
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


THREADS = 1
"""Threads of torch in each process: the demo's processes share few cores, and all sides must sum in the same order."""


class SingleProcess:
    """A model in this process: no pages, no transfer, only Transformers."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        torch.set_num_threads(THREADS)
        self._model = load_model(folder, device)
        tokenizer = load_tokenizer(str(folder))
        if tokenizer is None:
            raise ConfigurationError(f"{folder} has no tokenizer")
        self._tokenizer = tokenizer

    def answer(self, question: Question) -> Answer:
        """Answer greedily."""
        ids = self._tokenizer.encode(question.text)
        sampling = Sampling(max_new_tokens=question.max_new_tokens, temperature=0.0, ignore_eos=question.ignore_eos)
        made = generate_single(self._model, list(ids), sampling)
        return Answer(made.token_ids, self._tokenizer.decode(made.token_ids))


def is_right(question: Question, answer: Answer) -> bool:
    """Whether the answer is the right one; only for questions whose right answer is known."""
    return question.prompt is not None and check(question.prompt, answer.text)
