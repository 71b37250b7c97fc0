"""Takes the connections of writers: the greeting, the gate, and the end; what comes after is the transport's.

What comes from the port is not trusted. A connection holds a fixed amount of memory until it has shown the token and a
fixed amount after; numbers are checked before they are used; whoever breaks a rule loses its connection, and only that.
"""

from __future__ import annotations

import abc
import contextlib
import socket
import threading
from collections import Counter

from kvbaton.transport import wire
from kvbaton.transport.dial import cut_off_after, tune
from kvbaton.transport.gate import Gate
from kvbaton.transport.table import RegionTable

GREETING_SECONDS = 5.0
MAX_PENDING = 64
"""Connections that may be in the handshake at a time."""
MAX_CONNECTIONS = 4096
FENCE_WAIT = 1.0
"""Seconds that a fence waits for a write that is in progress."""


class Connection:
    """One inbound connection; ``instance`` is empty until the handshake is over."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.instance = ""
        self.refusals = 0
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
    """Listens, and serves each connection in a thread of its own.

    ``counters`` counts what was refused, by reason: greeting, version, token, fenced, full, frame, bounds.
    """

    def __init__(self, listener: socket.socket, dialect: wire.Dialect, instance: str, token: bytes) -> None:
        self.table = RegionTable()
        self.gate = Gate()
        self.counters: Counter[str] = Counter()
        self._listener = listener
        self._dialect = dialect
        self._instance = instance
        self._token = token
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._closing = threading.Event()
        self._served = 0
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
        """How many connections are open."""
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
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                # Out of descriptors, or a connection that was reset before it was taken; `close` ends the wait.
                self._closing.wait(0.05)
                continue
            connection = Connection(sock)
            with self._lock:
                pending = sum(not other.instance for other in self._connections)
                full = pending >= MAX_PENDING or len(self._connections) >= MAX_CONNECTIONS
                refused = full or self._closing.is_set()
                if full:
                    self.counters["full"] += 1
                if not refused:
                    self._connections.add(connection)
                    self._served += 1
                    name = f"kvbaton-{self._dialect.name}-read-{self._served}"
                    connection.thread = threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True)
                    connection.thread.start()
            if refused:
                if full:
                    self._say_full(sock)
                sock.close()

    def _say_full(self, sock: socket.socket) -> None:
        """Tell a writer, before it greeted, that there is no room; without waiting for it."""
        with contextlib.suppress(OSError):
            sock.setblocking(False)
            wire.say_full(sock, self._dialect)
            sock.shutdown(socket.SHUT_WR)
            # A reset, which follows where something is left unread, may overtake the answer.
            sock.recv(wire.MAX_GREETING)

    def _serve(self, connection: Connection) -> None:
        greeted = False
        try:
            with cut_off_after(connection.sock, GREETING_SECONDS):
                greeted = self._greeted(connection)
            if greeted:
                self._receive(connection)
        except (OSError, EOFError):
            pass  # The peer is gone; it knows, or is no more.
        except ValueError:
            self._count("frame" if connection.instance else "greeting")
        finally:
            with self._lock:
                self._connections.discard(connection)
            if greeted:
                self._over(connection)
            connection.sock.close()

    def _greeted(self, connection: Connection) -> bool:
        sock = connection.sock
        reception = wire.Reception(sock, self._dialect, self._token)
        greeting = reception.read()
        status = wire.ACCEPTED
        if greeting.version != self._dialect.version:
            status = wire.WRONG_VERSION
            self._count("version")
        elif not greeting.authentic:
            status = wire.WRONG_TOKEN
            self._count("token")
        else:
            with self._lock:
                # Named first, asked after: a fence that comes in between finds the connection, or is found.
                connection.refusals = self.gate.refusals(greeting.instance)
                connection.instance = greeting.instance
            if self.gate.refuses(greeting.instance):
                status = wire.FENCED
                self._count("fenced")
        reception.answer(status, self._instance)
        if status == wire.ACCEPTED:
            tune(sock)
        return status == wire.ACCEPTED
