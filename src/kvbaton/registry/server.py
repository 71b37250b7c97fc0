"""The registry over HTTP: a FastAPI app around `RegistryTable`, and a server that runs it in a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Annotated, Any, TypeVar

import msgspec

from kvbaton.address import is_wildcard
from kvbaton.errors import ConfigurationError, KVBatonError
from kvbaton.registry.base import (
    ErrorBody,
    Problem,
    Registration,
    RegistryRefused,
    UnknownDeployment,
    UnknownInstance,
)
from kvbaton.registry.table import RegistryTable
from kvbaton.registry.waiting import Waiting
from kvbaton.secret import Secret, SecretLike, check_exposure

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import Response
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

    from kvbaton.registry.guard import BodyDiffers, Guard
    from kvbaton.registry.impatient import ImpatientProtocol, PatientServer
    from kvbaton.registry.metrics import add_metrics
except ImportError as error:  # pragma: no cover - needs an environment without the extra
    raise ConfigurationError(
        f"the registry server needs FastAPI, uvicorn and prometheus-client ({error}): install kvbaton[registry]"
    ) from error

MAX_BODY = 4 << 20
"""Bytes of a registration: a layout with as many tensors as there may be has some 2 MiB."""
MAX_ROOMS_BODY = 1 << 20
MAX_ROOMS = 1 << 14
"""Rooms that one request speaks of."""
BODY_SECONDS = 20.0
MAX_WAIT_SECONDS = 30.0

Content = TypeVar("Content")


RoomNumbers = Annotated[list[int], msgspec.Meta(max_length=MAX_ROOMS)]


class RoomsNews(msgspec.Struct, frozen=True):
    """The body by which a rank announces rooms."""

    opened: RoomNumbers = []
    closed: RoomNumbers = []
    ended: RoomNumbers = []


class RoomsQuestion(msgspec.Struct, frozen=True):
    """The body that asks who opened rooms; see `RegistryClient.find_rooms`."""

    rooms: RoomNumbers
    deployment: str = "default"
    wait_seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_SECONDS)] = 0.0
    asker: Annotated[str, msgspec.Meta(max_length=128)] = ""


class BadBody(KVBatonError):
    """A body that cannot be read."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class BodyTooLarge(KVBatonError):
    """A request's body is over the limit; the message has the limit."""


