"""The shapes of replies: SGLang's ``/generate``, OpenAI's completions and chats, whole and streamed, and errors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kvbaton.serve.generation import Progress

DONE = b"data: [DONE]\n\n"

_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 409: "ConflictError", 413: "BadRequestError"}


class Shape(Protocol):
    """One API's way to tell of progress."""

    def whole(self, items: Sequence[Progress]) -> Any:
        """Return the reply when all is done."""

    def step(self, item: Progress) -> list[Any]:
        """Return the streamed chunks for one step."""

    def last(self, items: Sequence[Progress]) -> list[Any]:
        """Return the streamed chunks after all is done."""


def encode(content: Any) -> bytes:
    """Return JSON, whatever the text: halves of surrogate pairs are replaced."""
    try:
        return msgspec.json.encode(content)
    except (UnicodeEncodeError, msgspec.EncodeError):
        return msgspec.json.encode(_printable(content))


def event(content: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + encode(content) + b"\n\n"


def error_body(message: str, status: int) -> dict[str, Any]:
    """Return an error in the form that SGLang and OpenAI share."""
    kind = _ERROR_TYPES.get(status, "ServiceUnavailableError" if status == 503 else "InternalServerError")
    fields = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return {"error": fields, **fields}


class GenerateShape:
    """SGLang's ``/generate``: streamed chunks hold all the text so far."""

    def __init__(self, batch: bool) -> None:
        self._batch = batch

    def whole(self, items: Sequence[Progress]) -> Any:
        """Return one reply, or a list for a batch."""
        replies = [self._reply(item) for item in items]
        return replies if self._batch else replies[0]

    def step(self, item: Progress) -> list[Any]:
        """Return the reply so far, with its index in a batch."""
        reply = self._reply(item)
        return [{**reply, "index": item.index} if self._batch else reply]

    def last(self, items: Sequence[Progress]) -> list[Any]:
        """Return nothing: the last step was the last."""
        return []

    @staticmethod
    def _reply(item: Progress) -> dict[str, Any]:
        meta = {
            "id": item.request.request_id,
            "finish_reason": item.finish,
            "prompt_tokens": len(item.request.input_ids),
            "completion_tokens": len(item.token_ids),
            "cached_tokens": 0,
            "weight_version": "default",
            "e2e_latency": time.monotonic() - item.started,
        }
        if item.metrics:
            meta["kvbaton"] = item.metrics
        return {"text": item.text, "output_ids": item.token_ids, "meta_info": meta}


class _OpenAIShape:
    object_whole = ""
    object_chunk = ""

    def __init__(self, request_id: str, model: str, include_usage: bool) -> None:
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._include_usage = include_usage

    def whole(self, items: Sequence[Progress]) -> Any:
        """Return the reply with a choice for each request, and the usage of all."""
        choices = [self._choice(item) for item in items]
        return {**self._head, "object": self.object_whole, "choices": choices, "usage": _usage(items)}

    def step(self, item: Progress) -> list[Any]:
        """Return a chunk with the new text, if there is any or the request has ended."""
        return [self._chunk([choice]) for choice in self._deltas(item)]

    def last(self, items: Sequence[Progress]) -> list[Any]:
        """Return the usage, if it was asked for."""
        return [{**self._chunk([]), "usage": _usage(items)}] if self._include_usage else []

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        return {**self._head, "object": self.object_chunk, "choices": choices}

    def _choice(self, item: Progress) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(self, item: Progress) -> list[dict[str, Any]]:
        raise NotImplementedError


class CompletionShape(_OpenAIShape):
    """OpenAI's ``/v1/completions``."""

    object_whole = object_chunk = "text_completion"

    def _choice(self, item: Progress) -> dict[str, Any]:
        return {"index": item.index, "text": item.text, "logprobs": None, **_finish(item)}

    def _deltas(self, item: Progress) -> list[dict[str, Any]]:
        if not item.new_text and item.finish is None:
            return []
        return [{"index": item.index, "text": item.new_text, "logprobs": None, **_finish(item)}]


class ChatShape(_OpenAIShape):
    """OpenAI's ``/v1/chat/completions``."""

    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def __init__(self, request_id: str, model: str, include_usage: bool) -> None:
        super().__init__(request_id, model, include_usage)
        self._begun: set[int] = set()

    def _choice(self, item: Progress) -> dict[str, Any]:
        message = {"role": "assistant", "content": item.text, "tool_calls": None}
        return {"index": item.index, "message": message, "logprobs": None, **_finish(item)}

    def _deltas(self, item: Progress) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        unfinished = {"finish_reason": None, "matched_stop": None}
        if item.index not in self._begun:
            self._begun.add(item.index)
            deltas.append({"index": item.index, "delta": {"role": "assistant", "content": ""}, **unfinished})
        if item.new_text:
            deltas.append({"index": item.index, "delta": {"content": item.new_text}, **unfinished})
        if item.finish is not None:
            deltas.append({"index": item.index, "delta": {}, **_finish(item)})
        return [{"logprobs": None, **delta} for delta in deltas]


def _finish(item: Progress) -> dict[str, Any]:
    finish = item.finish or {}
    return {"finish_reason": finish.get("type"), "matched_stop": finish.get("matched")}


def _usage(items: Sequence[Progress]) -> dict[str, Any]:
    # Choices of one prompt (n > 1) share it; it counts once.
    prompts = {id(item.request.input_ids): len(item.request.input_ids) for item in items}
    prompt = sum(prompts.values())
    completion = sum(len(item.token_ids) for item in items)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _printable(content: Any) -> Any:
    if isinstance(content, str):
        return content.encode("utf-8", "replace").decode()
    if isinstance(content, dict):
        return {_printable(key): _printable(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_printable(each) for each in content]
    return content
