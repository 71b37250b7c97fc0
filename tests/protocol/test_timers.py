import hypothesis.strategies as st
from hypothesis import given

from kvbaton.protocol.epochs import MAX_GAPS, SeenEpochs
from kvbaton.protocol.timers import Timers


@given(
    st.lists(st.tuples(st.sampled_from(["set", "cancel", "due"]), st.integers(0, 5), st.integers(0, 20)), max_size=60)
)
def test_timers_agree_with_a_plain_table(steps):
    timers, table = Timers(), {}
    for step, key, when in steps:
        if step == "set":
            timers.set(key, float(when))
            table[key] = float(when)
        elif step == "cancel":
            timers.cancel(key)
            table.pop(key, None)
        else:
            due = timers.due(float(when))
            assert sorted(due) == sorted(key for key, time in table.items() if time <= when)
            assert [table[key] for key in due] == sorted(table[key] for key in due)
            table = {key: time for key, time in table.items() if time > when}
        assert timers.next() == min(table.values(), default=None)
        assert len(timers) == len(table)
        # What was cancelled does not pile up.
        assert len(timers._heap) <= 2 * len(table)


@given(st.lists(st.integers(1, 30), max_size=60))
def test_epochs_count_once_in_any_order(epochs):
    seen, table = SeenEpochs(), set()
    for epoch in epochs:
        assert (epoch in seen) == (epoch in table)
        assert seen.add(epoch) == (epoch not in table)
        table.add(epoch)


@given(st.permutations(range(1, 20)))
def test_epochs_without_a_gap_take_no_memory(epochs):
    seen = SeenEpochs()
    for epoch in epochs:
        seen.add(epoch)
    assert len(seen) == 0
    assert all(epoch in seen for epoch in range(1, 20))
    assert 20 not in seen


def test_epochs_far_ahead_are_bounded():
    seen = SeenEpochs()
    assert all(seen.add(2 * number) for number in range(1, 2 * MAX_GAPS + 1))
    assert len(seen) == MAX_GAPS
    # Those that are so far behind count as seen; each of the others still counts once.
    assert not seen.add(1)
    assert seen.add(4 * MAX_GAPS - 1)
    assert not seen.add(4 * MAX_GAPS - 1)


def test_one_epoch_that_was_lost_does_not_stand_in_the_way_for_ever():
    seen = SeenEpochs()
    assert all(seen.add(epoch) for epoch in range(2, 3 * MAX_GAPS))
    assert len(seen) < MAX_GAPS
    assert not seen.add(1)
