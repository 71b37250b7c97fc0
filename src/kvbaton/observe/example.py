"""A small run to look at: two prefill ranks hand a few requests over to a decode rank of this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from kvbaton.errors import KVBatonError
from kvbaton.layout import Coords, RankLayout, conv_state, paged_kv, required_bytes
from kvbaton.memory import Region, SharedMemory
from kvbaton.observe.base import Observer
from kvbaton.registry import MemoryRegistry
from kvbaton.runtime import Manager, Receiver, Sender

LAYERS, PAGE, PAGES, HEADS, CHANNELS = 16, 16, 512, 8, 512
CHUNKS = 4
"""In which the prefill engine hands a request over."""
CHUNK_SECONDS = 0.002
"""What stands for the forward pass of a chunk."""
ROOM_SECONDS = 30.0


def run_example(observers: Sequence[Observer], rooms: int = 8, transports: Sequence[str] = ("shm", "tcp")) -> None:
    """Run ``rooms`` requests one after the other, half of them overlapping with the next; the last one is aborted.

    Raises `KVBatonError` if one of the others does not end well.
    """
    registry = MemoryRegistry()
    with contextlib.ExitStack() as stack:

        def rank(role: str, number: int, size: int) -> Manager:
            layout = _layout(number, size)
            memory = stack.enter_context(contextlib.closing(SharedMemory(required_bytes(layout.components)[0])))
            return stack.enter_context(
                Manager(
                    layout,
                    [Region.of(memory)],
                    role="prefill" if role == "prefill" else "decode",
                    registry=registry,
                    model="example",
                    transports=list(transports),
                    observers=observers,
                )
            )

        prefills = [rank("prefill", number, 2) for number in range(2)]
        decode = rank("decode", 0, 1)
        before: list[Sender | Receiver] = []
        for room in range(1, rooms + 1):
            started = _hand_over(room, prefills, decode, aborted=room == rooms)
            _end(before)
            before = started
            if room % 2:
                _end(before)
                before = []
        _end(before, good=False)


def _layout(number: int, size: int) -> RankLayout:
    heads = HEADS // size
    kv = paged_kv(
        layers=range(LAYERS),
        rows=PAGES,
        page_size=PAGE,
        heads=HEADS,
        head_dim=64,
        dtype="bfloat16",
        head_spans=((number * heads, heads),),
    )
    state = conv_state(
        layers=range(4),
        rows=8,
        blocks=(CHANNELS,),
        columns=4,
        dtype="bfloat16",
        rank=number,
        size=size,
        offset=-(-required_bytes([kv])[0] // 64) * 64,
    )
    return RankLayout((kv, state), Coords(tp=(number, size)))


def _hand_over(room: int, prefills: Sequence[Manager], decode: Manager, *, aborted: bool) -> list[Sender | Receiver]:
    tokens = PAGE * CHUNKS * (4 + room % 3)
    pages, state = [(room * 64 + each) % PAGES for each in range(tokens // PAGE)], [room % 8]
    senders = [manager.sender(room) for manager in prefills]
    receiver = decode.receiver(room)
    chunk = tokens // CHUNKS
    for number in range(CHUNKS - 1):
        time.sleep(CHUNK_SECONDS)
        first = number * chunk
        for sender in senders:
            sender.send({"kv": pages[first // PAGE : (first + chunk) // PAGE]}, (first, first + chunk))
        if number == 0:
            receiver.offer({"kv": list(reversed(pages)), "conv": state}, tokens)
    if aborted:
        receiver.abort("the client went away")
    for sender in senders:
        sender.finish({"kv": pages[(tokens - chunk) // PAGE :], "conv": state}, (tokens - chunk, tokens))
    return [receiver, *senders]


def _end(rooms: Sequence[Sender | Receiver], *, good: bool = True) -> None:
    deadline = time.monotonic() + ROOM_SECONDS
    for room in rooms:
        while not (room.poll().terminal and room.rows_released):
            if time.monotonic() > deadline:
                raise KVBatonError(f"room {room.room} did not end within {ROOM_SECONDS:g} s")
            time.sleep(0.0005)
        if good:
            room.raise_for_failure()
        room.close()
