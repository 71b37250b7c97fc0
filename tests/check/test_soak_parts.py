"""The parts of the soak: a network that can be cut, content that is known, and the counting of what is broken."""

import random
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from kvbaton.check.soak import traffic
from kvbaton.check.soak.diary import Diary
from kvbaton.check.soak.proxy import Proxy
from kvbaton.check.soak.store import Store, make_layout
from kvbaton.check.soak.tally import Tally, normalised
from kvbaton.check.soak.traffic import Traffic


class Echo:
    """A server that sends everything back."""

    def __init__(self):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    @staticmethod
    def _serve(connection):
        with connection:
            while True:
                try:
                    received = connection.recv(65536)
                except OSError:
                    return
                if not received:
                    return
                connection.sendall(received)

    def close(self):
        self._server.close()


@pytest.fixture
def proxy():
    echo = Echo()
    made = Proxy(echo.address)
    yield made
    made.close()
    echo.close()


def dial(proxy):
    connection = socket.create_connection(("127.0.0.1", proxy.port), timeout=10)
    connection.sendall(b"hello")
    assert connection.recv(5) == b"hello"
    return connection


def read(connection, count):
    received = b""
    while len(received) < count:
        received += connection.recv(count - len(received))
    return received


class TestProxy:
    def test_much_passes_unchanged(self, proxy):
        data = np.random.default_rng(1).bytes(4 << 20)
        with dial(proxy) as connection:
            writer = threading.Thread(target=connection.sendall, args=(data,))
            writer.start()
            assert read(connection, len(data)) == data
            writer.join()

    @pytest.mark.parametrize(("inwards", "outwards"), [(True, True), (True, False), (False, True)])
    def test_what_is_held_comes_later(self, proxy, inwards, outwards):
        with dial(proxy) as connection:
            proxy.hold(inwards=inwards, outwards=outwards)
            connection.sendall(b"world")
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.recv(5)
            connection.settimeout(10)
            proxy.heal()
            assert read(connection, 5) == b"world"

    def test_a_broken_connection_is_broken_for_both(self, proxy):
        with dial(proxy) as connection:
            proxy.reset()
            with pytest.raises(ConnectionError):
                connection.recv(5)
        with dial(proxy):
            pass

    def test_an_end_passes(self, proxy):
        with dial(proxy) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(5) == b""


