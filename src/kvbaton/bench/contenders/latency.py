"""Small hand-overs one after the other, in turn with a bare ZeroMQ round trip between the same two processes.

The destination tells the source over that ZeroMQ connection that it has offered, and when it saw the bytes.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import time
from typing import Any

import zmq

from kvbaton import Status

from .baton import BatonSide
from .side import now, serve

SETTLE_SECONDS = 0.001
"""From the offer to the send: the offer is there before the data in an engine too."""
POLL_SECONDS = 20e-6
ROUND_TRIP_BYTES = 64
PR_SET_TIMERSLACK = 29


class LatencySide(BatonSide):
    """A `BatonSide` with a ZeroMQ connection to the other side."""

    def prepare(self, work: dict[str, Any]) -> dict[str, Any]:
        """As `Side.prepare`."""
        # Linux may let a short sleep last 50 us longer; an engine that polls all the time has no such gap.
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)
        card = super().prepare(work)
        self.zmq: Any = zmq.Context.instance().socket(zmq.PAIR)
        if self.role != "source":
            card["port"] = self.zmq.bind_to_random_port("tcp://127.0.0.1")
        return card

    def meet(self, card: dict[str, Any]) -> None:
        """As `Side.meet`."""
        super().meet(card)
        if self.role == "source":
            self.zmq.connect(f"tcp://127.0.0.1:{card['port']}")

    def _round_trip(self) -> float:
        """Seconds of one round trip, at the source, after a pause as before a hand-over: idle cores wake slowly."""
        if self.role != "source":
            self.zmq.send(self.zmq.recv())
            return 0.0
        time.sleep(SETTLE_SECONDS)
        started = now()
        self.zmq.send(bytes(ROUND_TRIP_BYTES))
        self.zmq.recv()
        return now() - started

    def hand_over(self, count: int) -> dict[str, list[float]]:
        """``count`` rooms, and a round trip before each.

        At the source: seconds to visible success, inside ``send`` and ``finish``, and of the round trips.
        """
        trips: list[float] = []
        visible: list[float] = []
        send: list[float] = []
        finish: list[float] = []
        for _ in range(count):
            self.room += 1
            trips.append(self._round_trip())
            if self.role != "source":
                self._receive_one()
                continue
            sender = self.manager.sender(self.room)
            self.zmq.recv()
            time.sleep(SETTLE_SECONDS)
            started = now()
            sender.send({"kv": self.rows}, (0, self.work.pages))
            sent = now()
            sender.finish()
            finished = now()
            (seen,) = struct.unpack("d", self.zmq.recv())
            visible.append(seen - started)
            send.append(sent - started)
            finish.append(finished - sent)
            sender.close()
        return {"visible": visible, "send": send, "finish": finish, "round trip": trips}

    def _receive_one(self) -> None:
        receiver = self.manager.receiver(self.room)
        receiver.offer({"kv": self.rows}, tokens=self.work.pages)
        self.zmq.send(b"offered")
        while not receiver.poll().terminal:
            time.sleep(POLL_SECONDS)
        seen = now()
        if receiver.poll() is not Status.SUCCESS:
            raise RuntimeError(f"room {self.room} ended as {receiver.poll().value}: {receiver.reason}")
        self.zmq.send(struct.pack("d", seen))
        receiver.close()


if __name__ == "__main__":
    serve(LatencySide(sys.argv[-1], sys.argv[-2]))
