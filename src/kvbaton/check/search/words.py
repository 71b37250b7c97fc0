"""What a step of a search is called."""

from __future__ import annotations

from kvbaton.check.search.bounds import Bounds
from kvbaton.check.search.process import Event, LinkKey
from kvbaton.protocol import Abort, AbortAck, Done, Message, Offer, decode


def describe(label: Event, bounds: Bounds) -> str:
    """One line for a step."""
    word, first, *rest = label
    if word in ("deliver", "repeat"):
        frame, to_prefill = rest
        (message,) = decode(frame)
        sender, receiver = _ends(first, to_prefill)
        kept = ", and will arrive once more" if word == "repeat" else ""
        return f"{receiver}: {_name(message)} of {sender} arrives{_on(first)}{kept}"
    if word == "cut":
        return f"the connection of prefill {first.prefill} and decode {first.decode}{_on(first)} is cut"
    if word == "join":
        return f"prefill {first.prefill} and decode {first.decode} pass a handshake{_on(first)}"
    if word == "lost":
        here, there = (first.prefill, f"decode {first.decode}")
        if rest[0] == "decode":
            here, there = (first.decode, f"prefill {first.prefill}")
        return f"{rest[0]} {here}: notices that the connection of {there}{_on(first)} has ended"
    if word == "fenced":
        return f"decode {first.decode}: has proof that prefill {first.prefill} writes no more{_on(first)}"
    if word == "die":
        return f"{first}: the process dies, and a new one takes its place"
    return f"{first}: {_local(word, rest, bounds)}"


def _local(word: str, about: list[object], bounds: Bounds) -> str:
    if word in ("land", "fail"):
        key, life, handle = about
        assert isinstance(key, LinkKey)
        assert isinstance(handle, int)
        origin, chunk = divmod(handle, bounds.chunks)
        end = "ends well" if word == "land" else "fails"
        return f"its write of chunk {chunk} of life {origin} to the rows of life {life} of decode {key.decode} {end}"
    if word == "unpark":
        return "the time of its oldest parked Offer is over"
    if word == "forget":
        return f"forgets the oldest room that it remembers as {about[0]}"
    if word == "checked":
        life, part, right = about
        return f"the digests of part {part} of life {life} are {'right' if right else 'WRONG'}"
    (life,) = about
    assert isinstance(life, int)
    room = f"life {life} (room {bounds.rooms[life]})"
    return {
        "open": f"opens {room}",
        "cancel": f"gives {room} up before it opens it",
        "submit": f"submits the next chunk of {room}",
        "offer": f"offers rows for {room}",
        "abort": f"aborts {room}",
        "close": f"closes {room}",
        "deadline": f"the deadline of {room} passes",
        "drain": f"the drain deadline of {room} passes",
    }[word]


def _ends(key: LinkKey, to_prefill: bool) -> tuple[str, str]:
    prefill, decode_rank = f"prefill {key.prefill}", f"decode {key.decode}"
    return (decode_rank, prefill) if to_prefill else (prefill, decode_rank)


def _on(key: LinkKey) -> str:
    return f" (connection {key.number})" if key.number > 1 else ""


def _name(message: Message) -> str:
    if isinstance(message, AbortAck):
        return f"AbortAck({'drained' if message.drained else 'not drained'}) for room {message.room}, {_epoch(message)}"
    if isinstance(message, (Offer, Done, Abort)):
        offered = " (offered)" if isinstance(message, Abort) and message.offered else ""
        return f"{type(message).__name__}{offered} for room {message.room}, {_epoch(message)}"
    return type(message).__name__


def _epoch(message: Offer | Done | Abort | AbortAck) -> str:
    return f"epoch {message.epoch}"
