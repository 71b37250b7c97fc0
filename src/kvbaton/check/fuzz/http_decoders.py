"""Decoders of what comes over HTTP and from files: bodies for registry and servers, descriptions of models."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.check.fuzz import samples
from kvbaton.check.fuzz.target import Decoder, pure
from kvbaton.engines.base import EngineInfo
from kvbaton.errors import AuthenticationError, ConfigurationError, LayoutError, RegistryError
from kvbaton.layout import Coords, RankLayout
from kvbaton.registry import FoundRooms, HttpRegistry, Registration, RegistryRefused, RegistryTable, Topology
from kvbaton.registry.server import MAX_BODY, RoomsNews, RoomsQuestion
from kvbaton.registry.signing import Signer, Verifier
from kvbaton.secret import Secret
from kvbaton.serve.bodies import BadRequest, Parser
from kvbaton.topology import lay_out, read_topology
from kvbaton.topology.parse import check_values
from kvbaton.topology.presets import PRESETS

_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, RegistryRefused)
"""What the registry answers with a 4xx."""
TOKENS = 4096
NOW = 1.7e9
_SECRET = Secret([bytes(range(32))])


def decoders() -> list[Decoder]:
    """All of them."""
    pack = msgspec.json.encode
    ranks = (samples.registration(), msgspec.structs.replace(samples.registration(), layout=samples.quantised()))
    news, question = RoomsNews([1, 2, 2**63 - 1], [3]), RoomsQuestion([1, 2], "default", 0.5, "decode-1")
    room = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
    sampling = {
        "max_new_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 4,
        "stop": ["x"],
        "stop_token_ids": [9],
    }
    generate = {**room, "input_ids": [[5, 6], [7]], "sampling_params": sampling, "rid": ["a", "b"], "stream": True}
    chat = {**room, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 5}
    completion = {**room, "prompt": ["ab", "c"], "max_tokens": 5, "seed": 7, "stop": "x", "logit_bias": {}}
    topology = {
        "model": {"layers": 4, "components": {"kv": {"heads": 4, "head_dim": 8}}},
        "tp": 2,
        "pp": 2,
        "cp": {"size": 2, "unit": 16},
        "page_size": 16,
        "components": {"kv": {"dtype": "float8_e4m3fn", "scale": {"axes": ["token", "head"]}}},
        "transport": ["tcp"],
    }
    configs = tuple(json.dumps(config).encode() for config in PRESETS.values())
    bad = (BadRequest,)
    return [
        Decoder("signature of a request", _Signed, (_signature().encode(),), (AuthenticationError,), weight=4),
        Decoder("registration", _Register, tuple(map(pack, ranks)), _JSON, "json", weight=8),
        Decoder("news of rooms", _News, (pack(news),), _JSON, "json", weight=5),
        Decoder("question for rooms", _Question, (pack(question),), _JSON, "json", weight=5),
        Decoder("topology answer", pure(_topology), (pack(Topology(7, ranks)),), (RegistryError,), "json", weight=4),
        Decoder("rooms answer", pure(_found), (pack(FoundRooms(2, {1: 0, 5: 1})),), (RegistryError,), "json", weight=4),
        Decoder("body of /generate", _body("generate"), (pack(generate),), bad, "json", weight=4),
        Decoder("body of /v1/completions", _body("completion"), (pack(completion),), bad, "json", weight=4),
        Decoder("body of /v1/chat/completions", _body("chat"), (pack(chat),), bad, "json", weight=4),
        Decoder(
            "topology file",
            pure(_description),
            (pack(topology),),
            (ConfigurationError, LayoutError),
            "json",
            weight=0.05,
            patience=15.0,
        ),
        Decoder("config.json", pure(_config), configs, (ConfigurationError, LayoutError), "json", weight=0.4),
    ]


def _signature() -> str:
    return Signer(_SECRET, lambda: NOW).sign("GET", "/health", b"").header


class _Signed:
    """A registry that knows who signs."""

    def __init__(self) -> None:
        self._verifier = Verifier(_SECRET, lambda: NOW)

    def __call__(self, data: bytes) -> None:
        header = data.decode("latin-1")
        signed = self._verifier.check("GET", "/health", header)
        if header.rpartition(":")[2] != signed.mac.hex():
            raise AssertionError("a request is believed that nobody signed")


class _Register:
    """A registry that hears registrations; strangers' ones too."""

    def __init__(self) -> None:
        self._table = RegistryTable(ttl=10.0)
        self._times = itertools.count()

    def __call__(self, data: bytes) -> None:
        if len(data) > MAX_BODY:
            raise RegistryRefused("too long")
        registration = msgspec.json.decode(data, type=Registration)
        self._table.register(registration, next(self._times) * 0.5)
        msgspec.json.encode(registration)


class _News:
    """A registry with two replicas that hears of rooms."""

    def __init__(self) -> None:
        self._table = RegistryTable(ttl=1e9)
        for rank in range(2):
            layout = RankLayout((), Coords(dp=(rank, 2)))
            self._table.register(Registration(f"i{rank}", "tcp://a:1", layout, "m"), 0.0)

    def __call__(self, data: bytes) -> None:
        news = msgspec.json.decode(data, type=RoomsNews)
        held = self._table.announce_rooms("i0", news.opened, news.closed, 0.0)
        msgspec.json.encode({"held": held})


class _Question(_News):
    """The same, asked for rooms."""

    def __call__(self, data: bytes) -> None:
        question = msgspec.json.decode(data, type=RoomsQuestion)
        msgspec.json.encode(self._table.find_rooms(question.deployment, question.rooms, 0.0))


_CLIENT = HttpRegistry("http://127.0.0.1:1")


def _topology(data: bytes) -> None:
    _CLIENT.decoded("/v1/topology", data, Topology, "a topology")


def _found(data: bytes) -> None:
    _CLIENT.decoded("/v1/rooms/find", data, FoundRooms, "about rooms")


class _Tokenizer:
    """A token for each character."""

    eos_token_ids = (0,)

    def encode(self, text: str) -> Sequence[int]:
        return [1 + ord(letter) % 900 for letter in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Sequence[int]:
        return self.encode("".join(message["content"] for message in messages))


def _body(kind: str) -> Any:
    parser = Parser(EngineInfo("decode", "m", "fuzz", context_length=64, vocab_size=1000), _Tokenizer())
    parse = getattr(parser, kind)
    return lambda: lambda data: parse(data, "request-1")


def _description(data: bytes) -> None:
    lay_out(read_topology(_json(data)), TOKENS)


def _config(data: bytes) -> None:
    # A file with a config of Hugging Face: the description of the model and nothing else.
    from kvbaton.topology.huggingface import read_config

    value = _json(data)
    if not isinstance(value, dict):
        raise ConfigurationError("no JSON object")
    read_config(value, "config.json")


def _json(data: bytes) -> object:
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"no JSON: {error}") from None
    check_values(value, "file")
    return value
