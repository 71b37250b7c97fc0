"""``kvbaton plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan(
    source: Annotated[Path, typer.Option("--from", help="Topology file of the side that prefills (YAML).")],
    destination: Annotated[Path, typer.Option("--to", help="Topology file of the side that decodes (YAML).")],
    tokens: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens of the request.")] = 4096,
    prefix: Annotated[int, typer.Option(min=0, help="Tokens that the destination has already.")] = 0,
    contiguous: Annotated[bool, typer.Option("--contiguous", help="Pages side by side instead of shuffled.")] = False,
    executor: Annotated[
        str, typer.Option(help="How one-sided transports write: auto (what costs less), packed, or direct.")
    ] = "auto",
    times: Annotated[bool, typer.Option("--times", help="Also how long the planner took.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the explanation as JSON; - for stdout.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of who sends what to whom.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page: picture, tables, one pair's bytes.")] = None,
    pair: Annotated[
        str | None,
        typer.Option(metavar="SOURCE:DESTINATION", help="Numbers of the ranks whose bytes the page shows."),
    ] = None,
) -> None:
    """Explain what one deployment hands to another: who sends what to whom, in which pieces, or why not.

    The exit code is 0 if everything fits, 1 if a pair of ranks is refused, 2 if a file cannot be used.
    """
    from kvbaton.explain import Request, report
    from kvbaton.transport.executor import executor_option

    request = Request(tokens, prefix, contiguous)
    made = report.make(source, destination, request, pair=pair, timed=times, executor=executor_option(executor))
    for path, text in ((json, made.json), (svg, made.svg), (html, made.html)):
        if path is not None and str(path) != "-":
            report.write(path, text())
    if json is not None and str(json) == "-":
        typer.echo(made.json())
    else:
        made.print()
    raise typer.Exit(1 if made.explanation.refused else 0)
