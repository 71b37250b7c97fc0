"""Where writers wait until they have greeted: any number may come, few may stay, and nobody gets a thread for it.

Who has not shown the token is a stranger. A stranger holds a descriptor and a few hundred bytes for a short while; when
there are too many, or descriptors run out, the one that has waited longest goes. So strangers that say nothing cannot
keep a writer out, which greets as soon as it is connected.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import TracebackType

from kvbaton.transport import wire

logger = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 32
PAUSE_SECONDS = 0.2
"""How long nobody is taken in after the process ran out of descriptors."""
QUIET_SECONDS = 60.0
"""How long nothing is logged after a line about that."""
IDLE_SECONDS = 1.0
"""How long a turn may wait where nothing is due."""

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Stranger:
    """A connection that has not greeted yet."""

    def __init__(self, reception: wire.Reception, until: float) -> None:
        self.reception = reception
        self.sock = reception.sock
        self.until = until


class Lobby:
    """Takes connections from ``listener`` and reads their greetings, all on the thread that calls `turn`.

    At most ``most`` strangers are kept, each for ``seconds``. ``count`` is told of those that were turned away, by
    reason: greeting, full, descriptors.
    """

    def __init__(
        self,
        listener: socket.socket,
        dialect: wire.Dialect,
        token: bytes,
        count: Callable[[str], None],
        *,
        most: int,
        seconds: float,
    ) -> None:
        self._listener = listener
        self._dialect = dialect
        self._token = token
        self._count = count
        self.most = most
        self.seconds = seconds
        self._strangers: OrderedDict[socket.socket, Stranger] = OrderedDict()
        """The one that came first is the first."""
        self._selector = selectors.DefaultSelector()
        self._resume: float | None = None
        """When connections are taken again, while none are."""
        self._next_warning = 0.0
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __len__(self) -> int:
        return len(self._strangers)

    def turn(self) -> Iterator[tuple[wire.Reception, wire.Greeting]]:
        """Wait a moment; gives those that greeted since, with what they said. Their sockets are the caller's."""
        for key, _ in self._selector.select(self._timeout()):
            if key.data is None:
                self._accept()
            elif key.data.sock in self._strangers:
                greeting = self._read(key.data)
                if greeting is not None:
                    yield key.data.reception, greeting
        self._let_pass(time.monotonic())

    def close(self) -> None:
        """Turn everybody away. The listener is the caller's."""
        for stranger in list(self._strangers.values()):
            self._leave(stranger)
            stranger.sock.close()
        self._selector.close()

    def __enter__(self) -> Lobby:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _timeout(self) -> float:
        due = [stranger.until for stranger in self._strangers.values()][:1]
        due += [self._resume] if self._resume is not None else []
        return max(0.0, min([IDLE_SECONDS, *(when - time.monotonic() for when in due)]))

    def _let_pass(self, now: float) -> None:
        while self._strangers and (first := next(iter(self._strangers.values()))).until <= now:
            self._count("greeting")
            self._leave(first)
            first.sock.close()
        if self._resume is not None and self._resume <= now:
            self._resume = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                self._out_of_descriptors(error)
                return
            if len(self._strangers) >= self.most:
                self._turn_away("full")
            sock.setblocking(False)
            try:
                reception = wire.Reception(sock, self._dialect, self._token)
            except OSError:
                # It is gone.
                sock.close()
                continue
            stranger = self._strangers[sock] = Stranger(reception, time.monotonic() + self.seconds)
            self._selector.register(sock, selectors.EVENT_READ, stranger)

    def _out_of_descriptors(self, error: OSError) -> None:
        """Nothing can be accepted: make room if strangers have it, else wait. The connection stays in the queue."""
        if error.errno in _EXHAUSTED:
            self._count("descriptors")
            if time.monotonic() >= self._next_warning:
                self._next_warning = time.monotonic() + QUIET_SECONDS
                logger.warning(
                    "%s: no connection can be taken: %s; raise the limit of open files (ulimit -n)",
                    self._dialect.name,
                    error,
                )
            if self._strangers:
                self._turn_away("full")
                return
        self._selector.unregister(self._listener)
        self._resume = time.monotonic() + PAUSE_SECONDS

    def _turn_away(self, reason: str) -> None:
        """Tell the one that has waited longest, without waiting for it, that there is no room."""
        stranger = next(iter(self._strangers.values()))
        self._count(reason)
        self._leave(stranger)
        sock = stranger.sock
        with contextlib.suppress(OSError):
            wire.say_full(sock, self._dialect)
            sock.shutdown(socket.SHUT_WR)
            # A reset, which follows where something is left unread, may overtake the answer.
            sock.recv(wire.MAX_GREETING)
        sock.close()

    def _read(self, stranger: Stranger) -> wire.Greeting | None:
        """Read on; the greeting once it is whole. Who says something else, or nothing more, is turned away."""
        try:
            greeting = stranger.reception.read()
        except BlockingIOError:
            return None
        except ValueError:
            self._count("greeting")
        except (OSError, EOFError):
            pass  # It is gone.
        else:
            self._leave(stranger)
            return greeting
        self._leave(stranger)
        stranger.sock.close()
        return None

    def _leave(self, stranger: Stranger) -> None:
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger.sock]
