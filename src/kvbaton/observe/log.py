"""The log line of a room that failed: everything that explains it, for people and for machines."""

from __future__ import annotations

import json
import logging
from typing import Any

from kvbaton.observe.base import ObservedRoom, Observer, PartRecord
from kvbaton.protocol.status import Status

logger = logging.getLogger("kvbaton.rooms")


class FailureLog(Observer):
    """One line for each room that failed, and one when rows that were held back came free. Every manager has it.

    The logger is ``kvbaton.rooms``. The line begins as a sentence and ends with the details as JSON; handlers that
    write JSON themselves find the same as a dict in the record's attribute ``kvbaton``. Level: INFO where an engine
    aborted, which is part of every day's work, else WARNING.
    """

    def room_ended(self, room: ObservedRoom) -> None:
        """Say why it failed."""
        if room.status is not Status.FAILED:
            return
        level = logging.INFO if room.aborted else logging.WARNING
        if logger.isEnabledFor(level):
            details = failure(room)
            shown = {name: value for name, value in details.items() if name not in ("event", "side", "room", "reason")}
            logger.log(
                level,
                "%s: room %d failed: %s %s",
                room.side,
                room.number,
                one_line(room.reason),
                json.dumps(shown),
                extra={"kvbaton": details},
            )

    def rows_released(self, room: ObservedRoom) -> None:
        """Say that rows came back, if they had been held back."""
        if not room.held or room.ended is None or room.released is None:
            return
        seconds = room.released - room.ended
        details = {"event": "rows_released", **_who(room), "rows": room.rows, "held_seconds": round(seconds, 6)}
        logger.info(
            "%s: room %d: %d rows that were held back for %.3f s are free",
            room.side,
            room.number,
            room.rows,
            seconds,
            extra={"kvbaton": details},
        )


def failure(room: ObservedRoom) -> dict[str, Any]:
    """Everything that explains a room that failed, as values that JSON has. Times are in seconds."""
    return {
        "event": "room_failed",
        **_who(room),
        "error": room.error_name,
        "reason": room.reason,
        "stage": stage_reached(room),
        **_tokens(room),
        "bytes": _bytes(room),
        "parts": [_part(part) for part in room.parts],
        "seconds": _ages(room),
        "rows": room.rows,
        "rows_released": not room.held,
        "held_by": [_why_held(room, part) for part in room.parts if not part.quiet] if room.held else [],
    } | ({"trace": room.trace} if room.trace else {})


def stage_reached(room: ObservedRoom) -> str:
    """How far a room came: "handshake" (decode only), "waiting" or "transfer"."""
    if room.transferring is not None:
        return "transfer"
    return "handshake" if room.side == "decode" and room.connected is None else "waiting"


def one_line(text: str) -> str:
    """``text`` without characters that would end a line or steer a terminal: parts of it come from peers."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _who(room: ObservedRoom) -> dict[str, Any]:
    rank = room.rank
    return {"side": room.side, "room": room.number, "rank": str(rank.coords), "instance": rank.instance}


def _tokens(room: ObservedRoom) -> dict[str, int]:
    tokens = {"sent_tokens": room.sent_tokens} if room.side == "prefill" else {}
    if room.parts:
        tokens |= {"offered_tokens": room.parts[0].tokens, "prefix": room.parts[0].prefix}
    return tokens


def _bytes(room: ObservedRoom) -> dict[str, dict[str, int]]:
    expected: dict[str, int] = {}
    for part in room.parts:
        for name, nbytes in part.expected.items():
            expected[name] = expected.get(name, 0) + nbytes
    return {
        name: {"done": room.moved.get(name, 0), "expected": expected.get(name, 0)}
        for name in sorted(expected.keys() | (room.moved.keys() & room.rank.components))
    }


def _part(part: PartRecord) -> dict[str, Any]:
    return {
        "part": part.part,
        "rank": part.peer.coords,
        "instance": part.peer.instance,
        "transport": part.peer.transport,
        "epoch": part.epoch,
        "state": _state(part),
        "writes": part.writes,
    }


def _state(part: PartRecord) -> str:
    if part.done:
        return "done" if part.quiet else "is checked"
    return "sends nothing" if not part.sends else "quiet" if part.quiet else "may write"


def _ages(room: ObservedRoom) -> dict[str, float]:
    ages = {name: end - begin for name, (begin, end) in room.stages().items() if end is not None}
    for name, since in (("connected_after", room.connected), ("offered_after", room.offered)):
        if since is not None:
            ages[name] = since - room.opened
    return {name: round(seconds, 6) for name, seconds in ages.items()}


def _why_held(room: ObservedRoom, part: PartRecord) -> str:
    who = f"part {part.part} ({part.peer.coords or 'not joined'})"
    if room.side == "prefill":
        return f"{who}: {part.writes} writes have not ended"
    if part.done:
        return f"{who}: its digests are being checked"
    return f"{who}: it has not confirmed that it writes no more"
