"""Ranks in processes of their own, as tests drive them: see `rank_process`."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import kvbaton

SCRIPT = Path(__file__).with_name("rank_process.py")
SOURCE = str(Path(kvbaton.__file__).parent.parent)
LARGE = 100
"""About 50 MB at 60 pages."""


class Process:
    """A rank, asked by `ask` and answered with a line."""

    def __init__(self, role, registry, transport, scale=1, tp=(), **options):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), role, registry, transport, str(scale), *map(str, tp)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "RANK_OPTIONS": json.dumps(options)},
        )
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.answer() == "ready"

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))

    def tell(self, name, *numbers):
        self.process.stdin.write(" ".join([name, *map(str, numbers)]) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds=40):
        return self._lines.get(timeout=seconds)

    def ask(self, name, *numbers, seconds=40):
        self.tell(name, *numbers)
        return self.answer(seconds)

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def close(self):
        """End it in order, or by force."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.stdin.close()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(5)
        self.process.stdout.close()
        if not self.process.stdin.closed:
            self.process.stdin.close()
        return self.process.returncode


def hand_over(prefill, decode, room, count=20):
    assert prefill.ask("send", room, count) == "sent"
    assert decode.ask("receive", room, count) == "offered"
    assert decode.ask("over", room) == "SUCCESS "
    assert prefill.ask("over", room) == "SUCCESS "
    assert decode.ask("released", room) == prefill.ask("released", room) == "released"
    assert decode.ask("check", room, count) == "same"
    decode.ask("wipe")
