"""Every promise of the transport contract, over the memory fabric, in each way of writing."""

import pytest

from kvbaton.transport.conformance import Conformance, NotApplicable
from kvbaton.transport.fabric.memory import MemoryFabric
from kvbaton.transport.fabric.transport import FabricTransport

SMALL = {"slabs": "16", "staging_slabs": "4", "slab_bytes": "1MiB"}


def suite(executor):
    fabrics = []

    def make(instance):
        fabrics.append(MemoryFabric(instance))
        return FabricTransport(instance, fabrics[-1], options={"executor": executor, **SMALL})

    made = Conformance(make)
    made.fabrics = fabrics
    return made


SUITES = {executor: suite(executor) for executor in ("packed", "direct", "auto")}


@pytest.mark.parametrize("check", Conformance.names())
@pytest.mark.parametrize("executor", SUITES)
def test_promise_is_kept_over_the_memory_fabric(executor, check):
    made = SUITES[executor]
    try:
        made.run(check)
    except NotApplicable as missing:
        pytest.skip(f"{executor}: {missing}")
    finally:
        misuses = [misuse for fabric in made.fabrics for misuse in fabric.misuses]
        made.fabrics.clear()
    assert not misuses
