"""An observer that writes everything down."""

import inspect
import threading
from typing import NamedTuple

from kvbaton.observe import Observer
from kvbaton.observe.base import ObservedRoom


def settle(world):
    """Wait until what engines see of their rooms was told to observers too: they hear of it a moment later."""
    for rank in world.ranks:
        over = threading.Event()
        rank.manager._control.post(over.set)
        # A closed manager has told everything.
        assert not rank.manager._control._thread.is_alive() or over.wait(10)


class Event(NamedTuple):
    name: str
    thread: str
    subject: object
    """The room or the rank."""
    more: tuple


class Heard(Observer):
    def __init__(self):
        self.events = []

    def of_room(self, number, side=None):
        """The names of what was heard of a room, in order."""
        return [
            each.name
            for each in self.events
            if isinstance(each.subject, ObservedRoom) and each.subject.number == number
            if side in (None, each.subject.side)
        ]

    def rooms(self, side):
        """The records of all rooms of a side, in the order in which they were opened."""
        return [each.subject for each in self.events if each.name == "room_opened" and each.subject.side == side]

    def named(self, *names):
        return [each for each in self.events if each.name in names]


def _hear(name):
    def method(self, subject, *more):
        self.events.append(Event(name, threading.current_thread().name, subject, more))

    return method


for name, value in list(vars(Observer).items()):
    if inspect.isfunction(value):
        setattr(Heard, name, _hear(name))
