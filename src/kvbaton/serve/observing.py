"""How a server is watched: what it shows at ``/metrics``, and the traces that its rooms belong to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from kvbaton.errors import ConfigurationError
from kvbaton.observe import Metrics, Observer
from kvbaton.serve.generation import Service


def server_metrics() -> Metrics:
    """Metrics of a server's managers and of its process, in a registry of their own."""
    registry = CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    prometheus_client.GCCollector(registry=registry)
    return Metrics(registry)


def server_observers(metrics: Metrics) -> list[Observer]:
    """Who watches the managers of a server: its metrics, and OpenTelemetry where it is installed.

    Spans go to the global tracer provider: nowhere, unless the process was started with an SDK.
    """
    try:
        from kvbaton.observe import Spans
    except ConfigurationError:
        return [metrics]
    return [metrics, Spans()]


@contextlib.contextmanager
def in_trace_of(headers: Mapping[str, str]) -> Iterator[None]:
    """Make the trace that a request's headers name the current one; does nothing without opentelemetry-api."""
    try:
        from opentelemetry import context, propagate
    except ImportError:
        yield
        return
    token = context.attach(propagate.extract(headers))
    try:
        yield
    finally:
        context.detach(token)


def add_service(metrics: Metrics, service: Service) -> None:
    """Show how many requests the server answers too."""
    metrics.registry.register(_Requests(service))


def add_metrics_of(metrics: Metrics, other: CollectorRegistry) -> None:
    """Show the metrics of another registry of metrics too."""
    metrics.registry.register(_Others(other))


class _Others(Collector):
    def __init__(self, other: CollectorRegistry) -> None:
        self._other = other

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self._other.collect()


class _Requests(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> list[Metric]:
        """Two numbers of the service."""
        running, served = self._service.running, self._service.served
        return [
            GaugeMetricFamily("kvbaton_server_requests_running", "Requests that are being answered.", value=running),
            CounterMetricFamily("kvbaton_server_requests", "Requests that were taken.", value=served),
        ]
