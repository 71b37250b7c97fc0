"""How each kind of fault is done to a world, and how all of it is mended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvbaton.check.faults import scenario as kinds
from kvbaton.check.faults.network import Node
from kvbaton.check.faults.scenario import Fault
from kvbaton.errors import KVBatonError, RoomError
from kvbaton.protocol import Offer, bundle, decode, encode
from kvbaton.protocol.messages import PROTOCOL_VERSION, Abort, AbortAck, Done, Message, Ping, Rows

if TYPE_CHECKING:
    from kvbaton.check.faults.engine import Job
    from kvbaton.check.faults.process import Process
    from kvbaton.check.faults.world import World


class Stranger:
    """Somebody who dials a prefill rank and is none of its peers."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.alive = True
        self.stopped = False

    def arrived(self, key: str, frame: bytes) -> None:
        """It does not listen."""

    def lost(self, key: str, reason: str) -> None:
        """It does not care."""


class Strikes:
    """Lets the faults of a scenario strike at their times. Some wait for the next frame or write of a process."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: dict[int, list[Fault]] = {}
        """Faults that strike with the next frame or write of a place."""
        self._slips = {(fault.kind, fault.target) for fault in world.scenario.faults if fault.kind in kinds.SLIPS}
        self._mending: list[Callable[[], None]] = []
        """What undoes the faults that last."""
        self._chance = world.scenario.stream("strikes")
        self._mended = False

    def plan(self) -> None:
        """Put every fault of the scenario on the time line."""
        for fault in self._world.scenario.faults:
            if fault.kind not in kinds.SLIPS:
                self._world.timeline.at(fault.at, partial(self._strike, fault))

    def mend(self) -> None:
        """Nothing is broken any more."""
        self._mended = True
        self._waiting.clear()
        mending, self._mending = self._mending, []
        for undo in mending:
            undo()

    # Faults that wait for their moment.

    def slip(self, kind: str, request: int) -> bool:
        """Whether the engine makes this mistake with a request."""
        found = (kind, request) in self._slips
        if found:
            self._world.result.faults[kind] += 1
        return found

    def struck(self, kind: str, slot: int) -> float | None:
        """Whether a fault of this kind waits for this place: it strikes now, and lasts so many seconds."""
        fault = self._take(slot, (kind,))
        return None if fault is None else fault.seconds

    def _take(self, slot: int, wanted: tuple[str, ...]) -> Fault | None:
        waiting = self._waiting.get(slot)
        if not waiting:
            return None
        found = next((fault for fault in waiting if fault.kind in wanted), None)
        if found is not None:
            waiting.remove(found)
            self._world.result.faults[found.kind] += 1
        return found

    def tamper(self, node: Node, frame: bytes) -> list[tuple[bytes, float | None]]:
        """What becomes of a frame that ``node`` sends."""
        version = getattr(node, "version", PROTOCOL_VERSION)
        if version != PROTOCOL_VERSION:
            frame = frame[:4] + version.to_bytes(2, "little") + frame[6:]
        if not self._waiting.get(node.slot) or isinstance(node, Stranger):
            return [(frame, None)]
        if version == PROTOCOL_VERSION and any(isinstance(each, Offer) for each in decode(frame)):
            fault = self._take(node.slot, ("hostile_rows",))
            if fault is not None:
                return [(self._with_hostile_rows(frame, fault), None)]
        fault = self._take(node.slot, ("corrupt", "duplicate", "reorder"))
        if fault is None:
            return [(frame, None)]
        if fault.kind != "corrupt" and fault.other:
            self._waiting[node.slot].append(msgspec.structs.replace(fault, other=fault.other - 1))
        if fault.kind == "corrupt":
            return [(self._corrupted(frame), None)]
        late = 0.02 + fault.seconds * self._chance.random()
        return [(frame, None), (frame, late)] if fault.kind == "duplicate" else [(frame, late)]

    def _corrupted(self, frame: bytes) -> bytes:
        """The frame with an error that a checksum of the network did not find, and that a reader must find."""
        for _ in range(20):
            bad = bytearray(frame)
            for _ in range(self._chance.randint(1, 4)):
                bad[self._chance.randrange(len(bad))] = self._chance.randrange(256)
            if self._chance.random() < 0.3:
                del bad[self._chance.randrange(len(bad)) :]
            try:
                decode(bytes(bad))
            except KVBatonError:
                return bytes(bad)
        return frame[:-1]

    def _with_hostile_rows(self, frame: bytes, fault: Fault) -> bytes:
        """The frame, but its Offers name rows that are not registered."""
        return bundle([encode(self._hostile(each, fault.other)) for each in decode(frame)])[0]

    def _hostile(self, message: Message, how: int) -> Message:
        if not isinstance(message, Offer):
            return message
        bad = (1 << 40, (1 << 62) + 7, -1, 4096, 1 << 31, 63, 200, -(1 << 63))[how % 8]
        components = {}
        for name, rows in message.components.items():
            indices = np.frombuffer(rows.rows, "<i8").copy()
            if len(indices):
                indices[self._chance.randrange(len(indices))] = bad
            components[name] = Rows(indices.tobytes(), rows.start)
        return msgspec.structs.replace(message, components=components)

    # Faults that strike at once.

    def _strike(self, fault: Fault) -> None:
        if self._mended:
            return
        if fault.kind in kinds.FRAMES or fault.kind in kinds.WRITES:
            self._waiting.setdefault(fault.target, []).append(fault)
            return
        strike: Callable[[Fault], bool] = getattr(self, f"_{fault.kind}")
        if strike(fault):
            self._world.result.faults[fault.kind] += 1
        elif fault.kind in kinds.ENGINE or fault.kind == "double_open":
            # There is no such room now; there may be one soon.
            self._world.timeline.after(self._chance.uniform(0.05, 0.3), partial(self._strike, fault))

    def _until(self, seconds: float, undo: Callable[[], None]) -> None:
        """Undo something after a while, or when all is mended."""

        def now() -> None:
            if undo in self._mending:
                self._mending.remove(undo)
                undo()

        self._mending.append(undo)
        self._world.timeline.after(seconds, now)

    def _process(self, slot: int) -> Process | None:
        return self._world.processes[slot]

    def _kill(self, fault: Fault) -> bool:
        if self._process(fault.target) is None:
            return False
        self._replace(fault, other_version=False)
        return True

    def _version_skew(self, fault: Fault) -> bool:
        if self._process(fault.target) is None:
            return False
        self._replace(fault, other_version=True)
        return True

    def _replace(self, fault: Fault, *, other_version: bool) -> None:
        world, place = self._world, self._world.places[fault.target]
        world.kill(place.slot)

        def again(*, other_version: bool = False) -> None:
            if world.processes[place.slot] is None:
                world.start(place, other_version=other_version)

        if not other_version:
            self._until(fault.seconds, again)
            return
        again(other_version=True)
        skewed = world.processes[place.slot]

        def back() -> None:
            if world.processes[place.slot] is skewed:
                world.kill(place.slot)
                again()

        self._until(2.0 + fault.seconds, back)

    def _stop(self, fault: Fault) -> bool:
        process = self._process(fault.target)
        if process is None:
            return False
        process.stop()
        self._until(fault.seconds, process.resume)
        return True

    def _clock_jump(self, fault: Fault) -> bool:
        process = self._process(fault.target)
        if process is None:
            return False
        process.jump(fault.seconds)
        return True

    def _slow_background(self, fault: Fault) -> bool:
        process = self._process(fault.target)
        if process is None:
            return False
        process.background.extra = min(fault.seconds, 2.0)

        def undo() -> None:
            process.background.extra = 0.0

        self._until(4.0, undo)
        return True

    def _stranger(self, fault: Fault) -> bool:
        network, place = self._world.network, self._world.places[fault.target]
        stranger = Stranger(-1 - fault.other)
        key = network.dial(stranger, place.endpoint)
        for _ in range(self._chance.randint(1, 6)):
            frame = encode(self._nonsense()) if self._chance.random() < 0.6 else self._chance.randbytes(40)
            network.send(stranger, key, frame)
        self._until(fault.seconds, lambda: network.hang_up(stranger, key, linger=False))
        return True

    def _nonsense(self) -> Message:
        room, epoch = self._chance.choice((7, 8, 9, 77)), self._chance.randint(1, 3)
        return self._chance.choice(
            (
                Offer(room, epoch, 3, {"kv": Rows(np.arange(2, dtype="<i8").tobytes())}),
                Abort(room, epoch, "a stranger says so"),
                AbortAck(room, epoch, 0, drained=True),
                Done(room, epoch, 0),
                Ping(4),
            )
        )

    def _double_open(self, fault: Fault) -> bool:
        """A request with a number that is in use: refused, and the one that has it never knows."""
        process, job = self._job(fault, lambda job: job.room is not None)
        if process is None or job is None:
            return False
        try:
            if process.place.side == "prefill":
                process.side.open_room(job.request.room)  # type: ignore[call-arg]
            else:
                process.side.open_room(job.request.room, process.registry_name, process.client, 0)  # type: ignore[call-arg]
        except RoomError as error:
            if str(job.request.room) not in str(error):
                self._world.violate(process.instance, f"the refusal does not name room {job.request.room}: {error}")
        else:
            self._world.violate(process.instance, f"room {job.request.room} was opened twice")
        return True

    # The network.

    def _cut(self, fault: Fault) -> bool:
        self._cut_to_prefill(fault)
        return self._cut_to_decode(fault)

    def _cut_to_prefill(self, fault: Fault) -> bool:
        return self._cut_way(self._decode_slot(fault), fault.target, fault.seconds)

    def _cut_to_decode(self, fault: Fault) -> bool:
        return self._cut_way(fault.target, self._decode_slot(fault), fault.seconds)

    def _cut_way(self, source: int, destination: int, seconds: float) -> bool:
        world = self._world
        world.network.cut(source, destination)

        def heal() -> None:
            world.network.heal(source, destination)
            for process in world.living():
                for transport in process.transports.values():
                    transport.healed()

        self._until(seconds, heal)
        return True

    def _slow(self, fault: Fault) -> bool:
        network = self._world.network
        ways = [(fault.target, self._decode_slot(fault)), (self._decode_slot(fault), fault.target)]
        for way in ways:
            network.slow_down(*way, fault.seconds)

        def undo() -> None:
            for way in ways:
                network.slow_down(*way, 0.0)

        self._until(5.0, undo)
        return True

    def _control_closed(self, fault: Fault) -> bool:
        ends = self._world.network.between(fault.target, self._decode_slot(fault))
        for end in ends:
            self._world.network.break_off(end, "the connection was reset")
        return bool(ends)

    def _data_closed(self, fault: Fault) -> bool:
        writer, reader = self._process(fault.target), self._process(self._decode_slot(fault))
        if writer is None or reader is None:
            return False
        stream = writer.transports.get("stream")
        if stream is None:
            return False
        stream.break_off(reader.instance)
        return True

    def _decode_slot(self, fault: Fault) -> int:
        shape = self._world.scenario.shape
        return shape.prefill_ranks * shape.replicas + fault.other

    # The registry.

    def _registry_down(self, fault: Fault) -> bool:
        registry = self._world.registry
        registry.down += 1
        registry.look_again(end=True)

        def undo() -> None:
            registry.down -= 1

        self._until(fault.seconds, undo)
        return True

    def _registry_restart(self, fault: Fault) -> bool:
        self._world.registry.restart()
        return True

    # The engines.

    def _job(self, fault: Fault, fits: Callable[[Job], bool]) -> tuple[Process | None, Job | None]:
        process = self._process(fault.target)
        if process is None or process.stopped:
            return None, None
        jobs = [job for job in process.jobs.values() if fits(job)]
        return process, jobs[fault.other % len(jobs)] if jobs else None

    def _abort(self, fault: Fault, times: int) -> bool:
        _, job = self._job(fault, lambda job: job.room is not None and not job.status.terminal)
        if job is None:
            return False
        for _ in range(times):
            job.abort("the engine gives it up")
        return True

    def _abort_prefill(self, fault: Fault) -> bool:
        return self._abort(fault, 1)

    def _abort_decode(self, fault: Fault) -> bool:
        return self._abort(fault, 1)

    def _abort_twice(self, fault: Fault) -> bool:
        return self._abort(fault, 2)

    def _close_manager(self, fault: Fault) -> bool:
        process, job = self._job(fault, lambda job: job.room is not None and not job.status.terminal)
        if process is None or job is None or process.closing:
            return False
        world = self._world

        def replace() -> None:
            if world.processes[process.slot] is process:
                world.kill(process.slot)
                world.start(process.place)

        process.close(lambda: self._until(0.0 if self._mended else fault.seconds, replace))
        return True

    def _close_early(self, fault: Fault) -> bool:
        _, job = self._job(fault, lambda job: job.room is not None and not job.status.terminal)
        if job is None:
            return False
        job.close()
        return True
