"""A tensor-parallel engine whose ranks are processes of their own, handing over to one of another size."""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import kvbaton
from kvbaton.engines.base import Sampling
from kvbaton.engines.hf import generate_single, make_model
from kvbaton.registry.server import RegistryServer

pytestmark = pytest.mark.end_to_end

SCRIPT = Path(__file__).with_name("rank_engine.py")
SOURCE = str(Path(kvbaton.__file__).parent.parent)
SECONDS = 90
NEW_TOKENS = 16
_rooms = itertools.count(1)


class Process:
    """One `rank_engine.py`."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)

    def tell(self, do: str, **values: object) -> None:
        self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")

    def answer(self) -> object:
        try:
            return json.loads(self._lines.get(timeout=SECONDS))
        except queue.Empty:
            raise AssertionError(f"no answer: {Path(self._log.name).read_text()[-2000:]}") from None

    def end(self) -> int:
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._reader.join(10)
        self._process.stdout.close()
        self._log.close()
        return self._process.returncode


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    started = [Process(logs / f"{number}.log") for number in range(3)]
    assert [process.answer() for process in started] == ["ready"] * 3
    yield started
    assert [process.end() for process in started] == [0, 0, 0]


@pytest.fixture(scope="module")
def expected():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(5)
    model = make_model("qwen3_5")
    sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [tuple(torch.randint(4, 256, (tokens,), generator=generator).tolist()) for tokens in (3, 41, 100)]
    yield {ids: generate_single(model, ids, sampling).token_ids for ids in prompts}
    torch.set_num_threads(threads)


def open_side(processes, role, **values):
    """Open an engine that has one rank in each of ``processes``."""
    for number, process in enumerate(processes):
        process.tell("open", role=role, tp=len(processes), ranks=[number], **values)
    size = len(processes)
    coords = [[f"tp{number}/{size} pp0/1 cp0/1 dp0/1"] for number in range(size)]
    assert [process.answer() for process in processes] == coords


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_answers_are_those_of_one_process(prefill_tp, decode_tp, transport, processes, expected):
    prefills, decodes = processes[:prefill_tp], processes[prefill_tp:]
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with RegistryServer() as registry:
        common = {"registry": registry.url, "transport": transport, "store": store.port}
        open_side(prefills, "prefill", page_size=16, **common)
        open_side(decodes, "decode", page_size=4, **common)
        rooms = {next(_rooms): ids for ids in expected}
        # All at once; the processes of a side need not see them in the same order.
        for number, process in enumerate(processes):
            for room in sorted(rooms, reverse=number % 2 == 1):
                process.tell("submit", room=room, ids=rooms[room], max_new_tokens=NEW_TOKENS)
                assert process.answer() is None
        results = {}
        for process in processes:
            for room in rooms:
                process.tell("result", room=room)
                results[process, room] = process.answer()
        for process in (*decodes, *prefills):
            process.tell("close")
            assert process.answer() == {}, "rows were not given back"
    for room, ids in rooms.items():
        for process in decodes:
            result = results[process, room]
            assert (result["finish"], result["error"]) == ("length", "")
            assert tuple(result["tokens"]) == expected[ids]
            # Two attention layers: key and value, 2 heads of 16 values. Two layers of states with 4 heads.
            whole = {"kv": 2 * len(ids) * 2 * 2 * 16 * 4, "conv": 2 * 128 * 4 * 4, "recurrent": 2 * 4 * 16 * 16 * 4}
            assert result["bytes"] == {name: count // decode_tp for name, count in whole.items()} | {"aux": 24}
        sent = [results[process, room] for process in prefills]
        assert [result["finish"] for result in sent] == ["length"] * prefill_tp
        assert all({"kv", "conv", "recurrent"} <= set(result["bytes"]) for result in sent), "a rank sent nothing"