class TestStore:
    @pytest.fixture
    def stores(self):
        return [Store(make_layout(rank, 2, (0, 1), 8, 4)) for rank in range(2)]

    def test_free_rows_are_canaries(self, stores):
        assert all(store.touched(store.pages, 0) == 0 for store in stores)

    def test_content_is_the_room_s_and_the_rank_s(self, stores):
        for store in stores:
            store.fill(7, [5, 2], 1)
            assert store.wrong(7, 32, [5, 2], 1) == 0
            assert store.wrong(8, 32, [5, 2], 1) > 0
            assert store.wrong(7, 32, [2, 5], 1) > 0
            assert store.touched([5, 2], 1) > 0
        first, second = (store.memory.array for store in stores)
        assert (first[: first.size // 2] != second[: first.size // 2]).any()

    def test_what_follows_the_last_token_must_be_untouched(self, stores):
        store = stores[0]
        store.fill(7, [5, 2], 1)
        assert store.wrong(7, 20, [5, 2], 1) > 0

    def test_one_byte_is_seen(self, stores):
        store = stores[0]
        store.fill(7, [5, 2], 1)
        at = store.layout.component("kv").tensors[1]
        store.memory.array[at.offset + 2 * at.row_stride + 3] ^= 1
        assert store.wrong(7, 32, [5, 2], 1) == 1
        store.wipe([5, 2], 1)
        store.memory.array[at.offset + 2 * at.row_stride + 3] ^= 1
        assert store.touched([5, 2], 1) == 1

    def test_rows_are_used_again_at_once(self, stores):
        store = stores[0]
        pages, slot = store.take(3)
        assert store.take(6) is None
        store.give(pages, slot)
        assert store.take(3) == (pages[::-1], slot)


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(traffic.time, "monotonic", lambda: self.now)


class TestTraffic:
    @pytest.fixture
    def clock(self, monkeypatch):
        return Clock(monkeypatch)

    @pytest.fixture
    def made(self, clock, tmp_path):
        ranks = {key: SimpleNamespace(tell=lambda *_, **__: None, still_seconds=0.0) for key in ("p0.0", "d0.0")}
        fleet = SimpleNamespace(
            ranks=ranks, prefills={"p0": ("p0.0",)}, decodes={"d0": ("d0.0",)}, serving=lambda keys: True
        )
        tally, diary = Tally(), Diary(tmp_path / "diary.txt")
        yield Traffic(fleet, random.Random(1), tally, 1, diary), tally, ranks
        diary.close()

    def begin(self, made, monkeypatch):
        monkeypatch.setattr(traffic, "HALF_SHARE", 0.0)
        made[0].begin("p0", "d0")
        return next(iter(made[0]._rooms))

    def end(self, made, number, *, keys=("p0.0", "d0.0"), status="SUCCESS", reason=""):
        for key in keys:
            made[0].heard(key, {"event": "end", "room": number, "status": status, "reason": reason})
            made[0].heard(key, {"event": "free", "room": number})

    def test_a_room_that_succeeds(self, made, monkeypatch):
        self.end(made, self.begin(made, monkeypatch))
        assert (made[1].rooms, made[1].succeeded, made[1].broken()) == (1, 1, [])

    def test_a_room_that_fails_is_counted_by_its_reason(self, made, monkeypatch):
        self.end(made, self.begin(made, monkeypatch), status="FAILED", reason="part 3 of 4 was lost")
        assert made[1].reasons == {"part N of N was lost": 1}
        assert made[1].broken() == []

    def test_a_room_that_fails_without_a_reason_is_a_broken_promise(self, made, monkeypatch):
        self.end(made, self.begin(made, monkeypatch), status="FAILED")
        assert made[1].broken()

    def test_a_room_that_does_not_end(self, made, monkeypatch, clock):
        self.end(made, self.begin(made, monkeypatch), keys=["p0.0"])
        clock.now += traffic.END_SECONDS
        made[0].look_for_hangs()
        assert made[1].hangs == []
        clock.now += 1
        made[0].look_for_hangs()
        assert len(made[1].hangs) == 1
        assert "did not end" in made[1].hangs[0]
        assert len(made[0]) == 0

    def test_rows_that_do_not_come_back(self, made, monkeypatch, clock):
        number = self.begin(made, monkeypatch)
        made[0].heard("d0.0", {"event": "end", "room": number, "status": "FAILED", "reason": "no"})
        self.end(made, number, keys=["p0.0"])
        clock.now += traffic.FREE_SECONDS + 1
        made[0].look_for_hangs()
        assert "keeps its rows" in made[1].hangs[0]

    def test_time_in_which_a_rank_stands_still_does_not_count(self, made, monkeypatch, clock):
        self.begin(made, monkeypatch)
        for rank in made[2].values():
            rank.still_seconds = 5.0
        clock.now += traffic.END_SECONDS + 4
        made[0].look_for_hangs()
        assert made[1].hangs == []

    def test_a_rank_that_is_gone_says_nothing_more(self, made, monkeypatch):
        self.begin(made, monkeypatch)
        made[0].gone("d0.0")
        assert len(made[0]) == 1
        made[0].gone("p0.0")
        assert len(made[0]) == 0
        assert made[1].lost_with_their_process == 1

    def test_wrong_content_is_a_broken_promise(self, made, monkeypatch):
        number = self.begin(made, monkeypatch)
        made[0].heard("d0.0", {"event": "wrong", "room": number, "words": 3, "what": "wrong content"})
        assert made[1].broken() == [f"wrong bytes: d0.0: room {number}: wrong content (3 words)"]


def test_reasons_without_what_differs_each_time():
    reason = "decode: tcp://10.0.0.1:99 gave up after 0.25 s; instance 0123456789abcdef0123456789abcdef is gone"
    assert normalised(reason) == "decode: <address> gave up after N s; instance <instance> is gone"
