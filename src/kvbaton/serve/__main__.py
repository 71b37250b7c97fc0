"""``python -m kvbaton.serve``: how `kvbaton.serve.processes` starts its children; people use ``kvbaton serve``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence

from kvbaton.errors import ConfigurationError, KVBatonError
from kvbaton.serve.launch import run_decode, run_pd, run_prefill, run_router


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says and return the exit code."""
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return _run(given)
    except KVBatonError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    if given.what == "router":
        return run_router(
            [_prefill(entry) for entry in given.prefill],
            given.decode,
            given.host,
            given.port,
            metrics_port=given.metrics_port,
            policy=given.policy,
            retries=given.retries,
            log_level=given.log_level,
            extra=given.router_option,
        )
    if given.what == "pd":
        return run_pd(
            given.model,
            given.host,
            given.port,
            prefills=given.prefills,
            decodes=given.decodes,
            logs=given.logs,
            options=given.options,
            prefill_options=given.prefill_options,
            decode_options=given.decode_options,
            served_model_name=given.served_model_name,
        )
    settings = {
        "served_model_name": given.served_model_name,
        "drain_seconds": given.drain_seconds,
        "options": given.options,
    }
    if given.what == "prefill":
        run_prefill(given.model, given.host, given.port, given.bootstrap_port, **settings)
    else:
        run_decode(given.model, given.host, given.port, **settings)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvbaton.serve", description=__doc__)
    kinds = parser.add_subparsers(dest="what", required=True)
    for what, port in (("prefill", 30000), ("decode", 30001), ("router", 8000), ("pd", 8000)):
        kind = kinds.add_parser(what)
        kind.add_argument("--host", default="127.0.0.1")
        kind.add_argument("--port", type=int, default=port)
        if what == "router":
            _router_arguments(kind)
            continue
        kind.add_argument("--model", required=True, help="folder or name of the model")
        kind.add_argument("--served-model-name", default="")
        kind.add_argument("--options", type=_options, default={}, help="JSON object with options for the engine")
        if what == "pd":
            kind.add_argument("--prefills", type=int, default=1)
            kind.add_argument("--decodes", type=int, default=1)
            kind.add_argument("--logs")
            kind.add_argument("--prefill-options", type=_options, default={})
            kind.add_argument("--decode-options", type=_options, default={})
        else:
            kind.add_argument("--drain-seconds", type=float, default=10.0)
        if what == "prefill":
            kind.add_argument("--bootstrap-port", type=int, default=8998)
    return parser


def _router_arguments(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--prefill", nargs=2, action="append", default=[], metavar=("URL", "BOOTSTRAP_PORT"))
    kind.add_argument("--decode", action="append", default=[], metavar="URL")
    kind.add_argument("--metrics-port", type=int, default=0)
    kind.add_argument("--policy", default="round_robin")
    kind.add_argument("--retries", type=int, default=2)
    kind.add_argument("--log-level", default="warn")
    kind.add_argument("--router-option", action="append", default=[], help="passed to the router as it is")


def _prefill(entry: Sequence[str]) -> tuple[str, int]:
    url, port = entry
    if not port.isdigit():
        raise ConfigurationError(f"bootstrap port {port!r} of {url} is not a number")
    return url, int(port)


def _options(text: str) -> dict[str, object]:
    options = json.loads(text)
    if not isinstance(options, dict):
        raise ValueError(text)
    return options


if __name__ == "__main__":
    sys.exit(main())
