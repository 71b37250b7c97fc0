"""Checks of beginnings and ends: tickets, peers, fences, descriptors, leaks."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import numpy as np

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport.conformance.case import CANARY, NotApplicable, PromiseBroken, refused, require, rows
from kvbaton.transport.conformance.suite import SETTLE, Suite
from kvbaton.transport.table import MAX_DESCRIPTOR


class LifeChecks(Suite):
    """Every ticket ends once, every end is final, and nothing is left behind."""

    def check_poll_and_waker(self) -> None:
        """The waker is called for a ticket that ends; a second poll does not report it again."""
        with self.pair([64], [64]) as pair:
            woken = threading.Event()
            pair.writer.set_waker(woken.set)
            pair.write([rows(64, [0], [0])], 7)
            require(woken.wait(self.timeout), "the waker was not called")
            pair.succeed([7])
            time.sleep(SETTLE)
            require(not pair.writer.poll(), "a ticket was reported twice")

    def check_disconnect(self) -> None:
        """Outstanding tickets end once, then nothing lands; the peer cannot be written to any more."""
        with self.pair([8 << 20], [8 << 20]) as pair:
            for ticket in range(20):
                pair.write([rows(4096, np.arange(2048), np.arange(2048))], ticket)
            pair.writer.disconnect(pair.peer)
            pair.wait(range(20))
            self.require_quiet(pair, "after disconnect")
            with contextlib.suppress(TransportError):
                pair.write([rows(4096, [0], [0])], 99)
                raise PromiseBroken("a write to a disconnected peer was accepted")
            pair.writer.disconnect(pair.peer)

    def check_close(self) -> None:
        """Outstanding tickets end once, `poll` still reports them, and a second close does no harm."""
        with self.pair([8 << 20], [8 << 20]) as pair:
            for ticket in range(20):
                pair.write([rows(4096, np.arange(2048), np.arange(2048))], ticket)
            pair.writer.close()
            pair.wait(range(20))
            self.require_quiet(pair, "after close")
            with contextlib.suppress(TransportError):
                pair.write([rows(4096, [0], [0])], 99)
                raise PromiseBroken("a closed transport accepted a write")
            pair.writer.close()

    def check_fence_of_a_stranger(self) -> None:
        """Nobody with that id was ever let in: proven."""
        with self.pair([64], [64]) as pair:
            require(pair.destination.fence(self.fresh("stranger")) is True, "a stranger cannot be fenced")
            pair.write([rows(64, [0], [0])], 1)
            pair.succeed([1])

    def check_fence_of_a_writer(self) -> None:
        """Where a living writer can be fenced, nothing of it lands afterwards; else all of its writes succeed."""
        with self.pair([8 << 20], [8 << 20]) as pair:
            instance = pair.names[0]
            for ticket in range(20):
                pair.write([rows(4096, np.arange(2048), np.arange(2048))], ticket)
            if not pair.destination.fence(instance):
                if not any(pair.wait(range(20)).values()):
                    raise NotApplicable("this transport proves a fence only by the end of the writer's process")
                # The writer was cut off: the proof may take it a moment longer.
                limit = time.monotonic() + self.timeout
                while not pair.destination.fence(instance):
                    require(time.monotonic() < limit, "a writer was cut off, but is never proven to be")
                    time.sleep(0.01)
            self.require_quiet(pair, "after the fence")
            pair.wait(range(20))
            for target in pair.targets:
                target.fill(CANARY)
            require(refused(pair, [rows(4096, [0], [0])], 50), "a fenced writer's write succeeded")
            try:
                pair.peer = pair.writer.connect(pair.destination.describe())
            except TransportError:
                pass
            else:
                require(refused(pair, [rows(4096, [0], [0])], 51), "a fenced writer connected again and wrote")
            require(pair.destination.fence(instance) is True, "a fence did not last")
            pair.require_content(pair.canaries(), "after the fence")

    def check_readmission(self) -> None:
        """A fenced writer that is readmitted writes by a new connection; the one that it had stays out."""
        with self.pair([4096], [4096]) as pair:
            if not pair.destination.fence(pair.names[0]):
                pair.destination.readmit(pair.names[0])
                pair.write([rows(64, [0], [0])], 1)
                pair.succeed([1])
                return
            pair.destination.readmit(pair.names[0])
            require(refused(pair, [rows(64, [1], [1])], 1), "a connection from before the fence wrote after it")
            pair.require_content(pair.canaries(), "after the fence")
            pair.peer = pair.writer.connect(pair.destination.describe())
            pair.destination.admit(pair.writer.describe())
            pair.write([rows(64, [2], [2])], 2)
            pair.succeed([2])

    def check_garbage_descriptor(self) -> None:
        """Bytes that are no descriptor, or half of one, raise `TransportError`."""
        with self.pair([64], [64]) as pair:
            good = pair.destination.describe()
            bad = [b"", b"\x00", b"\xff" * 40, np.random.default_rng(3).bytes(500), good + b"\x00"]
            bad += [good[:length] for length in range(len(good))]
            for descriptor in bad:
                for accept in (pair.writer.connect, pair.destination.admit):
                    with contextlib.suppress(TransportError):
                        accept(descriptor)
                        raise PromiseBroken(f"{len(descriptor)} bytes of garbage were taken for a descriptor")
            pair.write([rows(64, [0], [0])], 1)
            pair.succeed([1])

    def check_descriptor_size(self) -> None:
        """A rank of 256 regions fits a descriptor."""
        with self.pair([64] * 256, [64] * 256) as pair:
            size = len(pair.destination.describe())
            require(size <= MAX_DESCRIPTOR, f"the descriptor has {size} bytes, more than {MAX_DESCRIPTOR}")

    def check_two_peers(self) -> None:
        """One writer with two peers: each gets its own, and losing one leaves the other."""
        with self.pair([128], [64]) as one, self.pair([128], [64]) as two:
            other = one.writer.connect(two.destination.describe())
            two.destination.admit(one.writer.describe())
            one.write([rows(64, [0], [0])], 1)
            one.writer.write(other, [rows(64, [1], [0])], 2)
            one.succeed([1, 2])
            one.require_content([one.content[0][:64]], "the first peer")
            two.require_content([one.content[0][64:]], "the second peer")
            one.writer.disconnect(one.peer)
            one.writer.write(other, [rows(64, [0], [0])], 3)
            one.succeed([3])
            two.require_content([one.content[0][:64]], "the peer that stayed")

    def check_two_writers(self) -> None:
        """Two writers into one destination; the end of one leaves the other."""
        with self.pair([4096], [8192]) as one, self.pair([4096], [64]) as two:
            other = two.writer.connect(one.destination.describe())
            one.destination.admit(two.writer.describe())
            for ticket in range(16):
                one.write([rows(256, [ticket], [2 * ticket])], ticket)
                two.writer.write(other, [rows(256, [ticket], [2 * ticket + 1])], ticket)
            one.succeed(range(16))
            two.succeed(range(16))
            both = np.stack([one.content[0].reshape(16, 256), two.content[0].reshape(16, 256)], axis=1)
            one.require_content([both.reshape(-1)], "two writers")
            two.writer.close()
            one.write([rows(256, [15], [0])], 20)
            one.succeed([20])

    def check_replaced_peer(self) -> None:
        """Another instance behind the address of the first: old descriptors fail, new ones reach the new memory."""
        with self.pair([256], [256]) as pair:
            pair.write([rows(256, [0], [0])], 1)
            pair.succeed([1])
            old = pair.destination.describe()
            pair.destination = self.replace(pair.destination, self.fresh("destination"))
            memory = self.memory(256, pair.destination.capabilities.needs_shared_memory)
            memory.fill(CANARY)
            pair.destination.register([memory.region])
            for target in pair.targets:
                target.close()
            pair.targets = [memory]
            with contextlib.suppress(TransportUnavailable):
                pair.writer.connect(old)
                raise PromiseBroken("the descriptor of a peer that is gone was accepted")
            pair.writer.disconnect(pair.peer)
            pair.peer = pair.writer.connect(pair.destination.describe())
            pair.require_content(pair.canaries(), "before the first write to the new peer")
            pair.write([rows(256, [0], [0])], 2)
            pair.succeed([2])
            pair.require_content([pair.content[0]], "the new peer")

    def check_no_leaks(self) -> None:
        """Ten pairs that come and go leave no thread and no open descriptor."""
        self.check_two_peers()
        before = threading.active_count(), _descriptors()
        for _ in range(10):
            self.check_two_peers()
        limit = time.monotonic() + self.timeout
        while (after := (threading.active_count(), _descriptors())) > before and time.monotonic() < limit:
            time.sleep(0.01)
        require(after[0] <= before[0], f"{after[0]} threads instead of {before[0]}")
        require(after[1] <= before[1], f"{after[1]} open descriptors instead of {before[1]}")

    def check_memory_out_of_reach(self) -> None:
        """Memory of a foreign kind, and plain memory where shared memory is needed, are refused with the reason."""
        transport = self.make(self.fresh("destination"))
        writer = self.make(self.fresh("writer"))
        try:
            with contextlib.suppress(TransportUnavailable):
                transport.register([Region(4096, 64, kind="unheard-of")])
                raise PromiseBroken("memory of an unheard-of kind was registered")
            if not transport.capabilities.needs_shared_memory:
                return
            transport.register([Region.of(np.zeros(64, dtype=np.uint8))])
            with contextlib.suppress(TransportUnavailable):
                writer.connect(transport.describe())
                raise PromiseBroken("a peer without shared memory was connected")
        finally:
            transport.close()
            writer.close()


def _descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
