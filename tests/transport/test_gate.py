"""Who may touch the memory, and when it is quiet."""

import threading

from kvbaton.transport.gate import REMEMBERED, Gate


def test_refused_is_kept_out_while_others_go_on():
    gate = Gate()
    gate.refuse("old")
    assert not gate.enter("old")
    assert gate.enter("new")
    assert gate.wait_quiet("old", 0)
    assert not gate.wait_quiet("new", 0)
    gate.leave("new")
    assert gate.wait_quiet("new", 0)


def test_a_write_in_progress_is_waited_for():
    gate = Gate()
    assert gate.enter("writer")
    assert gate.enter("writer")
    gate.refuse("writer")
    quiet = []
    waiter = threading.Thread(target=lambda: quiet.append(gate.wait_quiet("writer", 20)))
    waiter.start()
    gate.leave("writer")
    assert not gate.wait_quiet("writer", 0)
    gate.leave("writer")
    waiter.join()
    assert quiet == [True]
    assert not gate.enter("writer")


def test_a_readmitted_instance_comes_by_new_connections_only():
    gate = Gate()
    before = gate.refusals("writer")
    gate.refuse("writer")
    during = gate.refusals("writer")
    assert not gate.enter("writer", during)
    gate.readmit("writer")
    assert not gate.enter("writer", before)
    assert gate.enter("writer", during)
    gate.leave("writer")
    gate.refuse("writer")
    assert not gate.enter("writer", during)


def test_a_shut_gate_lets_nobody_in():
    gate = Gate()
    gate.shut()
    assert not gate.enter("anybody")
    assert gate.refuses("anybody")


def test_what_is_remembered_is_bounded():
    gate = Gate()
    for number in range(REMEMBERED + 10):
        gate.refuse(f"instance {number}")
    assert gate.enter("instance 9")
    assert not gate.enter("instance 10")
