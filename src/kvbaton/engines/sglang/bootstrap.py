"""SGLang's bootstrap server, with kvbaton's registry below a path of the same port."""

from __future__ import annotations

import time

from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from kvbaton.engines.sglang.mounted import mount
from kvbaton.registry.server import make_app
from kvbaton.registry.table import RegistryTable
from kvbaton.secret import Secret, check_exposure

REGISTRY_PATH = "/kvbaton"
TTL_SECONDS = 30.0
"""How long a silent rank is kept: a scheduler that captures graphs does not let other threads run for a while."""


class KvbatonKVBootstrapServer(BaseKVBootstrapServer):
    """Serves from its constructor on, as SGLang expects of it.

    It is not a `CommonKVBootstrapServer` itself: SGLang's server in Rust takes the place of those, and does not serve
    kvbaton's registry. Raises `ConfigurationError` for a ``host`` that strangers reach without a secret
    (docs/security.md).
    """

    def __init__(self, host: str, port: int) -> None:
        secret = Secret.of(None)
        check_exposure("bootstrap server", (host,), secret, insecure=False)
        self._server = _Server(host, port, secret)

    def close(self) -> None:
        """Stop serving."""
        self._server.close()


class _Server(CommonKVBootstrapServer):
    def __init__(self, host: str, port: int, secret: Secret | None) -> None:
        self._secret = secret
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        super()._setup_routes()
        # Generations go on growing when the server is restarted in the same place.
        table = RegistryTable(TTL_SECONDS, generation=time.time_ns() // 1_000_000)
        mount(self.app, REGISTRY_PATH, make_app(table, secret=self._secret))


def registry_url(address: str) -> str:
    """Where kvbaton's registry is at the bootstrap server ``address`` ("host:port")."""
    return f"http://{address}{REGISTRY_PATH}"
