"""The client of a registry over HTTP."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection
from typing import TypeVar

import msgspec

from kvbaton.errors import ConfigurationError, RegistryError
from kvbaton.registry.base import (
    ErrorBody,
    FoundRooms,
    Problem,
    Registration,
    RegistryClient,
    RegistryRefused,
    RegistryUnauthorized,
    RegistryUnreachable,
    Topology,
    UnknownInstance,
)
from kvbaton.registry.signing import ANSWER_HEADER, Signer
from kvbaton.secret import VARIABLE, Secret, SecretLike

_MAX_ANSWER = 256 << 20

Answer = TypeVar("Answer")


class HttpRegistry(RegistryClient):
    """A client of `kvbaton.registry.server`, on the standard library alone.

    ``url`` is like ``http://host:port``. Each call takes at most about ``timeout`` seconds for each network step.
    Proxies that the environment names are not used: the registry is a neighbour, and a proxy would lead the ranks of
    one deployment to different places. ``secret`` is what it shares with the registry, by default what the environment
    says (`kvbaton.secret`): with one, requests are signed, and no answer is believed that the registry did not sign.
    Raises `ConfigurationError` for a url or a secret that cannot be used.
    """

    def __init__(self, url: str, timeout: float = 5.0, *, secret: SecretLike | None = None) -> None:
        self.url = url.rstrip("/")
        shared = Secret.of(secret)
        self._signer = None if shared is None else Signer(shared)
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

    def topology(self, deployment: str = "default", dp_rank: int | None = None) -> Topology:
        """See `RegistryClient.topology`."""
        path = f"/v1/topology?deployment={_quoted(deployment)}"
        if dp_rank is not None:
            path += f"&dp_rank={dp_rank}"
        return self.decoded(path, self._call("GET", path), Topology, "a topology")

    def announce_rooms(
        self, instance: str, opened: Collection[int], closed: Collection[int], ended: Collection[int] = ()
    ) -> dict[int, int]:
        """See `RegistryClient.announce_rooms`."""
        path = f"/v1/ranks/{_quoted(instance)}/rooms"
        said = msgspec.json.encode({"opened": list(opened), "closed": list(closed), "ended": list(ended)})
        body = self._call("POST", path, said, missing_is_none=True)
        if body is None:
            raise UnknownInstance(f"{self.url}: no rank with instance {instance!r} is registered: register again")
        return self.decoded(path, body, dict[str, dict[int, int]], "about rooms").get("held", {})

    def find_rooms(
        self, deployment: str, rooms: Collection[int], wait_seconds: float = 0.0, asker: str = ""
    ) -> FoundRooms:
        """See `RegistryClient.find_rooms`."""
        question = {"deployment": deployment, "rooms": list(rooms), "wait_seconds": wait_seconds, "asker": asker}
        path = "/v1/rooms/find"
        body = self._call("POST", path, msgspec.json.encode(question), patience=wait_seconds)
        return self.decoded(path, body, FoundRooms, "about rooms")

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes | None:
        """Ask what is served beside a registry, signed likewise; None if the answer is that nothing is there.

        Raises as the other methods do.
        """
        return self._call(method, path, body, missing_is_none=True)

    def decoded(self, path: str, body: bytes | None, kind: type[Answer], what: str) -> Answer:
        """The content of an answer. Raises `RegistryError` for one that is not ``what``."""
        try:
            return msgspec.json.decode(body or b"", type=kind)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise RegistryError(f"{self.url}{path}: the answer is not {what} ({error}); is this a registry?") from error

    def _call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        missing_is_none: bool = False,
        patience: float = 0.0,
    ) -> bytes | None:
        """Ask; the registry may take ``patience`` seconds longer than usual."""
        url = self.url + path
        timeout = self._timeout + patience
        headers = {"Content-Type": "application/json"} if body is not None else {}
        signed = None if self._signer is None else self._signer.sign(method, path, body or b"")
        if signed is not None:
            headers["Authorization"] = signed.header
        request = urllib.request.Request(url, data=body, method=method, headers=headers)
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                content: bytes = answer.read(_MAX_ANSWER + 1)
                cut_by = answer.length or 0
                status, signature = answer.status, answer.headers.get(ANSWER_HEADER)
        except urllib.error.HTTPError as error:
            with error:
                content, problem, reason = _problem(error)
            believed = signed is None or signed.is_answer(error.code, content, error.headers.get(ANSWER_HEADER))
            if error.code == 401 and problem is not None:
                raise RegistryUnauthorized(f"{method} {url}: refused: {reason}") from None
            if not believed and error.code < 500:
                raise self._unsigned(method, url) from None
            if missing_is_none and believed and problem is not None and error.code == 404:
                return None
            message = f"{method} {url}: refused with {error.code}: {reason}"
            if believed and problem is not None and error.code < 500:
                raise RegistryRefused(message, problem.returning_seconds) from None
            raise RegistryError(message) from None
        except TimeoutError as error:
            raise RegistryError(f"{method} {url}: no answer in {timeout:g} s") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise RegistryError(f"{method} {url}: no answer in {timeout:g} s") from error
            kind = RegistryUnreachable if isinstance(error.reason, ConnectionRefusedError) else RegistryError
            raise kind(f"{method} {url}: cannot be reached: {error.reason}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RegistryError(f"{method} {url}: the connection broke: {error!r}") from error
        if len(content) > _MAX_ANSWER:
            raise RegistryError(f"{method} {url}: the answer has more than {_MAX_ANSWER} bytes")
        if cut_by:
            raise RegistryError(f"{method} {url}: the connection broke: the answer lacks its last {cut_by} bytes")
        if signed is not None and not signed.is_answer(status, content, signature):
            raise self._unsigned(method, url)
        return content

    @staticmethod
    def _unsigned(method: str, url: str) -> RegistryUnauthorized:
        return RegistryUnauthorized(
            f"{method} {url}: the answer is not signed with our secret: the registry has no secret, or a stranger "
            f"answers there; set {VARIABLE} on the registry too"
        )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A registry does not send its ranks elsewhere: a redirect is an error like any other status."""

    def redirect_request(self, *arguments: object) -> None:
        """Follow nothing."""


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="")


def _problem(error: urllib.error.HTTPError) -> tuple[bytes, Problem | None, str]:
    """Return the body of an error answer, what it says where it has the registry's own form, and the reason."""
    try:
        body = error.read(65536)
    except (OSError, http.client.HTTPException):
        return b"", None, error.reason
    try:
        problem = msgspec.json.decode(body, type=ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body, None, f"{error.reason} {body[:200]!r}"
    return body, problem, problem.message
