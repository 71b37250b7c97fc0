"""Rooms that are checked by digests: right ones succeed, one changed byte anywhere fails the room by name."""

import itertools
import logging
import re
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from rank_world import FAST, Model, succeeded, wait, wait_over, wait_released
from room_pairs import KV, failed

import kvbaton as kb
from kvbaton.errors import ConfigurationError, DigestMismatch, PeerLost, TransferAborted
from kvbaton.runtime import digest_jobs, prefill
from kvbaton.runtime.digest_jobs import Sent
from kvbaton.runtime.digests import check_memory

ON = replace(FAST, digest=True)
EVERYTHING = Model(("kv", "window", "latent", "conv", "recurrent", "aux"))
TOKENS, PREFIX = 19, 5
HERE = {"kv": [3, 9, 1, 12, 5], "window": [2, 4, 6, 8, 10], "latent": [1, 2, 3, 4, 5], "conv": [2], "recurrent": [1]}
THERE = {"kv": [7, 6, 2, 5, 0], "window": [1, 3, 5, 7, 9], "latent": [9, 8, 7, 6, 5], "conv": [3], "recurrent": [0]}


@pytest.fixture(params=["at once", "in the background"])
def any_size(request, monkeypatch):
    """Small rooms as they are, and as if they were large."""
    if request.param == "in the background":
        monkeypatch.setattr(digest_jobs, "AT_ONCE_BYTES", 0)


def first_token(name, prefix):
    return max(prefix, TOKENS - EVERYTHING.window) if name == "window" else prefix


