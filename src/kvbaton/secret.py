"""The secret that the ranks and registries of one deployment share: where it comes from, and what it is needed for.

Who knows it belongs to the deployment; who does not is a stranger. Nothing here prints it: not in a repr, not in an
error. What keys are made of it is the business of `kvbaton.runtime.curve` (control connections),
`kvbaton.registry.signing` (the registry) and `kvbaton.doctor.wire` (the doctor).
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Union

from kvbaton.address import is_loopback
from kvbaton.errors import ConfigurationError

logger = logging.getLogger(__name__)

VARIABLE = "KVBATON_SECRET"
"""Environment variable with the secret."""
FILE_VARIABLE = "KVBATON_SECRET_FILE"
"""Environment variable with the path of a file that has the secret."""
INSECURE_VARIABLE = "KVBATON_INSECURE"
"""Environment variable that allows ports beyond loopback without a secret, if it is 1."""
LEAST_BYTES = 16
MOST_BYTES = 4096
MOST_SECRETS = 4
"""Secrets that count at a time; more than two are hardly ever needed."""

_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1, "maxmem": 64 << 20}
"""What one guess costs who has recorded a handshake: some 50 ms and 16 MiB."""

SecretLike = Union["Secret", str, bytes, Sequence[str | bytes]]


class Secret:
    """One or more secrets of at least `LEAST_BYTES` bytes: the first is used, all are accepted.

    Several are for the time while a secret is replaced. Never shown: not by ``repr``, and not by pickling.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[bytes]) -> None:
        """``values`` in order of preference. Raises `ConfigurationError` for none, too many, and what is too short."""
        if not 1 <= len(values) <= MOST_SECRETS:
            raise ConfigurationError(f"secret: {len(values)} secrets are given; give 1 to {MOST_SECRETS}, one a line")
        for number, value in enumerate(values):
            if not LEAST_BYTES <= len(value) <= MOST_BYTES:
                raise ConfigurationError(
                    f"secret: secret {number + 1} of {len(values)} has {len(value)} bytes; it must have "
                    f"{LEAST_BYTES} to {MOST_BYTES}: make one with 'openssl rand -hex 32'"
                )
        self._values = tuple(values)

    @classmethod
    def of(cls, given: SecretLike | None, environment: Mapping[str, str] | None = None) -> Secret | None:
        """What was given, else what the environment has (`VARIABLE`, `FILE_VARIABLE`), else None.

        A text has one secret on each line; bytes are one secret as they are. Raises `ConfigurationError` for what
        cannot be used.
        """
        if given is None:
            return cls._from_environment(os.environ if environment is None else environment)
        if isinstance(given, Secret):
            return given
        if isinstance(given, str):
            return cls(_lines(given, "the text that was given"))
        if isinstance(given, (bytes, bytearray)):
            return cls([bytes(given)])
        if isinstance(given, (list, tuple)) and all(isinstance(each, (str, bytes)) for each in given):
            return cls([_encoded(each) if isinstance(each, str) else each for each in given])
        raise ConfigurationError(f"secret: pass text or bytes, or a list of them, not {type(given).__name__}")

    @classmethod
    def _from_environment(cls, environment: Mapping[str, str]) -> Secret | None:
        text, path = environment.get(VARIABLE), environment.get(FILE_VARIABLE)
        if text is not None and path is not None:
            raise ConfigurationError(f"secret: both {VARIABLE} and {FILE_VARIABLE} are set; unset one of them")
        if text is not None:
            return cls(_lines(text, VARIABLE))
        return None if path is None else cls(_lines(_content(path), f"the file {path} that {FILE_VARIABLE} names"))

    def __len__(self) -> int:
        return len(self._values)

    def keys(self, purpose: str) -> tuple[bytes, ...]:
        """A key of 32 bytes for each secret, for one purpose; keys of two purposes tell nothing of each other."""
        return tuple(
            hmac.digest(_stretched(value), b"kvbaton 1 " + purpose.encode(), "sha256") for value in self._values
        )

    def __repr__(self) -> str:
        return f"Secret({len(self._values)} not shown)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled: pass it on in the environment")


def insecure_allowed(allowed: bool, environment: Mapping[str, str] | None = None) -> bool:
    """Whether ports beyond loopback may do without a secret: by ``allowed``, or by the environment.

    Raises `ConfigurationError` for another value of `INSECURE_VARIABLE` than 0 and 1.
    """
    text = (os.environ if environment is None else environment).get(INSECURE_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ConfigurationError(f"{INSECURE_VARIABLE} is {text!r}; it must be 1 (ports need no secret) or 0")
    return allowed or text == "1"


def check_exposure(who: str, hosts: Sequence[str], secret: Secret | None, *, insecure: bool) -> None:
    """Refuse ``hosts``, those where ``who`` listens or that it tells peers, if strangers reach them, without a secret.

    Raises `ConfigurationError`, which says what to set. With ``insecure`` that is a warning, once for each ``who``.
    """
    exposed = [host for host in hosts if not is_loopback(host)]
    if secret is not None or not exposed:
        return
    if insecure_allowed(insecure):
        _warn_once(who, exposed[0])
        return
    raise ConfigurationError(
        f"{who}: {exposed[0]!r} can be reached from beyond this machine, and there is no secret to tell peers from "
        f"strangers: set {VARIABLE} (or {FILE_VARIABLE}, or pass secret=) to the same {LEAST_BYTES} bytes or more on "
        "every rank and registry, e.g. what 'openssl rand -hex 32' prints; or allow it: Settings(insecure=True), "
        f"--insecure, or {INSECURE_VARIABLE}=1"
    )


@functools.cache
def _warn_once(who: str, host: str) -> None:
    logger.warning("%s: %s can be reached from beyond this machine without a secret, as it was asked for", who, host)


@functools.lru_cache(maxsize=2 * MOST_SECRETS)
def _stretched(value: bytes) -> bytes:
    """The key that all others are made of. Kept: it costs what a guess costs."""
    return hashlib.scrypt(value, salt=b"kvbaton", dklen=32, **_SCRYPT)


def _content(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read((MOST_BYTES + 2) * MOST_SECRETS)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"secret: {FILE_VARIABLE} names {path!r}, which cannot be read: {reason}") from None
    try:
        return content.decode()
    except UnicodeDecodeError:
        # The error itself would show the bytes.
        pass
    raise ConfigurationError(f"secret: the file {path} is not text: write the secret as hexadecimal or base64")


def _lines(text: str, where: str) -> list[bytes]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigurationError(f"secret: {where} is empty; put a secret there, or unset it")
    return [_encoded(line) for line in lines]


def _encoded(text: str) -> bytes:
    # Never fails: the error would show the text.
    return text.encode("utf-8", "surrogatepass")
