"""Runs the conformance suite on the transports that this machine has: what ran, what was skipped, and why."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, cast

import msgspec

from kvbaton.errors import ConfigurationError, TransportUnavailable
from kvbaton.transport import NAMES, Transport, create
from kvbaton.transport.conformance import Conformance, Outcome
from kvbaton.transport.executor import EXECUTORS
from kvbaton.transport.fabric import FABRICS

Make = Callable[[str], Transport]

SMALL = {"slabs": "16", "staging_slabs": "4", "slab_bytes": "1MiB"}
"""Options of fabrics for a run of many small transports; what the user gives goes before."""


class Subject(NamedTuple):
    """Something to run the suite on: what it is called, and how one is made for an instance id."""

    name: str
    make: Make


class Run(msgspec.Struct, frozen=True):
    """What the suite found. ``reason``: why it did not run; ``seconds`` is then 0."""

    transport: str
    status: Literal["ran", "unavailable"]
    reason: str = ""
    seconds: float = 0.0
    outcomes: tuple[Outcome, ...] = ()

    def count(self, status: str) -> int:
        """How many checks ended that way."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def broken(self) -> bool:
        """Whether a promise was broken."""
        return bool(self.count("broken"))


def subjects(only: Sequence[str] = (), options: Mapping[str, str] | None = None) -> list[Subject]:
    """The transports named ``only``, or all of this release, each fabric with each executor.

    ``options`` are given to fabrics; with ``executor`` among them only that one runs. Raises `ConfigurationError` for a
    name that there is not.
    """
    known = (*NAMES, *(name for name in FABRICS if name not in NAMES))
    for name in only:
        if name not in known:
            raise ConfigurationError(f"there is no transport {name!r}; choose among {', '.join(known)}")
    found = []
    for name in only or NAMES:
        if name not in FABRICS:
            found.append(Subject(name, _maker(name, None)))
            continue
        given = dict(options or {})
        executors = (given["executor"],) if "executor" in given else EXECUTORS
        found += [
            Subject(f"{name}, {executor}", _maker(name, {**SMALL, **given, "executor": executor}))
            for executor in executors
        ]
    return found


def subject_of(factory: str) -> Subject:
    """The transport that ``module:callable`` makes for an instance id. Raises `ConfigurationError`."""
    module, _, attribute = factory.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"--factory {factory}: {error}; write it as module:callable") from error
    if not callable(make):
        raise ConfigurationError(f"--factory {factory}: that is of type {type(make).__name__}, and cannot be called")
    return Subject(factory, cast(Make, make))


def why_not(subject: Subject) -> str:
    """Why a subject cannot be had here; empty if it can. Raises `ConfigurationError` for options that it refuses."""
    try:
        subject.make(f"probe-{os.getpid()}-{time.monotonic_ns()}").close()
    except TransportUnavailable as error:
        return str(error)
    except ConfigurationError as error:
        raise ConfigurationError(f"{subject.name}: {error}; options go to every fabric that is checked") from error
    return ""


def run(
    subject: Subject,
    checks: Sequence[str] = (),
    timeout: float = 20.0,
    progress: Callable[[str], None] = lambda check: None,
) -> Run:
    """Run the suite, or some of its ``checks``, on a subject. ``progress`` is told of each check before it runs.

    Raises `ConfigurationError` for a check that there is not, before anything else.
    """
    unknown = sorted(set(checks) - set(Conformance.names()))
    if unknown:
        raise ConfigurationError(
            f"there is no check {', '.join(unknown)}; choose among {', '.join(Conformance.names())}"
        )
    suite = Conformance(subject.make, timeout=timeout)
    began = time.monotonic()
    outcomes = []
    for check in checks or Conformance.names():
        progress(check)
        outcomes.append(suite.outcome(check))
    return Run(subject.name, "ran", "", round(time.monotonic() - began, 2), tuple(outcomes))


def _maker(name: str, options: Mapping[str, str] | None) -> Make:
    return lambda instance: create(name, instance=instance, options=options)
