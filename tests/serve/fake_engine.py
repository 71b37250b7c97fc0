"""A scripted engine: what it does is said by the prompt. Runs in tests, and as a server of its own (``main``)."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvbaton.engines.base import EndEvent, EngineInfo, GenerateRequest, TokenEvent
from kvbaton.errors import RegistryError, RoomError, RowsError
from kvbaton.layout.nouns import RankLayout
from kvbaton.registry import HttpRegistry, Registration

EOS = 1
ROOM_IN_USE, NEVER_FITS, FAIL_AT_ONCE, FAIL_LATER, HANG, ABORTED, SLOW = 900, 901, 902, 903, 904, 905, 906


class CharTokenizer:
    """One token for each character, from 10 up; token 1 ends a text."""

    eos_token_ids = (EOS,)

    def encode(self, text: str) -> Sequence[int]:
        return [ord(each) % 800 + 10 for each in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(each - 10) for each in token_ids if each >= 10 or not skip_special_tokens)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Sequence[int]:
        if options.get("broken"):
            raise ValueError("the template broke")
        return self.encode("".join(f"<{each['role']}>{each['content']}" for each in messages) + "<assistant>")


class FakeHandle:
    def __init__(self, engine: FakeEngine, request: GenerateRequest) -> None:
        self.request = request
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cancelled = threading.Event()
        self._engine = engine
        threading.Thread(target=self._run, daemon=True).start()

    def cancel(self) -> None:
        self.cancelled.set()

    def _run(self) -> None:
        try:
            end = self._engine.work(self)
        finally:
            self._engine.release(self)
        self.events.put(end)


class FakeEngine:
    """Decode answers with the prompt reversed, then the end of text; prefill answers with nothing.

    A prompt that holds one of the special ids does what its name says. ``log`` has every request, ``pages`` those whose
    pages are taken now.
    """

    def __init__(self, role: str, model_path: str = "some/model", registry: str = "") -> None:
        self.role = role
        self.model_path = model_path
        self.log: list[GenerateRequest] = []
        self.pages: dict[int, FakeHandle] = {}
        self.cancelled: list[int] = []
        self.sick = ""
        self.closed = False
        self._lock = threading.Lock()
        if registry:
            client = HttpRegistry(registry)
            me = Registration(f"prefill-{id(self)}", "tcp://127.0.0.1:1", RankLayout(()), "m")
            client.register(me)
            threading.Thread(target=self._stay_registered, args=(client, me), daemon=True).start()

    def _stay_registered(self, client: HttpRegistry, me: Registration) -> None:
        while not self.closed:
            time.sleep(2)
            with contextlib.suppress(RegistryError):
                client.register(me)

    def info(self) -> EngineInfo:
        return EngineInfo(self.role, self.model_path, "fake", context_length=512, vocab_size=1000)  # type: ignore[arg-type]

    def healthy(self) -> str:
        return self.sick

    def close(self) -> None:
        self.closed = True

    def submit(self, request: GenerateRequest) -> FakeHandle:
        if ROOM_IN_USE in request.input_ids:
            raise RoomError(f"room {request.room} is in use")
        if NEVER_FITS in request.input_ids:
            raise RowsError("the prompt needs 9 pages, and the pool has 4")
        with self._lock:
            self.log.append(request)
            handle = FakeHandle(self, request)
            self.pages[id(handle)] = handle
        return handle

    def release(self, handle: FakeHandle) -> None:
        with self._lock:
            # Before the pages go: who waits for that then finds the cancel.
            if handle.cancelled.is_set():
                self.cancelled.append(handle.request.room)
            self.pages.pop(id(handle), None)

    def work(self, handle: FakeHandle) -> EndEvent:
        request = handle.request
        if self.role == "decode" and not request.source.endswith(":1"):
            try:
                HttpRegistry(request.source).topology()
            except RegistryError as error:
                return EndEvent("error", error=str(error))
        if FAIL_AT_ONCE in request.input_ids:
            return EndEvent("error", error=f"room {request.room}: part 0 of rank tp0/1 was lost", retry=True)
        if HANG in request.input_ids:
            handle.cancelled.wait(30)
            return EndEvent("abort", error="cancelled")
        if ABORTED in request.input_ids:
            return EndEvent("abort", error="the engine was told to stop")
        if self.role == "prefill":
            return EndEvent("length", metrics={"bytes": {"kv": 4096}})
        sampling = request.sampling
        answer = [*reversed([each for each in request.input_ids if each < 900]), EOS]
        for count, token in enumerate(answer, start=1):
            if handle.cancelled.wait(0.05 if SLOW in request.input_ids else 0):
                return EndEvent("abort", error="cancelled")
            if FAIL_LATER in request.input_ids and count == 3:
                return EndEvent("error", error="the pool is gone")
            handle.events.put(TokenEvent((token,)))
            if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
                return EndEvent("stop", matched=token, metrics={"ms": 1.5})
            if count == sampling.max_new_tokens:
                break
        return EndEvent("length")


def main(arguments: Sequence[str]) -> None:
    """Serve: ``role port bootstrap_port [crash]``; "crash" ends the process soon after it was healthy."""
    from kvbaton.serve.launch import run_decode, run_prefill

    role, port, bootstrap_port, *rest = arguments
    if "crash" in rest:

        def crash() -> None:
            time.sleep(1.5)
            print("the engine exploded", flush=True)
            import os

            os._exit(7)

        threading.Thread(target=crash, daemon=True).start()
    if "never" in rest:
        print("cannot find the model", flush=True)
        sys.exit(3)

    def build(model: str, *, role: str, registry: str | None, **options: Any) -> FakeEngine:
        return FakeEngine(role, model, registry or "")

    folder = rest[0] if rest and rest[0] not in ("crash", "never") else "."
    if role == "prefill":
        run_prefill(folder, port=int(port), bootstrap_port=int(bootstrap_port), drain_seconds=1, build=build)
    else:
        run_decode(folder, port=int(port), drain_seconds=1, build=build)


if __name__ == "__main__":
    main(sys.argv[1:])
