"""What the operating system allows this process, read from sysfs, proc and the process itself."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbaton.devices.files import names_in, read_number, read_text


@dataclass(frozen=True)
class HugePages:
    """Reserved huge pages of one size, in bytes."""

    size: int
    total: int
    free: int


@dataclass(frozen=True)
class Limits:
    """Sizes are in bytes; -1 is no limit, None not known."""

    processors: int
    """Those that this process may run on."""
    memory: int
    memory_limit: int | None
    """Of the container."""
    memlock: int
    """What one process may pin: registering memory with a network card pins it."""
    open_files: int
    dev_shm: int | None
    """The size of ``/dev/shm``. Libraries put shared memory there; kvbaton's own needs no file system."""
    dev_shm_free: int | None
    shmmax: int | None
    """The longest segment of System V shared memory."""
    anonymous_files: bool
    """Whether there is ``memfd_create``, which `SharedMemory` needs."""
    ptrace_scope: int | None
    """Which processes may look into others: 0 those of the same user; None: the kernel has no such rule."""
    shared_huge_pages: str
    """When shared memory gets transparent huge pages: "never", "advise"..."""
    huge_pages: tuple[HugePages, ...]

    @classmethod
    def find(cls, root: Path = Path("/")) -> Limits:
        """Those of this process; ``root`` holds ``sys``, ``proc`` and ``dev``."""
        shm, free = _file_system(root / "dev/shm")
        return cls(
            processors=len(_processors()),
            memory=_kilobytes(read_text(root / "proc/meminfo"), "MemTotal"),
            memory_limit=_container_limit(root),
            memlock=_limit(resource.RLIMIT_MEMLOCK),
            open_files=_limit(resource.RLIMIT_NOFILE),
            dev_shm=shm,
            dev_shm_free=free,
            shmmax=_number_or_none(root / "proc/sys/kernel/shmmax"),
            anonymous_files=hasattr(os, "memfd_create"),
            ptrace_scope=_number_or_none(root / "proc/sys/kernel/yama/ptrace_scope"),
            shared_huge_pages=_chosen(read_text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")),
            huge_pages=_huge_pages(root / "sys/kernel/mm/hugepages"),
        )


def _processors() -> Sequence[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _file_system(path: Path) -> tuple[int | None, int | None]:
    try:
        status = os.statvfs(path)
    except OSError:
        return None, None
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _container_limit(root: Path) -> int | None:
    limit = read_number(root / "sys/fs/cgroup/memory.max", -1)
    return limit if limit >= 0 else None


def _kilobytes(text: str, name: str) -> int:
    for line in text.splitlines():
        label, _, value = line.partition(":")
        number = value.split()[0] if value.split() else ""
        if label == name and number.isdecimal():
            return int(number) << 10
    return 0


def _number_or_none(path: Path) -> int | None:
    number = read_number(path, -1)
    return number if number >= 0 else None


def _chosen(text: str) -> str:
    """The word in brackets: "always within_size [advise] never"."""
    return text.partition("[")[2].partition("]")[0]


def _huge_pages(folder: Path) -> tuple[HugePages, ...]:
    found = []
    for name in names_in(folder):
        kilobytes = name.removeprefix("hugepages-").removesuffix("kB")
        if kilobytes.isdecimal():
            total = read_number(folder / name / "nr_hugepages", 0)
            found.append(HugePages(int(kilobytes) << 10, total, read_number(folder / name / "free_hugepages", 0)))
    return tuple(found)
