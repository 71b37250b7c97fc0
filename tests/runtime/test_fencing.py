"""Lost peers by themselves: tried at the right times, forgotten once and for the right reason."""

import pytest

from kvbaton.runtime.fencing import LostPeers


class Fence:
    """A transport's fence that gives the answers it was given, and notes who was asked for."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def fence(self, instance):
        self.asked.append(instance)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_tried_again_until_it_is_proven():
    lost, transport = LostPeers(0.5), Fence(False, False, True)
    assert lost.next_try() is None
    lost.add("out:a", "one", transport)
    assert lost.next_try() == 0.0
    assert lost.fence(10.0) == []
    assert (lost.fence(10.4), len(transport.asked)) == ([], 1)
    assert lost.next_try() == 10.5
    assert lost.fence(10.5) == []
    assert lost.fence(11.0) == ["out:a"]
    assert transport.asked == ["one"] * 3
    assert (len(lost), lost.next_try()) == (0, None)


def test_an_error_proves_nothing_and_is_logged_once(caplog):
    lost = LostPeers(0.5)
    lost.add("out:a", "one", Fence(OSError("no"), OSError("no"), True))
    assert [lost.fence(float(now)) for now in range(3)] == [[], [], ["out:a"]]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.parametrize(("may_write", "kept"), [((), []), (("out:a",), ["out:a"]), (("out:b",), ["out:b"])])
def test_a_rank_that_lives_is_forgiven_where_no_room_waits(may_write, kept):
    lost = LostPeers(0.5)
    for peer, instance in (("out:a", "one"), ("out:b", "one"), ("out:c", "other")):
        lost.add(peer, instance, Fence(True))
    lost.forgive("one", lambda peer: peer in may_write)
    assert lost.waits_for("one") == bool(kept)
    assert lost.waits_for("other")
    assert lost.fence(1.0) == [*kept, "out:c"]
