"""Checks of what lands: content, order, bounds."""

from __future__ import annotations

import threading
import time
from typing import Literal

import numpy as np

from kvbaton.errors import RowsError
from kvbaton.plan.boxes import CONVERT, QUANTISE, SCALE, Boxes, Cast, Float32s, Transfer
from kvbaton.transport.conformance.case import (
    CANARY,
    Bytes,
    PromiseBroken,
    apply,
    refused,
    require,
    require_equal,
    rows,
    table,
    wait_for,
)
from kvbaton.transport.conformance.suite import SETTLE, Suite

HUGE = 2**63 - 1


class ContentChecks(Suite):
    """What lands is what was written, all of it, and nothing else."""

    @staticmethod
    def _boxes() -> Transfer:
        """Two regions, two boxes, strides that differ, and units that are half a row at the destination only."""
        shape = table((2, 3, 16), (1, 4, 5))
        source = table((0, 8, 512, 1, 0, 200, 32), (1, 0, 64, 1, 0, 0, 10))
        destination = table((0, 0, 1024, 2, 512, 256, 64), (1, 3, 128, 2, 64, 0, 7))
        units = np.array([3, 0, 2], dtype=np.int64), np.array([1, 6, 3], dtype=np.int64)
        return Transfer(Boxes(shape, source, destination), *units)

    def check_visible_content(self) -> None:
        """Scattered rows on both sides are in place when the ticket ends, and no other byte changed."""
        with self.pair([1 << 18], [1 << 19]) as pair:
            order = np.random.default_rng(1).permutation(128)
            transfer = rows(2048, order, order[::-1], stride=4096)
            pair.write([transfer], 1)
            pair.succeed([1])
            expected = pair.canaries()
            apply([transfer], pair.content, expected)
            pair.require_content(expected, "after the ticket ended")

    def check_strided_boxes(self) -> None:
        """Boxes with two strides, several regions, and parts of rows."""
        with self.pair([4096, 1024], [8192, 1024]) as pair:
            transfer = self._boxes()
            pair.write([transfer], 1)
            pair.succeed([1])
            expected = pair.canaries()
            apply([transfer], pair.content, expected)
            pair.require_content(expected, "strided boxes")

    def check_every_run_length(self) -> None:
        """Runs of 1 to 300 bytes at odd offsets."""
        with self.pair([1 << 16], [1 << 17]) as pair:
            shape = table(*((1, 1, run) for run in range(1, 301)))
            offsets = np.cumsum(shape[:, 2]) - shape[:, 2]
            source = np.zeros((300, 7), dtype=np.int64)
            source[:, 1], source[:, 3] = offsets, 1
            destination = source.copy()
            destination[:, 1] += np.arange(300)
            one = np.zeros(1, dtype=np.int64)
            transfer = Transfer(Boxes(shape, source, destination), one, one.copy())
            pair.write([transfer], 1)
            pair.succeed([1])
            expected = pair.canaries()
            apply([transfer], pair.content, expected)
            pair.require_content(expected, "runs of every length")

    def check_casts(self) -> None:
        """Elements that change on their way: widened, and narrowed under a scale, also across slabs."""
        count, elements = 700, 1000
        with self.pair([(count + 1) * elements * 2], [count * (elements * 5 + 4)]) as pair:
            random = np.random.default_rng(3)
            # Numbers of a few digits: every dtype here has them, and what they become needs no rounding.
            values = (random.integers(-7, 8, (count + 1, elements)) * 64).astype(np.float32)
            values[:, 0] = 448
            pair.sources[0].fill((values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1))
            order = random.permutation(count)
            wide = 4 * elements
            stride = wide + 4 + elements
            how = table((CONVERT, 2, 1, elements), (SCALE, 2, 4, elements), (QUANTISE, 2, 4, elements))
            cast = Cast(how, np.full(3, 2, np.float32), table(*[(-1, 0, 0, 1, 0, 0, 0)] * 3))
            source = table(*[(0, 0, 2 * elements, 1, 0, 0, 0)] * 3)
            destination = table(*((0, at, stride, 1, 0, 0, 0) for at in (0, wide, wide + 4)))
            shape = table((1, 1, wide), (1, 1, 4), (1, 1, elements))
            pair.write([Transfer(Boxes(shape, source, destination, cast), order, np.arange(count))], 1)
            pair.succeed([1])
            # The factor is 2 and the largest value of a block 896: its scale is 2, and elements are as they were.
            expected = np.empty((count, stride), np.uint8)
            expected[:, :wide] = (values * 2)[order].view(np.uint8)
            expected[:, wide : wide + 4] = np.frombuffer(np.float32(2).tobytes(), np.uint8)
            expected[:, wide + 4 :] = _float8_of_multiples(values[order])
            pair.require_content([expected.reshape(-1)], "casts")

    def check_cast_bounds(self) -> None:
        """A cast reads as many bytes as its source's dtype has, and is refused where those are not there."""
        with self.pair([64], [4096]) as pair:
            one, shape = np.zeros(1, np.int64), table((1, 1, 16))
            side, none = table((0, 0, 64, 1, 0, 0, 0)), table((-1, 0, 0, 1, 0, 0, 0))
            how = table((CONVERT, 1, 4, 16))
            good = Boxes(shape, side, side, Cast(how, np.ones(1, np.float32), none))
            outside = good._replace(source=table((0, 1, 64, 1, 0, 0, 0)))
            scales = good._replace(cast=Cast(how, np.ones(1, np.float32), table((0, 61, 0, 1, 0, 0, 0))))
            for number, boxes in enumerate((outside, scales)):
                try:
                    pair.write([Transfer(boxes, one, one)], number)
                except RowsError:
                    continue
                raise PromiseBroken(f"cast {number} reads outside the source and was not refused with RowsError")
            pair.write([Transfer(good, one, one)], 2)
            pair.succeed([2])

    def check_large_unit(self) -> None:
        """One piece that is larger than any slab, of odd length."""
        size = (5 << 20) + 3
        with self.pair([size], [size + 64]) as pair:
            transfer = rows(size, [0], [0])
            pair.write([transfer], 1)
            pair.succeed([1])
            expected = pair.canaries()
            expected[0][:size] = pair.content[0]
            pair.require_content(expected, "one large piece")

    def check_many_units(self) -> None:
        """More units than fit one message, in tiny pieces."""
        count = 200_000
        with self.pair([count * 8], [count * 16]) as pair:
            order = np.random.default_rng(2).permutation(count)
            pair.write([rows(8, order, order[::-1], stride=16)], 1)
            pair.succeed([1])
            expected = pair.canaries()
            expected[0].reshape(count, 16)[order[::-1], :8] = pair.content[0].reshape(count, 8)[order]
            pair.require_content(expected, "many units")

    def check_many_tickets(self) -> None:
        """Hundreds of tickets at a time: each ends once, each with its content."""
        with self.pair([500 * 64], [500 * 64]) as pair:
            for ticket in range(500):
                pair.write([rows(64, [ticket], [499 - ticket])], ticket)
            pair.succeed(range(500))
            require(not pair.writer.poll(), "a ticket was reported after all had ended")
            expected = pair.content[0].reshape(500, 64)[::-1].reshape(-1)
            pair.require_content([expected], "many tickets")

    def check_nothing_to_move(self) -> None:
        """No transfer, no unit or no box: success, and nothing lands."""
        with self.pair([64], [64]) as pair:
            none = np.zeros(0, dtype=np.int64)
            no_box = Boxes(np.zeros((0, 3), np.int64), np.zeros((0, 7), np.int64), np.zeros((0, 7), np.int64))
            pair.write([], 1)
            pair.write([rows(64, none, none)], 2)
            pair.write([Transfer(no_box, np.zeros(1, np.int64), np.zeros(1, np.int64))], 3)
            pair.succeed([1, 2, 3])
            pair.require_content(pair.canaries(), "nothing to move")

    def check_local_bounds(self) -> None:
        """A write that reads outside the own regions raises `RowsError` before anything moves."""
        with self.pair([640], [64 * 20]) as pair:
            for number, transfer in enumerate(_outside(side="source")):
                try:
                    pair.write([rows(64, [0], [0]), transfer], number)
                except RowsError:
                    continue
                raise PromiseBroken(f"source case {number} was not refused with RowsError")
            time.sleep(SETTLE)
            pair.require_content(pair.canaries(), "after refused writes")

    def check_remote_bounds(self) -> None:
        """A write outside the peer's regions is refused, lands nowhere, and harms no other ticket."""
        with self.pair([64 * 20], [640]) as pair:
            expected = pair.canaries()
            for number, transfer in enumerate(_outside(side="destination")):
                good = rows(64, [number], [number % 10])
                pair.write([good], 100 + number)
                require(refused(pair, [transfer], number), f"destination case {number} was not refused")
                apply([good], pair.content, expected)
                pair.succeed([100 + number])
            pair.require_content(expected, "good and refused writes together")

    def check_concurrent_threads(self) -> None:
        """Eight threads write at a time through one transport."""
        with self.pair([8 * 25 * 512], [8 * 25 * 512]) as pair:
            failures: list[BaseException] = []

            def write(thread: int) -> None:
                try:
                    for number in range(25):
                        place = thread * 25 + number
                        pair.write([rows(512, [place], [199 - place])], place)
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=write, args=(thread,)) for thread in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            require(not failures, f"a thread failed: {failures[:1]}")
            pair.succeed(range(200))
            pair.require_content([pair.content[0].reshape(200, 512)[::-1].reshape(-1)], "concurrent threads")

    def check_both_ways(self) -> None:
        """A process that writes to a peer can be written to by that peer at the same time."""
        with self.pair([64 * 50], [64 * 50]) as pair, self.pair([64], [64]) as spare:
            shared = spare.destination.capabilities.needs_shared_memory
            ends = [self.make(self.fresh("end")) for _ in range(2)]
            memories = [self.memory(64 * 100, shared) for _ in range(2)]
            try:
                for end, memory in zip(ends, memories, strict=True):
                    memory.fill(np.concatenate([pair.content[0], np.full(64 * 50, CANARY, np.uint8)]))
                    end.register([memory.region])
                peers = [ends[0].connect(ends[1].describe()), ends[1].connect(ends[0].describe())]
                for ticket in range(50):
                    for end, peer in zip(ends, peers, strict=True):
                        end.write(peer, [rows(64, [ticket], [50 + ticket])], ticket)
                for end in ends:
                    ended: dict[int, str] = {}
                    wait_for(end, range(50), ended, self.timeout)
                    require(not any(ended.values()), f"a ticket ended with an error: {ended}")
                for memory in memories:
                    require_equal(memory.read(), np.tile(pair.content[0], 2), "both ways")
            finally:
                for end in ends:
                    end.close()
                for memory in memories:
                    memory.close()


