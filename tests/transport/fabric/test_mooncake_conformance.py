"""Every promise of the transport contract, over Mooncake's engine and TCP, in each way of writing."""

import pytest
from mooncake_process import MISSING, TCP

from kvbaton.transport.conformance import Conformance, NotApplicable
from kvbaton.transport.fabric.mooncake.adapter import MooncakeFabric
from kvbaton.transport.fabric.transport import FabricTransport

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def suite(executor):
    return Conformance(
        lambda instance: FabricTransport(
            instance, MooncakeFabric(instance, options=TCP), options={"executor": executor}
        )
    )


SUITES = {executor: suite(executor) for executor in ("packed", "direct", "auto")}


@pytest.mark.parametrize("check", Conformance.names())
@pytest.mark.parametrize("executor", SUITES)
def test_promise_is_kept_over_mooncake(executor, check):
    try:
        SUITES[executor].run(check)
    except NotApplicable as missing:
        pytest.skip(f"{executor}: {missing}")
