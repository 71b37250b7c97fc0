"""How the demo shows what it does: a table that grows row by row, a summary, and a JSON file."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvbaton.demo.ask import Answer
from kvbaton.demo.cases import Case, Question

COLUMNS = (
    ("prompt", 24),
    ("answer through prefill and decode", 33),
    ("same", 4),
    ("right", 5),
    ("moved", 40),
    ("ms", 6),
)
"""The columns of the table and their widths."""


@dataclass
class CaseResult:
    """What came of one case."""

    name: str
    prompts: int = 0
    identical: int = 0
    right_pd: int = 0
    right_single: int = 0
    bytes: Counter[str] = field(default_factory=Counter)
    transfer_ms: list[float] = field(default_factory=list)

    def add(self, answer: Answer, single: Answer, right: bool, single_right: bool) -> None:
        """Count one question."""
        self.prompts += 1
        self.identical += answer.token_ids == single.token_ids
        self.right_pd += right
        self.right_single += single_right
        self.bytes.update(answer.bytes)
        self.transfer_ms.append(answer.transfer_ms)

    def as_json(self) -> dict[str, object]:
        """The figures of ``build/demo.json``: bytes of all prompts together, the median transfer time."""
        return {
            "name": self.name,
            "prompts": self.prompts,
            "identical": self.identical,
            "bytes": dict(self.bytes),
            "transfer_ms": round(statistics.median(self.transfer_ms), 3),
        }


def corruption_is_seen(accuracy: Mapping[str, float]) -> bool:
    """Whether damage after the transfer costs at least 20 points of accuracy: what shows that the comparison works."""
    return accuracy["corrupted"] <= accuracy["pd"] - 0.2


class Report:
    """Prints as things happen; colours only on a terminal."""

    def __init__(self) -> None:
        self._colour = sys.stdout.isatty()

    def say(self, text: str = "") -> None:
        """Print a line."""
        print(text, flush=True)

    def begin(self, case: Case) -> None:
        """Print the head of a case's table."""
        self.say(f"\n{case.name}: {case.cache}")
        self._row([name for name, _ in COLUMNS])
        self._row(["-" * width for _, width in COLUMNS])

    def row(self, question: Question, answer: Answer, same: bool, right: bool | None) -> None:
        """Print one question and its answer. ``right`` is None where no right answer is known."""
        moved = " ".join(f"{name} {_size(nbytes)}" for name, nbytes in sorted(answer.bytes.items()))
        cells = [
            _short(question.text, 24),
            _short(answer.text if question.prompt else f"tokens {' '.join(map(str, answer.token_ids))}", 33),
            self._verdict(same),
            "-" if right is None else self._verdict(right),
            _short(moved, 40),
            f"{answer.transfer_ms:6.2f}",
        ]
        self._row(cells)

    def summary(
        self,
        results: Sequence[CaseResult],
        accuracy: Mapping[str, float],
        corrupted: Mapping[str, float],
        seconds: float,
    ) -> None:
        """Print what it all came to."""
        prompts, identical = sum(each.prompts for each in results), sum(each.identical for each in results)
        self.say(
            f"\n{identical} of {prompts} answers through prefill, decode and router are those of a single process."
        )
        self.say(
            f"Right answers of the trained model: {accuracy['single']:.0%} in a single process, "
            f"{accuracy['pd']:.0%} through the hand-over."
        )
        for what, value in corrupted.items():
            self.say(f"  with {what} overwritten after the transfer: {value:.0%}")
        seen = corruption_is_seen(accuracy)
        self.say(f"  so the comparison {'sees' if seen else 'DOES NOT SEE'} corruption.")
        self.say(f"It took {seconds:.0f} s.\n")
        self.say(
            "Where to go next: `make demo ALL=1` for every architecture, `.venv/bin/kvbaton serve pd --model PATH` for"
        )
        self.say("your own, docs/design.md for how it works, README.md for the library by itself.")

    def _verdict(self, good: bool) -> str:
        text = "yes" if good else "NO"
        return f"\033[{'32' if good else '31'}m{text}\033[0m" if self._colour else text

    def _row(self, cells: Sequence[str]) -> None:
        padded = []
        for cell, (_, width) in zip(cells, COLUMNS, strict=True):
            invisible = len(cell) - _visible(cell)
            padded.append(cell.ljust(width + invisible))
        self.say("  ".join(padded).rstrip())


def write_json(path: Path, results: Sequence[CaseResult], accuracy: Mapping[str, float], details: object) -> None:
    """Write ``build/demo.json``."""
    content = {
        "all_identical": all(each.identical == each.prompts for each in results),
        "accuracy": dict(accuracy),
        "models": [each.as_json() for each in results],
        "details": details,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _short(text: str, width: int) -> str:
    text = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return text if len(text) <= width else f"{text[: width // 2 - 1]}...{text[-(width - width // 2 - 2) :]}"


def _size(nbytes: int) -> str:
    if nbytes < 1024:
        return f"{nbytes}B"
    return f"{nbytes / 1024:.0f}K" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):.1f}M"


def _visible(cell: str) -> int:
    return len(cell.replace("\033[32m", "").replace("\033[31m", "").replace("\033[0m", ""))
