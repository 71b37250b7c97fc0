"""``kvbaton serve prefill | decode | router | pd | registry``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from kvbaton.cli.insecure import Insecure
from kvbaton.cli.transports import transport_names
from kvbaton.errors import ConfigurationError

app = typer.Typer(no_args_is_help=True)

MANAGER_OPTIONS = ("transports", "transport_options", "bind", "advertise", "deployment")
"""What may stand in ``manager_options``; everything else of a `Manager` is the engine's business."""

Model = Annotated[str, typer.Option("--model", help="Folder or name of a Transformers causal LM.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Name = Annotated[str, typer.Option(help="Name under which the model answers; the folder's name by default.")]
Drain = Annotated[float, typer.Option(help="Seconds that running requests have to end after SIGTERM.")]
EngineOptions = Annotated[str, typer.Option(help="JSON object with options of the engine; see docs/serving.md.")]
TensorParallel = Annotated[Optional[int], typer.Option("--tp", min=1, help="Virtual ranks that share heads.")]  # noqa: UP045
PipelineParallel = Annotated[Optional[int], typer.Option("--pp", min=1, help="Virtual stages that share layers.")]  # noqa: UP045
ContextParallel = Annotated[Optional[int], typer.Option("--cp", min=1, help="Virtual ranks that share tokens.")]  # noqa: UP045
ContextUnit = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--cp-unit", min=1, help="Neighbouring tokens of one rank: by default a page at prefill, 1 at decode."
    ),
]
PageOrder = Annotated[Optional[str], typer.Option("--order", help="NHD or HND: which axis of a page lies outside.")]  # noqa: UP045
Bind = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Address of the ports between ranks and of the registry; --host by default."),
]
Advertise = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Address that other ranks are told; needed where the one to listen on is 0.0.0.0 or ::."),
]
Transports = Annotated[str, typer.Option(help="Transports in order of preference, separated by commas, or auto.")]


@app.command()
def prefill(
    model: Model,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the HTTP API.")] = 30000,
    bootstrap_port: Annotated[int, typer.Option(help="Port of this server's registry.")] = 8998,
    served_model_name: Name = "",
    drain_seconds: Drain = 10.0,
    unasked_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds until what no decode server asks for is given up; 0: never.")
    ] = 10.0,
    transport: Transports = "shm,tcp",
    tp: TensorParallel = None,
    pp: PipelineParallel = None,
    cp: ContextParallel = None,
    cp_unit: ContextUnit = None,
    order: PageOrder = None,
    options: EngineOptions = "{}",
    bind: Bind = None,
    advertise: Advertise = None,
    insecure: Insecure = False,
) -> None:
    """Serve prefill, with the registry that decode servers look it up in.

    All ranks and registries of a deployment share a secret: KVBATON_SECRET, or the file that KVBATON_SECRET_FILE names.
    The HTTP API itself asks for none: put it behind your own front.
    """
    from kvbaton.serve.launch import run_prefill

    _log_requests()
    run_prefill(
        model,
        host,
        port,
        bootstrap_port,
        bind=bind,
        advertise=advertise,
        served_model_name=served_model_name,
        drain_seconds=drain_seconds,
        unasked_seconds=unasked_seconds,
        options=_engine_options(options, transport, tp=tp, pp=pp, cp=cp, cp_unit=cp_unit, order=order),
    )


@app.command()
def decode(
    model: Model,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the HTTP API.")] = 30001,
    served_model_name: Name = "",
    drain_seconds: Drain = 10.0,
    transport: Transports = "shm,tcp",
    tp: TensorParallel = None,
    pp: PipelineParallel = None,
    cp: ContextParallel = None,
    cp_unit: ContextUnit = None,
    order: PageOrder = None,
    options: EngineOptions = "{}",
    bind: Bind = None,
    advertise: Advertise = None,
    insecure: Insecure = False,
) -> None:
    """Serve decode; each request says where its prefill side is.

    All ranks and registries of a deployment share a secret: KVBATON_SECRET, or the file that KVBATON_SECRET_FILE names.
    The HTTP API itself asks for none: put it behind your own front.
    """
    from kvbaton.serve.launch import run_decode

    _log_requests()
    run_decode(
        model,
        host,
        port,
        bind=bind,
        advertise=advertise,
        served_model_name=served_model_name,
        drain_seconds=drain_seconds,
        options=_engine_options(options, transport, tp=tp, pp=pp, cp=cp, cp_unit=cp_unit, order=order),
    )


