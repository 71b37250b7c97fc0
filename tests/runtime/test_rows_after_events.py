"""Chunks that a device is still writing: nothing of them is read before their event is done."""

import threading

import pytest
from rank_world import CANARY, succeeded, wait, wait_released
from room_pairs import failed, pair, start

from kvbaton.runtime.later import Later
from kvbaton.runtime.threads import Threads


class Recorded:
    """An event as torch has it, done when the test says so."""

    def __init__(self):
        self.done = False
        self.asked = 0
        self.error = None

    def query(self):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.done


def test_rows_are_read_only_when_their_event_is_done(any_world):
    source, destination = pair(any_world)
    source.memory.array[:] = CANARY
    sender, receiver = start(source, destination)
    event = Recorded()
    sender.send({"kv": [0]}, (0, 4), after=event)
    # It has no event of its own, but comes after one that is not done.
    sender.finish({"kv": [1]}, (4, 8))
    wait(lambda: event.asked > 10, "the event to be asked")
    assert sender.bytes_by_component == {}
    assert not sender.poll().terminal
    source.fill("kv", [0, 1], (0, 8))
    event.done = True
    succeeded(sender, receiver)
    wait_released(sender, receiver)
    destination.check("kv", [4, 5], (0, 8))
    destination.check_rest()


def test_an_event_that_is_done_costs_no_thread(world):
    source, destination = pair(world)
    sender, receiver = start(source, destination)
    event = Recorded()
    event.done = True
    sender.finish({"kv": [0, 1]}, (0, 8), after=event)
    assert event.asked == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "kvbaton-later"]
    succeeded(sender, receiver)


def test_an_event_that_fails_fails_its_room(world):
    source, destination = pair(world)
    sender, receiver = start(source, destination)
    event = Recorded()
    sender.finish({"kv": [0, 1]}, (0, 8), after=event)
    event.error = RuntimeError("an illegal memory access was encountered")
    failed(sender, "the event of a chunk failed", "illegal memory access")
    failed(receiver, "illegal memory access")


@pytest.mark.parametrize("end", ["abort", "close"])
def test_a_room_may_end_before_the_event_of_its_chunk(world, end):
    source, destination = pair(world)
    sender, receiver = start(source, destination)
    event = Recorded()
    sender.finish({"kv": [0, 1]}, (0, 8), after=event)
    sender.abort() if end == "abort" else sender.close()
    failed(receiver)
    wait_released(sender, receiver)
    event.done = True
    wait(lambda: not len(source.manager.side._later), "the step to be taken")
    sender.close()
    receiver.close()
    assert source.manager.faults == 0
    destination.check_rest()


def test_a_manager_closes_while_an_event_is_awaited(world):
    source, destination = pair(world)
    sender, _ = start(source, destination)
    sender.finish({"kv": [0, 1]}, (0, 8), after=Recorded())
    source.manager.close()
    assert not len(source.manager.side._later)


def test_steps_of_one_owner_keep_their_order_and_hold_up_no_other():
    later, taken = Later(Threads()), []
    events = [Recorded() for _ in range(3)]
    for owner, number in (("a", 0), ("a", 1), ("b", 2)):
        later.run(owner, events[number], lambda error, number=number: taken.append(number))
    later.run("a", None, lambda error: taken.append("last"))
    events[1].done = events[2].done = True
    wait(lambda: taken == [2])
    events[0].done = True
    wait(lambda: len(taken) == 4)
    assert taken == [2, 0, 1, "last"]


class NoThreads:
    """Threads of a process that has as many as it may."""

    full = True

    def start(self, work, name):
        if self.full:
            raise RuntimeError("can't start new thread")
        threading.Thread(target=work, name=name, daemon=True).start()


def test_an_event_that_cannot_be_asked_at_first_is_told_to_its_step():
    event, told = Recorded(), []
    event.error = ValueError("captured")
    later = Later(NoThreads())
    later.run("room", event, told.append)
    assert told == [event.error]
    assert len(later) == 0


def test_a_thread_that_cannot_be_started_holds_up_nothing_that_comes_later():
    threads, event, told = NoThreads(), Recorded(), []
    later = Later(threads)
    with pytest.raises(RuntimeError, match="new thread"):
        later.run("room", event, told.append)
    assert len(later) == 0
    threads.full = False
    later.run("other", event, told.append)
    event.done = True
    wait(lambda: told == [None], "the step")
