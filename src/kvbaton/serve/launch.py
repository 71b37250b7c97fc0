"""What `kvbaton serve prefill | decode | router | pd` run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from kvbaton.address import is_wildcard
from kvbaton.engines.base import Engine, Role, Tokenizer
from kvbaton.errors import ConfigurationError
from kvbaton.observe import Observer

from kvbaton.registry.server import RegistryServer  # isort: skip
from kvbaton.registry.metrics_port import metrics_port
from kvbaton.secret import Secret, check_exposure
from kvbaton.serve.app import make_app
from kvbaton.serve.observing import add_metrics_of, server_metrics, server_observers
from kvbaton.serve.processes import PDCluster, ProcessFailed, free_ports
from kvbaton.serve.refusals import UNASKED_SECONDS, Refusals, add_routes
from kvbaton.serve.router import router_command, router_environment
from kvbaton.serve.server import PARENT_VARIABLE, bind, run_server, stop_with_parent
from kvbaton.serve.tokenizer import load_tokenizer

EngineBuilder = Callable[..., Engine]
"""``build(model, role=..., registry=<url or None>, served_model_name=..., **options) -> Engine``.

The default is `kvbaton.engines.hf.open_engine`.
"""


def run_prefill(
    model: str,
    host: str = "127.0.0.1",
    port: int = 30000,
    bootstrap_port: int = 8998,
    *,
    bind: str | None = None,
    advertise: str | None = None,
    served_model_name: str = "",
    drain_seconds: float = 10.0,
    unasked_seconds: float = UNASKED_SECONDS,
    build: EngineBuilder | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Serve prefill until SIGTERM or SIGINT, with the registry of this server at ``bootstrap_port``.

    ``bind`` is where the registry and the ports between ranks listen (``host`` by default), ``advertise`` what other
    ranks are told. A request for which no decode server asks in ``unasked_seconds`` is given up (0: never). ``options``
    go to the engine. Raises `ConfigurationError` for what cannot be used: an address, the model, an option; and for
    addresses beyond loopback without a secret.
    """
    options = _with_addresses(options, bind, advertise)
    registry = RegistryServer(bind or host, bootstrap_port)
    refusals = Refusals(unasked_seconds=unasked_seconds)
    add_routes(registry.app, refusals)
    with registry:
        _serve("prefill", model, host, port, registry, refusals, served_model_name, drain_seconds, build, options)


