"""What stands before a registry's routes where there is a secret: an ASGI middleware."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvbaton.errors import KVBatonError
from kvbaton.registry.base import ErrorBody, Problem
from kvbaton.registry.signing import ANSWER_HEADER, Refusal, Signed, Verifier
from kvbaton.secret import Secret

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health"})
"""What may be asked without a secret; it must give nothing away."""


class BodyDiffers(KVBatonError):
    """A body is not the one that was signed."""


class Guard:
    """Lets only signed requests through, and signs their answers.

    Whoever does not know the secret is refused by its header, before a byte of its body is taken.
    """

    def __init__(self, app: ASGIApp, secret: Secret, clock: Callable[[], float] = time.time) -> None:
        self._app = app
        self._verifier = Verifier(secret, clock)
        self._refused: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        query = scope["query_string"]
        target = (scope.get("raw_path") or scope["path"].encode()) + (b"?" + query if query else b"")
        try:
            signed = self._verifier.check(
                scope["method"], target.decode("latin-1"), Headers(scope=scope).get("authorization")
            )
        except Refusal as refusal:
            self._count(scope, refusal)
            answer = _refused(refusal.kind, str(refusal))
            if refusal.signed is not None:
                answer.headers[ANSWER_HEADER] = refusal.signed.sign_answer(answer.status_code, bytes(answer.body))
            await answer(scope, receive, send)
            return
        await self._app(scope, _checked(receive, signed), _signing(send, signed))

    def _count(self, scope: Scope, refusal: Refusal) -> None:
        self._refused[refusal.kind] += 1
        # The first of each kind is worth a line; strangers could fill the log with the rest.
        level = logging.WARNING if self._refused[refusal.kind] == 1 else logging.DEBUG
        client = scope.get("client") or ("somebody",)
        logger.log(level, "registry: a request of %s was refused: %s", client[0], refusal)


def _checked(receive: Receive, signed: Signed) -> Receive:
    """Receive a body, and raise `BodyDiffers` at its end if it is not the one that was signed."""
    seen = hashlib.sha256()

    async def checked() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            seen.update(message.get("body", b""))
            if not message.get("more_body") and seen.hexdigest() != signed.body_hash:
                raise BodyDiffers("the body is not the one that was signed: it was changed on its way")
        return message

    return checked


def _signing(send: Send, signed: Signed) -> Send:
    """Send an answer when it is whole, with its signature."""
    begun: list[Message] = []
    body = bytearray()

    async def signing(message: Message) -> None:
        if message["type"] == "http.response.start":
            begun.append(message)
            return
        if message["type"] != "http.response.body":
            await send(message)
            return
        body.extend(message.get("body", b""))
        if message.get("more_body"):
            return
        start = begun.pop()
        signature = signed.sign_answer(start["status"], bytes(body))
        headers = [*start.get("headers", ()), (ANSWER_HEADER.lower().encode(), signature.encode())]
        await send({**start, "headers": headers})
        await send({**message, "body": bytes(body), "more_body": False})

    return signing


def _refused(kind: str, message: str) -> Response:
    content = msgspec.json.encode(ErrorBody(Problem(kind, message)))
    return Response(content, 401, {"WWW-Authenticate": "KVBaton"}, media_type="application/json")
