"""``kvbaton trace``: a timeline of a run, for ui.perfetto.dev."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from kvbaton.errors import ConfigurationError

if TYPE_CHECKING:
    from kvbaton.observe.timeline import Recording

app = typer.Typer()

Output = Annotated[Path, typer.Option("--output", "-o", help="Where the trace is written.")]


@app.callback(invoke_without_command=True)
def trace(
    context: typer.Context,
    output: Output = Path("build/trace.json"),
    demo: Annotated[bool, typer.Option("--demo", help="Trace a model's prefill and decode servers instead.")] = False,
    model: Annotated[Optional[Path], typer.Option(help="With --demo: the model; the trained one by default.")] = None,  # noqa: UP045
    prompts: Annotated[int, typer.Option(min=1, help="With --demo: how many prompts are asked.")] = 8,
    rooms: Annotated[int, typer.Option(min=2, help="Requests of the small run.")] = 8,
    transport: Annotated[str, typer.Option(help="Transports in order of preference, or auto.")] = "shm,tcp",
) -> None:
    """Run a few hand-overs and write a timeline that ui.perfetto.dev opens: ranks, rooms, stages, chunks, failures."""
    if context.invoked_subcommand is not None:
        return
    from kvbaton.cli.transports import transport_names
    from kvbaton.observe.perfetto import write_trace

    names = transport_names(transport)
    if demo:
        from kvbaton.demo.trace import trace_demo

        recordings = trace_demo(model, prompts, names)
    else:
        from kvbaton.observe.example import run_example
        from kvbaton.observe.timeline import Timeline

        timeline = Timeline()
        run_example([timeline], rooms, names)
        recordings = timeline.recordings()
    write_trace(recordings, output)
    print(f"{_counted(recordings)}: {output} (open it in ui.perfetto.dev)")


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Files that ranks wrote, or folders of them.")],
    output: Output = Path("build/trace.json"),
) -> None:
    """Make one timeline of the files that ranks wrote where KVBATON_TRACE named a folder."""
    from kvbaton.observe.perfetto import write_trace
    from kvbaton.observe.timeline import read_recording

    paths = [path for given in files for path in (sorted(given.glob("*.jsonl")) if given.is_dir() else [given])]
    if not paths:
        raise ConfigurationError(f"no file of a rank (*.jsonl) is in {', '.join(map(str, files))}")
    recordings = [read_recording(path) for path in paths]
    write_trace(recordings, output)
    print(f"{_counted(recordings)}: {output} (open it in ui.perfetto.dev)")


def _counted(recordings: list[Recording]) -> str:
    from kvbaton.observe.perfetto import rooms_of

    rooms = rooms_of(recordings)
    return f"{len(recordings)} ranks, {len(rooms)} rooms"
