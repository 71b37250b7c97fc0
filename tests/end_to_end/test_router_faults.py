"""Servers behind the real router that are killed, replaced and drained under load: every request has a right end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("sglang_router", reason="sglang-router is not installed: make setup")

from kvbaton.check.soak.requests import Clients
from kvbaton.check.soak.serving import ServedSoak
from kvbaton.demo.cases import TRAINED_MODEL, trained_questions
from kvbaton.serve.processes import PDCluster, http_get

pytestmark = [pytest.mark.end_to_end, pytest.mark.long, pytest.mark.timeout(400)]

DEADLINE = 60.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[PDCluster]:
    options = {"threads": 1, "offer_wait_seconds": 10}
    with PDCluster(
        str(TRAINED_MODEL), 2, 1, logs=tmp_path / "logs", options=options, decode_options={"max_batch": 1}
    ) as running:
        yield running


@pytest.fixture
def clients(cluster: PDCluster) -> Clients:
    made = Clients(cluster.url, trained_questions(8), count=6, deadline=DEADLINE, seed=1, leave=False)
    made.learn()
    return made


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def more_right(clients: Clients, count: int) -> None:
    """Wait for so many more right answers."""
    before = clients.requests.right
    wait_for(lambda: clients.requests.right >= before + count)


def test_a_prefill_server_is_killed_and_comes_back(cluster: PDCluster, clients: Clients) -> None:
    clients.start()
    more_right(clients, 20)
    victim = cluster.process("prefill-0")
    os.kill(victim.pid, signal.SIGKILL)
    more_right(clients, 40)
    cluster.start_again("prefill-0")
    wait_for(lambda: http_get(f"{cluster.prefill_urls[0]}/health") is not None)
    wait_for(lambda: b'"healthy_workers":3' in (http_get(f"{cluster.url}/readiness") or b""))
    requests = clients.stop()
    assert requests.broken == []
    # The router tries again, but perhaps with the dead server: it learns of that by its own checks.
    assert all(error.startswith("503 ") for error in requests.errors), requests.errors
    assert clients.ask_in_peace() == []


def test_a_server_that_is_told_to_stop_ends_what_it_has(cluster: PDCluster, clients: Clients) -> None:
    """Draining by SIGTERM: it ends by itself and in order, and no request hangs or is cut off."""
    clients.start()
    more_right(clients, 20)
    for name in ("prefill-1", "decode-0"):
        process = cluster.process(name)
        process.terminate()
        wait_for(lambda process=process: process.ended() is not None, 30)
        assert process.ended() == 0, process.tail()
        cluster.start_again(name)
        urls = cluster.prefill_urls if name == "prefill-1" else cluster.decode_urls
        wait_for(lambda url=urls[-1]: http_get(f"{url}/health") is not None)
        more_right(clients, 20)
    requests = clients.stop()
    assert requests.broken == []
    assert clients.ask_in_peace() == []


def test_a_short_soak_of_servers(tmp_path: Path) -> None:
    figures = ServedSoak(("shm", "tcp"), 5, tmp_path / "logs").run(30.0)
    assert figures.broken == []
    assert figures.faults.total() >= 3
    assert figures.requests.right > 50
