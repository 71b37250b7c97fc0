"""Requests to a registry and their answers, signed with the shared secret.

A request has a header ``Authorization: KVBaton TIME:NONCE:BODY:MAC``: the sender's clock in milliseconds, a random
nonce, the SHA-256 of the body, and an HMAC-SHA256 over these, the method and the path with its query. Its answer has
``KVBaton-Signature: MAC`` over the request's MAC, the status and the body: nobody else can have written it, and it
answers no other request. A refusal of a request that nobody can have signed has none.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import re
import secrets
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import NamedTuple

from kvbaton.errors import AuthenticationError
from kvbaton.secret import VARIABLE, Secret

CLOCK_SECONDS = 300.0
"""How far the clocks of a registry and its clients may differ."""
RESTART_SECONDS = 10.0
"""How far a client's clock may be behind when it writes to a registry that has only begun."""
MAX_NONCES = 1 << 17
"""Writes that a registry remembers, so that none is taken twice."""
ANSWER_HEADER = "KVBaton-Signature"

_SCHEME = "KVBaton "
_HEADER = re.compile(r"KVBaton ([0-9]{1,15}):([0-9a-f]{32}):([0-9a-f]{64}):([0-9a-f]{64})")
_PURPOSE = "registry"


class Signed(NamedTuple):
    """A request that was signed: the key, by which its answer is signed too, and what ties the answer to it."""

    key: bytes
    mac: bytes
    body_hash: str
    header: str = ""

    def __repr__(self) -> str:
        return "Signed(...)"

    def sign_answer(self, status: int, body: bytes) -> str:
        """The signature of the answer."""
        return _mac(self.key, "answer", self.mac.hex(), str(status), hashlib.sha256(body).hexdigest()).hex()

    def is_answer(self, status: int, body: bytes, signature: str | None) -> bool:
        """Whether ``signature`` is that of this answer."""
        expected = self.sign_answer(status, body).encode()
        return hmac.compare_digest(expected, (signature or "").encode("utf-8", "replace"))


class Signer:
    """Signs the requests of a client."""

    def __init__(self, secret: Secret, clock: Callable[[], float] = time.time) -> None:
        self._key = secret.keys(_PURPOSE)[0]
        self._clock = clock

    def sign(self, method: str, target: str, body: bytes) -> Signed:
        """Sign a request for ``target``, the path with its query; `Signed.header` is its ``Authorization``."""
        when, nonce = str(int(self._clock() * 1000)), secrets.token_hex(16)
        body_hash = hashlib.sha256(body).hexdigest()
        mac = _mac(self._key, "request", method, target, when, nonce, body_hash)
        return Signed(self._key, mac, body_hash, f"{_SCHEME}{when}:{nonce}:{body_hash}:{mac.hex()}")


class Refusal(AuthenticationError):
    """A request that is not believed. ``signed``: it knows the secret, so that the answer can be signed."""

    def __init__(self, kind: str, message: str, signed: Signed | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.signed = signed


class Verifier:
    """Tells requests that know one of the secrets from others, and takes each write once. Not thread-safe.

    What was taken is remembered for as long as its time would be believed. If that were more than ``max_nonces``, the
    oldest are forgotten, and nothing as old is believed any more.
    """

    def __init__(self, secret: Secret, clock: Callable[[], float] = time.time, max_nonces: int = MAX_NONCES) -> None:
        self._keys = secret.keys(_PURPOSE)
        self._clock = clock
        self._max_nonces = max_nonces
        self._taken: set[str] = set()
        self._by_time: list[tuple[float, str]] = []
        """A heap: the oldest comes first."""
        self._oldest = clock() - RESTART_SECONDS
        """Writes with an earlier time may have been taken before, and are refused."""

    def __len__(self) -> int:
        return len(self._taken)

    def check(self, method: str, target: str, header: str | None) -> Signed:
        """Believe a request, but for its body: that must have the hash `Signed.body_hash`. Raises `Refusal`."""
        if header is None:
            raise Refusal("SecretMissing", f"this registry wants a secret, and the request has none: set {VARIABLE}")
        match = _HEADER.fullmatch(header)
        if match is None:
            raise Refusal("SecretMissing", "this registry wants requests signed by kvbaton, and this one is not")
        when, nonce, body_hash, theirs = match.groups()
        said = bytes.fromhex(theirs)
        signed = None
        for key in self._keys:
            mac = _mac(key, "request", method, target, when, nonce, body_hash)
            if hmac.compare_digest(mac, said):
                signed = Signed(key, mac, body_hash)
        if signed is None:
            raise Refusal("SecretDiffers", f"the request was signed with another secret: set {VARIABLE} to the same")
        self._check_time(int(when) / 1000, signed)
        if method not in ("GET", "HEAD"):
            self._take(int(when) / 1000, nonce, signed)
        return signed

    def _check_time(self, when: float, signed: Signed) -> None:
        now = self._clock()
        if abs(when - now) > CLOCK_SECONDS:
            raise Refusal("ClockDiffers", _clocks(when, now, CLOCK_SECONDS), signed)

    def _take(self, when: float, nonce: str, signed: Signed) -> None:
        now = self._clock()
        while self._by_time and self._by_time[0][0] < now - CLOCK_SECONDS:
            self._forget_oldest()
        if nonce in self._taken:
            raise Refusal("Replayed", "this request was taken before; a new one needs a nonce of its own", signed)
        if when <= self._oldest:
            raise Refusal("ClockDiffers", _clocks(when, now, now - self._oldest), signed)
        self._taken.add(nonce)
        heapq.heappush(self._by_time, (when, nonce))
        if len(self._taken) > self._max_nonces:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        when, nonce = heapq.heappop(self._by_time)
        self._taken.discard(nonce)
        # Also where the clock is set back later on.
        self._oldest = max(self._oldest, when)


def _mac(key: bytes, *parts: str) -> bytes:
    # No part but the target can have a line break, and a target with one is no target.
    return hmac.digest(key, "\n".join(("kvbaton registry 1", *parts)).encode("utf-8", "surrogatepass"), "sha256")


def _clocks(when: float, now: float, limit: float) -> str:
    return (
        f"the sender's clock said {_date(when)} and the registry's says {_date(now)}, {abs(when - now):.1f} s apart; "
        f"it believes no more than {limit:.0f} s: set the clocks, or if they are right, ask again"
    )


def _date(when: float) -> str:
    try:
        return datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return f"{when:g}"