def _float8_of_multiples(values: Float32s) -> Bytes:
    """float8_e4m3fn of multiples of 64 up to 448, as bytes."""
    codes = np.array([0, 0x68, 0x70, 0x74, 0x78, 0x7A, 0x7C, 0x7E], np.uint8)
    magnitude: Bytes = codes[(np.abs(values) / 64).astype(np.int64)]
    return np.where(values < 0, magnitude | 0x80, magnitude).astype(np.uint8)


def _outside(side: Literal["source", "destination"]) -> list[Transfer]:
    """Writes of 64-byte rows that leave a region of 10 rows on that side."""
    zero = np.zeros(1, dtype=np.int64)
    good = table((0, 0, 64, 1, 0, 0, 0))
    units = [10, -1, HUGE, -HUGE - 1]
    tables = [
        (0, 577, 64, 1, 0, 0, 0),
        (0, HUGE, 64, 1, 0, 0, 0),
        (1, 0, 64, 1, 0, 0, 0),
        (-1, 0, 64, 1, 0, 0, 0),
        (0, -64, 64, 1, 0, 0, 0),
        (0, 0, 64, 0, 0, 0, 0),
    ]
    strides = [(HUGE, 0), (0, HUGE), (2**62, 2**62), (400, 400)]
    cases = [(table((1, 1, 64)), good, np.array([unit], dtype=np.int64)) for unit in units]
    cases += [(table((1, 1, 64)), table(row), zero) for row in tables]
    cases += [(table((3, 3, 7)), table((0, 0, 64, 1, 0, *pair)), zero) for pair in strides]
    if side == "source":
        return [Transfer(Boxes(shape, row, good), unit, zero) for shape, row, unit in cases]
    return [Transfer(Boxes(shape, good, row), zero, unit) for shape, row, unit in cases]
