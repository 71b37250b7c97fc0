"""The registry's own metrics, at ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import prometheus_client
from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OTHER = "other"
"""The label of a path, and of a method, that is not served."""
METHODS = frozenset({"DELETE", "GET", "POST", "PUT"})

_GAUGES = {
    "ranks": "Ranks that are registered and live.",
    "deployments": "Deployments with at least one rank.",
    "rooms": "Rooms that data-parallel replicas have announced.",
}


def add_metrics(app: FastAPI, sizes: Callable[[], Mapping[str, int]]) -> None:
    """Serve ``/metrics`` and count the requests of ``app``; the metrics are also at ``app.state.metrics``.

    ``sizes`` gives how many ranks, deployments and rooms there are; it is asked at each scrape.
    """
    metrics = CollectorRegistry()
    app.state.metrics = metrics
    metrics.register(_Sizes(sizes))
    requests = prometheus_client.Counter(
        "kvbaton_registry_requests",
        "Requests that were answered, by route and status.",
        ("method", "route", "status"),
        registry=metrics,
    )
    app.add_middleware(_Counting, requests=requests)
    show_metrics(app, metrics)


def show_metrics(app: FastAPI, metrics: CollectorRegistry) -> None:
    """Let ``app`` show ``metrics`` at ``/metrics``."""

    @app.get("/metrics")
    async def show() -> Response:
        text = prometheus_client.generate_latest(metrics)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


class _Sizes(Collector):
    def __init__(self, sizes: Callable[[], Mapping[str, int]]) -> None:
        self._sizes = sizes

    def collect(self) -> list[Metric]:
        sizes = self._sizes()
        return [
            GaugeMetricFamily(f"kvbaton_registry_{name}", text, value=sizes[name]) for name, text in _GAUGES.items()
        ]


class _Counting:
    """Counts what the app inside it answers. Labels are the app's own routes, never a path that a client made up."""

    def __init__(self, app: ASGIApp, requests: prometheus_client.Counter) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # An app that raises is answered with a 500 further out.
        status = 500

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            route: Any = scope.get("route")
            method = scope["method"] if scope["method"] in METHODS else OTHER
            self._requests.labels(method, OTHER if route is None else route.path, str(status)).inc()
