"""``kvbaton demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbaton.cli.transports import Device, Transports, transport_names


def demo(
    everything: Annotated[bool, typer.Option("--all", help="Every architecture instead of one of each kind.")] = False,
    transport: Transports = None,
    device: Device = "cpu",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts for the trained model.")] = 20,
    json: Annotated[Path, typer.Option(help="Where the figures are written.")] = Path("build/demo.json"),
) -> None:
    """Answer prompts through prefill, decode and router processes, and compare with a single process.

    The exit code is 0 only if every answer is identical, and deliberate damage to the cache is noticed; 2 for an
    argument that cannot be used.
    """
    # Before torch and transformers are loaded, which takes seconds.
    names = transport_names(transport, device)
    from kvbaton.demo.run import run_demo

    raise typer.Exit(
        run_demo(everything=everything, transport=",".join(names), device=device, prompts=prompts, json_path=json)
    )
