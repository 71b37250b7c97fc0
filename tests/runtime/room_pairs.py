"""A sender and a receiver of one small request, and what tests of their failures share."""

import threading
import uuid

import pytest
from rank_world import Model, succeeded, wait_over, wait_released

import kvbaton as kb
from kvbaton import errors
from kvbaton.transport.loopback import LoopbackTransport

KV = Model(("kv",))
FULL = Model(("kv", "conv", "aux"))


def pair(world, model=KV, **options):
    (source,) = world.prefill(model.layout(), **options)
    (destination,) = world.decode(model.layout(), **options)
    source.fill("kv", [0, 1], (0, 8))
    return source, destination


def start(source, destination, room=0, tokens=8):
    sender, receiver = source.manager.sender(room), destination.manager.receiver(room)
    receiver.offer({"kv": [4, 5]}, tokens)
    return sender, receiver


def hand_over(source, destination, room=0):
    sender, receiver = start(source, destination, room)
    sender.finish({"kv": [0, 1]}, (0, 8))
    succeeded(sender, receiver)
    wait_released(sender, receiver)
    destination.check("kv", [4, 5], (0, 8))
    sender.close()
    receiver.close()


def failed(room, *words, error=errors.TransferFailed):
    wait_over(room)
    assert room.poll() is kb.Status.FAILED
    assert not [word for word in words if word not in room.reason], room.reason
    with pytest.raises(error):
        room.raise_for_failure()


class Gate:
    """Holds writes of a loopback transport between their start and their copy."""

    def __init__(self):
        self._entered, self._open = threading.Event(), threading.Event()

    def __call__(self, ticket):
        self._entered.set()
        self._open.wait(30)
        return ""

    def wait_entered(self):
        assert self._entered.wait(20)

    def open(self):
        self._open.set()


def gated(world):
    gate = Gate()
    transport = LoopbackTransport(uuid.uuid4().hex, fail=gate)
    (source,) = world.prefill(KV.layout(), transports=[transport])
    (destination,) = world.decode(KV.layout())
    source.fill("kv", [0, 1], (0, 8))
    return source, destination, gate


class SlowRegistry(kb.MemoryRegistry):
    def __init__(self):
        super().__init__()
        self.asked, self.answer = threading.Event(), threading.Event()

    def find_rooms(self, deployment, rooms, wait_seconds=0.0, asker=""):
        self._hold()
        return super().find_rooms(deployment, rooms, wait_seconds, asker)

    def _hold(self):
        self.asked.set()
        self.answer.wait(20)

    def topology(self, deployment="default", dp_rank=None):
        self._hold()
        return super().topology(deployment, dp_rank)


def broken(error):
    raise error
