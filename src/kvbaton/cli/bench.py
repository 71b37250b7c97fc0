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


@app.command()
def copy(
    pieces: Annotated[str, typer.Option(help="Piece sizes in bytes, separated by commas.")] = "256,2048,16384,131072",
    megabytes: Annotated[int, typer.Option(min=1, help="Most MiB of one copy.")] = 256,
    runs: Annotated[int, typer.Option(min=1, help="Counted runs; the median is reported.")] = 5,
    json: Annotated[Path, typer.Option(help="Where the figures are written.")] = Path("build/bench/copy.json"),
) -> None:
    """The copy kernel alone: fused copy, gather and scatter, beside memcpy and numpy."""
    from kvbaton.bench.kernel import run
    from kvbaton.bench.report import write_report

    write_report(run([_piece(piece) for piece in pieces.split(",")], megabytes, runs), json)


@app.command()
def latency(
    transports: Annotated[str, typer.Option(help="kvbaton's transports, separated by commas.")] = "shm,tcp",
    rooms: Annotated[int, typer.Option(min=10, help="Hand-overs, one after the other.")] = 1000,
    pages: Annotated[int, typer.Option(min=1, help="Pages of one large send.")] = 4096,
    json: Annotated[Path, typer.Option(help="Where the figures are written.")] = Path("build/bench/latency.json"),
) -> None:
    """Small hand-overs beside a bare ZeroMQ round trip, and how long a large send keeps the engine's thread."""
    from kvbaton.bench.latency import run
    from kvbaton.bench.report import write_report

    write_report(run(_listed(transports, ("shm", "tcp"), "--transports"), rooms, pages), json)


@app.command()
def rooms(
    transports: Annotated[str, typer.Option(help="kvbaton's transports, separated by commas.")] = "shm,tcp",
    megabytes: Annotated[
        int, typer.Option(min=1, help="MiB of all rooms together; four times that for the larger rooms.")
    ] = 256,
    runs: Annotated[int, typer.Option(min=1, help="Counted runs; the median is reported.")] = 5,
    many: Annotated[int, typer.Option(min=2, help="Rooms at once.")] = 1024,
    flat: Annotated[int, typer.Option(min=0, help="Rooms over which memory is watched; 0 for none.")] = 10_000,
    json: Annotated[Path, typer.Option(help="Where the figures are written.")] = Path("build/bench/rooms.json"),
) -> None:
    """Many rooms at once beside few, as large as each and with the same bytes, and memory over very many."""
    from kvbaton.bench.report import write_report
    from kvbaton.bench.rooms import run_rooms

    write_report(run_rooms(_listed(transports, ("shm", "tcp"), "--transports"), megabytes, runs, many, flat), json)


@app.command()
def slices(
    transports: Annotated[str, typer.Option(help="kvbaton's transports, separated by commas.")] = "shm,tcp",
    megabytes: Annotated[int, typer.Option(min=1, help="MiB of one hand-over.")] = 256,
    runs: Annotated[int, typer.Option(min=1, help="Counted runs; the median is reported.")] = 5,
    json: Annotated[Path, typer.Option(help="Where the figures are written.")] = Path("build/bench/slices.json"),
) -> None:
    """Head slices of two prefill ranks beside the same bytes where they are contiguous."""
    from kvbaton.bench.report import write_report
    from kvbaton.bench.rooms import run_slices

    write_report(run_slices(_listed(transports, ("shm", "tcp"), "--transports"), megabytes, runs), json)


@app.command()
def handover(
    sglang: Annotated[
        Path | None,
        typer.Option(help="Folder of a harness that drives SGLang's managers; without it they are absent."),
    ] = None,
    cases: Annotated[str, typer.Option(help="Cases, separated by commas.")] = "a,c,d",
    transports: Annotated[str, typer.Option(help="kvbaton's transports, separated by commas.")] = "shm,tcp",
    runs: Annotated[int, typer.Option(min=1, help="Counted runs; the median is reported.")] = 5,
    json: Annotated[Path, typer.Option(help="Where the figures are written.")] = Path("build/bench/handover.json"),
) -> None:
    """Whole hand-overs of kvbaton's managers beside SGLang's NIXL manager."""
    from kvbaton.bench.handover import CASES, run
    from kvbaton.bench.report import write_report

    chosen = _listed(cases, tuple(CASES), "--cases")
    write_report(run(sglang, chosen, _listed(transports, ("shm", "tcp"), "--transports"), runs), json)