@app.command()
def router(
    prefill: Annotated[list[str], typer.Option(help="URL,BOOTSTRAP_PORT of a prefill server; repeat for more.")],
    decode: Annotated[list[str], typer.Option(help="URL of a decode server; repeat for more.")],
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the router.")] = 8000,
    metrics_port: Annotated[int, typer.Option(help="Port of the router's own metrics; 0 finds a free one.")] = 0,
    policy: Annotated[str, typer.Option(help="How the router chooses servers.")] = "round_robin",
    retries: Annotated[int, typer.Option(help="How often the router tries a request in all.")] = 3,
    log_level: Annotated[str, typer.Option(help="The router's log level.")] = "warn",
    router_option: Annotated[Optional[list[str]], typer.Option(help="Passed to the router as it is.")] = None,  # noqa: UP045
) -> None:
    """Run sglang-router over prefill and decode servers."""
    from kvbaton.serve.launch import run_router

    code = run_router(
        [_prefill(text) for text in prefill],
        decode,
        host,
        port,
        metrics_port=metrics_port,
        policy=policy,
        retries=retries,
        log_level=log_level,
        extra=router_option or [],
    )
    raise typer.Exit(code)


@app.command()
def pd(
    model: Model,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the router.")] = 8000,
    prefills: Annotated[int, typer.Option(min=1, help="Number of prefill servers.")] = 1,
    decodes: Annotated[int, typer.Option(min=1, help="Number of decode servers.")] = 1,
    served_model_name: Name = "",
    transport: Transports = "shm,tcp",
    options: EngineOptions = "{}",
    prefill_options: Annotated[str, typer.Option(help="Options of the prefill engines only.")] = "{}",
    decode_options: Annotated[str, typer.Option(help="Options of the decode engines only.")] = "{}",
    logs: Annotated[Optional[Path], typer.Option(help="Folder for the logs.")] = None,  # noqa: UP045
) -> None:
    """Run prefill servers, decode servers and the router on this host, until Ctrl-C.

    Only the router listens at --host; the servers listen at 127.0.0.1.
    """
    from kvbaton.serve.launch import run_pd

    code = run_pd(
        model,
        host,
        port,
        prefills=prefills,
        decodes=decodes,
        logs=logs,
        served_model_name=served_model_name,
        options=_engine_options(options, transport),
        prefill_options=_json_object("--prefill-options", prefill_options),
        decode_options=_json_object("--decode-options", decode_options),
    )
    raise typer.Exit(code)


@app.command()
def registry(
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8998,
    metrics_port: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Port for the metrics alone, which need no secret there."),
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Run a registry by itself, for prefill engines that do not bring one.

    It shares a secret with its ranks: KVBATON_SECRET, or the file that KVBATON_SECRET_FILE names. Beyond this machine
    it does not listen without one.
    """
    from kvbaton.serve.launch import run_registry

    run_registry(host, port, metrics_at=metrics_port)


def _log_requests() -> None:
    logging.getLogger("kvbaton").setLevel(logging.INFO)


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{flag} is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigurationError(f"{flag} must be a JSON object, not {type(given).__name__}")
    inner = given.get("manager_options", {})
    if not isinstance(inner, dict):
        raise ConfigurationError(f"{flag}: manager_options must be a JSON object, not {type(inner).__name__}")
    for name in inner:
        if name not in MANAGER_OPTIONS:
            hint = {
                "settings": "; settings are given from Python, offer_wait_seconds beside manager_options",
                "secret": "; a command line can be read by others: set KVBATON_SECRET or KVBATON_SECRET_FILE",
            }.get(name, "")
            raise ConfigurationError(
                f"{flag}: manager_options has {name}, but only {', '.join(MANAGER_OPTIONS)} can be given here{hint}"
            )
    return given


def _engine_options(options: str, transport: str, **flags: int | str | None) -> dict[str, Any]:
    """The options of the engine; a flag that was given counts more than the same name in ``options``."""
    given = _json_object("--options", options) | {name: value for name, value in flags.items() if value is not None}
    if flags.get("cp_unit") is not None and given.get("cp", 1) == 1:
        raise ConfigurationError(f"--cp-unit {flags['cp_unit']} without --cp: one rank holds all tokens; give --cp too")
    return {**given, "manager_options": {"transports": transport_names(transport), **given.get("manager_options", {})}}


def _prefill(text: str) -> tuple[str, int]:
    url, comma, port = text.rpartition(",")
    if not comma or not port.isdigit():
        raise ConfigurationError(f"--prefill {text!r}: write it as URL,BOOTSTRAP_PORT, e.g. http://10.0.0.1:30000,8998")
    return url, int(port)
