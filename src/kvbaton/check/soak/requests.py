"""Clients of a served model: they ask all the time, know the right answers, and note how each request ended."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from kvbaton.check.soak.tally import normalised
from kvbaton.demo.cases import Question

LEAVES_SHARE = 0.02
"""Requests whose client leaves before the answer."""


@dataclass
class Requests:
    """How requests ended. All but those answered right, with an error, or left by their client are broken promises."""

    asked: int = 0
    right: int = 0
    left: int = 0
    """By their own client."""
    errors: Counter[str] = field(default_factory=Counter)
    """Clean errors, by status and normalised message."""
    broken: list[str] = field(default_factory=list)
    """Wrong, late, cut off, or an error without a message."""
    slowest_seconds: float = 0.0


class Clients:
    """``count`` threads that ask ``questions`` of the server at ``url``, each within ``deadline`` seconds."""

    def __init__(
        self, url: str, questions: Sequence[Question], *, count: int, deadline: float, seed: int, leave: bool = True
    ) -> None:
        self.requests = Requests()
        self._url, self._questions, self._deadline, self._leave = url, questions, deadline, leave
        self._truth: list[list[int]] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed + number),), name=f"client-{number}")
            for number in range(count)
        ]

    def learn(self) -> None:
        """Ask everything once, in peace: these are the right answers. Raises `RuntimeError` where there is none."""
        with httpx.Client(timeout=60, trust_env=False) as client:
            for question in self._questions:
                answer = client.post(f"{self._url}/generate", json=_body(question))
                if answer.status_code != httpx.codes.OK:
                    raise RuntimeError(f"{self._url} answered {answer.status_code} in peace: {answer.text[:500]}")
                self._truth.append(answer.json()["output_ids"])

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> Requests:
        """Ask no more, wait for what was asked, and return how everything ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return self.requests

    def ask_in_peace(self, rounds: int = 1) -> list[str]:
        """Ask everything; what was not answered right."""
        failed = []
        with httpx.Client(timeout=60, trust_env=False) as client:
            for _ in range(rounds):
                for question, right in zip(self._questions, self._truth, strict=True):
                    answer = client.post(f"{self._url}/generate", json=_body(question))
                    if answer.status_code != httpx.codes.OK or answer.json()["output_ids"] != right:
                        failed.append(f"{answer.status_code}: {answer.text[:200]}")
        return failed

    def _run(self, rng: random.Random) -> None:
        with httpx.Client(timeout=self._deadline, trust_env=False) as client:
            while not self._stop.is_set():
                number = rng.randrange(len(self._questions))
                leaves = self._leave and rng.random() < LEAVES_SHARE
                self._ask(client, number, rng.choice((0.01, 0.05, 0.2)) if leaves else 0.0)

    def _ask(self, client: httpx.Client, number: int, leave_after: float) -> None:
        began = time.monotonic()
        requests = self.requests
        what = error = ""
        right = False
        try:
            answer = client.post(
                f"{self._url}/generate",
                json=_body(self._questions[number]),
                timeout=leave_after or self._deadline,
            )
            if answer.status_code == httpx.codes.OK:
                right = answer.json()["output_ids"] == self._truth[number]
                what = "" if right else f"question {number} was answered wrong: {answer.text[:200]}"
            elif _message(answer):
                error = f"{answer.status_code} {normalised(_message(answer))}"
            else:
                what = f"an error without a message: {answer.status_code} {answer.text[:200]!r}"
        except httpx.TimeoutException:
            what = "" if leave_after else f"no answer within {self._deadline:g} s"
        except httpx.HTTPError as broken:
            what = f"the connection broke: {broken!r}"
        with self._lock:
            requests.asked += 1
            requests.right += right
            requests.slowest_seconds = max(requests.slowest_seconds, time.monotonic() - began)
            if error:
                requests.errors[error] += 1
            elif what:
                requests.broken.append(what)
            elif not right:
                requests.left += 1
        if error:
            # As clients do: one that is refused does not ask again at once.
            time.sleep(0.05)


def _body(question: Question) -> dict[str, object]:
    sampling = {"temperature": 0.0, "max_new_tokens": question.max_new_tokens}
    return {"text": question.text, "sampling_params": sampling}


def _message(answer: httpx.Response) -> str:
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return ""
    return str(error.get("message", "")) if isinstance(error, dict) else str(error)
