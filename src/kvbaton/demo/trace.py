"""A timeline of real servers: prefill, decode and router processes answer a few prompts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvbaton.demo.ask import ask_all
from kvbaton.demo.cases import random_questions, trained_case
from kvbaton.observe.environment import TRACE_VARIABLE
from kvbaton.observe.timeline import Recording, read_recording
from kvbaton.serve.processes import PDCluster

AT_ONCE = 4


def trace_demo(model: Path | None, prompts: int, transports: Sequence[str]) -> list[Recording]:
    """Serve ``model`` (the trained one by default), ask ``prompts`` questions, and return what its ranks recorded.

    Raises `ProcessFailed` if a server does not come up, and `TransferFailed` if a question is not answered.
    """
    if model is None:
        case = trained_case(prompts)
        folder, questions = case.folder, case.questions
    else:
        folder, questions = model, random_questions(prompts)
    with tempfile.TemporaryDirectory(prefix="kvbaton-trace-") as traces:
        cluster = PDCluster(
            str(folder),
            options={"threads": 1, "manager_options": {"transports": list(transports)}},
            environment={**os.environ, TRACE_VARIABLE: traces},
        )
        with cluster:
            ask_all(cluster.url, questions, AT_ONCE)
        # The servers have ended: their files are whole.
        return [read_recording(path) for path in sorted(Path(traces).glob("*.jsonl"))]
