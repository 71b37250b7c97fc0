"""``kvbaton check``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Annotated, Optional

import typer

app = typer.Typer(no_args_is_help=True)


@app.command()
def layouts(
    examples: Annotated[int, typer.Option(min=1, help="Pairs of layouts to check.")] = 2000,
    seed: Annotated[Optional[int], typer.Option(min=0, help="Same number, same examples; else a fresh one.")] = None,  # noqa: UP045
    json: Annotated[str, typer.Option(help="Where the figures are written as JSON; - is standard output.")] = "",
    processes: Annotated[int, typer.Option(min=1, help="Processes that share the work.")] = 1,
    example: Annotated[str, typer.Option(help="Check only the example of this name.")] = "",
) -> None:
    """Check the planner against the oracle on random pairs of layouts, byte by byte.

    The exit code is 1 if an example failed; the smallest one that was found is printed with the command to repeat it.
    """
    import secrets
    import tempfile

    from kvbaton.check.report import check_example, check_examples

    if example:
        passed = check_example(example, json_to=json)
    else:
        chosen = secrets.randbelow(1 << 32) if seed is None else seed
        with tempfile.TemporaryDirectory() as folder, _storage(folder):
            passed = check_examples(examples, chosen, processes=processes, json_to=json)
    raise typer.Exit(0 if passed else 1)


@app.command()
def transports(
    only: Annotated[str, typer.Option(help="Transports to check, separated by commas; else all.")] = "",
    checks: Annotated[str, typer.Option(help="Checks to run, separated by commas; else all.")] = "",
    option: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="NAME=VALUE for every fabric that is checked; name those that take it with --only. May be repeated."
        ),
    ] = None,
    factory: Annotated[str, typer.Option(help="module:callable that makes a transport for an instance id.")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a check waits for one thing.")] = 20.0,
    json: Annotated[str, typer.Option(help="Where the results are written as JSON; - is standard output.")] = "",
) -> None:
    """Check what transports promise: the conformance suite, on every transport that this machine has.

    Both ends run in one process. The exit code is 1 if a promise is broken, or if a transport that was asked for is
    not there.
    """
    from kvbaton.check.transport_report import check_transports

    asked = [name.strip() for name in only.split(",") if name.strip()]
    wanted = [name.strip() for name in checks.split(",") if name.strip()]
    passed = check_transports(asked, wanted, _options(option or []), factory, timeout, json)
    raise typer.Exit(0 if passed else 1)


@app.command()
def fuzz(
    inputs: Annotated[
        int, typer.Option(min=1, help="Inputs for all of it together; one in 100 goes to a port.")
    ] = 300_000,
    seed: Annotated[Optional[int], typer.Option(min=0, help="Same number, same inputs; else a fresh one.")] = None,  # noqa: UP045
    only: Annotated[str, typer.Option(help="Decoders and ports by name, separated by semicolons; else all.")] = "",
    replay: Annotated[str, typer.Option(help="One input in hexadecimal, for the decoder that --only names.")] = "",
    processes: Annotated[int, typer.Option(min=1, help="Processes that share the work.")] = 1,
    json: Annotated[str, typer.Option(help="Where the figures are written as JSON; - is standard output.")] = "",
) -> None:
    """Feed everything that reads what comes from outside with changed valid inputs: decoders, and the ports.

    The exit code is 1 if one of them did anything but take or refuse an input; it is printed with the command that
    repeats it.
    """
    import secrets

    from kvbaton.check.fuzz.report import check_fuzz

    chosen = secrets.randbelow(1 << 32) if seed is None else seed
    wanted = [name.strip() for name in only.split(";") if name.strip()]
    passed = check_fuzz(inputs, chosen, wanted, processes=processes, json_to=json, replayed=replay)
    raise typer.Exit(0 if passed else 1)


@app.command()
def soak(
    seconds: Annotated[float, typer.Option(min=1, help="How long faults are injected.")] = 30,
    transport: Annotated[str, typer.Option(help="Transports, separated by commas.")] = "shm,tcp",
    seed: Annotated[Optional[int], typer.Option(min=0, help="Of the load and the faults; else a fresh one.")] = None,  # noqa: UP045
    load: Annotated[int, typer.Option(min=1, help="Rooms under way at each decode engine.")] = 8,
    json: Annotated[str, typer.Option(help="Where the figures are written as JSON; - is standard output.")] = "",
    logs: Annotated[str, typer.Option(help="Folder for the logs of the processes; else they are not kept.")] = "",
    serve: Annotated[bool, typer.Option("--serve", help="Soak the demo servers behind the real router.")] = False,
) -> None:
    """Run ranks as processes at full load, with a random fault each second, and check every row.

    Processes are killed and replaced, stopped, cut off from the network, their rooms aborted, the registry restarted.
    The exit code is 1 for a wrong byte, a room that hangs, and anything that is not given back. With --serve it is
    the demo servers that are killed, stopped and drained: 1 for a request that is answered wrong, late, or not at all.
    """
    from kvbaton.check.soak.report import check_served_soak, check_soak

    wanted = [name.strip() for name in transport.split(",") if name.strip()]
    if serve:
        raise typer.Exit(0 if check_served_soak(seconds, wanted, seed, json_to=json, logs=logs) else 1)
    passed = check_soak(seconds, wanted, seed, load=load, json_to=json, logs=logs)
    raise typer.Exit(0 if passed else 1)


@app.command()
def faults(
    seeds: Annotated[int, typer.Option(min=1, help="Worlds to simulate, one for each seed.")] = 2000,
    first: Annotated[int, typer.Option(min=0, help="The first seed; a seed means the same world every time.")] = 0,
    size: Annotated[int, typer.Option(min=1, max=50, help="How many times more happens than in a small world.")] = 1,
    json: Annotated[str, typer.Option(help="Where the figures are written as JSON; - is standard output.")] = "",
    processes: Annotated[int, typer.Option(min=1, help="Processes that share the work.")] = 1,
    scenario: Annotated[str, typer.Option(help="Run only the scenario in this JSON file, and show all of it.")] = "",
) -> None:
    """Simulate whole managers with seeded faults, and check after every step that nothing is lost or overwritten.

    The exit code is 1 if something was violated; the failing seed and the smallest scenario that still fails are
    printed.
    """
    from kvbaton.check.faults.report import check_faults, check_scenario

    if scenario:
        passed = check_scenario(scenario)
    else:
        passed = check_faults(seeds, first, size=size, processes=processes, json_to=json)
    raise typer.Exit(0 if passed else 1)


@app.command()
def search(
    world: Annotated[str, typer.Option(help="Worlds to search, separated by commas; else those of seconds.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Search every world; some take minutes.")] = False,
    replay: Annotated[str, typer.Option(help="Go only this way through the one world, as a failure printed it.")] = "",
    json: Annotated[str, typer.Option(help="Where the figures are written as JSON; - is standard output.")] = "",
) -> None:
    """Check the protocol itself: every state that the real cores can reach together in small worlds.

    The exit code is 1 if a promise is broken; the shortest way to it is printed with the command to go it again.
    """
    from kvbaton.check.search.bounds import SHORT, WORLDS
    from kvbaton.check.search.report import check_search, show_replay

    if replay:
        kept = show_replay(world, replay)
    else:
        names = [name.strip() for name in world.split(",") if name.strip()]
        kept = check_search(names or (tuple(WORLDS) if everything else SHORT), json)
    raise typer.Exit(0 if kept else 1)


def _options(given: list[str]) -> dict[str, str]:
    from kvbaton.errors import ConfigurationError

    for text in given:
        if "=" not in text:
            raise ConfigurationError(f"--option {text}: write it as NAME=VALUE")
    return dict(text.split("=", 1) for text in given)


@contextlib.contextmanager
def _storage(folder: str) -> Iterator[None]:
    """Let Hypothesis keep its files in ``folder`` instead of the working directory, unless the user said where."""
    name = "HYPOTHESIS_STORAGE_DIRECTORY"
    if name in os.environ:
        yield
        return
    os.environ[name] = folder
    try:
        yield
    finally:
        del os.environ[name]
