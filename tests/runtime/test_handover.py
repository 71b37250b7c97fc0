"""Requests that go well: every byte that belongs to the receiver arrives, no other byte changes, nothing is kept."""

import itertools
import threading

import numpy as np
import pytest
from rank_world import Model, succeeded, wait_released

import kvbaton as kb
from kvbaton.errors import RoomError

EVERYTHING = ("kv", "window", "latent", "conv", "recurrent", "aux")


def rows_for(model, page_size, tokens, first=3, step=1):
    """Rows of every component for a request; ``step`` -1 gives them in falling order."""
    count = -(-tokens // page_size)
    pages = list(range(first, first + count))[::step]
    rows = {name: pages for name in ("kv", "latent", "window") if name in model.parts}
    rows |= {name: [2] for name in ("conv", "recurrent") if name in model.parts}
    return rows


def fill(ranks, rows, tokens, seed=1, aux=5):
    for rank in ranks:
        for component in rank.layout.components:
            at = [aux] if component.kind.aux else rows[component.name]
            rank.fill(component.name, at, (0, tokens), seed=seed)


def wanted(model, page_size, rows, tokens, prefix=0):
    """What the receiver offers: rows from the prefix, or from the window's first token; and where they start."""
    offered, starts = {}, {}
    for name, value in rows.items():
        first = max(prefix, tokens - model.window) if name == "window" else prefix
        if name in ("conv", "recurrent"):
            offered[name], starts[name] = value, 0
        else:
            offered[name], starts[name] = value[first // page_size :] if first < tokens else [], first
    return offered, starts


def check(ranks, model, page_size, rows, tokens, prefix=0, seed=1, aux=1):
    offered, starts = wanted(model, page_size, rows, tokens, prefix)
    for rank in ranks:
        for component in rank.layout.components:
            name = component.name
            if component.kind.aux:
                if aux is not None:
                    rank.check(name, [aux], seed=seed)
            else:
                page = starts[name] // page_size * page_size
                rank.check(name, offered[name], (starts[name], tokens), page, seed)


def hand_over(model, sources, destinations, page_sizes=(4, 4), tokens=19, prefix=0, room=1, seed=1, cuts=()):
    """One request from ``sources`` to ``destinations``, in chunks that end at ``cuts``."""
    here = rows_for(model, page_sizes[0], tokens)
    there = rows_for(model, page_sizes[1], tokens, first=1, step=-1)
    fill(sources, here, tokens, seed)
    has_aux = "aux" in model.parts
    senders = [rank.manager.sender(room) for rank in sources]
    receivers = [rank.manager.receiver(room) for rank in destinations]
    edges = [0, *cuts, tokens]
    for sender in senders:
        for first, last in itertools.pairwise(edges[:-1]):
            sender.send(chunk(here, page_sizes[0], first, last), (first, last))
        state = {name: here[name] for name in ("conv", "recurrent") if name in here}
        last_chunk = chunk(here, page_sizes[0], edges[-2], tokens)
        sender.finish({**last_chunk, **state}, (edges[-2], tokens), aux=5 if has_aux else None)
    for receiver in receivers:
        offered, _ = wanted(model, page_sizes[1], there, tokens, prefix)
        receiver.offer(offered, tokens, prefix, aux=1 if has_aux else None)
    succeeded(*senders, *receivers)
    check(destinations, model, page_sizes[1], there, tokens, prefix, seed)
    for rank in destinations:
        rank.check_rest()
    return senders, receivers


def chunk(rows, page_size, first, last):
    return {
        name: value[first // page_size : -(-last // page_size)] if last > first else []
        for name, value in rows.items()
        if name in ("kv", "latent", "window")
    }


def close_all(world, *rooms):
    wait_released(*rooms)
    for room in rooms:
        room.close()
    world.assert_empty()
    world.assert_no_faults()


@pytest.mark.parametrize(("source_tp", "destination_tp"), [(1, 1), (1, 2), (2, 1)])
def test_everything_over_every_transport(any_world, source_tp, destination_tp):
    model = Model(EVERYTHING)
    sources = any_world.prefill(*(model.layout(rank, source_tp) for rank in range(source_tp)))
    destinations = any_world.decode(*(model.layout(rank, destination_tp) for rank in range(destination_tp)))
    senders, receivers = hand_over(model, sources, destinations, cuts=(6, 13))
    close_all(any_world, *senders, *receivers)


@pytest.mark.parametrize(("source_tp", "destination_tp"), [(2, 4), (4, 2), (2, 8), (8, 2)])
def test_replicated_heads(world, source_tp, destination_tp):
    """D01 and D02a at the managers: two heads, each held by several ranks of the wider side."""
    model = Model(("kv",), heads=2, layers=1)
    sources = world.prefill(*(model.layout(rank, source_tp) for rank in range(source_tp)))
    destinations = world.decode(*(model.layout(rank, destination_tp) for rank in range(destination_tp)))
    senders, receivers = hand_over(model, sources, destinations)
    per_rank = destinations[0].nbytes_per_token["kv"] * 19
    assert [receiver.bytes_by_component for receiver in receivers] == [{"kv": per_rank}] * destination_tp
    assert sum(sender.bytes_by_component.get("kv", 0) for sender in senders) == per_rank * destination_tp
    close_all(world, *senders, *receivers)


def test_the_ranks_of_a_grid_serve_a_room_together(world):
    """Without destination_index and destinations the coords say it."""
    model = Model(("kv", "latent"))
    sources = world.prefill(model.layout())
    destinations = world.decode(
        *(model.layout(rank, 4) for rank in range(4)), destination_index=None, destinations=None
    )
    senders, receivers = hand_over(model, sources, destinations)
    close_all(world, *senders, *receivers)


@pytest.mark.parametrize("striped", [False, True])
def test_a_latent_that_every_source_holds(world, striped):
    """The decode side's setting counts, whatever the prefill side has."""
    model = Model(("latent",))
    sources = world.prefill(*(model.layout(rank, 4) for rank in range(4)), settings=kb.Settings(striped=not striped))
    destinations = world.decode(*(model.layout(rank, 2) for rank in range(2)), settings=kb.Settings(striped=striped))
    senders, receivers = hand_over(model, sources, destinations)
    busy = [bool(sender.bytes_by_component) for sender in senders]
    assert all(busy) if striped else sum(busy) == 2
    close_all(world, *senders, *receivers)


@pytest.mark.parametrize("page_sizes", [(4, 8), (8, 4), (6, 4), (1, 16), (16, 1)])
@pytest.mark.parametrize("tokens", [1, 16, 19])
def test_page_sizes_that_differ(world, page_sizes, tokens):
    """D11, second run: tokens land exactly, whatever the pages."""
    model = Model(("kv", "window"))
    sources = world.prefill(model.layout(page_size=page_sizes[0], rows=32))
    destinations = world.decode(model.layout(page_size=page_sizes[1], rows=32))
    senders, receivers = hand_over(model, sources, destinations, page_sizes, tokens)
    close_all(world, *senders, *receivers)


@pytest.mark.parametrize("prefix", [0, 3, 4, 12, 17, 19])
def test_a_prefix_is_not_written(any_world, prefix):
    model = Model(("kv", "window", "conv", "aux"))
    sources = any_world.prefill(model.layout())
    destinations = any_world.decode(model.layout())
    senders, receivers = hand_over(model, sources, destinations, prefix=prefix)
    moved = (19 - prefix) * sources[0].nbytes_per_token["kv"]
    assert receivers[0].bytes_by_component.get("kv", 0) == senders[0].bytes_by_component.get("kv", 0) == moved
    close_all(any_world, *senders, *receivers)


def test_another_order_of_axes(world):
    model = Model(("kv",))
    sources = world.prefill(model.layout(order="NHD"))
    destinations = world.decode(model.layout(order="HND"))
    senders, receivers = hand_over(model, sources, destinations)
    close_all(world, *senders, *receivers)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("offered", ["before", "between", "after"])
def test_chunks_in_any_order(world, order, offered):
    model = Model(("kv", "aux"))
    (source,) = world.prefill(model.layout())
    (destination,) = world.decode(model.layout())
    rows, spans = [7, 8, 9, 10, 11], [(0, 6), (6, 14), (14, 19)]
    source.fill("kv", rows, (0, 19))
    source.fill("aux", [2])
    receiver = destination.manager.receiver(4)
    sender = source.manager.sender(4)
    for number, index in enumerate(order):
        if offered == ("before", "between", "after")[number]:
            receiver.offer({"kv": [0, 2, 4, 6, 8]}, tokens=19, aux=3)
        first, last = spans[index]
        sender.send({"kv": rows[first // 4 : -(-last // 4)]}, (first, last))
    sender.finish(aux=2)
    succeeded(sender, receiver)
    destination.check("kv", [0, 2, 4, 6, 8], (0, 19))
    destination.check("aux", [3])
    destination.check_rest()
    close_all(world, sender, receiver)


def test_a_window_whose_rows_begin_late(world):
    """The prefill side keeps rows for the window only, and says so with Pages."""
    model = Model(("window",), window=6)
    (source,) = world.prefill(model.layout())
    (destination,) = world.decode(model.layout())
    source.fill("window", [5, 6, 7], (8, 19), start=8)
    sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
    sender.finish({"window": kb.Pages(np.array([5, 6, 7]), 8)}, (0, 19))
    receiver.offer({"window": [1, 2]}, tokens=19)
    succeeded(sender, receiver)
    destination.check("window", [1, 2], (13, 19), start=12)
    destination.check_rest()
    assert receiver.bytes_by_component == {"window": 6 * source.nbytes_per_token["window"]}
    close_all(world, sender, receiver)


def test_several_rooms_at_once(any_world):
    model = Model(("kv", "conv", "aux"))
    (source,) = any_world.prefill(model.layout(rows=64, slots=16))
    (destination,) = any_world.decode(model.layout(rows=64, slots=16))
    senders, receivers = {}, {}
    for room in range(8):
        pages = [room * 5 + index for index in range(5)]
        source.fill("kv", pages, (0, 19), seed=room)
        source.fill("conv", [room], seed=room)
        source.fill("aux", [room], seed=room)
    for room in range(8):
        senders[room] = source.manager.sender(room)
    for room in reversed(range(8)):
        receivers[room] = destination.manager.receiver(room)
        receivers[room].offer({"kv": [63 - room * 5 - i for i in range(5)], "conv": [15 - room]}, 19, aux=7 - room)
    for room in range(8):
        senders[room].send({"kv": [room * 5, room * 5 + 1]}, (0, 8))
    for room in reversed(range(8)):
        rows = {"kv": [room * 5 + 2, room * 5 + 3, room * 5 + 4], "conv": [room]}
        senders[room].finish(rows, (8, 19), aux=room)
    succeeded(*senders.values(), *receivers.values())
    for room in range(8):
        destination.check("kv", [63 - room * 5 - i for i in range(5)], (0, 19), seed=room)
        destination.check("conv", [15 - room], seed=room)
        destination.check("aux", [7 - room], seed=room)
    destination.check_rest()
    close_all(any_world, *senders.values(), *receivers.values())


def test_a_room_number_is_free_when_its_room_was_closed(world):
    """No wait between close and the next life of the number, on both sides."""
    model = Model(("kv",))
    (source,) = world.prefill(model.layout())
    (destination,) = world.decode(model.layout())
    for life in range(30):
        tokens = 1 + life % 16
        rows = list(range(-(-tokens // 4)))
        source.fill("kv", rows, (0, tokens), seed=life)
        sender, receiver = source.manager.sender(7), destination.manager.receiver(7)
        receiver.offer({"kv": rows}, tokens)
        sender.finish({"kv": rows}, (0, tokens))
        succeeded(sender, receiver)
        wait_released(sender, receiver)
        destination.check("kv", rows, (0, tokens), seed=life)
        sender.close()
        receiver.close()
        sender.close()
        receiver.close()
    world.assert_empty()
    world.assert_no_faults()


def test_many_engine_threads(any_world):
    """Threads that open, use, abort and close rooms of one pair of managers at the same time."""
    model = Model(("kv", "aux"))
    (source,) = any_world.prefill(model.layout(rows=64))
    (destination,) = any_world.decode(model.layout(rows=64))
    for thread in range(6):
        source.fill("kv", [thread * 5 + index for index in range(5)], (0, 19), seed=thread)
        source.fill("aux", [thread], seed=thread)
    wrong = []

    def work(thread):
        rows = [thread * 5 + index for index in range(5)]
        for life in range(25):
            # Two numbers in turn, so that each is used again soon.
            sender = source.manager.sender(thread * 2 + life % 2)
            receiver = destination.manager.receiver(thread * 2 + life % 2)
            receiver.offer({"kv": rows}, 19, aux=thread)
            sender.send({"kv": rows[:2]}, (0, 8))
            if life % 5 == 4:
                sender.abort()
                wait_released(sender, receiver)
            else:
                sender.finish({"kv": rows[2:]}, (8, 19), aux=thread)
                wait_released(sender, receiver)
                if sender.poll() is not kb.Status.SUCCESS or receiver.poll() is not kb.Status.SUCCESS:
                    wrong.append((sender.reason, receiver.reason))
            sender.close()
            receiver.close()

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
    for thread in range(6):
        destination.check("kv", [thread * 5 + index for index in range(5)], (0, 19), seed=thread)
        destination.check("aux", [thread], seed=thread)
    destination.check_rest()
    any_world.assert_empty()
    assert source.manager._control.faults == destination.manager._control.faults == 0


def test_bytes_count_every_destination(world):
    model = Model(("kv", "conv", "aux"))
    (source,) = world.prefill(model.layout())
    destinations = world.decode(*(model.layout(rank, 2) for rank in range(2)))
    (sender,), receivers = hand_over(model, [source], destinations)
    kv = 19 * source.nbytes_per_token["kv"]
    conv = source.nbytes_per_token["conv"]
    aux = source.nbytes_per_token["aux"]
    assert [receiver.bytes_by_component for receiver in receivers] == [
        {"kv": kv // 2, "conv": conv // 2, "aux": aux}
    ] * 2
    assert sender.bytes_by_component == {"kv": kv, "conv": conv, "aux": 2 * aux}
    close_all(world, sender, *receivers)


class TestNothingToSend:
    """D05: a request with nothing to move still ends well on both sides, its aux data delivered once."""

    def run(self, world, model, rows, tokens, sent, prefix=0):
        (source,) = world.prefill(model.layout())
        (destination,) = world.decode(model.layout())
        source.fill("aux", [6])
        if tokens > prefix:
            source.fill("kv", [3, 4], (0, tokens))
        delivered = []
        deliver = destination.manager.side._deliver
        destination.manager.side._deliver = lambda action: (delivered.append(action.done.aux), deliver(action))
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        receiver.offer(rows, tokens, prefix, aux=2)
        sender.finish(sent, (0, tokens), aux=6)
        succeeded(sender, receiver)
        destination.check("aux", [2])
        if tokens > prefix:
            destination.check("kv", rows["kv"], (0, tokens))
        destination.check_rest()
        assert len(delivered) == 1
        close_all(world, sender, receiver)

    def test_no_state_component(self, any_world):
        self.run(any_world, Model(("kv", "aux")), {"kv": [1, 2]}, 8, {"kv": [3, 4]})

    def test_no_slot_wanted(self, any_world):
        rows = {"kv": [1, 2], "conv": [], "recurrent": []}
        self.run(any_world, Model(("kv", "conv", "recurrent", "aux")), rows, 8, {"kv": [3, 4]})

    def test_no_slot_wanted_and_none_sent(self, any_world):
        rows, sent = {"kv": [1, 2], "conv": []}, {"kv": [3, 4], "conv": []}
        self.run(any_world, Model(("kv", "conv", "aux")), rows, 8, sent)

    def test_a_component_without_rows(self, any_world):
        """Its tensors are elided on both sides: they have no byte of memory."""
        model = Model(("kv", "conv", "aux"))
        layout = model.layout(slots=0)
        assert {tensor.rows for tensor in layout.component("conv").tensors} == {0}
        model_without = Model(("kv", "conv", "aux"))
        object.__setattr__(model_without, "layout", lambda: layout)
        self.run(any_world, model_without, {"kv": [1, 2]}, 8, {"kv": [3, 4]})

    def test_all_tokens_are_there_already(self, any_world):
        self.run(any_world, Model(("kv", "aux")), {}, 8, {"kv": [3, 4]}, prefix=8)

    def test_no_token_at_all(self, any_world):
        self.run(any_world, Model(("kv", "aux")), {}, 0, {})


def test_integers_of_any_type(world):
    model = Model(("kv", "aux"))
    (source,) = world.prefill(model.layout())
    (destination,) = world.decode(model.layout())
    source.fill("kv", [0, 1], (0, 7))
    source.fill("aux", [1])
    sender, receiver = source.manager.sender(np.int64(3)), destination.manager.receiver(np.uint8(3))
    receiver.offer({"kv": np.array([4, 5], np.uint16)}, np.int32(7), np.int64(0), aux=np.int16(2))
    sender.finish({"kv": np.array([0, 1])}, (np.int64(0), np.int64(7)), aux=np.int64(1))
    succeeded(sender, receiver)
    destination.check("kv", [4, 5], (0, 7))
    destination.check("aux", [2])
    destination.check_rest()
    close_all(world, sender, receiver)


def test_roles_are_kept_apart(world):
    model = Model(("kv",))
    (source,) = world.prefill(model.layout())
    (destination,) = world.decode(model.layout())
    with pytest.raises(RoomError, match="use sender"):
        source.manager.receiver(0)
    with pytest.raises(RoomError, match="use receiver"):
        destination.manager.sender(0)
    for number in (-1, 1 << 63, "7"):
        with pytest.raises(RoomError, match="room"):
            source.manager.sender(number)
