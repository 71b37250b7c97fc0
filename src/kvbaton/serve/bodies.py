"""Bodies of requests, in SGLang's and OpenAI's forms, and what they ask the engine for.

A field that would change the answer and that the engine cannot honour is refused; one that cannot is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.engines.base import MAX_ROOM, EngineInfo, GenerateRequest, Sampling, Tokenizer
from kvbaton.errors import KVBatonError

MAX_BATCH = 256
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}")
_DEFAULT_GENERATE, _DEFAULT_COMPLETION, _DEFAULT_CHAT = 128, 16, 1024


class BadRequest(KVBatonError):
    """The body cannot be served as it is; the message names the field."""


class SamplingParams(msgspec.Struct):
    """``sampling_params`` of SGLang's ``/generate``."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    seed: int | None = None
    n: int | None = None
    min_p: float | None = None
    min_new_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None
    structural_tag: str | None = None
    logit_bias: dict[str, float] | None = None


class _Room(msgspec.Struct):
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None


class GenerateBody(_Room):
    """SGLang's ``/generate``."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: SamplingParams | None = None
    stream: bool | None = False
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    return_hidden_states: bool | list[bool] | None = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    input_embeds: Any = None
    lora_path: Any = None


class StreamOptions(msgspec.Struct):
    """``stream_options`` of OpenAI."""

    include_usage: bool | None = False


class _OpenAIBody(_Room):
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None
    response_format: dict[str, Any] | None = None
    return_hidden_states: bool | None = None
    lora_path: Any = None


class CompletionBody(_OpenAIBody):
    """OpenAI's ``/v1/completions``."""

    prompt: str | list[Any] = ""
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None


class Message(msgspec.Struct):
    """One message of a conversation; ``content`` may be a list of text parts."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Any = None


class ChatBody(_OpenAIBody):
    """OpenAI's ``/v1/chat/completions``."""

    messages: list[Message] = []
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Job:
    """What one body asks for: requests for the engine, and what to do with their tokens."""

    requests: tuple[GenerateRequest, ...]
    batch: bool
    stream: bool
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    include_usage: bool = False


