"""Which faults can make a room end in which way: an end that no fault of a world explains is a violation."""

from __future__ import annotations

from kvbaton.check.faults.reasons import kind_of
from kvbaton.check.faults.scenario import HARMLESS, KINDS

MESSAGES = frozenset(
    {
        "kill",
        "close_manager",
        "stop",
        "clock_jump",
        "version_skew",
        "cut",
        "cut_to_prefill",
        "cut_to_decode",
        "slow",
        "control_closed",
        "corrupt",
        "reorder",
        "slow_background",
    }
)
"""Faults that keep messages from being said, heard or understood in time."""

PROMPT = frozenset(
    {
        "duplicate",
        "stranger",
        "double_open",
        "hostile_rows",
        "write_error",
        "piece_lost",
        "flip",
        "admit_refused",
        "abort_prefill",
        "abort_decode",
        "abort_twice",
        "abort_after_success",
        "close_early",
        "lost_chunk",
        "wrong_tokens",
        "no_sender",
    }
)
"""Faults that hinder no message: where there are only these, every rank of a request hears of its failure at once."""

_LOSES = MESSAGES | {"data_closed", "completion_lost", "slow_write", "slow_fence"}
"""Faults after which a connection may be gone: also because a peer could not confirm in time that it is quiet."""

_CAUSES = {
    "peer lost": _LOSES,
    "write failed": _LOSES | {"write_error", "piece_lost"},
    "aborted: by the engine": frozenset({"abort_prefill", "abort_decode", "abort_twice"}),
    "aborted: closed early": frozenset({"close_early"}),
    "aborted: the manager closed": frozenset({"close_manager"}),
    "digests differ": frozenset({"flip"}),
    "deadline: no progress": _LOSES | {"never_finish", "no_sender"},
    "deadline: handshake": MESSAGES - {"version_skew", "control_closed"} | {"registry_down"},
    # Also where the room failed, and was closed at its replica, before a decode rank looked for it.
    "deadline: no replica opened it": frozenset(KINDS) - frozenset(HARMLESS) - {"registry_restart"} | {"stop"},
    # Also where a late Offer of a room that had failed joined the next one of its number.
    "engine: not all was sent": MESSAGES | {"lost_chunk", "wrong_tokens"},
    "refused: rows": frozenset({"hostile_rows"}),
    "refused: version": frozenset({"version_skew", "corrupt"}),
    "refused: transport": _LOSES | {"admit_refused"},
    "malformed frame": frozenset({"corrupt"}),
    "other": frozenset(),
    "registry": MESSAGES | {"registry_down"},
}


_WAITING = frozenset({"deadline: no replica opened it"})
"""Ends that come also where an engine waited for rows, or for a number."""


def is_explained(reason: str, faults: frozenset[str], *, waited: bool) -> bool:
    """Whether one of the ``faults`` can be why a room failed for ``reason``; ``waited``: or an engine that waited."""
    kind = kind_of(reason)
    causes = _CAUSES.get(kind)
    return causes is None or bool(causes & faults) or (waited and kind in _WAITING)
