"""A port that shows a registry's metrics and nothing else, for those who do not share its secret."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fastapi import FastAPI

from kvbaton.registry.metrics import show_metrics
from kvbaton.registry.server import BackgroundServer


@contextlib.contextmanager
def metrics_port(app: FastAPI, host: str, port: int) -> Iterator[int]:
    """Serve the metrics of the registry's ``app``, and nothing else, at a port of their own; gives it (0: a free one).

    Strangers may reach it: a connection that asks nothing is closed in time, as at the registry itself. Raises
    `ConfigurationError` for an address that cannot be used.
    """
    alone = FastAPI(title="kvbaton metrics", docs_url=None, redoc_url=None, openapi_url=None)
    show_metrics(alone, app.state.metrics)
    with BackgroundServer(alone, host, port) as server:
        yield server.port
