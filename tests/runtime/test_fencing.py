"""Lost peers by themselves: tried at the right times, forgotten once and for the right reason."""

from types import SimpleNamespace

import pytest

from kvbaton.runtime.fencing import Greeting, LostPeers
from kvbaton.transport import Capabilities


def greeting(connection=1):
    return Greeting("tcp://there:1", SimpleNamespace(connection=connection))


class Fence:
    """A transport's fence that gives the answers it was given, and notes who was asked for."""

    def __init__(self, *answers, lets_go=False):
        self.capabilities = Capabilities(True, False, frozenset(), False, lets_go=lets_go)
        self.answers, self.asked = list(answers), []

    def fence(self, instance):
        self.asked.append(instance)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def fenced(lost, now):
    return [each.peer for each in lost.fence(now)]


def test_tried_again_until_it_is_proven():
    lost, transport = LostPeers(0.5), Fence(False, False, True)
    assert lost.next_try() is None
    lost.add("out:a", "one", transport, greeting())
    assert lost.next_try() == 0.0
    assert fenced(lost, 10.0) == []
    assert (fenced(lost, 10.4), len(transport.asked)) == ([], 1)
    assert lost.next_try() == 10.5
    assert fenced(lost, 10.5) == []
    assert fenced(lost, 11.0) == ["out:a"]
    assert transport.asked == ["one"] * 3
    assert (len(lost), lost.next_try()) == (0, None)


def test_an_error_proves_nothing_and_is_logged_once(caplog):
    lost = LostPeers(0.5)
    lost.add("out:a", "one", Fence(OSError("no"), OSError("no"), True), greeting())
    assert [fenced(lost, float(now)) for now in range(3)] == [[], [], ["out:a"]]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.parametrize(("may_write", "kept"), [((), []), (("out:a",), ["out:a"]), (("out:b",), ["out:b"])])
def test_a_rank_that_lives_is_forgiven_where_no_room_waits(may_write, kept):
    lost = LostPeers(0.5)
    for peer, instance in (("out:a", "one"), ("out:b", "one"), ("out:c", "other")):
        lost.add(peer, instance, Fence(True), greeting())
    lost.forgive("one", lambda peer: peer in may_write)
    assert lost.waits_for("one") == bool(kept)
    assert lost.waits_for("other")
    assert fenced(lost, 1.0) == [*kept, "out:c"]


def test_what_a_rank_let_go_of_is_proven_where_its_word_is_a_proof():
    lost = LostPeers(0.5)
    for number, peer in enumerate(("out:a", "out:b", "out:c")):
        lost.add(peer, "one", Fence(lets_go=peer != "out:c"), greeting(number))
    lost.add("out:d", "other", Fence(lets_go=True), greeting(0))
    assert lost.connections("one") == (0, 1, 2)
    assert sorted(lost.instances()) == ["one", "other"]
    assert lost.let_go("one", (0, 2, 7)) == ["out:a"]
    assert (lost.connections("one"), lost.connections("other")) == ((1, 2), (0,))


def test_a_rank_that_is_asked_is_not_fenced_meanwhile():
    lost, transport = LostPeers(0.5), Fence(True)
    lost.add("out:a", "one", transport, greeting())
    assert lost.fence(1.0, but_not={"one"}) == []
    assert transport.asked == []
    assert fenced(lost, 1.0) == ["out:a"]
