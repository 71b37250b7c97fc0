"""Which process a peer is, and whether it is dead: what `shm` needs to prove that nobody can write any more."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from pathlib import Path

import msgspec

from kvbaton.errors import TransportUnavailable


class ProcessKey(msgspec.Struct, frozen=True, array_like=True):
    """One life of one process: a pid is used again, a pid with its start time is not."""

    pid: int
    start: int
    boot: str
    namespace: str

    @classmethod
    def own(cls) -> ProcessKey:
        """Give the key of this process. Raises `TransportUnavailable` where there is no ``/proc``."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = os.readlink("/proc/self/ns/pid")
        except OSError as error:
            raise TransportUnavailable(f"shared memory between processes needs /proc: {error}") from error
        status = _status(os.getpid())
        if status is None:
            raise TransportUnavailable("shared memory between processes needs /proc/<pid>/stat")
        return cls(os.getpid(), status[1], boot, namespace)


class ProcessWatch:
    """Tells whether a process of this host has ended. Thread-safe.

    Raises `TransportUnavailable` if the process cannot be watched from here: another host or pid namespace.
    """

    def __init__(self, key: ProcessKey) -> None:
        own = ProcessKey.own()
        if (key.boot, key.namespace) != (own.boot, own.namespace):
            raise TransportUnavailable(
                f"process {key.pid} runs on another host or in another pid namespace ({key.namespace}, here "
                f"{own.namespace}); use tcp"
            )
        self._key = key
        self._lock = threading.Lock()
        self._dead = False
        self._seen = 0.0
        self._descriptor = -1
        # Opened before the look at the start time: a pid that was used again in between is then found out.
        with contextlib.suppress(OSError, AttributeError, OverflowError):
            self._descriptor = os.pidfd_open(key.pid)
        if self._ended():
            self._dead = True
            self.close()

    @property
    def descriptor(self) -> int:
        """A pidfd that is readable once the process has ended; -1 where the system has none, or it is closed."""
        return self._descriptor

    def dead(self) -> bool:
        """Whether every thread of the process has ended. Once True, always True."""
        with self._lock:
            if not self._dead:
                if self._descriptor >= 0:
                    poll = select.poll()
                    poll.register(self._descriptor, select.POLLIN)
                    self._dead = bool(poll.poll(0))
                else:
                    self._dead = self._ended()
            return self._dead

    def dead_for(self, seconds: float) -> bool:
        """Whether it ended, and this was seen from here at least so many seconds ago."""
        if not self.dead():
            return False
        with self._lock:
            self._seen = self._seen or time.monotonic()
            return time.monotonic() - self._seen >= seconds

    def close(self) -> None:
        """Stop watching. Safe to call twice."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _ended(self) -> bool:
        status = _status(self._key.pid)
        if status is None or status[1] != self._key.start:
            return True
        state, _, threads = status
        # A zombie leader may have living threads; they can still write.
        return state in "ZX" and threads <= 1


def _status(pid: int) -> tuple[str, int, int] | None:
    """State, start time in ticks since boot, and number of threads; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        raise TransportUnavailable(f"cannot look at process {pid}: {error}") from error
    # The name is in brackets and may hold anything, brackets and spaces too.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19]), int(fields[17])
