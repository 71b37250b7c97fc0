"""``kvbaton bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.command()
def transfer(
    transports: Annotated[str, typer.Option(help="kvbaton's transports, separated by commas.")] = "shm,tcp",
    against: Annotated[str, typer.Option(help="Contenders, separated by commas; empty for none.")] = "nixl,mooncake",
    pieces: Annotated[str, typer.Option(help="Piece sizes in bytes, separated by commas.")] = "256,2048,131072",
    megabytes: Annotated[int, typer.Option(min=1, help="Most MiB of one hand-over.")] = 256,
    runs: Annotated[int, typer.Option(min=1, help="Counted runs; the median is reported.")] = 5,
    json: Annotated[Path, typer.Option(help="Where the figures are written.")] = Path("build/bench/transfer.json"),
) -> None:
    """Hand a large request over between two processes, in shuffled pieces, beside others, every byte checked."""
    from kvbaton.bench.report import write_report
    from kvbaton.bench.transfer import VENDORS, run

    write_report(
        run(
            _listed(transports, ("shm", "tcp"), "--transports"),
            _listed(against, tuple(VENDORS), "--against"),
            [_piece(piece) for piece in pieces.split(",")],
            megabytes,
            runs,
        ),
        json,
    )


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


def _listed(given: str, known: tuple[str, ...], option: str) -> list[str]:
    """The names in a list with commas. Raises a usage error for one that is not known."""
    names = [name for name in given.split(",") if name]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint=option)
    return names


def _piece(given: str) -> int:
    if not given.isdecimal() or not int(given):
        raise typer.BadParameter(f"{given!r} is no size in bytes", param_hint="--pieces")
    return int(given)
