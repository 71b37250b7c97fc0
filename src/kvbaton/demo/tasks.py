"""Prompts with checkable answers: what the demo asks its model, and what the model was trained on.

Every prompt is a function of a task, a seed and a scale. Values and spans are random, so that no answer can be guessed:
a wrong byte in the cache or in the state that the decode engine received shows up as a wrong answer.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, get_args

Task = Literal["recall", "copy"]
TASKS: tuple[Task, ...] = cast("tuple[Task, ...]", get_args(Task))

HELD_OUT_SEEDS = 1_000_000
"""Seeds below this number are never trained on: training counts its seeds from here upwards."""

ASKED_KEYS = 4
VALUE_DIGITS = 4
_COPIED = string.ascii_lowercase + string.digits


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question and its only right answer.

    `evidence` are the [start, end) character ranges of `text` that the answer is read from, in the order of the answer.
    The tokenizer of the demo's model makes one token of each character, so they are token positions as well.
    """

    task: Task
    text: str
    answer: str
    evidence: tuple[tuple[int, int], ...]


def make_prompt(task: Task, seed: int, scale: float = 1.0) -> Prompt:
    """Make the prompt that belongs to a seed; a scale below 1 makes it shorter (training begins with short ones)."""
    if task not in _MAKERS:
        raise ValueError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
    if not 0.0 < scale <= 1.0:
        raise ValueError(f"scale must be above 0 and at most 1, got {scale}")
    # The tasks draw from different streams, so that one seed does not give the same choices to all of them.
    generator = random.Random(seed * len(TASKS) + TASKS.index(task))
    return _MAKERS[task](generator, scale)


def check(prompt: Prompt, answer_text: str) -> bool:
    """Say whether a model's answer is right: character by character, but for white space at its ends."""
    return answer_text.strip() == prompt.answer


def _scaled(generator: random.Random, low: int, high: int, scale: float) -> int:
    return max(1, round(generator.randint(low, high) * scale))


def _recall(generator: random.Random, scale: float) -> Prompt:
    """Make many `key=value` pairs, then the keys that are asked; the answer is the asked pairs.

    No two pairs agree in the last letter of the key and the first digit of the value: a small model sees a few
    characters at a time, and confuses such pairs.
    """
    pair_count = max(2, _scaled(generator, 24, 32, scale))
    pairs: list[str] = []
    keys: set[str] = set()
    joints: set[str] = set()
    while len(pairs) < pair_count:
        key = generator.choice(string.ascii_lowercase) + generator.choice(string.ascii_lowercase)
        value = f"{generator.randrange(10**VALUE_DIGITS):0{VALUE_DIGITS}d}"
        if key not in keys and key[-1] + value[0] not in joints:
            keys.add(key)
            joints.add(key[-1] + value[0])
            pairs.append(f"{key}={value}")
    head = "recall: "
    pair_length = len(pairs[0])
    asked = generator.sample(range(pair_count), min(ASKED_KEYS, max(1, round(ASKED_KEYS * scale)), pair_count))
    starts = [len(head) + index * (pair_length + 1) for index in asked]
    return Prompt(
        task="recall",
        text=f"{head}{';'.join(pairs)}\nask: {','.join(pairs[index].partition('=')[0] for index in asked)}\n",
        answer=";".join(pairs[index] for index in asked),
        evidence=tuple((start, start + pair_length) for start in starts),
    )


def _copy(generator: random.Random, scale: float) -> Prompt:
    """Make a span of random letters and digits, in which no two neighbours occur twice; the answer is the span."""
    length = max(3, _scaled(generator, 50, 58, scale))
    span = generator.choice(_COPIED)
    neighbours: set[str] = set()
    while len(span) < length:
        pair = span[-1] + generator.choice(_COPIED)
        if pair not in neighbours:
            neighbours.add(pair)
            span += pair[-1]
    head = "copy: "
    return Prompt(task="copy", text=f"{head}{span}\n", answer=span, evidence=((len(head), len(head) + length),))


_MAKERS: dict[Task, Callable[[random.Random, float], Prompt]] = {
    "recall": _recall,
    "copy": _copy,
}