def offer_rows(model, prefix, size=4):
    rows = {name: THERE[name] for name in model.parts if name != "aux"}
    return {
        name: value if name in ("conv", "recurrent") else value[first_token(name, prefix) // size :]
        for name, value in rows.items()
    }


def send(sender, model, cuts, size=4):
    """The request in chunks that end at ``cuts``."""
    paged = [name for name in model.parts if name in ("kv", "window", "latent")]
    for first, last in itertools.pairwise((0, *cuts, TOKENS)):
        rows = {name: HERE[name][first // size : -(-last // size)] for name in paged}
        if last < TOKENS:
            sender.send(rows, (first, last))
    rows |= {name: HERE[name] for name in model.parts if name in ("conv", "recurrent")}
    sender.finish(rows, (first, TOKENS), aux=5 if "aux" in model.parts else None)


def fill(ranks):
    for rank in ranks:
        for part in rank.layout.components:
            rank.fill(part.name, [5] if part.kind.aux else HERE[part.name], (0, TOKENS))


def begin(model, sources, destinations, prefix=0, cuts=(), room=1):
    fill(sources)
    senders = [rank.manager.sender(room) for rank in sources]
    receivers = [rank.manager.receiver(room) for rank in destinations]
    for receiver in receivers:
        receiver.offer(offer_rows(model, prefix), TOKENS, prefix, aux=1 if "aux" in model.parts else None)
    for sender in senders:
        send(sender, model, cuts)
    return senders, receivers


def places(rank, name, prefix=0):
    """The addresses of all bytes of a component that a room puts in place at a decode rank."""
    part = rank.layout.component(name)
    if part.kind.aux:
        return np.concatenate([at for at, _ in rank._places(name, [1], (0, 0), 0, 1)])
    first = first_token(name, prefix) if part.kind.has_tokens else 0
    rows = offer_rows(EVERYTHING, prefix)[name]
    return np.concatenate([at for at, _ in rank._places(name, rows, (first, TOKENS), first // 4 * 4, 1)])


def before_done(source, act):
    """Let ``act`` run when a write has landed, before its Done is sent."""
    side = source.manager.side
    written = side._written

    def acting(completion, now):
        act()
        written(completion, now)

    side._written = acting


def flip(rank, address, bit=3):
    rank.memory.array[address] ^= 1 << bit


# Right ones.


@pytest.mark.parametrize("case", ["1 to 1", "2 to 1", "1 to 2", "2 to 2"])
@pytest.mark.usefixtures("any_size")
def test_rooms_that_are_right_succeed(any_world, case, dones):
    here, there = int(case[0]), int(case[-1])
    sources = any_world.prefill(*(EVERYTHING.layout(rank, here) for rank in range(here)))
    destinations = any_world.decode(*(EVERYTHING.layout(rank, there) for rank in range(there)), settings=ON)
    for room, (prefix, cuts) in enumerate([(0, ()), (PREFIX, (6, 13)), (8, (1, 2, 3, 14))]):
        senders, receivers = begin(EVERYTHING, sources, destinations, prefix, cuts, room)
        succeeded(*senders, *receivers)
        for rank in destinations:
            for name, rows in offer_rows(EVERYTHING, prefix).items():
                has_tokens = rank.layout.component(name).kind.has_tokens
                first = first_token(name, prefix) if has_tokens else 0
                rank.check(name, rows, (first, TOKENS), first // 4 * 4)
            rank.check("aux", [1])
            rank.check_rest()
            rank.memory.array[rank.touched] = 0xA5
        for each in (*senders, *receivers):
            each.close()
    assert {name for done in dones for name in done.digests} == set(EVERYTHING.parts)
    for done in dones:
        assert set(done.digests) == set(done.bytes)
        assert all(any(value) for value in done.digests.values())
    any_world.assert_empty()
    any_world.assert_no_faults()


def test_pipeline_stages_and_chunks_that_overlap(world):
    model = Model(("kv", "latent"), layers=4)
    sources = world.prefill(
        *(replace_coords(model.layout(layers=layers), pp) for pp, layers in enumerate([range(2), range(2, 4)]))
    )
    (destination,) = world.decode(model.layout(), settings=ON)
    fill(sources)
    receiver = destination.manager.receiver(3)
    receiver.offer(offer_rows(model, 0), TOKENS)
    senders = [rank.manager.sender(3) for rank in sources]
    for sender in senders:
        for first, last in ((0, 12), (4, 8), (7, 17), (2, 13)):
            pages = slice(first // 4, -(-last // 4))
            sender.send({name: HERE[name][pages] for name in model.parts}, (first, last))
        sender.finish({name: HERE[name][3:] for name in model.parts}, (15, TOKENS))
    succeeded(*senders, receiver)
    for name, rows in offer_rows(model, 0).items():
        destination.check(name, rows, (0, TOKENS))


def replace_coords(layout, stage):
    return kb.RankLayout(layout.components, kb.Coords(pp=(stage, 2)))


def test_the_decode_side_decides_and_a_room_may_differ(world, dones):
    (source,) = world.prefill(KV.layout(), settings=ON)
    (off,) = world.decode(KV.layout())
    (on,) = world.decode(KV.layout(), settings=ON)
    source.fill("kv", [0, 1], (0, 8))
    wanted = [(off, None, False), (off, True, True), (on, None, True), (on, False, False)]
    for room, (destination, asked, expected) in enumerate(wanted):
        sender, receiver = source.manager.sender(room), destination.manager.receiver(room, digest=asked)
        receiver.offer({"kv": [4, 5]}, 8)
        sender.finish({"kv": [0, 1]}, (0, 8))
        succeeded(sender, receiver)
        assert bool(dones.pop().digests) is expected


# Wrong ones.


@pytest.mark.parametrize(("name", "aux"), [*((name, "control") for name in EVERYTHING.parts), ("aux", "fabric")])
@pytest.mark.usefixtures("any_size")
def test_one_changed_bit_fails_the_room_by_name(any_world, name, aux, caplog, monkeypatch):
    (source,) = any_world.prefill(EVERYTHING.layout())
    (destination,) = any_world.decode(EVERYTHING.layout(), settings=replace(ON, aux=aux))
    changed = places(destination, name, PREFIX)[-5]
    if name == "aux" and aux == "control":
        packs = prefill.pack_aux

        def changes(*arguments):
            packed, moved = packs(*arguments)
            return packed[:-5] + bytes([packed[-5] ^ 8]) + packed[-4:], moved

        monkeypatch.setattr(prefill, "pack_aux", changes)
    else:
        once = iter([lambda: flip(destination, changed)])
        before_done(source, lambda: next(once, lambda: None)())
    (sender,), (receiver,) = begin(EVERYTHING, [source], [destination], PREFIX)
    failed(receiver, "part 0 of 1 (tp0/1", f"component {name}: the bytes in place have", error=DigestMismatch)
    assert len(set(re.findall(r"\b[0-9a-f]{16}\b", receiver.reason))) == 2
    wait_released(sender, receiver)
    wait(lambda: "prefill: room 1: decode rank tp0/1" in caplog.text, "the prefill side to hear of it")
    assert f"component {name}" in caplog.text
    receiver.close()
    sender.close()
    any_world.assert_empty()
    monkeypatch.undo()
    (sender,), (receiver,) = begin(EVERYTHING, [source], [destination], PREFIX, room=2)
    succeeded(sender, receiver)


def test_every_byte_of_a_component_counts(world):
    """And no byte but those of the room: the others may be another room's."""
    (source,) = world.prefill(KV.layout())
    (destination,) = world.decode(KV.layout(), settings=ON)
    own = places(destination, "kv", PREFIX)
    others = np.setdiff1d(np.arange(len(destination.memory.array)), own)
    sides = [(own, kb.Status.FAILED), (others, kb.Status.SUCCESS)]
    changes = [(at, wanted) for places_, wanted in sides for at in np.random.default_rng(1).choice(places_, 40)]
    now = []
    before_done(source, lambda: flip(destination, now[-1]))
    for room, (address, wanted) in enumerate(changes):
        now.append(address)
        (sender,), (receiver,) = begin(KV, [source], [destination], PREFIX, room=room)
        wait_over(receiver)
        assert receiver.poll() is wanted, (address, receiver.reason)
        wait_released(sender, receiver)
        receiver.close()
        sender.close()


def test_the_prefill_side_fails_too_while_it_still_sends(world):
    """Two decode ranks: one finds a fault, while the other has not offered yet."""
    (source,) = world.prefill(KV.layout())
    destinations = world.decode(KV.layout(0, 2), KV.layout(1, 2), settings=ON)
    fill([source])
    before_done(source, lambda: flip(destinations[0], places_of_half(destinations[0])[0]))
    sender = source.manager.sender(1)
    receivers = [rank.manager.receiver(1) for rank in destinations]
    receivers[0].offer(offer_rows(KV, 0), TOKENS)
    send(sender, KV, ())
    failed(receivers[0], "component kv", error=DigestMismatch)
    failed(sender, "decode rank 0", "component kv", error=DigestMismatch)
    receivers[1].offer(offer_rows(KV, 0), TOKENS)
    failed(receivers[1], "component kv", error=DigestMismatch)
    wait_released(sender, *receivers)


def places_of_half(rank):
    return np.concatenate([at for at, _ in rank._places("kv", THERE["kv"], (0, TOKENS), 0, 1)])


def test_one_of_several_parts_is_named(world):
    """Uneven tensor parallelism, and replicas that share a latent in stripes."""
    model = Model(("kv", "latent"))
    sources = world.prefill(model.layout(0, 2), model.layout(1, 2))
    (destination,) = world.decode(model.layout(), settings=ON)
    address = places_of_latent(destination)[0]
    for source in sources:
        before_done(source, lambda: destination.memory.array.__setitem__(address, 0x5A))
    senders, (receiver,) = begin(model, sources, [destination])
    failed(receiver, "of 2 (tp", "component latent", error=DigestMismatch)
    wait_released(*senders, receiver)


def places_of_latent(rank):
    return np.concatenate([at for at, _ in rank._places("latent", THERE["latent"], (0, TOKENS), 0, 1)])


def test_a_source_that_changes_before_its_digest_is_found(world):
    """Rows that the prefill engine gave to another request although they were being sent."""
    (source,) = world.prefill(KV.layout())
    (destination,) = world.decode(KV.layout(), settings=ON)
    start = source.manager.side._digests.start

    def late(*arguments):
        wait(lambda: (destination.memory.array[places(destination, "kv")] != 0xA5).all(), "the bytes")
        source.memory.array[:] = 1
        start(*arguments)

    source.manager.side._digests.start = late
    (sender,), (receiver,) = begin(KV, [source], [destination])
    failed(receiver, "component kv", error=DigestMismatch)
    wait_released(sender, receiver)


# What happens meanwhile.


class Held:
    """Digests of one manager wait until they are let go."""

    def __init__(self, monkeypatch, manager):
        self.entered, self.go = threading.Event(), threading.Event()
        self.calls = 0
        made = digest_jobs.digests_of

        def waits(context, portion):
            if context is manager._context:
                self.calls += 1
                self.entered.set()
                assert self.go.wait(20)
            return made(context, portion)

        monkeypatch.setattr(digest_jobs, "AT_ONCE_BYTES", 0)
        monkeypatch.setattr(digest_jobs, "digests_of", waits)


@pytest.fixture
def ranks(world):
    (source,) = world.prefill(KV.layout())
    (destination,) = world.decode(KV.layout(), settings=ON)
    return source, destination


def test_rows_are_kept_while_they_are_read_at_prefill(ranks, world, monkeypatch):
    source, destination = ranks
    held = Held(monkeypatch, source.manager)
    (sender,), (receiver,) = begin(KV, [source], [destination])
    assert held.entered.wait(10)
    sender.abort("enough")
    failed(sender, "enough", error=TransferAborted)
    failed(receiver, "enough", error=TransferAborted)
    time.sleep(0.05)
    assert not sender.rows_released
    assert not receiver.rows_released
    held.go.set()
    wait_released(sender, receiver)
    sender.close()
    receiver.close()
    world.assert_empty()


def test_rows_are_kept_while_they_are_read_at_decode(ranks, world, monkeypatch):
    source, destination = ranks
    held = Held(monkeypatch, destination.manager)
    (sender,), (receiver,) = begin(KV, [source], [destination])
    assert held.entered.wait(10)
    succeeded(sender)
    receiver.abort("enough")
    failed(receiver, "enough", error=TransferAborted)
    receiver.close()
    time.sleep(0.05)
    assert not receiver.rows_released
    held.go.set()
    wait_released(receiver)
    sender.close()
    world.assert_empty()


def test_a_prefill_rank_that_ends_after_its_work_is_not_missed(ranks, monkeypatch):
    source, destination = ranks
    held = Held(monkeypatch, destination.manager)
    (sender,), (receiver,) = begin(KV, [source], [destination])
    assert held.entered.wait(10)
    succeeded(sender)
    source.manager.close()
    wait(lambda: not destination.manager.peers, "the decode rank to notice")
    held.go.set()
    succeeded(receiver)
    wait_released(receiver)


def test_a_prefill_rank_that_ends_before_its_work_is(ranks, monkeypatch):
    source, destination = ranks
    held = Held(monkeypatch, source.manager)
    (sender,), (receiver,) = begin(KV, [source], [destination])
    assert held.entered.wait(10)
    closing = threading.Thread(target=source.manager.close)
    closing.start()
    failed(receiver)
    assert receiver._failure in (TransferAborted, PeerLost)
    held.go.set()
    closing.join(20)
    assert not closing.is_alive()
    wait_released(sender, receiver)


def test_control_messages_pass_while_digests_are_made(ranks, monkeypatch):
    """Rooms without digests come and go while those with them wait for their turn."""
    source, destination = ranks
    held = Held(monkeypatch, destination.manager)
    waiting = [begin(KV, [source], [destination], room=room) for room in range(6)]
    assert held.entered.wait(10)
    sender, receiver = source.manager.sender(9), destination.manager.receiver(9, digest=False)
    receiver.offer({"kv": [10, 11]}, 8)
    sender.finish({"kv": [0, 1]}, (0, 8))
    succeeded(sender, receiver)
    assert held.calls <= digest_jobs.AT_A_TIME
    assert not any(receiver.poll().terminal for _, (receiver,) in waiting)
    held.go.set()
    for senders, receivers in waiting:
        succeeded(*senders, *receivers)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.usefixtures("any_size")
def test_digests_that_cannot_be_made_fail_the_room(ranks, world, side, monkeypatch):
    source, destination = ranks
    manager = (source if side == "prefill" else destination).manager
    made = digest_jobs.digests_of

    def breaks(context, portion):
        if context is manager._context:
            raise OSError("no luck")
        return made(context, portion)

    monkeypatch.setattr(digest_jobs, "digests_of", breaks)
    (sender,), (receiver,) = begin(KV, [source], [destination])
    failed(receiver, "part 0", "no luck", "could not be " + ("made" if side == "prefill" else "checked"))
    if side == "prefill":
        failed(sender, "its digest could not be made: no luck")
    wait_released(sender, receiver)
    sender.close()
    receiver.close()
    world.assert_empty()


def test_memory_of_a_device_is_refused_by_name():
    region = kb.Region(1 << 20, 4096, "cuda")
    with pytest.raises(ConfigurationError, match="region 0 is memory of kind 'cuda'"):
        check_memory([region])
    with pytest.raises(ConfigurationError, match="host memory only"):
        kb.Manager(KV.layout(), [kb.Region(1 << 20, 1 << 20, "cuda")], role="decode", settings=ON)


def test_tokens_count_once():
    sent = Sent()
    assert sent.fresh("kv", (4, 8)) == ((4, 8),)
    assert sent.fresh("kv", (4, 8)) == ()
    assert sent.fresh("kv", (0, 12)) == ((0, 4), (8, 12))
    assert sent.fresh("kv", (20, 24)) == ((20, 24),)
    assert sent.fresh("kv", (10, 30)) == ((12, 20), (24, 30))
    assert sent.fresh("kv", (0, 30)) == ()
    assert sent.fresh("latent", (3, 5)) == ((3, 5),)


def test_rooms_without_digests_log_no_error(ranks, caplog):
    source, destination = ranks
    caplog.set_level(logging.ERROR)
    (sender,), (receiver,) = begin(KV, [source], [destination])
    succeeded(sender, receiver)
    assert not caplog.records
