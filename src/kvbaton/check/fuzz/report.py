"""A run of fuzzers: who gets how many inputs, in how many processes, and what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvbaton.check.fuzz import ports as port_fuzzers
from kvbaton.check.fuzz.decoders import all_decoders
from kvbaton.check.fuzz.run import Count, fuzz, replay
from kvbaton.check.report import check_target, write_json
from kvbaton.errors import ConfigurationError

PORTS_SHARE = 100
"""One in so many inputs goes to a port: those cost much more."""
SLICE = 50_000
"""Inputs that a process takes at a time."""


class Plan(msgspec.Struct, frozen=True):
    """How many inputs each target gets, by name."""

    decoders: dict[str, int]
    ports: dict[str, int]


def names() -> tuple[str, ...]:
    """The names of all targets."""
    return (*(decoder.name for decoder in all_decoders()), *(port.name for port in port_fuzzers.ports()))


def plan(inputs: int, only: Sequence[str] = ()) -> Plan:
    """Share ``inputs`` among the targets, or those named ``only``. Raises `ConfigurationError` for an unknown name."""
    unknown = sorted(set(only) - set(names()))
    if unknown:
        raise ConfigurationError(
            f"there is nothing to fuzz that is called {unknown[0]!r}; known are {', '.join(names())}"
        )
    decoders = {each.name: each.weight for each in all_decoders() if not only or each.name in only}
    ports = {each.name: each.weight for each in port_fuzzers.ports() if not only or each.name in only}
    for_ports = inputs if not decoders else (inputs // PORTS_SHARE if ports else 0)
    return Plan(_share(inputs - for_ports, decoders), _share(for_ports, ports))


def _share(inputs: int, weights: dict[str, float]) -> dict[str, int]:
    total = sum(weights.values())
    shares = {name: int(inputs * weight / total) for name, weight in weights.items()}
    if shares:
        # What rounding left over.
        first = next(iter(shares))
        shares[first] += inputs - sum(shares.values())
    return shares


def run(
    inputs: int,
    seed: int,
    only: Sequence[str] = (),
    *,
    processes: int = 1,
    progress: Callable[[int], None] = lambda inputs: None,
) -> list[Count]:
    """Feed ``inputs`` inputs, in ``processes`` processes; what became of them, by target, in the order of `names`.

    ``progress`` is told how many there were.
    """
    shares = plan(inputs, only)
    tasks = [
        (name, min(SLICE, count - begin), f"{seed} {name} {begin}", begin == 0)
        for name, count in shares.decoders.items()
        for begin in range(0, count, SLICE)
    ]
    found = {name: Count(name) for name in names() if name in shares.decoders or name in shares.ports}
    done = 0
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_fuzz_ports, shares.ports, seed)] if shares.ports else []
        futures += [pool.submit(_fuzz_decoder, *task) for task in tasks]
        for future in as_completed(futures):
            for count in future.result():
                found[count.target].add(count)
                done += count.inputs
            progress(done)
    return list(found.values())


def _fuzz_decoder(name: str, count: int, seed: str, systematic: bool) -> list[Count]:
    decoder = next(each for each in all_decoders() if each.name == name)
    return [fuzz(decoder, count, seed, systematic=systematic)]


def _fuzz_ports(shares: dict[str, int], seed: int) -> list[Count]:
    """One process after the other has all ports: a new one after something went wrong."""
    found: list[Count] = []
    process = port_fuzzers.Process()
    try:
        for port in port_fuzzers.ports():
            if port.name not in shares:
                continue
            found.append(port_fuzzers.fuzz(port, process, shares[port.name], f"{seed} {port.name}"))
            if found[-1].findings:
                process.close()
                process = port_fuzzers.Process()
    finally:
        process.close()
    return found


def check_fuzz(
    inputs: int, seed: int, only: Sequence[str] = (), *, processes: int = 1, json_to: str = "", replayed: str = ""
) -> bool:
    """Fuzz, and say what came out; whether nothing was found.

    ``replayed`` is the hexadecimal form of one input for the only target. ``json_to`` is the file for the figures, or
    ``-`` for standard output and nothing else there. Raises `ConfigurationError` for an unknown name, and where the
    file cannot be written.
    """
    check_target(json_to)
    began = time.monotonic()
    if replayed:
        counts = [_replay(only, replayed)]
    else:
        columns = (TextColumn("inputs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("inputs", total=inputs)
            counts = run(
                inputs, seed, only, processes=processes, progress=lambda done: bar.update(task, completed=done)
            )
    seconds = time.monotonic() - began
    if json_to:
        write_json(_figures(counts, seed, seconds), json_to)
    if json_to != "-":
        _show(counts, seed, seconds)
    return not any(count.findings for count in counts)


def _replay(only: Sequence[str], data: str) -> Count:
    decoder = next((each for each in all_decoders() if [each.name] == list(only)), None)
    if decoder is None:
        raise ConfigurationError("--replay needs --only with the name of one decoder")
    try:
        return replay(decoder, bytes.fromhex(data))
    except ValueError:
        raise ConfigurationError("--replay takes the input in hexadecimal, as it was printed") from None


def _figures(counts: Sequence[Count], seed: int, seconds: float) -> dict[str, Any]:
    targets = [
        {
            "target": count.target,
            "inputs": count.inputs,
            "taken": count.taken,
            "refused": count.refused,
            "seconds": round(count.seconds, 2),
            "slowest_milliseconds": round(1000 * count.slowest, 2),
            "findings": [{"error": each.error, "input": each.data.hex()} for each in count.findings],
        }
        for count in counts
    ]
    return {
        "seed": seed,
        "inputs": sum(count.inputs for count in counts),
        "seconds": round(seconds, 1),
        "findings": sum(len(count.findings) for count in counts),
        "targets": targets,
    }


def _show(counts: Sequence[Count], seed: int, seconds: float) -> None:
    console = Console()
    table = Table("target", "inputs", "taken", "refused", "seconds", "slowest ms", "findings")
    for column in table.columns[1:]:
        column.justify = "right"
    for count in counts:
        judged = (f"{count.taken:,}", f"{count.refused:,}") if count.taken or count.refused else ("-", "-")
        slowest = f"{1000 * count.slowest:.1f}" if count.slowest else "-"
        row = (f"{count.inputs:,}", *judged, f"{count.seconds:.1f}", slowest, str(len(count.findings)))
        table.add_row(count.target, *row)
    console.print(table)
    for count in counts:
        for finding in count.findings:
            console.print(finding.text(), markup=False, highlight=False, soft_wrap=True)
    total, findings = sum(count.inputs for count in counts), sum(len(count.findings) for count in counts)
    what = "nothing was found" if not findings else f"{findings} findings"
    console.print(f"{total:,} inputs of seed {seed} in {seconds:.0f} s: {what}", highlight=False)