async def read_body(request: Request, limit: int, seconds: float = BODY_SECONDS) -> bytes:
    """Read a body of at most ``limit`` bytes; nothing of one that says that it is longer.

    Raises `BodyTooLarge`, and `TimeoutError` if it is not whole in ``seconds``, or the client hung up.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise BodyTooLarge(f"the body has more than {limit} bytes")

    async def read() -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise BodyTooLarge(f"the body has more than {limit} bytes")
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), seconds)
    except asyncio.TimeoutError:  # Another class than TimeoutError before Python 3.11.
        raise TimeoutError(f"the body did not arrive in {seconds:g} s") from None
    except ClientDisconnect:
        raise TimeoutError("the client hung up before its body was whole") from None


async def read_json(request: Request, limit: int, kind: type[Content], what: str) -> Content:
    """Read a body of at most ``limit`` bytes that is ``what``. Raises `BadBody`."""
    try:
        return msgspec.json.decode(await read_body(request, limit), type=kind)
    except BodyTooLarge as error:
        raise BadBody(413, "BodyTooLarge", str(error)) from None
    except TimeoutError as error:
        raise BadBody(408, "Timeout", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = f"the body is not {what}: {error or 'nested too deeply'}"
        raise BadBody(400, "BadRequest", reason) from None


def make_app(
    table: RegistryTable,
    clock: Callable[[], float] = time.monotonic,
    max_body: int = MAX_BODY,
    waiting: Waiting | None = None,
    secret: Secret | None = None,
) -> FastAPI:
    """Make an app that serves ``table``; every refusal is a 4xx with an `ErrorBody`.

    With a ``secret`` only requests that are signed with it are served, but for ``/health``.
    """
    app = FastAPI(title="kvbaton registry", docs_url=None, redoc_url=None, openapi_url=None)
    lock = threading.Lock()
    waiting = Waiting() if waiting is None else waiting
    if secret is not None:
        app.add_middleware(Guard, secret=secret)

    @app.exception_handler(RegistryRefused)
    async def refused(request: Request, error: RegistryRefused) -> Response:
        unknown = isinstance(error, (UnknownDeployment, UnknownInstance))
        return _error(404 if unknown else 409, type(error).__name__, str(error), error.returning_seconds)

    @app.exception_handler(BadBody)
    async def bad_body(request: Request, error: BadBody) -> Response:
        return _error(error.status, error.kind, str(error))

    @app.exception_handler(BodyDiffers)
    async def body_differs(request: Request, error: BodyDiffers) -> Response:
        return _error(401, "BodyDiffers", str(error))

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        # Not in the registry's own form: a client must not read "no such route" as "no such rank".
        return _json(error.status_code, {"detail": error.detail})

    @app.get("/health")
    async def health() -> Response:
        if secret is not None:
            # Strangers ask this too.
            return _json(200, {"status": "ok"})
        with lock:
            table.expire(clock())
            return _json(200, {"status": "ok", "ranks": len(table), "deployments": len(table.deployments)})

    @app.put("/v1/ranks")
    async def register(request: Request) -> Response:
        registration = await read_json(request, max_body, Registration, "a registration")
        with lock:
            generation = table.register(registration, clock())
        return _json(200, {"generation": generation})

    @app.post("/v1/ranks/{instance}/heartbeat")
    async def heartbeat(instance: str) -> Response:
        with lock:
            known = table.heartbeat(instance, clock())
        return _json(200, {"ttl": table.ttl}) if known else _unknown(instance)

    @app.delete("/v1/ranks/{instance}")
    async def remove(instance: str) -> Response:
        with lock:
            known = table.remove(instance, clock())
        return _json(200, {}) if known else _unknown(instance)

    @app.get("/v1/topology")
    async def topology(deployment: str = "default", dp_rank: int | None = None) -> Response:
        with lock:
            return _json(200, table.topology(deployment, clock(), dp_rank))

    @app.post("/v1/ranks/{instance}/rooms")
    async def announce_rooms(instance: str, request: Request) -> Response:
        news = await read_json(request, min(max_body, MAX_ROOMS_BODY), RoomsNews, "news of rooms")
        with lock:
            held = table.announce_rooms(instance, news.opened, news.closed, clock(), news.ended)
            deployment = table.deployment_of(instance)
        waiting.announced(deployment, [*news.opened, *news.ended])
        return _json(200, {"held": held})

    @app.post("/v1/rooms/find")
    async def find_rooms(request: Request) -> Response:
        question = await read_json(request, min(max_body, MAX_ROOMS_BODY), RoomsQuestion, "a question for rooms")
        waiting.asked_again(question.asker)
        with lock:
            found = table.find_rooms(question.deployment, question.rooms, clock())
        if question.rooms and not found.rooms and question.wait_seconds:
            await waiting.wait(question.deployment, question.rooms, question.asker, question.wait_seconds)
            with lock:
                found = table.find_rooms(question.deployment, question.rooms, clock())
        return _json(200, found)

    def sizes() -> dict[str, int]:
        with lock:
            table.expire(clock())
            return {"ranks": len(table), "deployments": len(table.deployments), "rooms": table.rooms}

    add_metrics(app, sizes)
    return app


class BackgroundServer:
    """An ASGI app served by uvicorn in a thread of its own.

    ``port`` 0 takes a free one; `url` says which. The socket is bound by the constructor, so that an address in use is
    found there (`ConfigurationError`). `start` returns when requests are answered. `stop` may be called twice.
    """

    def __init__(self, app: FastAPI, host: str = "127.0.0.1", port: int = 0, drain_seconds: int = 5) -> None:
        self.app = app
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        self.host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise ConfigurationError(f"cannot listen at {host} port {port}: {error}; choose another port") from error
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=drain_seconds,
            http=ImpatientProtocol,
        )
        self.server = PatientServer(config)
        self._drain_seconds = drain_seconds
        self._thread = threading.Thread(target=self._run, name=f"http-{self.port}", daemon=True)

    @property
    def url(self) -> str:
        """Where it answers, for this host: ``http://host:port``."""
        host = self.host
        if is_wildcard(host):
            host = "::1" if ":" in host else "127.0.0.1"
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def start(self) -> None:
        """Serve; returns when the server answers. Raises `ConfigurationError` if it does not come up."""
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self.server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise ConfigurationError(f"the server at {self.url} did not come up")
            time.sleep(0.005)

    def stop(self) -> None:
        """Finish the requests that run (bounded by ``drain_seconds``), close the sockets and end the thread."""
        self.server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(self._drain_seconds + 5)
        self._socket.close()

    def _run(self) -> None:
        self.server.run(sockets=[self._socket])

    def __enter__(self) -> BackgroundServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class RegistryServer(BackgroundServer):
    """The registry's HTTP server, with a table of its own; used as a context manager, or with `start` and `stop`.

    ``secret`` is what it shares with its clients, by default what the environment says (`kvbaton.secret`). Without one
    ``host`` must be a loopback address, unless ``insecure`` allows another (else `ConfigurationError`).

    For ``returning_seconds`` it says to those who look for ranks in vain that they may still return; by default for
    ``ttl``, within which every rank that lives is heard of.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        ttl: float = 10.0,
        *,
        returning_seconds: float | None = None,
        secret: SecretLike | None = None,
        insecure: bool = False,
    ) -> None:
        shared = Secret.of(secret)
        check_exposure("registry", (host,), shared, insecure=insecure)
        settled = time.monotonic() + (ttl if returning_seconds is None else returning_seconds)
        # Generations go on growing when a registry is restarted in the same place.
        self.table = RegistryTable(ttl, generation=time.time_ns() // 1_000_000, settled=settled)
        self._waiting = Waiting()
        super().__init__(make_app(self.table, waiting=self._waiting, secret=shared), host, port)

    def stop(self) -> None:
        """Answer those who wait for a room, then stop."""
        self._waiting.end()
        super().stop()


def _json(status: int, content: Any) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _error(status: int, kind: str, message: str, returning_seconds: float = 0.0) -> Response:
    # Names come from strangers: what cannot be encoded is replaced, never an error of its own.
    printable = message.encode("utf-8", "replace").decode()
    return _json(status, ErrorBody(Problem(kind, printable, returning_seconds)))


def _unknown(instance: str) -> Response:
    return _error(404, "UnknownInstance", f"no rank with instance {instance[:80]!r} is registered: register again")
