"""A network that can be cut: a TCP proxy whose connections can be held up, one way or both, or broken."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from dataclasses import dataclass, field

_CHUNK = 256 * 1024
_ABORT = struct.pack("ii", 1, 0)
"""SO_LINGER of a connection that ends with a reset."""


@dataclass(eq=False)
class _Flow:
    """One direction of one connection."""

    source: socket.socket
    sink: socket.socket
    inwards: bool
    pending: bytearray = field(default_factory=bytearray)
    ended: bool = False
    """Whether the source said its last."""
    over: bool = False


class Proxy:
    """Forwards connections at `port` to ``target``, on a thread of its own.

    While a direction is held, nothing passes that way: what was sent is delivered after `heal`, as a network does that
    was away for a while. ``inwards`` is towards the target.
    """

    def __init__(self, target: tuple[str, int], host: str = "127.0.0.1") -> None:
        self._target = target
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        """Guards what follows; notified when the thread has taken it in."""
        self._asked = self._taken_in = 0
        self._held: frozenset[bool] = frozenset()
        self._resetting = False
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._flows: list[_Flow] = []
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()

    def hold(self, *, inwards: bool = True, outwards: bool = True) -> None:
        """Let nothing pass in these directions (and everything in the others), from when this returns."""
        self._change(held=frozenset({True} if inwards else ()) | frozenset({False} if outwards else ()))

    def heal(self) -> None:
        """Let everything pass again."""
        self._change(held=frozenset())

    def reset(self) -> None:
        """Break every connection there is now."""
        self._change(resetting=True)

    def close(self) -> None:
        """End all connections, and the thread."""
        self._change(closing=True)
        self._thread.join()

    def _change(self, held: frozenset[bool] | None = None, resetting: bool = False, closing: bool = False) -> None:
        with self._changed:
            if held is not None:
                self._held = held
            self._resetting |= resetting
            self._closing |= closing
            self._asked += 1
            asked = self._asked
            os.eventfd_write(self._wake, 1)
            self._changed.wait_for(lambda: self._taken_in >= asked, timeout=10.0)

    # Below: on the proxy's own thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                held, resetting, closing = self._held, self._resetting, self._closing
                self._resetting = False
                self._taken_in = self._asked
                self._changed.notify_all()
            if resetting or closing:
                for flow in self._flows:
                    _reset(flow.source)
                self._flows.clear()
            if closing:
                self._listener.close()
                os.close(self._wake)
                return
            ready = self._wait(held)
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._listener.fileno() in ready:
                self._accept()
            for flow in [flow for flow in self._flows if flow.inwards not in held]:
                self._move(flow, ready)
            self._forget_ended()

    def _wait(self, held: frozenset[bool]) -> dict[int, int]:
        wanted = {self._wake: select.POLLIN, self._listener.fileno(): select.POLLIN}
        for flow in self._flows:
            if flow.over or flow.inwards in held:
                continue
            end, event = (flow.sink, select.POLLOUT) if flow.pending else (flow.source, select.POLLIN)
            wanted[end.fileno()] = wanted.get(end.fileno(), 0) | event
        poller = select.poll()
        for descriptor, events in wanted.items():
            poller.register(descriptor, events)
        return dict(poller.poll())

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(self._target, timeout=2.0)
            except OSError:
                _reset(near)
                return
            for end in (near, far):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._flows += [_Flow(near, far, inwards=True), _Flow(far, near, inwards=False)]

    def _move(self, flow: _Flow, ready: dict[int, int]) -> None:
        if flow.over or flow.source.fileno() < 0:
            return
        try:
            if not flow.pending and not flow.ended and flow.source.fileno() in ready:
                chunk = flow.source.recv(_CHUNK)
                flow.ended = not chunk
                flow.pending += chunk
            if flow.pending:
                del flow.pending[: flow.sink.send(flow.pending)]
            if flow.ended and not flow.pending:
                flow.over = True
                flow.sink.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            # Either end broke: so does the other one.
            _reset(flow.source)
            _reset(flow.sink)

    def _forget_ended(self) -> None:
        pairs: dict[frozenset[int], list[_Flow]] = {}
        for flow in self._flows:
            pairs.setdefault(frozenset((id(flow.source), id(flow.sink))), []).append(flow)
        self._flows = []
        for both in pairs.values():
            if all(flow.over for flow in both) or any(flow.source.fileno() < 0 for flow in both):
                for flow in both:
                    flow.source.close()
            else:
                self._flows += both


def _reset(end: socket.socket) -> None:
    """Close a socket so that its peer sees a broken connection."""
    if end.fileno() >= 0:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        end.close()
