"""Train the demo's model: a small hybrid of gated delta net and full attention layers, from scratch.

    python training/train_recall.py --out models/recall --steps 2000          # train (CUDA if there is one, else CPU)
    python training/train_recall.py --evaluate models/recall --prompts 200    # greedy answers to held-out prompts

The tasks live in `kvbaton.demo.tasks`. Each starts with short prompts and grows as it is learnt: looking up a key forms
suddenly, within a few hundred steps, and it forms in short prompts first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from kvbaton.demo.tasks import HELD_OUT_SEEDS, TASKS, Task, check, make_prompt

PAD, END, UNKNOWN = 0, 1, 2
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
FIRST_CHARACTER = 3
IGNORED = -100
CHUNK = 32  # the gated delta rule works in chunks of so many tokens
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'].strip() + '\\n' }}{% endfor %}"
JOBS_AHEAD = 12
LOG_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Options:
    """What a training run is made of; models/recall/README.md has the values that made the model there."""

    out: Path
    steps: int = 2000
    batch: int = 128
    learning_rate: float = 2e-3
    warmup: int = 200
    weight_decay: float = 0.05
    start_scale: float = 0.1
    seed: int = 0
    hidden: int = 192
    layers: int = 6
    workers: int = 4
    average: float = 0.98
    check_every: int = 500
    time_limit: float = math.inf
    start_from: Path | None = None
    device: str = "cpu"


def make_config(options: Options) -> Qwen3_5TextConfig:
    """Two gated delta net layers, then one of full attention, twice; head counts that tensor parallelism can split."""
    return Qwen3_5TextConfig(
        vocab_size=FIRST_CHARACTER + len(CHARACTERS),
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 3 // 2,
        num_hidden_layers=options.layers,
        layer_types=["linear_attention" if (i + 1) % 3 else "full_attention" for i in range(options.layers)],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_key_head_dim=64,
        linear_num_value_heads=4,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=1024,
        initializer_range=0.04,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [6, 5, 5],
        },
        pad_token_id=PAD,
        eos_token_id=END,
    )


def make_model(options: Options) -> Qwen3_5ForCausalLM:
    torch.manual_seed(options.seed)
    if options.start_from:
        return Qwen3_5ForCausalLM.from_pretrained(options.start_from, dtype=torch.float32)
    model = Qwen3_5ForCausalLM(make_config(options))
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            # The library's initial decay forgets within a token or two, which suits a model that is then trained for
            # months. Time steps from 0.001 to 0.1 give heads that remember from ten to a thousand tokens.
            step = torch.exp(torch.empty_like(layer.linear_attn.dt_bias).uniform_(math.log(0.001), math.log(0.1)))
            layer.linear_attn.dt_bias.data.copy_(step + torch.log(-torch.expm1(-step)))
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character and the line feed."""
    vocabulary = {"<pad>": PAD, "<end>": END, "<unk>": UNKNOWN}
    vocabulary |= {character: FIRST_CHARACTER + index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        chat_template=CHAT_TEMPLATE,
    )


_TOKEN_OF_BYTE = np.full(256, UNKNOWN, dtype=np.int64)
for _index, _character in enumerate(CHARACTERS):
    _TOKEN_OF_BYTE[ord(_character)] = FIRST_CHARACTER + _index


def encode(text: str) -> NDArray[np.int64]:
    """Do what the tokenizer does, only faster; training checks once that the two agree."""
    return _TOKEN_OF_BYTE[np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)]


