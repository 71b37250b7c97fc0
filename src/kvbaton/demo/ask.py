"""Asks a server over SGLang's ``/generate``."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from kvbaton.demo.cases import Question
from kvbaton.errors import TransferFailed

TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Answer:
    """What came back; ``bytes`` by component and ``transfer_ms`` are figures of the hand-over, where there was one."""

    token_ids: tuple[int, ...]
    text: str
    bytes: dict[str, int] = field(default_factory=dict)
    transfer_ms: float = 0.0


def ask(url: str, question: Question) -> Answer:
    """Ask one question, greedily. Raises `TransferFailed` with what the server said if it is not answered."""
    body = {
        "text": question.text,
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": question.max_new_tokens,
            "ignore_eos": question.ignore_eos,
        },
    }
    # The environment's proxies are for other hosts.
    with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False) as client:
        reply = client.post(f"{url}/generate", json=body)
    if reply.status_code != httpx.codes.OK:
        raise TransferFailed(f"{url} answered {reply.status_code}: {reply.text[:500]}")
    content = reply.json()
    figures = content["meta_info"].get("kvbaton", {})
    return Answer(
        tuple(content["output_ids"]),
        content["text"],
        dict(figures.get("bytes_by_component", {})),
        float(figures.get("transfer_ms", 0.0)),
    )


def ask_all(url: str, questions: Sequence[Question], at_once: int) -> list[Answer]:
    """Ask many questions, ``at_once`` at a time; the answers are in the order of the questions."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda question: ask(url, question), questions))
