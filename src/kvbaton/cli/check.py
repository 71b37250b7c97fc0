"""``kvbaton check``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Annotated, Optional

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def check() -> None:
    """Keep ``layouts`` a subcommand: typer would fold a single one away."""


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
