"""One rank of the soak, a process of its own: takes rooms from its standard input, says on its output how they end.

python -m kvbaton.check.soak.rank '{"role": "prefill", ...}'        (see `RankOptions`)
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import select
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.check.soak.cables import CabledRegistry, Cables
from kvbaton.check.soak.descriptors import Met, open_descriptors
from kvbaton.check.soak.held import held
from kvbaton.check.soak.store import PAGE, Store, make_layout
from kvbaton.errors import KVBatonError, RegistryError
from kvbaton.protocol import Deadlines, Status
from kvbaton.runtime import Manager, Receiver, Sender, Settings
from kvbaton.runtime.transports import instance_of
from kvbaton.transport import create

BUSY_SECONDS, IDLE_SECONDS = 0.002, 0.05
"""How long the loop rests, with rooms and without."""
NO_REGISTRY = 75
"""Exit code of a rank that could not be registered."""


class RankOptions(msgspec.Struct, frozen=True):
    """What the supervisor says of a rank at its start."""

    role: str
    registry: str
    transports: tuple[str, ...]
    rank: int
    size: int
    replica: tuple[int, int]
    seed: int
    pages: int = 256
    slots: int = 64
    abort_share: float = 0.02
    """Share of the rooms that this rank aborts by itself."""


def settings() -> Settings:
    """Deadlines and intervals of a soak: short, so that each of them is met."""
    return Settings(
        heartbeat_seconds=0.4,
        peer_timeout_seconds=1.6,
        connect_seconds=1.0,
        handshake_seconds=8.0,
        registry_heartbeat_seconds=0.5,
        deadlines=Deadlines(offer_wait=12.0, transfer=10.0, drain=3.0, parked_seconds=10.0),
    )


@dataclass(eq=False)
class Job:
    """One room of this rank."""

    number: int
    tokens: int
    chunks: int
    started: float
    pages: list[int]
    slot: int = -1
    room: Sender | Receiver | None = None
    abort_at: float = 0.0
    said: bool = False


class Rank:
    """Runs the rooms that it is given, as an engine would."""

    def __init__(self, options: RankOptions) -> None:
        self._options = options
        self._random = random.Random(options.seed)
        self._store = Store(make_layout(options.rank, options.size, options.replica, options.pages, options.slots))
        self._cables = Cables()
        instance = instance_of(())
        transports = [self._cables.front(create(name, instance=instance)) for name in options.transports]
        self._met = Met(transports)
        self.manager = Manager(
            self._store.layout,
            [self._store.region],
            role="prefill" if options.role == "prefill" else "decode",
            registry=CabledRegistry(options.registry, self._cables),
            transports=transports,
            destination_index=options.rank if options.role == "decode" else None,
            destinations=options.size if options.role == "decode" else None,
            settings=settings(),
            observers=(self._met,),
        )
        self._waiting: list[Job] = []
        self._jobs: list[Job] = []
        self._unread = b""
        self._stopping = False

    def run(self) -> None:
        """Serve until told to stop, or until the supervisor is gone."""
        self._say(event="ready", instance=self.manager.instance)
        while not self._stopping:
            self._read()
            self._begin_waiting()
            self._jobs = [job for job in self._jobs if not self._step(job)]
        self.manager.close()

    def _say(self, **fields: Any) -> None:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()

    def _read(self) -> None:
        timeout = BUSY_SECONDS if self._jobs or self._waiting else IDLE_SECONDS
        while select.select([0], [], [], timeout)[0]:
            received = os.read(0, 1 << 16)
            if not received:
                self._stopping = True
                return
            *lines, self._unread = (self._unread + received).split(b"\n")
            for line in lines:
                command = json.loads(line)
                getattr(self, "_on_" + command.pop("do"))(**command)
            timeout = 0.0

    # Commands.

    def _on_room(self, number: int, tokens: int, chunks: int) -> None:
        now = time.monotonic()
        job = Job(number, tokens, chunks, now, [])
        if self._random.random() < self._options.abort_share:
            job.abort_at = now + self._random.choice((0.0, 0.002, 0.01, 0.05))
        self._waiting.append(job)

    def _on_abort(self, share: float) -> None:
        """Abort a share of what runs."""
        for job in self._jobs:
            if job.room is not None and self._random.random() < share:
                job.room.abort()

    def _on_hold(self, inwards: bool, outwards: bool) -> None:
        self._cables.hold(inwards=inwards, outwards=outwards)

    def _on_heal(self) -> None:
        self._cables.heal()

    def _on_reset(self) -> None:
        self._cables.reset()

    def _on_count(self, tag: int) -> None:
        """Say what is held, once nothing is under way."""
        clean = self._store.touched(self._store.pages, 0) == 0 if self._options.role == "decode" else True
        self._say(
            event="count",
            tag=tag,
            held=held(self.manager),
            jobs=len(self._jobs) + len(self._waiting),
            pages_lost=self._options.pages - len(self._store.pages),
            slots_lost=self._options.slots - len(self._store.slots),
            clean=clean,
            threads=threading.active_count(),
            descriptors=dict(open_descriptors()),
            kept_sockets=self._met.kept_sockets,
            faults=self.manager._control.faults,
        )

    def _on_stop(self) -> None:
        self._stopping = True

    # Rooms.

    def _begin_waiting(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            taken = self._store.take(-(-job.tokens // PAGE))
            if taken is None:
                return
            del self._waiting[0]
            job.pages, job.slot = taken
            try:
                self._begin(job)
            except KVBatonError as error:
                self._store.give(job.pages, job.slot)
                self._say(event="end", room=job.number, status="FAILED", reason=f"not begun: {error}", seconds=0.0)
                self._say(event="free", room=job.number)
                continue
            self._jobs.append(job)

    def _begin(self, job: Job) -> None:
        if self._options.role == "prefill":
            self._store.fill(job.number, job.pages, job.slot)
            sender = self.manager.sender(job.number)
            job.room = sender
            self._send(job, sender)
            return
        touched = self._store.touched(job.pages, job.slot)
        if touched:
            self._say(event="wrong", room=job.number, words=touched, what="rows that nobody owned were written")
            self._store.wipe(job.pages, job.slot)
        receiver = self.manager.receiver(job.number)
        job.room = receiver
        receiver.offer({"kv": job.pages, "state": [job.slot]}, job.tokens, aux=job.slot)

    def _send(self, job: Job, sender: Sender) -> None:
        # Chunks of whole pages, in any order, then the state.
        bounds = [len(job.pages) * part // job.chunks for part in range(job.chunks + 1)]
        parts = [(first, last) for first, last in itertools.pairwise(bounds) if first < last]
        self._random.shuffle(parts)
        for first, last in parts:
            sender.send({"kv": job.pages[first:last]}, (first * PAGE, min(last * PAGE, job.tokens)))
        sender.finish({"state": [job.slot]}, aux=job.slot)

    def _step(self, job: Job) -> bool:
        """Look after a room; whether it is over and forgotten."""
        room = job.room
        assert room is not None
        status = room.poll()
        if not status.terminal:
            if job.abort_at and time.monotonic() >= job.abort_at:
                job.abort_at = 0.0
                room.abort("aborted by a whim of the soak")
            return False
        if not job.said:
            job.said = True
            if status is Status.SUCCESS and self._options.role == "decode":
                words = self._store.wrong(job.number, job.tokens, job.pages, job.slot)
                if words:
                    self._say(
                        event="wrong", room=job.number, words=words, what="a room that succeeded has wrong content"
                    )
            self._say(event="end", room=job.number, status=status.name, reason=room.reason, seconds=room.seconds)
        if not room.rows_released:
            return False
        room.close()
        if self._options.role == "decode":
            self._store.wipe(job.pages, job.slot)
        self._store.give(job.pages, job.slot)
        self._say(event="free", room=job.number)
        return True


def main() -> None:
    """Run one rank."""
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    options = msgspec.json.decode(sys.argv[1].encode(), type=RankOptions)
    try:
        rank = Rank(options)
    except RegistryError:
        # As an engine does: whoever started it starts it again.
        sys.exit(NO_REGISTRY)
    rank.run()


if __name__ == "__main__":
    main()
