"""The table of rooms by itself: a number is free again when its room is both closed and released."""

from dataclasses import dataclass

import pytest

from kvbaton import errors
from kvbaton.runtime.rooms import Room
from kvbaton.runtime.table import RoomTable


@dataclass
class Held:
    room: Room
    opened: bool = True


@pytest.fixture
def table():
    return RoomTable("decode", "receiver")


@pytest.mark.parametrize("order", [("close", "release"), ("release", "close")])
def test_the_later_of_close_and_release_frees_the_number(table, order):
    held = Held(Room(3))
    table.add(held)
    for event in order:
        with pytest.raises(errors.RoomError, match=r"decode: room 3 is in use \(waiting\); close its receiver"):
            table.add(Held(Room(3)))
        if event == "close":
            held.room.closed = True
        else:
            held.room.show_released()
        table.remove_if_over(held)
    assert (len(table), table.get(3)) == (0, None)


def test_an_earlier_life_does_not_free_the_number_of_a_later_one(table):
    old, new = Held(Room(3)), Held(Room(3))
    old.room.closed = True
    old.room.show_released()
    table.add(new)
    table.remove_if_over(old)
    assert table.entries() == [new]
    assert table.held_by(old.room) is None


def test_what_the_engine_holds(table):
    held = Held(Room(3))
    with pytest.raises(errors.RoomError, match="room 3 was closed; ask the manager for a new receiver"):
        table.open_by(held.room)
    table.add(held)
    assert table.open_by(held.room) is table.held_by(held.room) is held
    assert table.held_by(Room(3)) is None
    held.room.closed = True
    assert table.held_by(held.room) is None
    with pytest.raises(errors.RoomError, match="was closed"):
        table.open_by(held.room)
