from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
from fake_engine import HANG, SLOW

from kvbaton.serve.launch import run_pd
from kvbaton.serve.processes import ManagedProcess, PDCluster, ProcessFailed, free_ports, http_get, wait_until

FAKE = str(Path(__file__).with_name("fake_engine.py"))


def fake(*extra: str) -> Callable[[str, int, int], Sequence[str]]:
    return lambda role, port, bootstrap: [sys.executable, FAKE, role, str(port), str(bootstrap), *extra]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def python(tmp_path: Path, code: str) -> ManagedProcess:
    return ManagedProcess("child", [sys.executable, "-c", code], tmp_path / "child.log")


def test_free_ports_differ() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20


def test_a_process_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    process = python(tmp_path, "import sys; print('no such model'); sys.exit(3)")
    with pytest.raises(ProcessFailed, match=r"child ended with exit code 3(.|\n)*no such model"):
        wait_until(lambda: False, [process], "child", 30)


def test_a_process_that_is_killed_is_told_by_its_signal(tmp_path: Path) -> None:
    process = python(tmp_path, "import time; time.sleep(60)")
    os.kill(process.pid, signal.SIGKILL)
    process.stop()
    with pytest.raises(ProcessFailed, match="signal 9"):
        process.check()


def test_not_ready_in_time(tmp_path: Path) -> None:
    process = python(tmp_path, "print('loading', flush=True)\nimport time; time.sleep(60)")
    try:
        wait_until(lambda: "loading" in process.tail(), [process], "child", 30)
        with pytest.raises(ProcessFailed, match=r"child was not ready after 0\.1 s(.|\n)*loading"):
            wait_until(lambda: False, [process], "child", 0.1)
    finally:
        process.stop()
    assert not alive(process.pid)


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = python(tmp_path, code)
    wait_until(lambda: bool(process.tail()), [process], "child", 30)
    grandchild = int(process.tail())
    assert process.stop(0.2) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while alive(grandchild) and zombie(grandchild) is False:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def zombie(pid: int) -> bool:
    # In a container nobody may reap an orphan: it is as dead as it gets.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/health", "nonsense"])
def test_http_get_of_nothing(url: str) -> None:
    assert http_get(url, 1.0) is None


def test_a_cluster_of_two_and_two(tmp_path: Path) -> None:
    with PDCluster(prefills=2, decodes=2, command=fake(), logs=tmp_path, ready_seconds=60) as cluster:
        pids = [process.pid for process in cluster.processes]
        assert len(pids) == 5
        with httpx.Client(base_url=cluster.url, trust_env=False, timeout=30) as client:
            for number in range(4):
                ids = [20, 21, 22 + number]
                answer = client.post("/generate", json={"input_ids": ids})
                assert answer.json()["output_ids"] == [*reversed(ids), 1], answer.text
        for url in (*cluster.prefill_urls, *cluster.decode_urls, *cluster.registry_urls):
            assert http_get(f"{url}/health") is not None
        # The list of refused rooms is beside each registry.
        for url in cluster.registry_urls:
            assert httpx.get(f"{url}/v1/rooms/7/refusal", trust_env=False).text == "null"
        cluster.check()
    assert not any(alive(pid) for pid in pids)
    cluster.stop()


def test_a_cluster_that_does_not_start_leaves_nothing(tmp_path: Path) -> None:
    cluster = PDCluster(command=fake("never"), logs=tmp_path, ready_seconds=60)
    with pytest.raises(ProcessFailed, match=r"(prefill|decode)-0 ended with exit code 3(.|\n)*cannot find the model"):
        cluster.start()
    assert cluster.processes == []
    for url in (*cluster.prefill_urls, *cluster.decode_urls):
        assert http_get(f"{url}/health", 1.0) is None


def test_run_pd_says_which_process_died(tmp_path: Path) -> None:
    told: list[str] = []
    cluster = PDCluster(command=fake("crash"), logs=tmp_path, ready_seconds=60)
    assert run_pd("", tell=told.append, cluster=cluster) == 1
    assert "ended with exit code 7" in told[-1]
    assert "the engine exploded" in told[-1]
    assert cluster.processes == []


PD = """
import sys
sys.path.insert(0, {folder!r})
from test_processes import fake
from kvbaton.serve.launch import run_pd
from kvbaton.serve.processes import PDCluster
cluster = PDCluster(command=fake(), logs={logs!r}, ready_seconds=60)
sys.exit(run_pd("", cluster=cluster, tell=lambda text: print(text, [p.pid for p in cluster.processes], flush=True)))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_pd_stops_everything_at_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    code = PD.format(folder=str(Path(__file__).parent), logs=str(tmp_path / "logs"))
    process = python(tmp_path, code)
    wait_until(lambda: "ready: ask http" in process.tail(), [process], "pd", 60)
    ready = next(line for line in process.tail().splitlines() if line.startswith("ready"))
    pids = [int(pid) for pid in ready.rsplit("[", 1)[1].rstrip("]").split(",")]
    assert len(pids) == 3
    assert all(alive(pid) for pid in pids)
    os.kill(process.pid, number)
    assert process.stop(30) == 0, process.tail()
    assert not any(alive(pid) and not zombie(pid) for pid in pids)


def test_children_stop_when_their_parent_was_killed(tmp_path: Path) -> None:
    code = PD.format(folder=str(Path(__file__).parent), logs=str(tmp_path / "logs"))
    process = python(tmp_path, code)
    wait_until(lambda: "ready: ask http" in process.tail(), [process], "pd", 60)
    ready = next(line for line in process.tail().splitlines() if line.startswith("ready"))
    pids = [int(pid) for pid in ready.rsplit("[", 1)[1].rstrip("]").split(",")]
    os.kill(process.pid, signal.SIGKILL)
    process.stop()
    deadline = time.monotonic() + 30
    while any(alive(pid) and not zombie(pid) for pid in pids):
        assert time.monotonic() < deadline, "children outlive their parent"
        time.sleep(0.05)


def test_sigterm_lets_requests_finish(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    process = ManagedProcess("decode", fake()("decode", port, 0), tmp_path / "decode.log")
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: http_get(f"{url}/health") is not None, [process], "decode", 30)
        body = {"input_ids": [SLOW, 20, 21, 22, 23], "stream": True}
        body |= {"bootstrap_room": 1, "bootstrap_host": "127.0.0.1", "bootstrap_port": 1}
        with httpx.stream("POST", f"{url}/generate", json=body, trust_env=False, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.terminate()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"output_ids":[23,22,21,20,1]' in rest[-2]
        assert process.stop(20) == 0
    finally:
        process.stop()


def test_sigterm_lets_requests_fail_in_bounded_time(tmp_path: Path) -> None:
    port, bootstrap_port = free_ports(2)
    process = ManagedProcess("prefill", fake()("prefill", port, bootstrap_port), tmp_path / "prefill.log")
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: http_get(f"{url}/health") is not None, [process], "prefill", 30)
        body = f'{{"input_ids": [{HANG}, 20], "bootstrap_room": 1}}'
        ask = f"import httpx; print(httpx.post('{url}/generate', content={body!r}, trust_env=False, timeout=30).text)"
        with subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True) as client:
            wait_until(
                lambda: b'"running_requests":1' in (http_get(f"{url}/server_info") or b""), [process], "request", 30
            )
            process.terminate()
            output = client.communicate(timeout=30)[0]
        assert "the request did not end in 1 s" in output
        assert process.stop(20) == 0
    finally:
        process.stop()