class Parser:
    """Reads bodies for one engine. Every method raises `BadRequest`."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        self._info = info
        self._tokenizer = tokenizer

    def generate(self, raw: bytes, request_id: str) -> Job:
        """Read a body of ``/generate``."""
        body = _decode(raw, GenerateBody)
        _refuse_unsupported(body, "return_logprob", "return_hidden_states", "image_data", "audio_data", "video_data")
        _refuse_unsupported(body, "input_embeds", "lora_path")
        params = body.sampling_params or SamplingParams()
        if (body.text is None) == (body.input_ids is None):
            raise BadRequest("pass either text or input_ids")
        given: Any = body.text if body.text is not None else body.input_ids
        prompts, batch = self._prompts("text" if body.text is not None else "input_ids", given)
        seed = params.sampling_seed if params.sampling_seed is not None else params.seed
        job = self._job(body, params, prompts, params.max_new_tokens, _DEFAULT_GENERATE, seed, request_id)
        names = body.rid if isinstance(body.rid, list) else None
        if names is not None and len(names) != len(job.requests):
            raise BadRequest(f"rid has {len(names)} entries for {len(job.requests)} prompts")
        if body.rid:
            texts = names or ([body.rid] if len(prompts) == 1 else [f"{body.rid}-{n}" for n in range(len(prompts))])
            job = _renamed(job, [str(text)[:256] for text in texts])
        return _shaped(job, batch or len(job.requests) > 1, bool(body.stream))

    def completion(self, raw: bytes, request_id: str) -> Job:
        """Read a body of ``/v1/completions``."""
        body = _decode(raw, CompletionBody)
        _refuse_unsupported(body, "logprobs", "echo", "suffix", "return_hidden_states", "lora_path", "response_format")
        if body.best_of not in (None, 1):
            raise BadRequest(f"best_of is {body.best_of}: only 1 is supported")
        prompts, _ = self._prompts("prompt", body.prompt)
        return self._openai(body, prompts, body.max_tokens, _DEFAULT_COMPLETION, request_id)

    def chat(self, raw: bytes, request_id: str) -> Job:
        """Read a body of ``/v1/chat/completions``."""
        body = _decode(raw, ChatBody)
        _refuse_unsupported(body, "logprobs", "top_logprobs", "tools", "continue_final_message")
        _refuse_unsupported(body, "return_hidden_states", "lora_path")
        if body.response_format and body.response_format.get("type", "text") != "text":
            raise BadRequest("response_format: only text is supported")
        if not body.messages:
            raise BadRequest("messages is empty")
        if self._tokenizer is None:
            raise BadRequest("this model has no tokenizer: ask /generate with input_ids")
        messages = [{"role": each.role, "content": _plain_text(each, at)} for at, each in enumerate(body.messages)]
        try:
            token_ids = self._tokenizer.chat(messages, **(body.chat_template_kwargs or {}))
        except BadRequest:
            raise
        except Exception as error:  # A template is a program of the model's: it may fail in any way.
            raise BadRequest(f"messages do not fit the model's chat template: {error}") from error
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        return self._openai(body, [tuple(token_ids)], limit, _DEFAULT_CHAT, request_id)

    def _openai(
        self, body: _OpenAIBody, prompts: list[tuple[int, ...]], limit: int | None, default: int, request_id: str
    ) -> Job:
        params = SamplingParams(
            **{name: getattr(body, name) for name in SamplingParams.__struct_fields__ if hasattr(body, name)}
        )
        params.min_new_tokens = body.min_tokens
        job = self._job(body, params, prompts, limit, default, body.seed, request_id)
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return _shaped(job, True, bool(body.stream), usage)

    def _prompts(self, name: str, given: Any) -> tuple[list[tuple[int, ...]], bool]:
        """Token ids of a prompt, or of each of a batch, given as text or as ids."""
        many = isinstance(given, list) and not all(type(each) is int for each in given)
        entries = given if many else [given]
        if not entries or len(entries) > MAX_BATCH:
            raise BadRequest(f"{name} has {len(entries)} prompts, not from 1 to {MAX_BATCH}")
        return [self._token_ids(name, entry) for entry in entries], many

    def _token_ids(self, name: str, prompt: Any) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise BadRequest(f"{name} is text, but this model has no tokenizer: ask /generate with input_ids")
            return tuple(self._tokenizer.encode(prompt))
        if not isinstance(prompt, list) or not all(type(each) is int for each in prompt):
            raise BadRequest(f"{name} has an entry that is neither text nor a list of token ids")
        return tuple(prompt)

    def _job(
        self,
        body: _Room,
        params: SamplingParams,
        prompts: list[tuple[int, ...]],
        limit: int | None,
        default: int,
        seed: int | None,
        request_id: str,
    ) -> Job:
        _refuse_unsupported(params, "min_p", "min_new_tokens", "frequency_penalty", "presence_penalty")
        _refuse_unsupported(params, "regex", "ebnf", "json_schema", "structural_tag", "logit_bias")
        if params.repetition_penalty not in (None, 1):
            raise BadRequest("repetition_penalty is not supported")
        copies = 1 if params.n is None else params.n
        if not 1 <= copies * len(prompts) <= MAX_BATCH or copies < 1:
            raise BadRequest(f"n is {copies} for {len(prompts)} prompts: not from 1 to {MAX_BATCH} in all")
        stops = _stops(params.stop)
        count = copies * len(prompts)
        rooms = _rooms(body, count)
        sources = _sources(body, count) if self._info.role == "decode" else [""] * count
        requests = []
        for index in range(count):
            prompt = prompts[index // copies]
            own_seed = None if seed is None else seed + index % copies
            sampling = self._sampling(params, prompt, limit, default, own_seed)
            name = request_id if count == 1 else f"{request_id}-{index}"
            requests.append(GenerateRequest(name, prompt, rooms[index], sampling, sources[index]))
        return Job(tuple(requests), count > 1, False, stops, bool(params.no_stop_trim))

    def _sampling(
        self, params: SamplingParams, prompt: Sequence[int], limit: int | None, default: int, seed: int | None
    ) -> Sampling:
        info = self._info
        room_left = info.context_length - len(prompt)
        if not prompt:
            raise BadRequest("the prompt has no tokens")
        if min(prompt) < 0 or max(prompt) >= info.vocab_size:
            bad = min(prompt) if min(prompt) < 0 else max(prompt)
            raise BadRequest(f"token id {bad} is not from 0 to {info.vocab_size - 1}")
        if room_left < 1:
            raise BadRequest(f"the prompt has {len(prompt)} tokens, and the model takes {info.context_length} in all")
        wanted = min(default, room_left) if limit is None else limit
        if not 1 <= wanted <= room_left:
            raise BadRequest(
                f"max_new_tokens is {wanted}: not from 1 to {room_left} "
                f"(the prompt has {len(prompt)} tokens, and the model takes {info.context_length} in all)"
            )
        temperature = 1.0 if params.temperature is None else params.temperature
        top_p = 1.0 if params.top_p is None else params.top_p
        top_k = -1 if params.top_k is None else params.top_k
        if not 0 <= temperature <= 1000:
            raise BadRequest(f"temperature is {temperature}: not from 0 to 1000")
        if not 0 < top_p <= 1:
            raise BadRequest(f"top_p is {top_p}: not over 0 and up to 1")
        if top_k < -1:
            raise BadRequest(f"top_k is {top_k}: pass -1 for all, or at least 1")
        if seed is not None and not 0 <= seed < 1 << 63:
            raise BadRequest(f"seed is {seed}: not from 0 to 2**63 - 1")
        stop_ids = tuple(params.stop_token_ids or ())
        if len(stop_ids) > MAX_STOPS or any(not 0 <= each < info.vocab_size for each in stop_ids):
            raise BadRequest(f"stop_token_ids: at most {MAX_STOPS} token ids, each from 0 to {info.vocab_size - 1}")
        # Beyond the vocabulary, top_k cuts nothing off; SGLang's clients pass 2**30 for "all".
        kept = 0 if top_k <= 0 or top_k >= info.vocab_size else top_k
        return Sampling(wanted, temperature, top_p, kept, stop_ids, bool(params.ignore_eos), seed)


def _decode(raw: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body cannot be understood: {error or 'nested too deeply'}") from error


def _refuse_unsupported(body: Any, *names: str) -> None:
    for name in names:
        value = getattr(body, name)
        asked = any(value) if isinstance(value, list) and name != "tools" else value not in (None, False, 0, "", {}, [])
        if asked:
            raise BadRequest(f"{name} is not supported by this engine: leave it out")


def _plain_text(message: Message, at: int) -> str:
    if message.tool_calls:
        raise BadRequest(f"messages[{at}]: tool_calls is not supported")
    if message.content is None:
        raise BadRequest(f"messages[{at}] has no content")
    if isinstance(message.content, str):
        return message.content
    parts = [part.get("text") if part.get("type") == "text" else None for part in message.content]
    if not all(isinstance(part, str) for part in parts):
        raise BadRequest(f"messages[{at}]: only parts of type text are supported")
    return "".join(part for part in parts if part)


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise BadRequest(f"stop: at most {MAX_STOPS} texts of at most {MAX_STOP_LENGTH} characters")
    return tuple(stop for stop in stops if stop)


def _rooms(body: _Room, count: int) -> list[int]:
    given = body.bootstrap_room
    if given is None:
        raise BadRequest("bootstrap_room is missing: this is one side of a prefill/decode pair; ask its router")
    rooms = list(given) if isinstance(given, list) else [given + index for index in range(count)]
    if len(rooms) != count:
        raise BadRequest(f"bootstrap_room has {len(rooms)} entries for {count} requests")
    for room in rooms:
        if not 0 <= room <= MAX_ROOM:
            raise BadRequest(f"bootstrap_room {room} is not from 0 to 2**63 - 1")
    if len(set(rooms)) != count:
        raise BadRequest("bootstrap_room has the same room twice")
    return rooms


def _sources(body: _Room, count: int) -> list[str]:
    hosts, ports = body.bootstrap_host, body.bootstrap_port
    if hosts is None or ports is None:
        raise BadRequest(
            "bootstrap_host or bootstrap_port is missing: start the router with --prefill URL BOOTSTRAP_PORT"
        )
    host_list = hosts if isinstance(hosts, list) else [hosts] * count
    port_list = ports if isinstance(ports, list) else [ports] * count
    if len(host_list) != count or len(port_list) != count:
        raise BadRequest(
            f"bootstrap_host has {len(host_list)} and bootstrap_port {len(port_list)} entries for {count} requests"
        )
    return [_source(host, port) for host, port in zip(host_list, port_list, strict=True)]


def _source(host: str, port: int | None) -> str:
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not _HOST.fullmatch(bare) or port is None or not 1 <= port <= 65535:
        raise BadRequest(f"bootstrap_host {host[:80]!r} with bootstrap_port {port} is no address")
    return f"http://[{bare}]:{port}" if ":" in bare else f"http://{bare}:{port}"


def _renamed(job: Job, names: Sequence[str]) -> Job:
    if len(names) != len(job.requests):
        names = [f"{names[0]}-{index}" for index in range(len(job.requests))]
    pairs = zip(job.requests, names, strict=True)
    renamed = tuple(GenerateRequest(name, r.input_ids, r.room, r.sampling, r.source) for r, name in pairs)
    return Job(renamed, job.batch, job.stream, job.stops, job.keep_stop, job.include_usage)


def _shaped(job: Job, batch: bool, stream: bool, include_usage: bool = False) -> Job:
    return Job(job.requests, batch, stream, job.stops, job.keep_stop, include_usage)
