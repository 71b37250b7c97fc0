"""A script: SGLang's own managers, senders, receivers and bootstrap server over kvbaton, in one process.

Prints one JSON line for each scenario: its name, and what was wrong, or nothing. `Scenarios` says what is run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
import torch

os.environ |= {
    "SGLANG_HOST_IP": "127.0.0.1",
    "KVBATON_TRANSPORT": "tcp",
    "KVBATON_SECRET": "a secret of these scenarios only",
}

import sglang_import
from sglang_pools import Place, Side, mamba, mha

sglang_import.install()

# Transformers adds it to Python's loggers.
logging.Logger.warning_once = logging.Logger.warning

import sglang.srt.disaggregation.common.conn as conn  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402

import kvbaton.engines.sglang.manager as manager_module  # noqa: E402
from kvbaton.engines.sglang import (  # noqa: E402
    KvbatonKVBootstrapServer,
    KvbatonKVManager,
    KvbatonKVReceiver,
    KvbatonKVSender,
)
from kvbaton.errors import ConfigurationError  # noqa: E402

HEADS, TOKENS, SECONDS = 4, 45, 20.0


class Bag(SimpleNamespace):
    """Stands for one namespace of SGLang's runtime context."""


def context(rank, size, *, dp=(0, 1), cp=(0, 1), pp=(0, 1), port, pp_group=None):
    """Have SGLang's code see this rank from now on."""
    parallel = Bag(
        dist_init_addr=None,
        nnodes=1,
        dp_size=1,
        num_dp_ranks=dp[1],
        tp_rank=rank,
        attn_tp_size=size,
        attn_tp_rank=rank,
        attn_cp_size=cp[1],
        attn_cp_rank=cp[0],
        attn_dcp_size=1,
        attn_dcp_rank=0,
        attn_dp_size=dp[1],
        attn_dp_rank=dp[0],
        pp_size=pp[1],
        pp_rank=pp[0],
        pp_group=pp_group,
        world_group=None,
        enable_cp_tp_group_sharing=False,
        enable_dsa_cache_layer_split=False,
        enable_kv_cache_sharding=False,
        load_balance_method="round_robin",
    )
    bags = {
        "get_parallel": parallel,
        "get_disagg": Bag(
            disaggregation_bootstrap_port=port,
            disaggregation_decode_allocation_policy="early",
            disaggregation_ib_device=None,
        ),
        "get_serving": Bag(host="127.0.0.1", port=0),
        "get_observability": Bag(enable_trace=False),
        "get_device": Bag(device="cpu"),
    }
    for name, bag in bags.items():
        for module in (conn, manager_module):
            if hasattr(module, name):
                setattr(module, name, lambda bag=bag: bag)
    conn.linear_attn_tp_size = lambda: size


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def until(condition, what, seconds=SECONDS):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"after {seconds:g} s: {what}"
        time.sleep(0.001)


