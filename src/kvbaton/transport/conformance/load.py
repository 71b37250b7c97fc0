"""Checks of much at a time: large batches, tiny pieces, full queues, many connections."""

from __future__ import annotations

import numpy as np

from kvbaton.memory import Region
from kvbaton.plan.boxes import Boxes, Transfer
from kvbaton.transport.base import Transport
from kvbaton.transport.conformance.case import CANARY, require, require_equal, rows, table, wait_for
from kvbaton.transport.conformance.suite import Suite

MIB = 1 << 20


class LoadChecks(Suite):
    """What holds for a little holds for much."""

    def check_tiny_pieces(self) -> None:
        """A hundred thousand pieces of one byte, scattered, in one write."""
        count = 100_000
        with self.pair([count], [2 * count]) as pair:
            order = np.random.default_rng(11).permutation(count)
            pair.write([rows(1, order, order[::-1], stride=2)], 1)
            pair.succeed([1])
            expected = pair.canaries()
            expected[0].reshape(count, 2)[order[::-1], 0] = pair.content[0][order]
            pair.require_content(expected, "tiny pieces")

    def check_large_batch(self) -> None:
        """One write of 300 transfers between many regions, with pieces of many lengths."""
        regions, length = 12, 1 << 16
        with self.pair([length] * regions, [length] * regions) as pair:
            random = np.random.default_rng(12)
            expected = pair.canaries()
            transfers = []
            # Each has 2048 bytes of the destination for itself.
            for number in range(300):
                source, destination = int(random.integers(regions)), number % regions
                nbytes = int(random.integers(1, 2000))
                begin, to = int(random.integers(length - nbytes)), 2048 * (number // regions)
                shape = table((1, 1, nbytes))
                sides = table((source, begin, 0, 1, 0, 0, 0)), table((destination, to, 0, 1, 0, 0, 0))
                one = np.zeros(1, dtype=np.int64)
                transfers.append(Transfer(Boxes(shape, *sides), one, one.copy()))
                expected[destination][to : to + nbytes] = pair.content[source][begin : begin + nbytes]
            pair.write(transfers, 1)
            pair.succeed([1])
            pair.require_content(expected, "a large batch")

    def check_full_queues(self) -> None:
        """Far more writes than any queue holds, posted without a look at what ended: none is lost or refused."""
        count, nbytes = 96, MIB // 2
        with self.pair([count * nbytes], [count * nbytes]) as pair:
            units = nbytes // 4096
            for ticket in range(count):
                first = ticket * units
                there = np.arange(first, first + units)
                pair.write([rows(4096, np.random.default_rng(ticket).permutation(there), there)], ticket)
            pair.succeed(range(count))
            content = pair.content[0].reshape(-1, 4096)
            expected = [
                content[np.random.default_rng(ticket).permutation(np.arange(ticket * units, (ticket + 1) * units))]
                for ticket in range(count)
            ]
            pair.require_content([np.concatenate(expected).reshape(-1)], "full queues")

    def check_many_connections(self) -> None:
        """Ten writers at a time into one destination, each to its own place; then all but one go, and it goes on."""
        count, nbytes = 10, 65536
        with self.pair([nbytes], [count * nbytes]) as pair:
            writers: list[Transport] = []
            memories = []
            try:
                peers = []
                for number in range(1, count):
                    memory = self.memory(nbytes, False)
                    memory.fill(number)
                    memories.append(memory)
                    writers.append(self.make(self.fresh("writer")))
                    writers[-1].register([memory.region])
                    peers.append(writers[-1].connect(pair.destination.describe()))
                    pair.destination.admit(writers[-1].describe())
                everything = np.arange(nbytes // 512)
                pair.write([rows(512, everything, everything)], 0)
                for number, (writer, peer) in enumerate(zip(writers, peers, strict=True), 1):
                    writer.write(peer, [rows(512, everything, everything + number * len(everything))], number)
                pair.succeed([0])
                for number, writer in enumerate(writers, 1):
                    ended: dict[int, str] = {}
                    wait_for(writer, [number], ended, self.timeout)
                    require(not ended[number], f"writer {number} ended with an error: {ended[number]}")
                expected = [pair.content[0], *(np.full(nbytes, number, np.uint8) for number in range(1, count))]
                pair.require_content([np.concatenate(expected)], "many writers")
            finally:
                for writer in writers:
                    writer.close()
                for memory in memories:
                    memory.close()
            pair.write([rows(512, everything, everything + len(everything))], 100)
            pair.succeed([100])

    def check_reconnections(self) -> None:
        """A writer that comes and goes forty times, with work under way when it goes, finds room each time."""
        with self.pair([4 * MIB], [4 * MIB]) as pair:
            everything = np.arange(1024)
            for ticket in range(40):
                pair.write([rows(4096, everything, everything)], ticket)
                if ticket % 2:
                    pair.succeed([ticket])
                pair.writer.disconnect(pair.peer)
                pair.wait([ticket])
                pair.peer = pair.writer.connect(pair.destination.describe())
            pair.write([rows(4096, everything, everything)], 100)
            pair.succeed([100])
            pair.require_content(pair.content, "after forty connections")

    def check_two_connections(self) -> None:
        """A writer that is connected twice to one peer: each works, and the end of one leaves the other."""
        with self.pair([128], [128]) as pair:
            second = pair.writer.connect(pair.destination.describe())
            pair.write([rows(64, [0], [0])], 1)
            pair.writer.write(second, [rows(64, [1], [1])], 2)
            pair.succeed([1, 2])
            pair.require_content(pair.content, "two connections")
            pair.writer.disconnect(pair.peer)
            pair.writer.write(second, [rows(64, [1], [0])], 3)
            pair.succeed([3])
            pair.require_content([np.tile(pair.content[0][64:], 2)], "the connection that stayed")

    def check_empty_regions(self) -> None:
        """Regions of no bytes, as elided tensors have, are registered and left alone, and move no number."""
        ends = [self.make(self.fresh(role)) for role in ("writer", "destination")]
        shared = ends[1].capabilities.needs_shared_memory
        source, target = self.memory(64, False), self.memory(64, shared)
        source.fill(7)
        target.fill(CANARY)
        nothing = Region.of(np.zeros(0, dtype=np.uint8))
        try:
            ends[0].register([nothing, source.region])
            ends[1].register([nothing, nothing, target.region])
            peer = ends[0].connect(ends[1].describe())
            one = np.zeros(1, dtype=np.int64)
            sides = table((1, 0, 0, 1, 0, 0, 0)), table((2, 32, 0, 1, 0, 0, 0))
            ends[0].write(peer, [Transfer(Boxes(table((1, 1, 32)), *sides), one, one.copy())], 1)
            ended: dict[int, str] = {}
            wait_for(ends[0], [1], ended, self.timeout)
            require(not ended[1], f"the write ended with an error: {ended[1]}")
            expected = np.full(64, CANARY, dtype=np.uint8)
            expected[32:] = 7
            require_equal(target.read(), expected, "beside empty regions")
        finally:
            for end in ends:
                end.close()
            source.close()
            target.close()
