"""Measure what a wrong page or a wrong state does to the demo's model: which parts of a hand-over its answers need.

    python training/measure_damage.py models/recall --prompts 50

Each prompt is prefilled, then its cache is damaged as a broken hand-over would, then the answer is decoded greedily.
The first token of an answer is the prefill engine's, so the damage acts on all the others.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbaton.demo.tasks import TASKS, Prompt, check, make_prompt

PAGE_SIZE = 16
Damage = Callable[[Any, Prompt, random.Random], None]


def randomize(tensor: torch.Tensor) -> None:
    """Overwrite with noise of twice the tensor's own scale."""
    tensor.copy_(torch.randn_like(tensor) * tensor.std() * 2)


def full_attention_layers(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if not hasattr(layer, "recurrent_states")]


def state_layers(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]


def overwrite_page(cache: Any, page: int) -> None:
    for layer in full_attention_layers(cache):
        randomize(layer.keys[:, :, page * PAGE_SIZE : (page + 1) * PAGE_SIZE])
        randomize(layer.values[:, :, page * PAGE_SIZE : (page + 1) * PAGE_SIZE])


def page_count(prompt: Prompt) -> int:
    return -(-len(prompt.text) // PAGE_SIZE)


def evidence_page(cache: Any, prompt: Prompt, generator: random.Random) -> None:
    start, end = generator.choice(prompt.evidence)
    overwrite_page(cache, generator.randrange(start, end) // PAGE_SIZE)


def random_page(cache: Any, prompt: Prompt, generator: random.Random) -> None:
    overwrite_page(cache, generator.randrange(page_count(prompt)))


def first_page(cache: Any, prompt: Prompt, generator: random.Random) -> None:
    overwrite_page(cache, 0)


def last_page(cache: Any, prompt: Prompt, generator: random.Random) -> None:
    overwrite_page(cache, page_count(prompt) - 1)


def zero_page(cache: Any, prompt: Prompt, generator: random.Random) -> None:
    page = generator.randrange(page_count(prompt))
    for layer in full_attention_layers(cache):
        layer.keys[:, :, page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = 0
        layer.values[:, :, page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = 0


def states(cache: Any, names: tuple[str, ...], change: Callable[[torch.Tensor], Any]) -> None:
    for layer in state_layers(cache):
        for name in names:
            change(getattr(layer, name)[0])


DAMAGES: dict[str, Damage] = {
    "none": lambda cache, prompt, generator: None,
    "page of the evidence: noise": evidence_page,
    "a page at random: noise": random_page,
    "a page at random: zeros": zero_page,
    "first page: noise": first_page,
    "last page: noise": last_page,
    "slot, both states: noise": lambda cache, p, g: states(cache, ("conv_states", "recurrent_states"), randomize),
    "slot, both states: zeros": lambda cache, p, g: states(cache, ("conv_states", "recurrent_states"), torch.zero_),
    "slot, recurrent state: noise": lambda cache, p, g: states(cache, ("recurrent_states",), randomize),
    "slot, recurrent state: zeros": lambda cache, p, g: states(cache, ("recurrent_states",), torch.zero_),
    "slot, conv state: zeros": lambda cache, p, g: states(cache, ("conv_states",), torch.zero_),
}


@torch.no_grad()
def answer(model: Any, tokenizer: Any, prompt: Prompt, damage: Damage, generator: random.Random) -> str:
    """Answer one prompt greedily, with its cache damaged between prefill and decode."""
    output = model(**tokenizer(prompt.text, return_tensors="pt"), use_cache=True)
    cache = output.past_key_values if hasattr(output, "past_key_values") else output.cache
    damage(cache, prompt, generator)
    tokens: list[int] = []
    while len(tokens) < 80:
        token = int(output.logits[0, -1].argmax())
        if token == tokenizer.eos_token_id:
            break
        tokens.append(token)
        output = model(input_ids=torch.tensor([[token]]), cache=cache, use_cache=True)
    return str(tokenizer.decode(tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prompts = {task: [make_prompt(task, seed) for seed in range(arguments.prompts)] for task in TASKS}
    print(f"{'right answers after damage':32}" + "".join(f"{task:>10}" for task in TASKS))
    for name, damage in DAMAGES.items():
        generator = random.Random(0)
        torch.manual_seed(0)
        row = ""
        for task in TASKS:
            right = sum(check(p, answer(model, tokenizer, p, damage, generator)) for p in prompts[task])
            row += f"{right / arguments.prompts:>10.1%}"
        print(f"{name:32}{row}", flush=True)


if __name__ == "__main__":
    main()
