from __future__ import annotations

import threading
import time

import pytest
from hf_pair import GREEDY, WAIT_SECONDS, Pair, end_of, prompt, single, submit_when_free, wait_until_free

from kvbaton.engines.base import GenerateRequest, Sampling
from kvbaton.errors import ConfigurationError, KVBatonError, RoomError, RowsError

LONG = Sampling(max_new_tokens=2000, temperature=0.0, ignore_eos=True)
# Prompts whose caches have several pages in every paged component.
PAGES = {"qwen3": 4, "qwen3_5": 4, "gemma3": 3, "deepseek_v32": 4, "falcon_h1": 4}


@pytest.mark.parametrize("name", PAGES)
def test_a_corrupted_page_changes_the_answer(name):
    ids = prompt(50)
    changed = 0
    # The last one is -1, as in a list.
    for page in range(-1, PAGES[name] - 1):
        with Pair(name, corrupt="page", corrupt_page=page) as pair:
            changed += pair.answers([ids]) != [single(name, ids).token_ids]
            pair.settle()
    assert changed == PAGES[name]


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "deepseek_v4", "mamba2", "falcon_h1"])
def test_a_corrupted_state_changes_the_answer(name):
    prompts = [prompt(50), prompt(30)]
    # Long enough for states that are used when the next entry of compressed attention is full.
    sampling = Sampling(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    with Pair(name, corrupt="state") as pair:
        answers = pair.answers(prompts, sampling)
        pair.settle()
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer != single(name, ids, sampling).token_ids


@pytest.mark.parametrize(("name", "corrupt"), [("qwen3", "state"), ("mamba2", "page"), ("qwen3", "else")])
def test_what_a_model_does_not_have_cannot_be_corrupted(name, corrupt):
    with pytest.raises(ConfigurationError, match=corrupt):
        Pair(name, corrupt=corrupt)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_requests_queue_while_a_pool_is_full(side):
    prompts = [prompt(40 + index, seed=3) for index in range(6)]
    with Pair("qwen3", **{side: {"pool_tokens": 64}}) as pair:
        assert pair.answers(prompts) == [single("qwen3", ids).token_ids for ids in prompts]
        pair.settle()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_requests_queue_while_all_slots_are_taken(side):
    prompts = [prompt(20 + index) for index in range(5)]
    with Pair("mamba2", **{side: {"max_running_requests": 1}}) as pair:
        assert pair.answers(prompts) == [single("mamba2", ids).token_ids for ids in prompts]
        pair.settle()


def test_full_pools_on_both_sides_never_wait_for_each_other():
    prompts = [prompt(40 + index) for index in range(4)]
    small = {"pool_tokens": 48, "max_running_requests": 1}
    with Pair("qwen3", prefill=small, decode=small) as pair:
        requests = [GenerateRequest(str(room), ids, 10_000 + room, GREEDY) for room, ids in enumerate(prompts)]
        # The two sides see the requests in opposite order.
        sent = [pair.prefill.submit(request) for request in requests]
        received = [pair.decode.submit(request) for request in reversed(requests)]
        answers = [handle.result(WAIT_SECONDS)[0] for handle in received]
        assert answers == [single("qwen3", ids).token_ids for ids in reversed(prompts)]
        assert [end_of(handle).finish for handle in sent] == ["length"] * len(sent)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_request_that_can_never_fit_is_refused_with_both_numbers(side):
    with Pair("qwen3", **{side: {"pool_tokens": 64}}) as pair:
        engine = getattr(pair, side)
        with pytest.raises(RowsError, match=r"needs 5 pages of component kv, but the pool has 4"):
            engine.submit(GenerateRequest("large", prompt(65), 77, GREEDY))
        # The room was not taken.
        assert pair.answers([prompt(64)]) == [single("qwen3", prompt(64)).token_ids]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ((), ConfigurationError, "empty"),
        ((5, 256), ConfigurationError, "token 256 .* 256 tokens"),
        ((-1,), ConfigurationError, "token -1"),
        ((5,) * 4096, RowsError, "4096 tokens, but the model's context is 4096"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(ids, error, message):
    with Pair("qwen3") as pair:
        for engine in (pair.prefill, pair.decode):
            with pytest.raises(error, match=message):
                engine.submit(GenerateRequest("wrong", ids, 78, GREEDY))


def test_a_room_in_use_is_refused_and_the_first_request_goes_on():
    with Pair("qwen3") as pair:
        request = GenerateRequest("first", prompt(12), 79, GREEDY)
        waiting = pair.prefill.submit(request)
        with pytest.raises(RoomError, match="79"):
            pair.prefill.submit(request)
        assert pair.decode.submit(request).result(WAIT_SECONDS)[0] == single("qwen3", prompt(12)).token_ids
        assert end_of(waiting).finish == "length"


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v4"])
def test_cancel_while_decoding_gives_pages_back_and_leaves_others_alone(name):
    ids = prompt(30)
    with Pair(name) as pair:
        victim = pair.submit(ids, LONG)[1]
        other = pair.submit(prompt(30, seed=5))[1]
        victim.events.get(timeout=WAIT_SECONDS)
        victim.cancel()
        assert end_of(victim).finish == "abort"
        assert other.result(WAIT_SECONDS)[0] == single(name, prompt(30, seed=5)).token_ids
        pair.settle()
        victim.cancel()


def test_cancel_at_decode_before_the_data_came_ends_the_prefill_side_too(monkeypatch):
    with Pair("qwen3") as pair:
        extend, cancelled = pair.prefill.runner.extend, threading.Event()

        def slow(cache, ids):
            assert cancelled.wait(WAIT_SECONDS)
            return extend(cache, ids)

        monkeypatch.setattr(pair.prefill.runner, "extend", slow)
        request = GenerateRequest("cancelled", prompt(30), 80, GREEDY)
        sent, received = pair.prefill.submit(request), pair.decode.submit(request)
        received.cancel()
        assert end_of(received).finish == "abort"
        wait_until_free(pair.decode.pools)
        cancelled.set()
        # A prompt that was not begun, or just finished, ends as well.
        end = end_of(sent)
        assert (end.finish, "cancelled by the client" in end.error) == ("error", True)
        pair.settle()
        # The room can be used again.
        again = submit_when_free(pair.prefill, request)
        assert submit_when_free(pair.decode, request).result(WAIT_SECONDS)[0] == single("qwen3", prompt(30)).token_ids
        assert end_of(again).finish == "length"


def test_cancel_at_prefill_before_the_decode_side_came_frees_the_room():
    with Pair("qwen3") as pair:
        request = GenerateRequest("cancelled", prompt(30), 81, GREEDY)
        sent = pair.prefill.submit(request)
        sent.cancel()
        assert end_of(sent).finish == "abort"
        # A later offer for that room waits for a sender; a new one serves it.
        received = pair.decode.submit(request)
        assert end_of(submit_when_free(pair.prefill, request)).finish == "length"
        assert received.result(WAIT_SECONDS)[0] == single("qwen3", prompt(30)).token_ids


def test_cancel_at_prefill_fails_the_decode_side_with_a_reason(monkeypatch):
    with Pair("qwen3") as pair:
        extend, handles = pair.prefill.runner.extend, []

        def cancelling(cache, ids):
            handles[0].cancel()
            return extend(cache, ids)

        monkeypatch.setattr(pair.prefill.runner, "extend", cancelling)
        # In pieces, so that the cancel is seen between two of them.
        pair.prefill.chunk_tokens = 8
        request = GenerateRequest("cancelled", prompt(30), 85, GREEDY)
        handles.append(pair.prefill.submit(request))
        received = pair.decode.submit(request)
        assert end_of(handles[0]).finish == "abort"
        end = end_of(received)
        assert (end.finish, "cancelled by the client" in end.error) == ("error", True)
        pair.settle()


def test_cancel_while_queued():
    with Pair("qwen3", decode={"max_running_requests": 1}) as pair:
        running = pair.submit(prompt(20), LONG)[1]
        running.events.get(timeout=WAIT_SECONDS)
        queued_sender, queued = pair.submit(prompt(21))
        queued.cancel()
        assert end_of(queued).finish == "abort"
        queued_sender.cancel()
        assert end_of(queued_sender).finish in ("abort", "error")
        running.cancel()
        pair.settle()


def test_prompts_that_differ_between_the_sides_are_noticed():
    with Pair("qwen3") as pair:
        pair.prefill.submit(GenerateRequest("here", prompt(17), 82, GREEDY))
        received = pair.decode.submit(GenerateRequest("there", prompt(18), 82, GREEDY))
        end = end_of(received)
        assert end.finish == "error"
        assert "17" in end.error
        assert "18" in end.error
        pair.settle()


def test_a_context_that_is_full_ends_the_answer():
    ids = prompt(4090)
    with Pair("mamba2", prefill={"pool_tokens": 4096}, decode={"pool_tokens": 4096}) as pair:
        assert pair.decode.info().context_length == 4096
        tokens, end = pair.submit(ids, LONG)[1].result(WAIT_SECONDS)
        assert (len(tokens), end.finish) == (6, "length")


def test_close_ends_what_runs_and_refuses_what_comes():
    with Pair("qwen3") as pair:
        running = pair.submit(prompt(20), LONG)[1]
        running.events.get(timeout=WAIT_SECONDS)
        pair.decode.close()
        assert end_of(running).finish == "abort"
        assert pair.decode.healthy() == "closed"
        pair.decode.close()
        with pytest.raises(KVBatonError, match="closed"):
            pair.decode.submit(GenerateRequest("late", prompt(5), 83, GREEDY))
        assert pair.prefill.healthy() == ""


def test_an_engine_whose_thread_failed_says_so_and_ends_its_requests():
    with Pair("qwen3") as pair:
        running = pair.submit(prompt(20), LONG)[1]
        running.events.get(timeout=WAIT_SECONDS)

        def broken() -> bool:
            raise ZeroDivisionError("a fault of the engine")

        pair.decode._advance = broken
        end = end_of(running)
        assert (end.finish, end.error) == ("error", "ZeroDivisionError: a fault of the engine")
        assert "a fault of the engine" in pair.decode.healthy()
        with pytest.raises(KVBatonError, match="does not run"):
            pair.decode.submit(GenerateRequest("late", prompt(5), 84, GREEDY))


def test_a_forward_that_fails_ends_its_request_alone(monkeypatch):
    with Pair("qwen3") as pair:
        extend = pair.prefill.runner.extend

        def failing(cache, ids):
            if len(ids) == 13:
                raise RuntimeError("out of memory")
            return extend(cache, ids)

        monkeypatch.setattr(pair.prefill.runner, "extend", failing)
        sent, received = pair.submit(prompt(13))
        assert "out of memory" in end_of(sent).error
        assert end_of(received).finish == "error"
        assert pair.answers([prompt(14)]) == [single("qwen3", prompt(14)).token_ids]
        pair.settle()


def test_idle_engines_do_not_spin():
    with Pair("qwen3") as pair:
        pair.answers([prompt(5)])
        turns = [0]
        advance = pair.decode._advance

        def counted() -> bool:
            turns[0] += 1
            return advance()

        pair.decode._advance = counted
        # The engine comes to rest: some time passes without a turn.
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            before = turns[0]
            time.sleep(0.1)
            if turns[0] == before:
                break
            assert time.monotonic() < deadline