class Rank:
    """One rank of one role: its pools, and SGLang's manager."""

    def __init__(
        self,
        world,
        role,
        *,
        tp=(0, 1),
        page_size=4,
        tokens=TOKENS,
        filled=0,
        prefix=0,
        heads=HEADS,
        layers=(0, 1),
        **where,
    ):
        self.world, self.role, self.tp, self.where = world, role, tp, where
        self.page_size, self.tokens, self.prefix = page_size, tokens, prefix
        self.place = Place(np.random.default_rng(len(world.ranks) + 1), page_size, 16, 40)
        self.side = Side(
            len(world.ranks),
            page_size,
            tp=tp,
            kv_layout=None,
            ib_device=None,
            pp_rank=where.get("pp", (0, 1))[0],
            system_dp_rank=None,
            rust_http_port=None,
            total_kv_head_num=heads,
            kv_head_num=max(1, heads // tp[1]),
            prefill_start_layer=layers[0],
        )
        at = np.arange(prefix if role == "decode" else 0, filled or tokens)
        mha(self.side, self.place, at, layers=layers, heads=heads)
        mamba(self.side, self.place, layers=layers)
        self.side.aux(self.place)
        if role == "prefill":
            self.side.fill()
        self.manager = None
        world.ranks.append(self)
        self.start()

    def see(self):
        context(*self.tp, port=self.world.port, **self.where)

    def start(self):
        self.see()
        mode = DisaggregationMode.PREFILL if self.role == "prefill" else DisaggregationMode.DECODE
        self.manager = KvbatonKVManager(self.side.args, mode, Bag(enable_pd_role_switch=True), False)

    @property
    def states(self):
        return [np.array([self.place.slot], np.int32)]

    def pages(self, first, last):
        size = self.page_size
        return self.place.pages[first // size : -(-last // size)]

    # As the scheduler does.

    def sender(self, room):
        self.see()
        return KvbatonKVSender(self.manager, self.world.address, room, True)

    def receiver(self, room, dp_rank=0):
        self.see()
        until(lambda: self.manager.try_ensure_parallel_info(self.world.address), "the prefill side is not ready")
        receiver = KvbatonKVReceiver(self.manager, self.world.address, room)
        receiver.init(dp_rank)
        return receiver

    def offer(self, receiver, *, exact=True):
        if exact:
            receiver.prompt_tokens = self.tokens
        receiver.send_metadata(
            self.pages(self.prefix, self.tokens), self.place.aux, self.states, decode_prefix_len=self.prefix
        )

    def send(self, sender, chunk_pages=0):
        """What `send_kv_chunk` does, after the bootstrap is done."""
        self.see()
        prefix = sender.pop_decode_prefix_len()
        pages = self.pages(prefix, self.tokens)
        sender.init(len(pages), self.place.aux)
        step = chunk_pages or max(len(pages), 1)
        for at in range(0, max(len(pages), 1), step):
            part = pages[at : at + step]
            last = at + step >= len(pages)
            first = prefix + at * self.page_size
            count = min(len(part) * self.page_size, self.tokens - first)
            assert sender.should_send_kv_chunk(len(part), last)
            sender.send(part, self.states if last else None, num_kv_tokens=count)


class World:
    """A bootstrap server and the ranks around it."""

    def __init__(self):
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.ranks = []
        self.server = KvbatonKVBootstrapServer("127.0.0.1", self.port)

    def close(self):
        for rank in self.ranks:
            if rank.manager is not None and rank.manager.baton is not None:
                rank.manager.teardown()
        self.server.close()


def state_is(each, *wanted):
    return each.poll() in wanted


def ended(*each):
    until(lambda: all(state_is(one, KVPoll.Success, KVPoll.Failed) for one in each), "not all rooms have ended")
    return [one.poll() for one in each]


def reason_of(each):
    try:
        each.failure_exception()
    except conn.KVTransferError as error:
        return error.failure_reason
    raise AssertionError("failure_exception raised nothing")


def ready(*senders):
    until(lambda: all(state_is(one, KVPoll.WaitingForInput) for one in senders), "the senders are not bootstrapped")


def hand_over(prefills, decodes, room, *, chunk_pages=0, exact=True, dp_rank=0):
    """One request that ends well; everything is cleared."""
    senders = [rank.sender(room) for rank in prefills]
    receivers = [rank.receiver(room, dp_rank) for rank in decodes]
    for receiver in receivers:
        assert state_is(receiver, KVPoll.WaitingForInput)
    for rank, receiver in zip(decodes, receivers, strict=True):
        rank.offer(receiver, exact=exact)
    ready(*senders)
    for rank, sender in zip(prefills, senders, strict=True):
        rank.send(sender, chunk_pages)
    for sender in senders:
        assert not state_is(sender, KVPoll.Bootstrapping)
    each = [*senders, *receivers]
    states = ended(*each)
    assert states == [KVPoll.Success] * len(each), [reason_of(one) for one in each if one.poll() == KVPoll.Failed]
    for one in each:
        one.clear()
    check(*decodes)
    nothing_left(*prefills, *decodes)
    return senders


def check(*decodes):
    for rank in decodes:
        assert rank.side.wrong_buffers() == [], f"rank {rank.tp}: buffers {rank.side.wrong_buffers()} are not as wanted"


def nothing_left(*ranks):
    for rank in ranks:
        manager = rank.manager
        assert dict(manager.request_status) == {}, manager.request_status
        assert manager.failure_records == {}, manager.failure_records
        assert manager._held == {}
        until(lambda manager=manager: manager.watch._listeners == {}, "rooms are still listened to")


class Scenarios:
    """Each method is one; it gets a world of its own."""

    def whole(self, world):
        sender = hand_over([Rank(world, "prefill")], [Rank(world, "decode")], 3)[0]
        metric = sender.get_transfer_metric()
        assert metric.transfer_latency_s > 0
        assert metric.transfer_total_bytes > TOKENS * HEADS * 8 * 2 * 2 * 2, metric

    def many_rooms(self, world):
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        for room in (1, 2, 2**62):
            hand_over([prefill], [decode], room)

    def chunks(self, world):
        hand_over([Rank(world, "prefill")], [Rank(world, "decode")], 3, chunk_pages=3)

    def pages_of_which_the_last_counts_as_full(self, world):
        prefill, decode = Rank(world, "prefill", filled=48), Rank(world, "decode", filled=48)
        hand_over([prefill], [decode], 3, chunk_pages=5, exact=False)

    def prefix(self, world):
        hand_over([Rank(world, "prefill")], [Rank(world, "decode", prefix=16)], 3)

    def whole_prefix(self, world):
        hand_over([Rank(world, "prefill", tokens=48)], [Rank(world, "decode", tokens=48, prefix=48)], 3)

    def pages_of_other_sizes(self, world):
        hand_over([Rank(world, "prefill", page_size=8)], [Rank(world, "decode", prefix=4)], 3, chunk_pages=2)

    def pages_of_other_sizes_the_other_way(self, world):
        decode = Rank(world, "decode", page_size=16, prefix=16)
        hand_over([Rank(world, "prefill")], [decode], 3, chunk_pages=3)

    def pages_of_other_sizes_and_no_exact_length(self, world):
        prefill, decode = Rank(world, "prefill", tokens=41), Rank(world, "decode", tokens=41, page_size=16)
        sender, receiver = prefill.sender(3), decode.receiver(3)
        decode.offer(receiver, exact=False)
        ready(sender)
        prefill.send(sender)
        assert ended(sender, receiver) == [KVPoll.Failed] * 2
        for each in (sender, receiver):
            reason = reason_of(each)
            assert "41" in reason and "48" in reason, reason  # noqa: PT018

    def two_to_one(self, world):
        hand_over([Rank(world, "prefill", tp=(at, 2)) for at in range(2)], [Rank(world, "decode")], 3, chunk_pages=4)

    def one_to_two(self, world):
        hand_over([Rank(world, "prefill")], [Rank(world, "decode", tp=(at, 2)) for at in range(2)], 3)

    def one_head_two_to_four(self, world):
        prefills = [Rank(world, "prefill", tp=(at, 2), heads=1) for at in range(2)]
        hand_over(prefills, [Rank(world, "decode", tp=(at, 4), heads=1) for at in range(4)], 3)

    def two_decode_sides_of_other_widths(self, world):
        prefills = [Rank(world, "prefill", tp=(at, 2)) for at in range(2)]
        alone, pair = Rank(world, "decode"), [Rank(world, "decode", tp=(at, 2)) for at in range(2)]
        hand_over(prefills, [alone], 3)
        hand_over(prefills, pair, 4)

    def replicas(self, world):
        prefills = [Rank(world, "prefill", dp=(at, 2)) for at in range(2)]
        decode = Rank(world, "decode")
        hand_over(prefills[1:], [decode], 3, dp_rank=1)
        hand_over(prefills[:1], [decode], 4, dp_rank=0)

    def context_parallel(self, world):
        hand_over([Rank(world, "prefill", cp=(at, 2)) for at in range(2)], [Rank(world, "decode")], 3, chunk_pages=4)

    def pipeline(self, world):
        group = Group(2)
        stages = [None, None]

        def start(at):
            return Rank(world, "prefill", pp=(at, 2), layers=(at,), pp_group=group.member(at))

        stages[0] = start(0)
        stages[1] = start(1)
        decode = Rank(world, "decode")
        senders, receiver = [rank.sender(3) for rank in stages], decode.receiver(3)
        assert senders[0].poll_pp_consensus() == KVPoll.Bootstrapping
        decode.offer(receiver)
        until(lambda: senders[0].poll_pp_consensus() == KVPoll.WaitingForInput, "the stages do not agree")
        for rank, sender in zip(stages, senders, strict=True):
            rank.send(sender)
        assert ended(*senders, receiver) == [KVPoll.Success] * 3
        until(lambda: senders[0].poll_pp_consensus() == KVPoll.Success, "the stages do not agree")
        for each in (*senders, receiver):
            each.clear()
        check(decode)

    def sends_after_an_event(self, world):
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        sender, receiver = prefill.sender(3), decode.receiver(3)
        decode.offer(receiver)
        ready(sender)
        happened = threading.Event()
        sender._early_send_wait_event = SimpleNamespace(
            query=happened.is_set, synchronize=lambda: happened.wait(SECONDS)
        )
        kept = [raw.copy() for raw in prefill.side.raw]
        for raw in prefill.side.raw:
            raw[:] = 0xEE
        prefill.send(sender, chunk_pages=4)
        assert sender._early_send_wait_event is None
        time.sleep(0.1)
        assert state_is(sender, KVPoll.Transferring)
        for raw, right in zip(prefill.side.raw, kept, strict=True):
            raw[:] = right
        happened.set()
        assert ended(sender, receiver) == [KVPoll.Success] * 2
        check(decode)
        for each in (sender, receiver):
            each.clear()

    def page_indices_that_come_later(self, world):
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        assert not KvbatonKVSender(prefill.manager, world.address, 9, True).supports_host_tensor_indices
        sender, receiver = prefill.sender(3), decode.receiver(3)
        decode.offer(receiver)
        ready(sender)
        assert sender.pop_decode_prefix_len() == 0
        right = prefill.pages(0, TOKENS)
        indices = torch.zeros(len(right), dtype=torch.int32)
        sender.init(len(right), prefill.place.aux)
        happened = threading.Event()
        event = SimpleNamespace(query=happened.is_set, synchronize=lambda: happened.wait(SECONDS))
        sender.send(indices, prefill.states, num_kv_tokens=TOKENS, indices_event=event)
        indices.copy_(torch.from_numpy(right))
        happened.set()
        assert ended(sender, receiver) == [KVPoll.Success] * 2
        check(decode)

    def allocation_that_is_not_served(self, world):
        Rank(world, "prefill")
        disagg = conn.get_disagg().__dict__ | {"disaggregation_decode_allocation_policy": "prefill_complete"}
        original, manager_module.get_disagg = manager_module.get_disagg, lambda: Bag(**disagg)
        with pytest.raises(ConfigurationError, match="prefill_complete"):
            KvbatonKVManager(Bag(), DisaggregationMode.DECODE, Bag(), False)
        manager_module.get_disagg = original

    def abort_by_decode(self, world):
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        sender, receiver = prefill.sender(3), decode.receiver(3)
        decode.offer(receiver)
        ready(sender)
        receiver.abort()
        assert state_is(receiver, KVPoll.Failed)
        assert receiver.abort_notified
        # As `pop_transferred` goes on: the exception, then the hold, then the release.
        assert "Abort" in reason_of(receiver)
        until(lambda: decode.manager.is_abort_release_safe(3, len(receiver.bootstrap_infos)), "no proof")
        decode.manager.clear_deferred_abort_state(3)
        receiver.clear()
        assert ended(sender) == [KVPoll.Failed]
        assert "decode scheduler" in reason_of(sender)
        nothing_left(prefill, decode)
        hand_over([prefill], [decode], 3)

    def failure_that_decode_did_not_begin(self, world):
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        sender, receiver = prefill.sender(3), decode.receiver(3)
        decode.offer(receiver)
        ready(sender)
        sender.abort()
        assert ended(receiver) == [KVPoll.Failed]
        assert not receiver.abort_notified
        assert "prefill scheduler" in reason_of(receiver)
        receiver.ensure_abort_notified(force_arm=True)
        assert receiver.abort_notified
        until(lambda: decode.manager.is_abort_release_safe(3, 1), "no proof")
        decode.manager.clear_deferred_abort_state(3)
        receiver.clear()
        # The scheduler never calls the sender again.
        nothing_left(prefill, decode)

    def failure_on_another_rank(self, world):
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        sender, receiver = prefill.sender(3), decode.receiver(3)
        decode.offer(receiver)
        ready(sender)
        for each in (sender, receiver):
            with pytest.raises(conn.KVTransferError, match="another rank") as caught:
                each.failure_exception()
            assert caught.value.is_from_another_rank
        nothing_left(prefill, decode)

    def abort_before_anything(self, world):
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        sender, receiver = prefill.sender(3), KvbatonKVReceiver(decode.manager, world.address, 3)
        receiver.abort()
        assert "Abort" in reason_of(receiver)
        sender.abort()
        assert state_is(sender, KVPoll.Failed)
        hand_over([prefill], [decode], 3)

    def room_that_still_drains(self, world):
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        held = prefill.manager.baton.sender(3)
        sender = prefill.sender(3)
        assert state_is(sender, KVPoll.Bootstrapping)
        held.close()
        receiver = decode.receiver(3)
        decode.offer(receiver)
        ready(sender)
        prefill.send(sender)
        assert ended(sender, receiver) == [KVPoll.Success] * 2

    def bootstrap_timeout(self, world):
        prefill = Rank(world, "prefill")
        prefill.manager.bootstrap_timeout = 0.05
        sender = prefill.sender(3)
        assert ended(sender) == [KVPoll.Failed]
        assert "KVPoll.Bootstrapping" in reason_of(sender)
        nothing_left(prefill)

    def waiting_timeout(self, world):
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        sender, receiver = prefill.sender(3), decode.receiver(3)
        decode.manager.waiting_timeout = 0.05
        decode.offer(receiver)
        assert ended(receiver) == [KVPoll.Failed]
        assert receiver.abort_notified
        assert "KVPoll.WaitingForInput" in reason_of(receiver)
        assert ended(sender) == [KVPoll.Failed]
        until(lambda: decode.manager.is_abort_release_safe(3, 1), "no proof")

    def other_dtypes(self, world):
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        decode.manager.deregister_buffer_to_engine()
        decode.side.args.kv_cache_dtype_str = "float16"
        decode.manager.register_buffer_to_engine()
        sender, receiver = prefill.sender(3), decode.receiver(3)
        decode.offer(receiver)
        assert ended(sender, receiver) == [KVPoll.Failed] * 2
        for each in (sender, receiver):
            reason = reason_of(each)
            assert "bfloat16" in reason and "float16" in reason, reason  # noqa: PT018

    def memory_that_goes_and_comes(self, world):
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        hand_over([prefill], [decode], 3)
        for rank in (prefill, decode):
            rank.see()
            rank.manager.deregister_buffer_to_engine()
            rank.manager.register_buffer_to_engine()
        hand_over([prefill], [decode], 4)

    def role_switch(self, world):
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        hand_over([prefill], [decode], 3)
        before = threading.active_count()
        for rank in (prefill, decode):
            rank.manager.teardown()
        conn.CommonKVReceiver.close_all_sockets()
        assert threading.active_count() < before
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        hand_over([prefill], [decode], 4)
        assert threading.active_count() <= before, [thread.name for thread in threading.enumerate()]

    def prefill_that_is_started_again(self, world):
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        hand_over([prefill], [decode], 3)
        sender, receiver = prefill.sender(4), decode.receiver(4)
        decode.offer(receiver)
        ready(sender)
        prefill.manager.teardown()
        assert ended(receiver) == [KVPoll.Failed]
        assert reason_of(receiver)
        prefill.start()
        hand_over([prefill], [decode], 5)

    def bootstrap_server_of_another_backend(self, world):
        decode = Rank(world, "decode")
        other = conn.CommonKVBootstrapServer("127.0.0.1", free_port())
        address = f"127.0.0.1:{other.port}"
        decode.manager.prefill_info_table[address] = info = conn.PrefillServerInfo(1, 1, 1, 1, 4, "bfloat16", True)
        decode.manager._resolve_rank_mapping(info)
        receiver = KvbatonKVReceiver(decode.manager, address, 3)
        receiver.init(0)
        decode.offer(receiver)
        assert ended(receiver) == [KVPoll.Failed]
        assert address in reason_of(receiver)
        assert address not in decode.manager.prefill_info_table
        other.close()

    def late_events_do_not_count(self, world):
        prefill, decode = Rank(world, "prefill"), Rank(world, "decode")
        for room in range(20):
            sender, receiver = prefill.sender(room), decode.receiver(room)
            decode.offer(receiver)
            if room % 2:
                time.sleep(0.002)
            for each in (sender, receiver):
                each.clear()
        time.sleep(0.1)
        nothing_left(prefill, decode)


class Group:
    """As much of SGLang's group of pipeline stages as its store of states needs, for stages that start one by one."""

    def __init__(self, size):
        self.size, self.told = size, None

    def member(self, rank):
        def broadcast_object(value, src):
            if rank == src:
                self.told = value
            return self.told

        return SimpleNamespace(broadcast_object=broadcast_object)


def main(wanted):
    failed = False
    wanted = [name for name in wanted if not name.startswith("-")]
    for name in wanted or [name for name in vars(Scenarios) if not name.startswith("_")]:
        world, wrong = World(), ""
        began = time.monotonic()
        try:
            getattr(Scenarios(), name)(world)
        except Exception:
            wrong = traceback.format_exc()
        with contextlib.suppress(Exception):
            world.close()
        failed = failed or bool(wrong)
        print(json.dumps([name, wrong, round(time.monotonic() - began, 2)]), flush=True)
    # With --report who reads the lines judges; SGLang leaves threads behind that do not end.
    os._exit(int(failed and "--report" not in sys.argv))


if __name__ == "__main__":
    main(sys.argv[1:])
