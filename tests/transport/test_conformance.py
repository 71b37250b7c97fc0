"""Every promise of the transport contract, on every transport that needs no device, with both ends in this process."""

import pytest

from kvbaton.transport import create
from kvbaton.transport.conformance import Conformance, NotApplicable
from kvbaton.transport.tcp import TcpTransport


def replace_tcp(old, instance):
    port = old.port
    old.close()
    return TcpTransport(instance, bind=f"127.0.0.1:{port}")


SUITES = {
    "loopback": Conformance(lambda instance: create("loopback", instance=instance)),
    "shm": Conformance(lambda instance: create("shm", instance=instance)),
    "tcp": Conformance(lambda instance: create("tcp", instance=instance), replace=replace_tcp),
    "tcp-ipv6": Conformance(lambda instance: create("tcp", instance=instance, bind="::1")),
}


@pytest.mark.parametrize("check", Conformance.names())
@pytest.mark.parametrize("transport", SUITES)
def test_promise_is_kept(transport, check):
    try:
        SUITES[transport].run(check)
    except NotApplicable as missing:
        pytest.skip(f"{transport}: {missing}")
