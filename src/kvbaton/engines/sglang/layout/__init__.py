"""From SGLang's `KVArgs` to a `RankLayout`, and from its page and state indices to rows. Imports nothing of SGLang."""

from kvbaton.engines.sglang.layout.describe import describe
from kvbaton.engines.sglang.layout.facts import Facts, facts_of
from kvbaton.engines.sglang.layout.ranks import Ranks
from kvbaton.engines.sglang.layout.rows import Described, StateRows

__all__ = ["Described", "Facts", "Ranks", "StateRows", "describe", "facts_of"]
