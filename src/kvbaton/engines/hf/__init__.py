"""The Transformers engine: prefill and decode over any causal language model, its caches in real paged pools.

It is the reference in tests, the demo, and the way to try an architecture before an engine supports it.
"""

from kvbaton.engines.hf.base import Engine
from kvbaton.engines.hf.decode import Corrupt, DecodeEngine
from kvbaton.engines.hf.exchange import Exchange, StoreExchange
from kvbaton.engines.hf.forward import Generated, generate_single
from kvbaton.engines.hf.grid import Grid
from kvbaton.engines.hf.loading import load_model, open_engine
from kvbaton.engines.hf.models import ARCHITECTURES, make_model, make_tokenizer, save_model
from kvbaton.engines.hf.pools import Pools
from kvbaton.engines.hf.prefill import PrefillEngine
from kvbaton.engines.hf.requests import RequestHandle

__all__ = [
    "ARCHITECTURES",
    "Corrupt",
    "DecodeEngine",
    "Engine",
    "Exchange",
    "Generated",
    "Grid",
    "Pools",
    "PrefillEngine",
    "RequestHandle",
    "StoreExchange",
    "generate_single",
    "load_model",
    "make_model",
    "make_tokenizer",
    "open_engine",
    "save_model",
]