def make_batch(task: Task, first_seed: int, scales: Sequence[float]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give (tokens, labels), padded on the right; only the answer and its end have labels."""
    count = len(scales)
    rows = []
    for row, scale in enumerate(scales):
        prompt = make_prompt(task, first_seed + row, scale)
        rows.append((encode(prompt.text), encode(prompt.answer)))
    longest = max(len(text) + len(answer) + 1 for text, answer in rows)
    length = -(-longest // CHUNK) * CHUNK
    tokens = np.full((count, length), PAD, dtype=np.int64)
    labels = np.full((count, length), IGNORED, dtype=np.int64)
    for row, (text, answer) in enumerate(rows):
        tokens[row, : len(text)] = text
        tokens[row, len(text) : len(text) + len(answer)] = answer
        tokens[row, len(text) + len(answer)] = END
        # The token at i predicts the token at i + 1.
        labels[row, len(text) - 1 : len(text) + len(answer) - 1] = answer
        labels[row, len(text) + len(answer) - 1] = END
    return tokens, labels


def loss_and_accuracy(
    model: Qwen3_5ForCausalLM, tokens: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the mean loss of an answer token and the part of the answers that are right as a whole.

    An answer whose every token is the likeliest one, given the right ones before it, is the greedy answer.
    """
    hidden = model.model(input_ids=tokens, use_cache=False, chunk_size=CHUNK).last_hidden_state
    answered = labels != IGNORED
    logits = model.lm_head(hidden[answered])
    loss = functional.cross_entropy(logits, labels[answered])
    wrong = torch.zeros_like(answered)
    wrong[answered] = logits.argmax(-1) != labels[answered]
    return loss, (~wrong.any(dim=1)).float().mean()


class Curriculum:
    """The scale of each task's prompts: grows while four of five answers are right."""

    def __init__(self, start: float) -> None:
        self.scales: dict[Task, float] = dict.fromkeys(TASKS, start)
        self._accuracy: dict[Task, float] = dict.fromkeys(TASKS, 0.0)

    def learn(self, task: Task, accuracy: float) -> None:
        """Take in the accuracy of one training step."""
        self._accuracy[task] += 0.1 * (accuracy - self._accuracy[task])
        if self._accuracy[task] > 0.8 and self.scales[task] < 1.0:
            self.scales[task] = min(1.0, self.scales[task] + 0.005)

    def batch_scales(self, task: Task, count: int) -> list[float]:
        """Give the scale of each prompt of a batch: a quarter are shorter, so that what was learnt on them is kept."""
        scale = self.scales[task]
        return [scale if row % 4 else scale * (row + 4) / (count + 4) for row in range(count)]


class BatchSource:
    """Makes batches in other processes, a fixed number of steps ahead, so that a run depends on its seed alone."""

    def __init__(self, options: Options, curriculum: Curriculum) -> None:
        self._pool = ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn"))
        self._options = options
        self._curriculum = curriculum
        self._next_seed = HELD_OUT_SEEDS + options.seed * 10**9
        self._jobs: deque[dict[Task, Future[tuple[NDArray[np.int64], NDArray[np.int64]]]]] = deque()
        for _ in range(JOBS_AHEAD):
            self._submit()

    def _submit(self) -> None:
        jobs = {}
        for task in TASKS:
            scales = self._curriculum.batch_scales(task, self._options.batch)
            jobs[task] = self._pool.submit(make_batch, task, self._next_seed, scales)
        self._next_seed += self._options.batch
        self._jobs.append(jobs)

    def next(self) -> dict[Task, tuple[torch.Tensor, torch.Tensor]]:
        """Give the (tokens, labels) of each task for the next step."""
        self._submit()
        batches = {}
        for task, job in self._jobs.popleft().items():
            tokens, labels = job.result()
            batches[task] = (to_device(tokens, self._options.device), to_device(labels, self._options.device))
        return batches

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)


def to_device(array: NDArray[np.int64], device: str) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def make_optimizer(model: Qwen3_5ForCausalLM, options: Options) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98), fused=options.device == "cuda")


def learning_rate(step: int, options: Options) -> float:
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.learning_rate * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * progress)))


@torch.no_grad()
def held_out_accuracy(model: Qwen3_5ForCausalLM, options: Options, prompts: int = 100) -> dict[Task, float]:
    model.eval()
    accuracy: dict[Task, float] = {}
    for task in TASKS:
        tokens, labels = make_batch(task, 0, [1.0] * prompts)
        _, right = loss_and_accuracy(model, to_device(tokens, options.device), to_device(labels, options.device))
        accuracy[task] = round(right.item(), 4)
    model.train()
    return accuracy


def save(model: Qwen3_5ForCausalLM, out: Path) -> None:
    model.save_pretrained(out)
    make_tokenizer().save_pretrained(out)
    # A copied span is the longest answer; greedy, because each prompt has one right answer.
    GenerationConfig(do_sample=False, max_new_tokens=80, eos_token_id=END, pad_token_id=PAD).save_pretrained(out)


