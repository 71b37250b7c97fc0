"""``kvbaton``: serve models, run the demo, measure. Each command imports what it needs when it runs."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from kvbaton.errors import KVBatonError

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Run the command line. Ends the process with 2 for a usage or configuration error, and says why in one line."""
    try:
        app = make_app()
    except ImportError as error:
        sys.exit(f"kvbaton: the command line needs the extra 'cli': pip install 'kvbaton[cli]' ({error})")
    try:
        app()
    except KVBatonError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


def make_app() -> typer.Typer:
    """Build the command line. Raises ``ImportError`` where typer is not installed."""
    import typer

    from kvbaton.cli import bench, check, demo, doctor, plan, serve, trace

    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Hands a request's KV cache and hybrid-model state from the prefill engine to the decode engine.",
    )
    app.add_typer(serve.app, name="serve", help="Serve a model with prefill and decode apart.")
    app.add_typer(bench.app, name="bench", help="Measure; every figure is a ratio of contenders in one run.")
    app.add_typer(check.app, name="check", help="Check layouts, what transports promise, and what faults do.")
    app.add_typer(trace.app, name="trace", help="Draw a timeline of a run, for ui.perfetto.dev.")
    app.command("demo")(demo.demo)
    app.command("plan")(plan.plan)
    app.command("doctor")(doctor.doctor)

    @app.callback(invoke_without_command=True)
    def common(
        version: bool = typer.Option(False, "--version", help="Print the version and exit."),
        verbose: bool = typer.Option(False, "--verbose", "-v", help="Log what happens, to standard error."),
    ) -> None:
        """Set up what all commands share."""
        logging.basicConfig(
            level=logging.INFO if verbose else logging.WARNING,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        if version:
            from kvbaton import __version__

            print(__version__)
            raise typer.Exit

    return app
