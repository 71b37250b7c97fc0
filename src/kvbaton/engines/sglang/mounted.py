"""An ASGI app below a path of an aiohttp server: kvbaton's registry on the port of SGLang's bootstrap server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from aiohttp import web

Message = MutableMapping[str, Any]
App = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


def mount(server: web.Application, prefix: str, app: App) -> None:
    """Serve ``app`` for every path below ``prefix``; it sees the rest. Answers are sent when they are whole."""

    async def handle(request: web.Request) -> web.Response:
        return await _serve(app, request, len(prefix))

    server.router.add_route("*", prefix + "/{path:.*}", handle)


async def _serve(app: App, request: web.Request, prefix: int) -> web.Response:
    path, _, query = request.raw_path.partition("?")
    peer = request.transport.get_extra_info("peername") if request.transport else None
    scope: MutableMapping[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path[prefix:],
        "raw_path": path[prefix:].encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.raw_headers],
        "client": tuple(peer[:2]) if peer else None,
        "server": None,
    }
    answer: dict[str, Any] = {"status": 500, "headers": [], "body": bytearray()}

    async def receive() -> Message:
        chunk = await request.content.readany()
        return {"type": "http.request", "body": chunk, "more_body": not request.content.at_eof()}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer["status"], answer["headers"] = message["status"], message.get("headers", [])
        elif message["type"] == "http.response.body":
            answer["body"] += message.get("body", b"")

    await app(scope, receive, send)
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in answer["headers"]]
    body = bytes(answer["body"])
    return web.Response(status=answer["status"], headers=headers, body=body)
