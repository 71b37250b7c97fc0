"""The suite must find broken transports; each of these breaks one promise."""

import pytest

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.plan.boxes import Transfer
from kvbaton.transport.base import Completion
from kvbaton.transport.conformance import Conformance
from kvbaton.transport.loopback import LoopbackTransport


class DropsTheLastUnit(LoopbackTransport):
    def write(self, peer, transfers, ticket):
        super().write(
            peer, [Transfer(t.boxes, t.source_units[:-1], t.destination_units[:-1]) for t in transfers], ticket
        )


class SwapsUnits(LoopbackTransport):
    def write(self, peer, transfers, ticket):
        super().write(peer, [Transfer(t.boxes, t.source_units[::-1], t.destination_units) for t in transfers], ticket)


class ForgetsCasts(LoopbackTransport):
    """Moves the bytes of the source as they are, as many as fit."""

    def write(self, peer, transfers, ticket):
        super().write(peer, [t._replace(boxes=t.boxes._replace(cast=None)) for t in transfers], ticket)


class EndsTwice(LoopbackTransport):
    def poll(self):
        return [completion for completion in super().poll() for _ in range(2)]


class EndsByItself(LoopbackTransport):
    """Ends tickets as it likes."""

    def end(self, ticket):
        self.ended = [*getattr(self, "ended", []), Completion(ticket)]

    def poll(self):
        ended, self.ended = getattr(self, "ended", []), []
        return ended + [completion for completion in super().poll() if completion.ticket >= 0]


class EndsBeforeItLands(EndsByItself):
    def write(self, peer, transfers, ticket):
        self.delay = 0.02
        super().write(peer, transfers, -1 - ticket)
        self.end(ticket)


class NeverEnds(LoopbackTransport):
    def poll(self):
        return []


class FencesInNameOnly(LoopbackTransport):
    def fence(self, instance):
        return True


class ForgetsTicketsOnClose(LoopbackTransport):
    def close(self):
        super().close()
        super().poll()


class NeverWakes(LoopbackTransport):
    def set_waker(self, wake):
        pass


class TakesAnyDescriptor(LoopbackTransport):
    def admit(self, descriptor):
        pass


class TakesAnyMemory(LoopbackTransport):
    def register(self, regions):
        with_kind = [region._replace(kind="host") for region in regions]
        super().register(with_kind)


class SwallowsRefusals(EndsByItself):
    def write(self, peer, transfers, ticket):
        try:
            super().write(peer, transfers, ticket)
        except Exception:
            self.end(ticket)


class RefusesWhenBusy(LoopbackTransport):
    """A queue of eight, and no patience."""

    def write(self, peer, transfers, ticket):
        if self._tickets.outstanding >= 8:
            raise TransportError("the queue is full")
        super().write(peer, transfers, ticket)


class LosesTinyPieces(LoopbackTransport):
    """Has room for so many pieces in one write, and forgets the others."""

    def write(self, peer, transfers, ticket):
        cut = [Transfer(t.boxes, t.source_units[:4096], t.destination_units[:4096]) for t in transfers]
        super().write(peer, cut, ticket)


class CountsConnections(LoopbackTransport):
    """Has room for so many connections, and never takes any back."""

    def connect(self, descriptor):
        self.connected = getattr(self, "connected", 0) + 1
        if self.connected > 20:
            raise TransportUnavailable("too many connections")
        return super().connect(descriptor)


class ForgetsEarlierConnections(LoopbackTransport):
    """Knows one connection for each peer: the latest."""

    def connect(self, descriptor):
        for peer in list(self._peers):
            self.disconnect(peer)
        return super().connect(descriptor)


class CountsEmptyRegions(LoopbackTransport):
    """Leaves regions out that have no bytes, and counts wrong from there."""

    def register(self, regions):
        super().register([region for region in regions if region.nbytes])


BROKEN = {
    DropsTheLastUnit: {"visible_content", "strided_boxes", "many_units", "many_tickets", "concurrent_threads"},
    SwapsUnits: {"visible_content", "strided_boxes", "many_units"},
    ForgetsCasts: {"casts", "cast_bounds"},
    EndsTwice: {"visible_content", "poll_and_waker", "many_tickets"},
    EndsBeforeItLands: {"visible_content", "large_unit"},
    NeverEnds: {"visible_content", "disconnect", "close"},
    FencesInNameOnly: {"fence_of_a_writer"},
    ForgetsTicketsOnClose: {"close"},
    NeverWakes: {"poll_and_waker"},
    TakesAnyDescriptor: {"garbage_descriptor"},
    TakesAnyMemory: {"memory_out_of_reach"},
    RefusesWhenBusy: {"full_queues"},
    LosesTinyPieces: {"tiny_pieces", "many_units"},
    CountsConnections: {"reconnections"},
    ForgetsEarlierConnections: {"two_connections"},
    CountsEmptyRegions: {"empty_regions"},
    SwallowsRefusals: {"local_bounds", "remote_bounds"},
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_promise_is_found(broken):
    suite = Conformance(broken, timeout=0.5)
    for check in BROKEN[broken]:
        assert suite.outcome(check).status == "broken", check


def test_run_all_reports_every_check_and_never_raises():
    class Unavailable(LoopbackTransport):
        def connect(self, descriptor):
            raise TransportUnavailable("not on this machine")

    outcomes = Conformance(Unavailable).run_all()
    assert tuple(outcome.check for outcome in outcomes) == Conformance.names()
    content = next(outcome for outcome in outcomes if outcome.check == "visible_content")
    assert content.status == "broken"
    assert content.reason == "TransportUnavailable: not on this machine"
