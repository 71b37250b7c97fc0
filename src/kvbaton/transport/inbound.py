"""Takes the connections of writers: the greeting, the gate, and the end; what comes after is the transport's.

What comes from the port is not trusted. A connection waits in the `Lobby` until it has shown the token, and holds a
fixed amount of memory after; numbers are checked before they are used; whoever breaks a rule loses its connection, and
only that.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import socket
import threading
from collections import Counter

from kvbaton.transport import wire
from kvbaton.transport.dial import tune
from kvbaton.transport.gate import Gate
from kvbaton.transport.lobby import Lobby
from kvbaton.transport.table import RegionTable

logger = logging.getLogger(__name__)

GREETING_SECONDS = 2.0
"""How long a connection may take to show the token."""
MAX_PENDING = 256
"""Connections that may do so at a time; when more come, the oldest goes."""
MAX_CONNECTIONS = 4096
FENCE_WAIT = 1.0
"""Seconds that a fence waits for a write that is in progress."""


class Connection:
    """One inbound connection, of the writer ``instance``."""

    def __init__(self, sock: socket.socket, instance: str, refusals: int) -> None:
        self.sock = sock
        self.instance = instance
        self.refusals = refusals
        """How often its instance had been refused when it came."""
        self.thread: threading.Thread | None = None

    def stop_reading(self) -> None:
        """Wake the thread if it waits for bytes; the peer does not notice yet."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RD)

    def cut_off(self) -> None:
        """Wake the thread that reads or sends here; it ends."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class Inbound(abc.ABC):
    """Listens, and serves each connection that was let in, in a thread of its own.

    ``counters`` counts what was refused, by reason: greeting, version, token, fenced, full, frame, bounds; and as
    descriptors how often there were none for another connection.
    """

    def __init__(self, listener: socket.socket, dialect: wire.Dialect, instance: str, token: bytes) -> None:
        self.table = RegionTable()
        self.gate = Gate()
        self.counters: Counter[str] = Counter()
        self._listener = listener
        self._dialect = dialect
        self._instance = instance
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._closing = threading.Event()
        self._served = 0
        self.lobby = Lobby(listener, dialect, token, self._count, most=MAX_PENDING, seconds=GREETING_SECONDS)
        name = f"kvbaton-{dialect.name}-accept-{instance}"
        self._accepter = threading.Thread(target=self._accept, name=name, daemon=True)
        self._accepter.start()

    @abc.abstractmethod
    def _receive(self, connection: Connection) -> None:
        """Serve a connection that was let in, until its end.

        Raises ``ValueError`` for a breach, ``EOFError`` or ``OSError`` for an end.
        """

    def _over(self, connection: Connection) -> None:
        """A connection that was let in is over; `connections` counts it no more. Called without the lock."""
        return

    def fence(self, instance: str) -> bool:
        """Keep ``instance`` out from now on; True when nothing of it is being put in place any more."""
        self.gate.refuse(instance)
        connections = self.connections_of(instance)
        for connection in connections:
            connection.stop_reading()
        # First this: the writer learns of the end only when nothing of it is put in place any more.
        quiet = self.gate.wait_quiet(instance, FENCE_WAIT)
        for connection in connections:
            connection.cut_off()
        return quiet

    def close(self) -> None:
        """Stop listening, end all connections and threads."""
        self.gate.shut()
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepter.join()
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.stop_reading()
        self.gate.wait_quiet(None, FENCE_WAIT)
        for connection in connections:
            connection.cut_off()
        for connection in connections:
            if connection.thread is not None:
                connection.thread.join()

    @property
    def connections(self) -> int:
        """How many writers' connections are open."""
        with self._lock:
            return len(self._connections)

    def connections_of(self, instance: str) -> list[Connection]:
        """The open connections of a writer."""
        with self._lock:
            return [connection for connection in self._connections if connection.instance == instance]

    def _count(self, reason: str) -> None:
        with self._lock:
            self.counters[reason] += 1

    def _accept(self) -> None:
        with self.lobby:
            while not self._closing.is_set():
                for reception, greeting in self.lobby.turn():
                    try:
                        self._let_in(reception, greeting)
                    except Exception:
                        # Whatever it was: the port stays open for others.
                        logger.exception("%s: a connection could not be taken", self._dialect.name)
                        reception.sock.close()

    def _let_in(self, reception: wire.Reception, greeting: wire.Greeting) -> None:
        """Answer a greeting; a writer that may come in gets a thread."""
        sock = reception.sock
        connection = Connection(sock, greeting.instance, self.gate.refusals(greeting.instance))
        status, reason = self._judge(greeting)
        if status == wire.ACCEPTED:
            with self._lock:
                self._connections.add(connection)
            # Known first, asked after: a fence that comes in between finds the connection, or is found.
            if self.gate.refuses(greeting.instance):
                status, reason = wire.FENCED, "fenced"
        if status != wire.ACCEPTED:
            self._count(reason)
        try:
            # Not blocking: it fits the buffer of a new connection.
            reception.answer(status, self._instance)
            if status == wire.ACCEPTED:
                tune(sock)
                self._start(connection)
                return
        except OSError:
            pass  # It is gone.
        except RuntimeError:
            # The system gives no more threads.
            self._count("full")
        with self._lock:
            self._connections.discard(connection)
        sock.close()

    def _judge(self, greeting: wire.Greeting) -> tuple[int, str]:
        """The answer to a greeting, and the counter if it is a refusal."""
        if greeting.version != self._dialect.version:
            return wire.WRONG_VERSION, "version"
        if not greeting.authentic:
            return wire.WRONG_TOKEN, "token"
        if self.connections >= MAX_CONNECTIONS:
            return wire.FULL, "full"
        return wire.ACCEPTED, ""

    def _start(self, connection: Connection) -> None:
        self._served += 1
        name = f"kvbaton-{self._dialect.name}-read-{self._served}"
        thread = threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True)
        connection.thread = thread
        try:
            thread.start()
        except RuntimeError:
            connection.thread = None
            raise

    def _serve(self, connection: Connection) -> None:
        try:
            self._receive(connection)
        except (OSError, EOFError):
            pass  # The peer is gone; it knows, or is no more.
        except ValueError:
            self._count("frame")
        except Exception:
            logger.exception("%s: the connection of %s failed", self._dialect.name, connection.instance)
        finally:
            with self._lock:
                self._connections.discard(connection)
            self._over(connection)
            connection.sock.close()
