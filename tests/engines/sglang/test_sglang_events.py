from __future__ import annotations

import threading

import pytest

from kvbaton.engines.sglang.events import AfterEvents


class Gate:
    """As an event of the GPU: happens when the test says so."""

    def __init__(self):
        self._event = threading.Event()

    def happen(self):
        self._event.set()

    def query(self):
        return self._event.is_set()

    def synchronize(self):
        assert self._event.wait(20)


class Broken(Gate):
    def synchronize(self):
        raise RuntimeError("the device is lost")


@pytest.fixture
def steps():
    made = AfterEvents("test-events")
    yield made
    made.close()


def never(reason):
    raise AssertionError(reason)


def test_without_events_a_step_runs_at_once_in_the_callers_thread(steps):
    ran = []
    steps.run("a", [], lambda: ran.append(threading.current_thread()), never)
    assert ran == [threading.current_thread()]


def test_an_event_that_has_happened_is_not_waited_for(steps):
    gate, ran = Gate(), []
    gate.happen()
    steps.run("a", [gate], lambda: ran.append(1), never)
    assert ran == [1]


def test_steps_of_one_owner_keep_their_order_and_others_pass(steps):
    gate, ran, done = Gate(), [], threading.Event()
    steps.run("a", [gate], lambda: ran.append("a1"), never)
    steps.run("a", [], lambda: (ran.append("a2"), done.set()), never)
    steps.run("b", [], lambda: ran.append("b1"), never)
    assert ran == ["b1"]
    gate.happen()
    assert done.wait(20)
    assert ran == ["b1", "a1", "a2"]


def test_after_its_steps_an_owner_is_served_at_once_again(steps):
    gate, done = Gate(), threading.Event()
    steps.run("a", [gate], done.set, never)
    gate.happen()
    assert done.wait(20)
    steps.close()
    ran = []
    steps.run("a", [], lambda: ran.append(threading.current_thread()), never)
    assert ran == [threading.current_thread()]


def test_an_event_that_cannot_be_waited_for_fails_its_step_only(steps):
    failures, ran, done = [], [], threading.Event()
    steps.run("a", [Broken()], lambda: ran.append("never"), failures.append)
    steps.run("a", [happened()], done.set, never)
    assert done.wait(20)
    assert ran == []
    assert failures == ["an event of the GPU could not be waited for: the device is lost"]


def happened():
    gate = Gate()
    gate.happen()
    return gate
