"""``kvbaton doctor``."""

from __future__ import annotations

import signal
from typing import Annotated, Optional

import typer

from kvbaton.address import Endpoint
from kvbaton.cli.insecure import Insecure
from kvbaton.errors import ConfigurationError


def doctor(
    peer: Annotated[str, typer.Option(help="HOST:PORT of a machine on which 'kvbaton doctor --serve' runs.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Wait for doctors of other machines, until a signal.")] = False,
    insecure: Insecure = False,
    where: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="[HOST:PORT]", help="Where --serve listens; 127.0.0.1:8899 by default."),
    ] = None,
) -> None:
    """Say what this machine has, what each transport can do with it, and what to change.

    With --peer also: a round trip and a bandwidth figure of each transport that both machines have. The exit code is 1
    only if nothing can work: no transport here, or with --peer none between the two. Two machines share a secret in
    KVBATON_SECRET, or in the file that KVBATON_SECRET_FILE names.
    """
    if serve:
        if peer or json:
            raise ConfigurationError("--serve waits for other doctors; leave --peer and --json to those")
        _serve(where or "127.0.0.1")
        return
    if where is not None:
        raise ConfigurationError(f"{where!r} is only for --serve; did you mean --peer {where}?")
    if peer:
        Endpoint.parse(peer)
    from rich.console import Console

    from kvbaton.doctor import examine, to_json
    from kvbaton.doctor.text import show

    report = examine(peer)
    if json:
        print(to_json(report))
    else:
        show(report, Console())
    raise typer.Exit(0 if report.works else 1)


def _serve(where: str) -> None:
    from kvbaton.doctor import DoctorServer

    # Also where SIGINT was ignored by whoever started this, as shells do in the background.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    server = DoctorServer(where)
    here = server.address
    there = f"HOST:{here.port}" if here.is_wildcard else here
    print(f"kvbaton doctor listens on {here}; on the other machine: kvbaton doctor --peer {there}", flush=True)
    try:
        server.run()
    except KeyboardInterrupt:
        server.close()
