"""What a server needs of an engine: requests go in, tokens come out of a handle.

The servers own everything textual (templates, stop strings, the shapes of replies); an engine sees token ids only.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Role = Literal["prefill", "decode"]
Finish = Literal["stop", "length", "abort", "error"]

MAX_ROOM = (1 << 63) - 1


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 cut nothing off."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt. ``source`` is the url of the registry of the prefill side that holds ``room`` (decode only)."""

    request_id: str
    input_ids: tuple[int, ...]
    room: int
    sampling: Sampling = field(default_factory=Sampling)
    source: str = ""


@dataclass(frozen=True)
class TokenEvent:
    """New tokens of a request, in order."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class EndEvent:
    """The last event of a request: exactly one, also after a cancel or a failure.

    ``finish`` "stop" comes with the token that ended the text in ``matched`` (it is also the last of the token
    events), and "error" with the reason in ``error``. A prefill engine ends with "length", once the transfer of the
    room is over. ``retry`` says of an error that the hand-over failed, not the request: another try may end well.
    ``metrics`` holds figures of the transfer (bytes by component, milliseconds), as plain JSON values.
    """

    finish: Finish
    matched: int | None = None
    error: str = ""
    retry: bool = False
    metrics: Mapping[str, Any] = field(default_factory=dict)


Event = TokenEvent | EndEvent


class Handle(Protocol):
    """A request that was submitted."""

    @property
    def events(self) -> queue.SimpleQueue[Event]:
        """Where the engine's thread puts the events."""

    def cancel(self) -> None:
        """Stop soon and give the pages back; an `EndEvent` still comes. No effect on a request that has ended."""


@dataclass(frozen=True)
class EngineInfo:
    """What an engine says about itself."""

    role: Role
    model_path: str
    served_model_name: str
    context_length: int
    vocab_size: int
    max_running_requests: int = 0
    pool_tokens: int = 0
    page_size: int = 1


@runtime_checkable
class Engine(Protocol):
    """An engine of one role. All methods may be called from any thread and return at once, but for `close`."""

    def submit(self, request: GenerateRequest) -> Handle:
        """Queue a request. Raises `RoomError` if its room is in use, `KVBatonError` if it can never be served."""

    def info(self) -> EngineInfo:
        """Return what it serves."""

    def healthy(self) -> str:
        """Return an empty text, or the reason why it cannot serve."""

    def close(self) -> None:
        """End what runs and give everything back."""


class Tokenizer(Protocol):
    """The part of a Transformers tokenizer that the servers use."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Sequence[int]:
        """Token ids of a conversation, with the prompt for the assistant's turn."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
