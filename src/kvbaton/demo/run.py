"""``kvbaton demo``: what ``make demo`` runs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from kvbaton.demo.ask import ask, ask_all
from kvbaton.demo.cases import CACHE_OF, ONE_OF_EACH_KIND, Case, architecture_cases, trained_case
from kvbaton.demo.compare import THREADS, SingleProcess, is_right, quiet_transformers
from kvbaton.demo.report import CaseResult, Report, corruption_is_seen, write_json
from kvbaton.engines.hf.loading import check_device
from kvbaton.errors import KVBatonError
from kvbaton.serve.processes import PDCluster

CORRUPTIONS: dict[str, dict[str, object]] = {
    "one state slot": {"corrupt": "state"},
    "the first page": {"corrupt": "page"},
}
"""What is overwritten at the decode server, to show that the comparison notices."""

AT_ONCE = 4
"""Questions that are asked at the same time where no row is printed for each."""


def run_demo(*, everything: bool, transport: str, prompts: int, json_path: Path, device: str = "cpu") -> int:
    """Run the demo, with all models on ``device``, and write its figures.

    Returns 0 if every answer through the hand-over is that of a single process, and deliberate damage is noticed.
    """
    quiet_transformers()
    check_device(device)
    report = Report()
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="kvbaton-demo-") as folder:
            names = tuple(CACHE_OF) if everything else ONE_OF_EACH_KIND
            trained = trained_case(prompts)
            report.say(
                "Each model runs as a prefill server, a decode server and sglang-router: three processes.\n"
                "Every answer is compared with a single process."
            )
            result = _run_case(trained, transport, device, report)
            corrupted = _corrupted_accuracy(trained, transport, device, report)
            cases = architecture_cases(names, Path(folder))
            results = [result, *(_run_case(case, transport, device, report) for case in cases)]
    except KVBatonError as error:
        report.say(f"\nThe demo failed: {type(error).__name__}: {error}")
        return 1
    accuracy = {
        "single": result.right_single / result.prompts,
        "pd": result.right_pd / result.prompts,
        "corrupted": max(corrupted.values()),
    }
    details: dict[str, object] = {
        "seconds": time.monotonic() - started,
        "transport": transport,
        "device": device,
        "corrupted": corrupted,
    }
    write_json(json_path, results, accuracy, details)
    report.summary(results, accuracy, corrupted, time.monotonic() - started)
    report.say(f"The figures are in {json_path}.")
    identical = all(each.identical == each.prompts for each in results)
    return 0 if identical and corruption_is_seen(accuracy) else 1


def _run_case(case: Case, transport: str, device: str, report: Report) -> CaseResult:
    report.begin(case)
    result = CaseResult(case.name)
    with _cluster(case, transport, device, {}) as cluster:
        single = SingleProcess(case.folder, device)
        for question in case.questions:
            answer, alone = ask(cluster.url, question), single.answer(question)
            right = is_right(question, answer)
            result.add(answer, alone, right, is_right(question, alone))
            report.row(question, answer, answer.token_ids == alone.token_ids, right if question.prompt else None)
    return result


def _corrupted_accuracy(case: Case, transport: str, device: str, report: Report) -> dict[str, float]:
    accuracy = {}
    for what, options in CORRUPTIONS.items():
        with _cluster(case, transport, device, options) as cluster:
            answers = ask_all(cluster.url, case.questions, AT_ONCE)
        right = [is_right(question, answer) for question, answer in zip(case.questions, answers, strict=True)]
        accuracy[what] = sum(right) / len(right)
        report.say(f"the same prompts with {what} overwritten after the transfer: {accuracy[what]:.0%} right")
    return accuracy


def _cluster(case: Case, transport: str, device: str, decode_options: Mapping[str, object]) -> PDCluster:
    return PDCluster(
        str(case.folder),
        options={"threads": THREADS, "device": device, "manager_options": {"transports": transport.split(",")}},
        decode_options=decode_options,
    )
