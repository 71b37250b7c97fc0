"""``kvbaton doctor --serve``: waits for doctors of other machines that want to measure the way to this one.

Each visit is a process of its own, since a vendor's library may end it or never return: at most `VISITS` at a time, and
`VISIT_SECONDS` long. Who does not begin as a doctor does is turned away before a process is made for it; a doctor too
many is told so.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import subprocess
import sys
import threading
from collections import Counter

from kvbaton.address import Endpoint
from kvbaton.doctor import wire
from kvbaton.errors import AddressError
from kvbaton.secret import Secret, SecretLike, check_exposure

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8899
VISITS = 4
VISIT_SECONDS = 120.0
GREETING_SECONDS = 5.0
WAITING = 16
"""Connections that may be looked at or served at a time; others are told that it is busy."""
TURN_AWAY_SECONDS = 1.0
PAUSE_SECONDS = 0.2
"""How long nobody is taken after that failed."""


class DoctorServer:
    """Listens from the start; `run` serves until `close`.

    ``secret`` is what it shares with its visitors, by default what the environment says (`kvbaton.secret`). Raises
    `AddressError` for an address that cannot be used, and `ConfigurationError` for one beyond loopback without a
    secret, unless ``insecure`` allows it.
    """

    def __init__(self, where: str, *, secret: SecretLike | None = None, insecure: bool = False) -> None:
        address = Endpoint.parse(where, default_port=DEFAULT_PORT)
        shared = Secret.of(secret)
        check_exposure("doctor", (address.host,), shared, insecure=insecure)
        self._token = None if shared is None else wire.token_of(shared)
        try:
            family, _, _, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise AddressError(f"cannot listen on {address}: {error}") from error
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(target)
            self._listener.listen(WAITING)
        except OSError as error:
            self._listener.close()
            raise AddressError(f"cannot listen on {address}: {error}") from error
        self.address = Endpoint(address.host, self._listener.getsockname()[1])
        self._closed = threading.Event()
        self._room = threading.Semaphore(WAITING)
        self._visits = threading.Semaphore(VISITS)
        self._bad: Counter[str] = Counter()

    def run(self) -> None:
        """Serve until `close`."""
        while not self._closed.is_set():
            readable, _, _ = select.select([self._listener], [], [], 0.2)
            if not readable:
                continue
            try:
                visitor, address = self._listener.accept()
            except OSError as error:
                # Out of descriptors, most likely: the visitor waits in the queue.
                self._warn("accept", "doctor: no visitor can be taken: %s", error)
                self._closed.wait(PAUSE_SECONDS)
                continue
            with contextlib.suppress(OSError):
                if not self._room.acquire(blocking=False):
                    self._warn("crowd", "doctor: %s came while %d others were here", address[0], WAITING)
                    with visitor:
                        if self._token is not None:
                            wire.turn_away_early(visitor)
                            continue
                        wire.turn_away(visitor, f"busy: {WAITING} others are connected; try again later", 0.01)
                    continue
                thread = threading.Thread(target=self._receive, args=(visitor, str(address[0])), daemon=True)
                thread.start()
        self._listener.close()

    def close(self) -> None:
        """Let `run` end; visits that are under way end by themselves."""
        self._closed.set()

    def _receive(self, visitor: socket.socket, address: str) -> None:
        try:
            with visitor:
                if self._token is not None and not wire.shares_secret(visitor, self._token, GREETING_SECONDS):
                    self._warn("secret", "doctor: %s does not share the secret", address)
                elif not wire.begins_like_a_doctor(visitor, GREETING_SECONDS):
                    self._warn("stranger", "doctor: %s did not speak like a doctor of kvbaton", address)
                elif not self._visits.acquire(timeout=GREETING_SECONDS):
                    self._warn("busy", "doctor: %s came while %d others were measuring", address, VISITS)
                    busy = f"busy: {VISITS} others are measuring; try again in a minute or two"
                    wire.turn_away(visitor, busy, TURN_AWAY_SECONDS)
                else:
                    try:
                        self._visit(visitor, address)
                    finally:
                        self._visits.release()
        finally:
            self._room.release()

    def _warn(self, kind: str, text: str, *values: object) -> None:
        """The first of a kind is worth a line; strangers could fill the log with the rest."""
        self._bad[kind] += 1
        logger.log(logging.WARNING if self._bad[kind] == 1 else logging.DEBUG, text, *values)

    def _visit(self, visitor: socket.socket, address: str) -> None:
        logger.warning("doctor: %s measures", address)
        command = [sys.executable, "-m", "kvbaton.doctor.session", str(visitor.fileno())]
        try:
            ended = subprocess.run(
                command,
                pass_fds=[visitor.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=VISIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            self._warn("long", "doctor: the visit of %s lasted longer than %g s and was ended", address, VISIT_SECONDS)
            return
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip().splitlines()
            last = (said or ["?"])[-1]
            self._warn("failed", "doctor: the visit of %s ended with %d: %s", address, ended.returncode, last)
