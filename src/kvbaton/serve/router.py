"""The command that starts sglang-router over prefill and decode servers.

What the flags are for, found with sglang-router 0.3.2:

* ``--worker-startup-check-interval 1``: servers are looked for each second, instead of each 30.
* ``--disable-circuit-breaker``: failures of some requests must not close the only pair of servers for a minute.
* ``--retry-max-retries``: a failed hand-over (5xx) is tried again with a new room, if it had not begun to answer. The
  number counts all tries.
* ``--request-timeout-secs``: the router waits for both sides, also when one has failed already: a side that is frozen
  would hold its requests for half an hour.
* ``--health-check-interval-secs 1``, ``--health-failure-threshold 2``: a dead server is asked nothing more after
  two seconds. Until then each request that meets it waits for its other side: see `kvbaton.serve.refusals`.
* ``--prometheus-port``: always taken; its default (29000) allows one router on a host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from kvbaton.errors import ConfigurationError

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def router_command(
    prefills: Sequence[tuple[str, int]],
    decodes: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int,
    metrics_port: int,
    policy: str = "round_robin",
    retries: int = 3,
    startup_seconds: int = 600,
    request_seconds: int = 600,
    shutdown_seconds: int = 10,
    log_level: str = "warn",
    extra: Sequence[str] = (),
) -> list[str]:
    """Return the router's command line for prefill servers ``(url, bootstrap_port)`` and decode urls.

    Raises `ConfigurationError` if sglang-router is not installed, or if one side has no server.
    """
    if find_spec("sglang_router") is None:
        raise ConfigurationError("the router needs sglang-router: install kvbaton[serve]")
    if not prefills or not decodes:
        raise ConfigurationError(f"the router has {len(prefills)} prefill and {len(decodes)} decode urls: pass some")
    servers: list[str] = []
    for url, bootstrap_port in prefills:
        servers += ["--prefill", url, str(bootstrap_port)]
    for url in decodes:
        servers += ["--decode", url]
    return [
        *(sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"),
        *servers,
        *("--host", host, "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--policy", policy),
        *("--worker-startup-check-interval", "1", "--worker-startup-timeout-secs", str(startup_seconds)),
        *("--retry-max-retries", str(retries), "--disable-circuit-breaker"),
        *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "5"),
        *("--health-failure-threshold", "2", "--health-success-threshold", "1"),
        *("--request-timeout-secs", str(request_seconds)),
        *("--shutdown-grace-period-secs", str(shutdown_seconds)),
        *("--log-level", log_level),
        *extra,
    ]


def router_environment() -> dict[str, str]:
    """Return this process's environment without proxies: the router would send the servers' requests through them."""
    kept = {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
    return {"NO_COLOR": "1", **kept}
