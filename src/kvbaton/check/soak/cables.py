"""The cables of one rank: proxies in front of its control port and of its data ports, all cut and healed together."""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton.address import Endpoint
from kvbaton.check.soak.proxy import Proxy
from kvbaton.registry import HttpRegistry, Registration
from kvbaton.transport import Transport


class Cables:
    """Makes peers dial proxies instead of the ports themselves."""

    def __init__(self) -> None:
        self._proxies: dict[tuple[str, int], Proxy] = {}

    def port(self, host: str, port: int) -> int:
        """The port to tell peers, instead of this one."""
        if (host, port) not in self._proxies:
            self._proxies[host, port] = Proxy((host, port))
        return self._proxies[host, port].port

    def front(self, transport: Transport) -> Transport:
        """Put the port that a transport listens at behind a cable; nothing where it has none."""
        ports: Any = transport
        if hasattr(transport, "port") and hasattr(transport, "host"):
            ports.port = self.port(ports.host, ports.port)
        return transport

    def hold(self, *, inwards: bool = True, outwards: bool = True) -> None:
        """See `Proxy.hold`; ``inwards`` is towards this rank, on connections that its peers made."""
        for proxy in self._proxies.values():
            proxy.hold(inwards=inwards, outwards=outwards)

    def heal(self) -> None:
        """See `Proxy.heal`."""
        for proxy in self._proxies.values():
            proxy.heal()

    def reset(self) -> None:
        """See `Proxy.reset`."""
        for proxy in self._proxies.values():
            proxy.reset()

    def close(self) -> None:
        """End all proxies."""
        for proxy in self._proxies.values():
            proxy.close()


class CabledRegistry(HttpRegistry):
    """Registers a rank under the address of its cable."""

    def __init__(self, url: str, cables: Cables) -> None:
        super().__init__(url)
        self._cables = cables

    def register(self, registration: Registration) -> None:
        """See `RegistryClient.register`."""
        endpoint = Endpoint.parse(registration.endpoint.partition("://")[2])
        assert endpoint.port is not None
        cabled = Endpoint(endpoint.host, self._cables.port(endpoint.host, endpoint.port)).url
        super().register(msgspec.structs.replace(registration, endpoint=cabled))
