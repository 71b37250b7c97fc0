"""Prefill and decode servers that speak SGLang's PD HTTP API, and the processes of a whole deployment."""

from kvbaton.serve.engine import (
    EndEvent,
    Engine,
    EngineInfo,
    GenerateRequest,
    Handle,
    Sampling,
    TokenEvent,
    Tokenizer,
)

__all__ = [
    "EndEvent",
    "Engine",
    "EngineInfo",
    "GenerateRequest",
    "Handle",
    "Sampling",
    "TokenEvent",
    "Tokenizer",
]
