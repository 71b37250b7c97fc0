"""``kvbaton bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.command()
def transfer(
    transports: Annotated[str, typer.Option(help="Contenders, separated by commas.")] = "shm,tcp",
    pieces: Annotated[str, typer.Option(help="Piece sizes in bytes, separated by commas.")] = "256,2048,131072",
    megabytes: Annotated[int, typer.Option(min=16, help="Size of one hand-over in MiB.")] = 256,
    runs: Annotated[int, typer.Option(min=1, help="Counted runs; the median is reported.")] = 5,
    json: Annotated[Path, typer.Option(help="Where the figures are written.")] = Path("build/bench/transfer.json"),
) -> None:
    """Hand a large request over between two processes, in shuffled pieces, every byte checked."""
    from kvbaton.bench.report import write_report
    from kvbaton.bench.transfer import run

    figures = run(transports.split(","), [int(piece) for piece in pieces.split(",")], megabytes, runs)
    write_report(figures, json)


@app.command()
def plan(
    pieces: Annotated[int, typer.Option(min=10_000, help="Pieces of one bound request.")] = 1_000_000,
    runs: Annotated[int, typer.Option(min=1, help="Counted runs; the median is reported.")] = 9,
    json: Annotated[Path, typer.Option(help="Where the figures are written.")] = Path("build/bench/plan.json"),
) -> None:
    """Bind, group, compile and assign, beside the same plans as Python lists of pieces."""
    from kvbaton.bench.plan import run
    from kvbaton.bench.report import write_report

    write_report(run(pieces, runs), json)