@app.command()
def fabrics(
    ways: Annotated[
        str, typer.Option(help="Libraries and protocols, separated by commas.")
    ] = "nixl over shm,nixl over tcp,mooncake over tcp",
    pieces: Annotated[str, typer.Option(help="Piece sizes in bytes, separated by commas.")] = "256,2048",
    megabytes: Annotated[int, typer.Option(min=1, help="Most MiB of one hand-over.")] = 128,
    runs: Annotated[int, typer.Option(min=1, help="Counted runs; the median is reported.")] = 5,
    json: Annotated[Path, typer.Option(help="Where the figures are written.")] = Path("build/bench/fabrics.json"),
) -> None:
    """Packed writes beside direct ones over the vendors' libraries, without rooms, every byte checked."""
    from kvbaton.bench.fabrics import WAYS, run
    from kvbaton.bench.report import write_report

    chosen = _listed(ways, tuple(WAYS), "--ways")
    write_report(run(chosen, [_piece(piece) for piece in pieces.split(",")], megabytes, runs), json)


@app.command()
def digest(
    transports: Annotated[str, typer.Option(help="kvbaton's transports, separated by commas.")] = "shm,tcp",
    pieces: Annotated[str, typer.Option(help="Piece sizes in bytes, separated by commas.")] = "256,2048,131072",
    megabytes: Annotated[int, typer.Option(min=1, help="Most MiB of one hand-over.")] = 256,
    runs: Annotated[int, typer.Option(min=1, help="Counted runs; the median is reported.")] = 5,
    json: Annotated[Path, typer.Option(help="Where the figures are written.")] = Path("build/bench/digest.json"),
) -> None:
    """What digests cost: the kernel beside memcpy, and hand-overs with and without them, every byte checked."""
    from kvbaton.bench.digests import run
    from kvbaton.bench.report import write_report

    chosen = _listed(transports, ("shm", "tcp"), "--transports")
    write_report(run(chosen, [_piece(piece) for piece in pieces.split(",")], megabytes, runs), json)


@app.command()
def gpu(
    against: Annotated[str, typer.Option(help="Contenders beside CUDA's and torch's, separated by commas.")] = "nixl",
    pieces: Annotated[
        str, typer.Option(help="Piece sizes in bytes, separated by commas.")
    ] = "128,256,512,1024,2048,8192,32768,131072,2097152,67108864",
    megabytes: Annotated[int, typer.Option(min=1, help="MiB of one copy, at least a page of all tensors.")] = 512,
    runs: Annotated[int, typer.Option(min=1, help="Counted runs; the median is reported.")] = 5,
    devices: Annotated[str, typer.Option(help="GPU of the source, and GPU of the destination.")] = "0,0",
    json: Annotated[Path, typer.Option(help="Where the figures are written.")] = Path("build/bench/gpu.json"),
) -> None:
    """Copies on GPUs, from one process into the mapped memory of another, beside others, every byte checked."""
    from kvbaton.bench.gpu.start import run
    from kvbaton.bench.report import write_report

    chosen = [number.strip() for number in devices.split(",")]
    if len(chosen) != 2 or not all(number.isdecimal() for number in chosen):
        raise typer.BadParameter(f"{devices!r} is no pair of numbers, as in 0,1", param_hint="--devices")
    sizes = [_piece(piece) for piece in pieces.split(",")]
    here, there = (int(number) for number in chosen)
    write_report(run((here, there), _listed(against, ("nixl",), "--against"), sizes, megabytes, runs), json)


@app.command()
def plot(
    json: Annotated[Path, typer.Option(help="Figures of `kvbaton bench transfer`.")] = Path(
        "build/bench/transfer.json"
    ),
    svg: Annotated[Path, typer.Option(help="Where the picture is written.")] = Path("build/bench/transfer.svg"),
) -> None:
    """Draw the throughput of every contender against the size of the pieces."""
    from kvbaton.bench.plot import draw_file

    draw_file(json, svg)


@app.command()
def summary(
    folder: Annotated[Path, typer.Option(help="Where the figures of `make bench` are.")] = Path("build/bench"),
) -> None:
    """All figures that have a target, met or missed, as a Markdown table."""
    from kvbaton.bench.summary import summarise

    print(summarise(folder))


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