def run_decode(
    model: str,
    host: str = "127.0.0.1",
    port: int = 30001,
    *,
    bind: str | None = None,
    advertise: str | None = None,
    served_model_name: str = "",
    drain_seconds: float = 10.0,
    build: EngineBuilder | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Serve decode until SIGTERM or SIGINT; each request says where its prefill side is. Arguments as `run_prefill`."""
    options = _with_addresses(options, bind, advertise)
    _serve("decode", model, host, port, None, None, served_model_name, drain_seconds, build, options)


def run_router(
    prefills: Sequence[tuple[str, int]],
    decodes: Sequence[str],
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    metrics_port: int = 0,
    **options: Any,
) -> int:
    """Run sglang-router over the servers until SIGTERM or SIGINT, and return its exit code (0 after a signal).

    ``prefills`` are ``(url, bootstrap_port)``; ``options`` those of `kvbaton.serve.router.router_command`.
    """
    metrics_port = metrics_port or free_ports(1)[0]
    command = router_command(prefills, decodes, host=host, port=port, metrics_port=metrics_port, **options)
    with _stop_signal() as stop, subprocess.Popen(command, env=router_environment()) as router:
        parent = os.environ.get(PARENT_VARIABLE, "")
        while router.poll() is None and not stop.wait(0.1):
            if parent.isdigit() and os.getppid() != int(parent):
                stop.set()
        if router.poll() is not None:
            return router.returncode
        router.terminate()
        try:
            router.wait(30)
        except subprocess.TimeoutExpired:
            router.kill()
        return 0


def run_registry(
    host: str = "127.0.0.1",
    port: int = 8998,
    tell: Callable[[str], None] = print,
    *,
    metrics_at: int | None = None,
) -> None:
    """Run a registry by itself until SIGTERM or SIGINT. Raises `ConfigurationError` if the address cannot be used.

    ``metrics_at`` is a port for its metrics alone: where there is a secret, nobody else may ask the registry.
    """
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(_stop_signal())
        server = stack.enter_context(RegistryServer(host, port))
        if metrics_at is not None:
            tell(f"metrics at port {stack.enter_context(metrics_port(server.app, host, metrics_at))}")
        where = f"port {server.port} of every address" if is_wildcard(server.host) else server.url
        tell(f"registry at {where}; Ctrl-C stops it")
        stop.wait()


def run_pd(
    model: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    prefills: int = 1,
    decodes: int = 1,
    logs: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    prefill_options: Mapping[str, Any] | None = None,
    decode_options: Mapping[str, Any] | None = None,
    served_model_name: str = "",
    ready_seconds: float = 600.0,
    tell: Callable[[str], None] = print,
    cluster: PDCluster | None = None,
) -> int:
    """Run prefill servers, decode servers and the router as child processes until SIGTERM, SIGINT, or one of them ends.

    Returns 0 after a signal, and 1 when a process failed; ``tell`` is given which one and how its log ends.
    The options are those of the engines (JSON values): of both, of prefill and of decode. ``cluster`` takes the place
    of the one made here.
    """
    deployment = cluster or PDCluster(
        model,
        prefills,
        decodes,
        host=host,
        port=port,
        logs=logs,
        options=options,
        prefill_options=prefill_options,
        decode_options=decode_options,
        served_model_name=served_model_name,
        ready_seconds=ready_seconds,
    )
    counts = f"{len(deployment.prefill_urls)} prefill and {len(deployment.decode_urls)} decode servers"
    with _stop_signal() as stop:
        try:
            tell(f"starting {counts} and the router; their logs are in {deployment.logs}")
            deployment.start(stop.is_set)
            if not stop.is_set():
                tell(f"ready: ask {deployment.url}; Ctrl-C stops everything")
                for url in (*deployment.prefill_urls, *deployment.decode_urls):
                    tell(f"  {url}")
            while not stop.wait(0.2):
                deployment.check()
            tell("stopping")
        except ProcessFailed as error:
            tell(str(error))
            return 1
        finally:
            deployment.stop()
    return 0


def _serve(
    role: Role,
    model: str,
    host: str,
    port: int,
    registry: RegistryServer | None,
    refusals: Refusals | None,
    served_model_name: str,
    drain_seconds: float,
    build: EngineBuilder | None,
    options: Mapping[str, Any] | None,
) -> None:
    metrics = server_metrics()
    if build is None:
        try:
            from kvbaton.engines.hf import open_engine
        except ImportError as error:
            raise ConfigurationError(
                f"the Transformers engine cannot be loaded ({error}): install kvbaton[serve]"
            ) from error
        build = open_engine
        options = _with_observers(options or {}, server_observers(metrics))
        if host != "localhost":
            options = {
                **(options or {}),
                "manager_options": {"bind": host, **(options or {}).get("manager_options", {})},
            }
        _check_exposure(role, (options or {}).get("manager_options", {}))
    stop_with_parent()
    _check_model(model)
    # What takes long comes last: an address in use or a model without files is told at once.
    with bind(host, port) as listener:
        tokenizer: Tokenizer | None = load_tokenizer(model)
        engine = build(
            model,
            role=role,
            registry=registry.url if registry else None,
            served_model_name=served_model_name or Path(model).name or model,
            **(options or {}),
        )
        told = {"disaggregation_bootstrap_port": registry.port} if registry else {}
        if registry is not None:
            add_metrics_of(metrics, registry.app.state.metrics)
        app = make_app(engine, tokenizer, extra_info=told, refusals=refusals, metrics=metrics)
        # A second signal, while the engine gives its rows back, must not end the process at once.
        with _stop_signal() as stop:
            try:
                if not stop.is_set():
                    run_server(app, listener, drain_seconds)
            finally:
                engine.close()


def _check_exposure(role: Role, manager_options: Mapping[str, Any]) -> None:
    """What a `Manager` would refuse too, but only when the model is loaded."""
    hosts = (manager_options.get("bind"), manager_options.get("advertise"))
    check_exposure(role, [host for host in hosts if host is not None], Secret.of(None), insecure=False)


def _with_addresses(options: Mapping[str, Any] | None, bind: str | None, advertise: str | None) -> Mapping[str, Any]:
    """The engine's options with these addresses of its managers, where they are given."""
    given = {name: text for name, text in (("bind", bind), ("advertise", advertise)) if text is not None}
    options = options or {}
    return {**options, "manager_options": {**options.get("manager_options", {}), **given}} if given else options


def _with_observers(options: Mapping[str, Any], observers: Sequence[Observer]) -> dict[str, Any]:
    """The options of an engine, with observers of its managers besides those that are there."""
    given = options.get("manager_options") or {}
    manager_options = {**given, "observers": [*given.get("observers", ()), *observers]}
    return {**options, "manager_options": manager_options}


def _check_model(model: str) -> None:
    """Raise `ConfigurationError` for a path that is not there: Transformers would ask a model hub for it, for long."""
    path = Path(model)
    if path.exists():
        return
    if model.startswith((".", "/")) or model.count("/") != 1:
        raise ConfigurationError(f"the model {model} is no folder here, and no name of the form owner/name")
    if path.parent.is_dir():
        raise ConfigurationError(
            f"the model {model} is not there, but the folder {path.parent.resolve()} is: see which models it has"
        )


@contextlib.contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """Give an event that SIGTERM and SIGINT set, while this runs (on the main thread; elsewhere nothing sets it)."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
