"""A whole hand-over of kvbaton's managers beside SGLang's own: the same cases, the same bytes, in one run.

SGLang's side is driven by a harness, a folder with a ``harness.py`` that takes ``--backend``, ``--case``, ``--reps``,
``--ucx-tls`` and ``--json`` and runs SGLang's managers in processes of their own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbaton.bench.contenders.cases import Case
from kvbaton.bench.pairs import contenders_python
from kvbaton.bench.report import Figure, absent, at_most
from kvbaton.bench.world import HandOver, World

CASES = {
    "a": Case(layers=32, tokens=4096, state_layers=4),
    "c": Case(layers=32, tokens=4096, prefill_tp=2, state_layers=4),
    "d": Case(layers=8, tokens=512, requests=64, state_layers=4),
}
"""As the harness has them: page size 1, shuffled, 8 KV heads of 128 bfloat16."""
WORDS = {
    "a": "4,096 tokens, page 1, shuffled",
    "c": "TP 2 to 1, page 1, shuffled",
    "d": "64 requests of 512 tokens",
}
TARGETS = {("shm", "a"): 5.0, ("tcp", "a"): 20.0}
OTHER_TARGETS = {"shm": 6.0, "tcp": 30.0}
PROCESSOR_TARGET = 0.2
UCX = {"shm": "", "tcp": "tcp,self"}
HARNESS_SECONDS = 900.0


class Theirs(NamedTuple):
    """What the harness measured, in seconds: the median repetition; or why it measured nothing."""

    last: float = 0.0
    median: float = 0.0
    source_processor: float = 0.0
    missing: str = ""


def run(harness: Path | None, cases: Sequence[str], transports: Sequence[str], runs: int) -> list[Figure]:
    """All figures, in milliseconds. Without a harness kvbaton's figures stand alone, and the rows say so."""
    figures: list[Figure] = []
    for name in cases:
        for transport in transports:
            # The fewest of SGLang's repetitions that have a median: over tcp each takes ten seconds and more.
            theirs = measure_sglang(harness, name, transport, min(runs, 3))
            with World(CASES[name], transport) as world:
                ours = [world.run() for _ in range(1 + runs)][1:]
            figures += _compare(name, transport, ours, theirs)
    return figures


def _compare(name: str, transport: str, ours: Sequence[HandOver], theirs: Theirs) -> list[Figure]:
    what = f"hand-over, case {name} ({WORDS[name]}), {transport}"
    peer = f"SGLang's NIXL manager over {'tcp' if transport == 'tcp' else 'shared memory'}"
    target = TARGETS.get((transport, name), OTHER_TARGETS[transport])
    rows = [(what, statistics.median(run.last for run in ours), theirs.last)]
    if CASES[name].requests > 1:
        rows.append((f"{what}, p50 of the requests", statistics.median(run.median for run in ours), theirs.median))
    figures = []
    for words, mine, other in rows:
        if theirs.missing:
            figures.append(absent(words, "ms", peer, theirs.missing, target, mine * 1e3))
        else:
            figures.append(_times_faster(words, mine, peer, other, target))
    words = f"processor time of the prefill process, case {name}, {transport}"
    mine = statistics.median(run.source_processor for run in ours)
    target_here = PROCESSOR_TARGET if (name, transport) == ("a", "shm") else None
    if theirs.missing:
        figures.append(Figure(words, mine * 1e3, "ms"))
    else:
        figures.append(at_most(words, mine * 1e3, "ms", peer, theirs.source_processor * 1e3, target_here))
    return figures


def _times_faster(name: str, mine: float, peer: str, theirs: float, target: float) -> Figure:
    """``ratio`` is how many times as long the peer takes."""
    ratio = theirs / mine
    return Figure(name, mine * 1e3, "ms", f"{peer}: {theirs * 1e3:.4g} ms", ratio, target, ratio >= target, "x faster")


def measure_sglang(harness: Path | None, case: str, transport: str, runs: int) -> Theirs:
    """Run one case of the harness. Never raises for what is missing."""
    if harness is None:
        return Theirs(missing="no harness was named (--sglang FOLDER)")
    script = harness.absolute() / "harness.py"
    python = contenders_python()
    for path in (script, python):
        if not path.exists():
            return Theirs(missing=f"{path.name} is missing in {path.parent}")
    with tempfile.TemporaryDirectory() as folder:
        written, log = Path(folder, "out.json"), Path(folder, "log")
        command = [str(python), str(script), "--backend", "nixl", "--case", case, "--reps", str(runs)]
        command += ["--ucx-tls", UCX[transport]] if UCX[transport] else []
        command += ["--json", str(written), "--log", str(log)]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=HARNESS_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return Theirs(missing=f"the harness took longer than {HARNESS_SECONDS:g} s")
        if done.returncode or not written.exists():
            return Theirs(missing=f"the harness failed: {_last_line(done.stderr)}")
        return _read(json.loads(written.read_text()))


def _read(runs: Sequence[Mapping[str, object]]) -> Theirs:
    (entry,) = runs
    rows = entry["rows"]
    assert isinstance(rows, list)
    if any(row["bad"] for row in rows):
        return Theirs(missing="the bytes that SGLang's manager moved are wrong")

    def median(key: str) -> float:
        return statistics.median(float(row[key]) for row in rows)

    return Theirs(median("e2e_ms") / 1e3, median("p50_ms") / 1e3, median("cpu_prefill_s"))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]
