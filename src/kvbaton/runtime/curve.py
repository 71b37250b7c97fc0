"""Control connections between ranks that share a secret: encrypted and authenticated by CurveZMQ.

Each secret gives two key pairs: one that listeners have, and one that diallers have. So a handshake succeeds only
between two sides that know the same secret, and everything after it is encrypted and authenticated.
"""

from __future__ import annotations

import hmac
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from kvbaton.errors import ConfigurationError
from kvbaton.secret import VARIABLE, Secret

OVERHEAD = 64
"""Bytes that the encryption adds to a frame, at most."""
_DOMAIN = b"kvbaton"
_ZAP = "inproc://zeromq.zap.01"
"""Where a listening socket asks whether a key is let in; fixed by ZeroMQ."""
_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


class KeyPair(NamedTuple):
    """A key pair, as ZeroMQ takes it."""

    public: bytes
    private: bytes

    def __repr__(self) -> str:
        return "KeyPair(...)"


class Keys(NamedTuple):
    """The key pairs of one secret."""

    listener: KeyPair
    dialler: KeyPair


def keys_of(secret: Secret | None) -> tuple[Keys, ...]:
    """The keys of each secret, in order of preference; none without a secret.

    Raises `ConfigurationError` if this ZeroMQ was built without CURVE.
    """
    if secret is None:
        return ()
    if not zmq.has("curve"):
        raise ConfigurationError("secret: this pyzmq was built without CURVE; install pyzmq from its wheel")
    halves = (secret.keys("control listener"), secret.keys("control dialler"))
    return tuple(Keys(_pair(listener), _pair(dialler)) for listener, dialler in zip(*halves, strict=True))


def secure_dialler(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Let ``socket`` connect only to a listener that has the same secret."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.listener.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.dialler.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.dialler.private)


class Doorkeeper:
    """Lets ``router`` take connections only of diallers that have one of the secrets.

    ``socket`` is to be polled; call `answer` when it is readable. To be made before the router is bound.
    """

    def __init__(self, context: zmq.Context[Any], router: zmq.Socket[bytes], keys: tuple[Keys, ...]) -> None:
        self._diallers = [z85.decode(each.dialler.public) for each in keys]
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, keys[0].listener.private)
        router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        # Without an answer nobody comes in; by default everybody would.
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def answer(self) -> None:
        """Say to each connection that waits whether it may come in."""
        while True:
            try:
                asked = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            known = len(asked) == 7 and asked[2] == _DOMAIN and asked[5] == b"CURVE" and self._knows(asked[6])
            number = asked[1] if len(asked) > 1 else b""
            status = (b"200", b"OK") if known else (b"400", b"unknown key")
            self.socket.send_multipart([b"1.0", number, *status, b"", b""])

    def close(self) -> None:
        """Close the socket."""
        self.socket.close(0)

    def _knows(self, key: bytes) -> bool:
        return sum(hmac.compare_digest(key, dialler) for dialler in self._diallers) > 0


class Refusal(NamedTuple):
    """Why a handshake failed, and whether that was for the secret."""

    reason: str
    for_secret: bool


def refusal(event: int, value: int, *, have_secret: bool) -> Refusal:
    """What a failed handshake means for the side that dialled, from the monitor's event."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Refusal("it does not know our key", True)
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MISMATCH:
        if have_secret:
            return Refusal(f"it has no secret, and we have one: set {VARIABLE} on both sides, or on neither", True)
        return Refusal(f"it wants a secret, and we have none: set {VARIABLE} here too", True)
    # It found out first, and hung up without a word.
    if have_secret:
        return Refusal(f"it has another secret, or none: set {VARIABLE} to the same on both sides", True)
    return Refusal(
        f"it hung up in the middle of the handshake: it may want a secret ({VARIABLE}), and we have none", False
    )


def breach(event: int, value: int, *, have_secret: bool) -> str:
    """What a failed handshake, or a frame that cannot be decrypted, means for the side that listens."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MISMATCH:
        return "it has no secret" if have_secret else "it has a secret, and we have none"
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "its key is unknown"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "it has another secret, or its bytes were changed on their way"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "it does not speak like a rank of kvbaton"
    return "it hung up in the middle of the handshake"


FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Events of a monitor to look at."""


def _pair(private: bytes) -> KeyPair:
    encoded = z85.encode(private)
    return KeyPair(zmq.curve_public(encoded), encoded)
