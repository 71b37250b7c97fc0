"""Every promise of the transport contract, on the cuda transport over a fake device: host memory stands for a GPU's.

Each end has a driver of its own, as two processes have; and both have the same one, as two ranks of a process have.
"""

import pytest
from fake_memory import DeviceMemory

from kvbaton.cuda.fake import FakeDriver, FakeMachine
from kvbaton.transport.conformance import Conformance, NotApplicable
from kvbaton.transport.cuda.transport import CudaTransport


@pytest.fixture(params=["two processes", "one process"])
def suite(request):
    machine = FakeMachine()
    drivers = []

    def make(instance):
        if not drivers or request.param == "two processes":
            drivers.append(FakeDriver(machine))
        return CudaTransport(instance, driver=drivers[-1])

    yield Conformance(make, memory=lambda nbytes, shared: DeviceMemory(machine, nbytes))
    assert machine.misuses == []
    assert machine.mapped == 0, "memory is left, or mapped"
    assert [(driver.opened, driver.exported) for driver in drivers] == [(0, 0)] * len(drivers)


@pytest.mark.parametrize("check", Conformance.names())
def test_promise_is_kept_over_a_fake_device(suite, check):
    try:
        suite.run(check)
    except NotApplicable as missing:
        pytest.skip(f"cuda: {missing}")
