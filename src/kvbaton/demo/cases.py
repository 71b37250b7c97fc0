"""What the demo asks, and which models it asks."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbaton.demo.tasks import TASKS, Prompt, make_prompt
from kvbaton.errors import ConfigurationError

TRAINED_MODEL = Path(__file__).parents[3] / "models" / "recall"
"""The trained model lies in the repository, not in the package."""

CACHE_OF: dict[str, str] = {
    "qwen3": "attention, grouped heads",
    "qwen3_next": "gated delta net + attention, MoE",
    "qwen3_5": "gated delta net + attention",
    "gemma3": "sliding windows + attention",
    "gpt_oss": "sliding windows + attention, sinks, MoE",
    "deepseek_v32": "latent attention + sparse index keys",
    "glm_moe_dsa": "latent attention + sparse index keys",
    "deepseek_v4": "compressed attention + sliding windows",
    "mamba2": "state space only",
    "falcon_h1": "state space beside attention",
}
"""What each architecture keeps of a request."""

ONE_OF_EACH_KIND = ("qwen3", "qwen3_5", "gemma3", "deepseek_v32", "mamba2")

RANDOM_MODEL_TOKENS = 24
"""Length of the answers of models with random weights, in tokens."""


@dataclass(frozen=True)
class Question:
    """A prompt; ``prompt`` is there where the right answer is known.

    A model with random weights ends its text at random too: without a right answer, all tokens are asked for.
    """

    text: str
    max_new_tokens: int
    prompt: Prompt | None = None

    @property
    def ignore_eos(self) -> bool:
        """Whether the model's own end of text is passed over."""
        return self.prompt is None


@dataclass(frozen=True)
class Case:
    """One model and what it is asked."""

    name: str
    cache: str
    folder: Path
    questions: tuple[Question, ...]


def trained_questions(count: int, first_seed: int = 0) -> tuple[Question, ...]:
    """Held-out prompts for the trained model, of each task in turn."""
    prompts = [make_prompt(TASKS[index % len(TASKS)], first_seed + index) for index in range(count)]
    return tuple(Question(prompt.text, len(prompt.answer) + 8, prompt) for prompt in prompts)


def trained_case(count: int) -> Case:
    """The trained model with ``count`` held-out prompts.

    Raises `ConfigurationError` outside a clone of the repository, where the model is.
    """
    if not (TRAINED_MODEL / "config.json").exists():
        raise ConfigurationError(
            f"the trained model is not at {TRAINED_MODEL}: run the demo from a clone of the repository"
        )
    return Case("recall (trained)", "gated delta net + attention", TRAINED_MODEL, trained_questions(count))


def architecture_cases(names: Sequence[str], folder: Path, prompts: int = 4) -> list[Case]:
    """A tiny model with random weights for each architecture, saved below ``folder``."""
    from kvbaton.engines.hf import save_model

    cases = []
    for name in names:
        save_model(name, folder / name)
        cases.append(Case(name, CACHE_OF[name], folder / name, random_questions(prompts)))
    return cases


def random_questions(count: int) -> tuple[Question, ...]:
    """Random text of several lengths: shorter and longer than a page, a window, and a sparse selection."""
    generator = random.Random(7)
    lengths = [random.Random(index).choice((9, 48, 130, 333)) + index for index in range(count)]
    letters = string.ascii_lowercase + " "
    return tuple(Question("".join(generator.choices(letters, k=length)), RANDOM_MODEL_TOKENS) for length in lengths)
