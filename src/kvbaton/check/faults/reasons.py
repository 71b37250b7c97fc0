"""Why rooms fail, in a few words: the kinds that a report counts."""

from __future__ import annotations

_PHRASES = (
    ("aborted: by the engine", "the engine gives it up"),
    ("aborted: closed early", "was closed before"),
    ("aborted: the manager closed", " rank shut down"),
    ("digests differ", "the bytes in place have the digest"),
    ("refused: rows", "registered rows"),
    ("refused: rows", "rows count from 0"),
    ("refused: rows", "row index"),
    ("refused: transport", "cannot be watched"),
    ("refused: transport", "cannot reach decode rank"),
    ("refused: version", " of the protocol"),
    ("refused: in use by others", "in use by other"),
    ("refused: topology is stale", "topology"),
    ("engine: not all was sent", "were not sent"),
    ("engine: not all was sent", "the sender finished"),
    ("deadline: no replica opened it", "no data-parallel replica"),
    ("deadline: no offer", "have offered their rows"),
    ("deadline: no offer", "did not offer its rows"),
    ("deadline: no progress", "no progress"),
    ("deadline: not opened at prefill", "did not open room"),
    ("deadline: handshake", "no answer within"),
    ("malformed frame", "cannot be decoded"),
    ("malformed frame", "does not begin like"),
    ("write failed", "write to decode rank"),
    ("peer lost", "was lost"),
    ("peer lost", "is not connected"),
    ("peer lost", "was replaced"),
    ("registry", "the registry cannot be reached"),
    ("registry", "deployment"),
)
"""The first phrase that a reason has says what it is."""


def kind_of(reason: str) -> str:
    """The kind of a room's reason."""
    return next((kind for kind, phrase in _PHRASES if phrase in reason), "other")
