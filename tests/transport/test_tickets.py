"""Each ticket ends once and is reported once."""

import pytest

from kvbaton.errors import TransportError
from kvbaton.transport.tickets import Tickets


def test_a_ticket_ends_once():
    tickets = Tickets()
    tickets.open(1)
    tickets.end(1, "broken")
    tickets.end(1)
    tickets.end(2)
    assert [tuple(completion) for completion in tickets.drain()] == [(1, "broken")]
    assert tickets.drain() == []
    assert tickets.outstanding == 0


def test_an_outstanding_number_cannot_be_used_again():
    tickets = Tickets()
    tickets.open(1)
    with pytest.raises(TransportError, match="ticket 1 is outstanding"):
        tickets.open(1)


def test_a_waker_that_comes_late_is_called_for_what_waits():
    tickets, calls = Tickets(), []
    tickets.open(1)
    tickets.set_waker(lambda: calls.append("early"))
    assert calls == []
    tickets.end(1)
    assert calls == ["early"]
    tickets.set_waker(lambda: calls.append("late"))
    assert calls == ["early", "late"]


def test_after_close_nothing_opens_but_what_is_open_can_end():
    tickets = Tickets()
    tickets.open(1)
    tickets.close()
    with pytest.raises(TransportError, match="closed"):
        tickets.open(2)
    tickets.end(1, "closed")
    assert len(tickets.drain()) == 1