def train(options: Options) -> None:
    """Train, write training_log.jsonl as it goes, and save the model at the end and at every check."""
    options.out.mkdir(parents=True, exist_ok=True)
    sample = make_prompt("recall", 0).text
    if make_tokenizer()(sample)["input_ids"] != encode(sample).tolist():
        raise RuntimeError("the fast encoding and the tokenizer disagree")
    torch.set_float32_matmul_precision("high")
    model = make_model(options).to(options.device).train()
    optimizer = make_optimizer(model, options)
    # What is saved is a running average of the weights: it is steadier than the last step's.
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(options.average))
    curriculum = Curriculum(options.start_scale)
    source = BatchSource(options, curriculum)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {options.device}", flush=True)
    started = time.monotonic()
    with (options.out / "training_log.jsonl").open("w") as log:
        for step in range(options.steps):
            for parameters in optimizer.param_groups:
                parameters["lr"] = learning_rate(step, options)
            measured: dict[Task, torch.Tensor] = {}
            for task, (tokens, labels) in source.next().items():
                loss, accuracy = loss_and_accuracy(model, tokens, labels)
                (loss / len(TASKS)).backward()
                measured[task] = torch.stack([loss, accuracy]).detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            averaged.update_parameters(model)
            figures = {task: value.tolist() for task, value in measured.items()}
            for task, (_, accuracy_now) in figures.items():
                curriculum.learn(task, accuracy_now)
            late = time.monotonic() - started > options.time_limit
            if step % LOG_EVERY == 0 or late or step == options.steps - 1:
                write_log(log, step, started, figures, curriculum, learning_rate(step, options))
            if (step + 1) % options.check_every == 0 or late or step == options.steps - 1:
                line = {"step": step, "held_out_accuracy": held_out_accuracy(averaged.module, options)}
                print(json.dumps(line), file=log, flush=True)
                print(json.dumps(line), flush=True)
                save(averaged.module, options.out)
            if late:
                break
    source.close()


def write_log(
    log: TextIO, step: int, started: float, figures: dict[Task, list[float]], curriculum: Curriculum, rate: float
) -> None:
    line = {
        "step": step,
        "seconds": round(time.monotonic() - started, 1),
        "learning_rate": round(rate, 6),
        "loss": {task: round(loss, 4) for task, (loss, _) in figures.items()},
        "accuracy": {task: round(accuracy, 3) for task, (_, accuracy) in figures.items()},
        "scale": {task: round(scale, 2) for task, scale in curriculum.scales.items()},
    }
    print(json.dumps(line), file=log, flush=True)
    print(json.dumps(line), flush=True)


@torch.no_grad()
def evaluate(directory: Path, prompts: int) -> None:
    """Let the saved model answer held-out prompts, greedily, in float32 on one CPU thread."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for task in TASKS:
        right, wrong_seeds = 0, []
        started = time.monotonic()
        for seed in range(prompts):
            prompt = make_prompt(task, seed)
            inputs = tokenizer(prompt.text, return_tensors="pt")
            output = model.generate(**inputs)
            answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            if check(prompt, answer):
                right += 1
            else:
                wrong_seeds.append(seed)
        seconds = (time.monotonic() - started) / prompts
        print(f"{task:9} {right}/{prompts} right ({right / prompts:.1%}), {seconds:.3f} s each, wrong: {wrong_seeds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", type=Path, metavar="DIRECTORY", help="evaluate a saved model instead")
    parser.add_argument("--prompts", type=int, default=200, help="held-out prompts of each task to evaluate on")
    for field in dataclasses.fields(Options):
        if field.name == "out":
            parser.add_argument("--out", type=Path, default=Path("models/recall"))
        elif field.name == "start_from":
            parser.add_argument("--start-from", type=Path, metavar="DIRECTORY", help="go on from a saved model")
        elif field.name == "device":
            parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        else:
            kind = float if isinstance(field.default, float) else int
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    arguments = vars(parser.parse_args())
    directory, prompts = arguments.pop("evaluate"), arguments.pop("prompts")
    if directory:
        evaluate(directory, prompts)
    else:
        train(Options(**arguments))


if __name__ == "__main__":
    main()
