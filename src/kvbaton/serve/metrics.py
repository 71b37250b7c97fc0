"""What a prefill or a decode server shows at ``/metrics``, and who else watches its managers."""

from __future__ import annotations

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


def add_service(metrics: Metrics, service: Service) -> None:
    """Show how many requests the server answers too."""
    metrics.registry.register(_Requests(service))


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
