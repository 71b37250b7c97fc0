"""Clients of the registry: over HTTP, and inside one process."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable

import msgspec

from kvbaton.errors import ConfigurationError, RegistryError
from kvbaton.registry.base import Registration, RegistryClient, RegistryRefused, Topology
from kvbaton.registry.table import RegistryTable

__all__ = ["HttpRegistry", "MemoryRegistry", "Registration", "RegistryClient", "RegistryRefused", "Topology"]

_MAX_ANSWER = 256 << 20


class MemoryRegistry(RegistryClient):
    """A registry inside this process, for tests, examples and single-process runs; thread-safe."""

    def __init__(self, ttl: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = RegistryTable(ttl)
        self._clock = clock
        self._lock = threading.Lock()

    def register(self, registration: Registration) -> None:
        """See `RegistryClient.register`."""
        with self._lock:
            self._table.register(registration, self._clock())

    def heartbeat(self, instance: str) -> bool:
        """See `RegistryClient.heartbeat`."""
        with self._lock:
            return self._table.heartbeat(instance, self._clock())

    def remove(self, instance: str) -> None:
        """See `RegistryClient.remove`."""
        with self._lock:
            self._table.remove(instance, self._clock())

    def topology(self, deployment: str = "default") -> Topology:
        """See `RegistryClient.topology`."""
        with self._lock:
            return self._table.topology(deployment, self._clock())


class HttpRegistry(RegistryClient):
    """A client of `kvbaton.registry.server`, on the standard library alone.

    ``url`` is like ``http://host:port``. Each call takes at most about ``timeout`` seconds for each network step.
    Proxies that the environment names are not used: the registry is a neighbour, and a proxy would lead the ranks of
    one deployment to different places. Raises `ConfigurationError` for a url that cannot be used.
    """

    def __init__(self, url: str, timeout: float = 5.0) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout
        try:
            parts = urllib.parse.urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.query or parts.fragment or parts.username is not None:
            raise ConfigurationError(f"registry url {url!r} cannot be used: pass one like http://host:port")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def register(self, registration: Registration) -> None:
        """See `RegistryClient.register`."""
        self._call("PUT", "/v1/ranks", msgspec.json.encode(registration))

    def heartbeat(self, instance: str) -> bool:
        """See `RegistryClient.heartbeat`."""
        return self._call("POST", f"/v1/ranks/{_quoted(instance)}/heartbeat", missing_is_none=True) is not None

    def remove(self, instance: str) -> None:
        """See `RegistryClient.remove`."""
        self._call("DELETE", f"/v1/ranks/{_quoted(instance)}", missing_is_none=True)

    def topology(self, deployment: str = "default") -> Topology:
        """See `RegistryClient.topology`."""
        path = f"/v1/topology?deployment={_quoted(deployment)}"
        body = self._call("GET", path) or b""
        try:
            return msgspec.json.decode(body, type=Topology)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise RegistryError(
                f"{self.url}{path}: the answer is not a topology ({error}); is this a registry?"
            ) from error

    def _call(
        self, method: str, path: str, body: bytes | None = None, *, missing_is_none: bool = False
    ) -> bytes | None:
        url = self.url + path
        headers = {"Content-Type": "application/json"} if body is not None else {}
        request = urllib.request.Request(url, data=body, method=method, headers=headers)
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                content: bytes = answer.read(_MAX_ANSWER + 1)
                cut_by = answer.length or 0
        except urllib.error.HTTPError as error:
            with error:
                reason, ours = _reason(error)
            if missing_is_none and ours and error.code == 404:
                return None
            kind = RegistryRefused if ours and error.code < 500 else RegistryError
            raise kind(f"{method} {url}: refused with {error.code}: {reason}") from None
        except TimeoutError as error:
            raise RegistryError(f"{method} {url}: no answer in {self._timeout:g} s") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise RegistryError(f"{method} {url}: no answer in {self._timeout:g} s") from error
            raise RegistryError(f"{method} {url}: cannot be reached: {error.reason}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RegistryError(f"{method} {url}: the connection broke: {error!r}") from error
        if len(content) > _MAX_ANSWER:
            raise RegistryError(f"{method} {url}: the answer has more than {_MAX_ANSWER} bytes")
        if cut_by:
            raise RegistryError(f"{method} {url}: the connection broke: the answer lacks its last {cut_by} bytes")
        return content


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A registry does not send its ranks elsewhere: a redirect is an error like any other status."""

    def redirect_request(self, *arguments: object) -> None:
        """Follow nothing."""


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="")


def _reason(error: urllib.error.HTTPError) -> tuple[str, bool]:
    """Return the reason in an error answer, and whether it has the registry's own form."""
    try:
        body = error.read(65536)
    except (OSError, http.client.HTTPException):
        return error.reason, False
    try:
        return msgspec.json.decode(body, type=dict[str, dict[str, str]])["error"]["message"], True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return f"{error.reason} {body[:200]!r}", False
