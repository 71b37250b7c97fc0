"""The HTTP app of a prefill or a decode server: SGLang's PD API over an `Engine`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from kvbaton.engines.base import Engine, Tokenizer
from kvbaton.errors import KVBatonError
from kvbaton.observe import Metrics
from kvbaton.registry.server import BodyTooLarge, read_body
from kvbaton.serve.bodies import BadRequest, Job, Parser
from kvbaton.serve.generation import Progress, RequestFailed, Service
from kvbaton.serve.observing import add_service, in_trace_of
from kvbaton.serve.refusals import Refusals
from kvbaton.serve.replies import DONE, ChatShape, CompletionShape, GenerateShape, Shape, encode, error_body, event

# The registry's server module says which extra is missing, if one is: import it first.
from fastapi import FastAPI, Request  # isort: skip
from fastapi.responses import Response, StreamingResponse  # isort: skip
from starlette.exceptions import HTTPException  # isort: skip

MAX_BODY = 16 << 20


class ClientGone(KVBatonError):
    """The client closed its connection before the answer was ready."""


def make_app(
    engine: Engine,
    tokenizer: Tokenizer | None,
    *,
    extra_info: dict[str, Any] | None = None,
    max_body: int = MAX_BODY,
    max_requests: int = 1024,
    request_seconds: float = 1800.0,
    refusals: Refusals | None = None,
    metrics: Metrics | None = None,
) -> FastAPI:
    """Make the app; its `Service` is ``app.state.service``.

    ``extra_info`` is added to ``/server_info``. ``refusals`` is the list that a prefill server keeps beside its
    registry. ``metrics`` are shown at ``/metrics``.
    """
    app = FastAPI(title="kvbaton", docs_url=None, redoc_url=None, openapi_url=None)
    service = Service(engine, tokenizer, max_requests, request_seconds, refusals)
    info = engine.info()
    parser = Parser(info, tokenizer)
    app.state.service = service

    async def answer(
        request: Request, parse: Callable[[bytes, str], Job], shape: Callable[[str, Job], Shape], prefix: str
    ) -> Response:
        request_id = prefix + secrets.token_hex(12)
        streaming = False
        try:
            body = await read_body(request, max_body)
            # Tokenizing a long text takes a while: other requests go on meanwhile.
            job = await asyncio.to_thread(parse, body, request_id)
            streaming = job.stream
            reply = shape(request_id, job)
            # The engine opens its rooms in the trace of the request.
            with in_trace_of(request.headers):
                return await (
                    _streamed(request, service, job, reply) if streaming else _whole(request, service, job, reply)
                )
        except BadRequest as error:
            return _error(400, str(error), streaming)
        except BodyTooLarge as error:
            return _error(413, str(error), streaming)
        except TimeoutError as error:
            return _error(408, str(error), streaming)
        except RequestFailed as error:
            return _error(error.status, str(error), streaming)
        except ClientGone:
            return Response(status_code=499)

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return _error(500, f"{type(error).__name__}: {error}")

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        return await answer(request, parser.generate, lambda _, job: GenerateShape(job.batch), "")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(
            request,
            parser.completion,
            lambda name, job: CompletionShape(name, info.served_model_name, job.include_usage),
            "cmpl-",
        )

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(
            request,
            parser.chat,
            lambda name, job: ChatShape(name, info.served_model_name, job.include_usage),
            "chatcmpl-",
        )

    @app.get("/v1/models")
    async def models() -> Response:
        model = {
            "id": info.served_model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "kvbaton",
            "root": info.served_model_name,
            "max_model_len": info.context_length,
        }
        return _json({"object": "list", "data": [model]})

    @app.get("/health")
    @app.get("/health_generate")
    async def health() -> Response:
        reason = service.not_ready()
        return _error(503, reason) if reason else Response(status_code=200)

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Response:
        return _json({**_server_info(service), **(extra_info or {})})

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Response:
        return _json(
            {
                "model_path": info.model_path,
                "tokenizer_path": info.model_path,
                "served_model_name": info.served_model_name,
                "is_generation": True,
                "weight_version": "default",
                "max_context_length": info.context_length,
            }
        )

    if metrics is not None:
        add_service(metrics, service)

        @app.get("/metrics")
        async def show_metrics() -> Response:
            # It asks every manager for its rooms.
            text = await asyncio.to_thread(metrics.text)
            return Response(text, media_type=metrics.content_type)

    return app


def _server_info(service: Service) -> dict[str, Any]:
    info = service.engine.info()
    told = {
        "served_model_name": info.served_model_name,
        "disaggregation_mode": info.role,
        "disaggregation_transfer_backend": "kvbaton",
        "context_length": info.context_length,
        "max_total_num_tokens": info.pool_tokens,
        "max_running_requests": info.max_running_requests,
        "page_size": info.page_size,
        "tp_size": 1,
        "dp_size": 1,
        "running_requests": service.running,
        "requests_served": service.served,
    }
    # The router loads a tokenizer from this path, and would ask a model hub for one that is no folder here.
    if os.path.isdir(info.model_path):
        told["model_path"] = told["tokenizer_path"] = info.model_path
    return told


async def _whole(request: Request, service: Service, job: Job, shape: Shape) -> Response:
    async def run() -> list[Progress]:
        async with contextlib.aclosing(service.run(job)) as steps:
            latest = {item.index: item async for item in steps}
        return [latest[index] for index in range(len(job.requests))]

    return _json(shape.whole(await _unless_gone(request, run())))


async def _streamed(request: Request, service: Service, job: Job, shape: Shape) -> Response:
    """Stream a job. The head waits for the first step, so that a hand-over that fails still has a status of its own."""
    steps = service.run(job)
    try:
        first = await _unless_gone(request, anext(steps))
    except BaseException:
        await steps.aclose()
        raise
    return _EventStream(first, steps, shape)


class _EventStream(StreamingResponse):
    """Server-sent events of one job; the job is over when the response is, however that ends."""

    def __init__(self, first: Progress, steps: AsyncGenerator[Progress, None], shape: Shape) -> None:
        self._steps = steps
        self._chunks = self._events(first, shape)
        super().__init__(self._chunks, media_type="text/event-stream")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Neither waits for anything, so both also run while this task is being cancelled.
            await self._chunks.aclose()
            await self._steps.aclose()

    async def _events(self, first: Progress, shape: Shape) -> AsyncGenerator[bytes, None]:
        latest = {first.index: first}
        try:
            for chunk in shape.step(first):
                yield event(chunk)
            async for item in self._steps:
                latest[item.index] = item
                for chunk in shape.step(item):
                    yield event(chunk)
            for chunk in shape.last(list(latest.values())):
                yield event(chunk)
        except RequestFailed as error:
            yield event(error_body(str(error), error.status))
        yield DONE


async def _unless_gone(request: Request, work: Any) -> Any:
    """Wait for ``work``, but cancel it and raise `ClientGone` when the client closes its connection."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("the client closed its connection")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _json(content: Any, status: int = 200) -> Response:
    return Response(encode(content), status, media_type="application/json")


def _error(status: int, message: str, streaming: bool = False) -> Response:
    body = encode(error_body(message, status))
    if not streaming:
        return Response(body, status, media_type="application/json")

    async def one() -> AsyncIterator[bytes]:
        yield body

    # sglang-router 0.3.2 wraps an error of a stream into an event, and cuts that at our Content-Length: send none.
    return StreamingResponse(one(), status, media_type="application/json")
