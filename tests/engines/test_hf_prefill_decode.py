from __future__ import annotations

import pytest
from hf_pair import GREEDY, Pair, cached_model, clear_prompt, prompt, single

from kvbaton.engines.base import Sampling
from kvbaton.engines.hf import ARCHITECTURES
from kvbaton.engines.hf.forward import Runner

PAGE = 16
# One token, around a page, around the window (24), and long enough for windows, entries and sparse selections.
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 23, 24, 25, 70)

COMPONENTS = {
    "qwen3": {"kv"},
    "qwen3_next": {"kv", "conv", "recurrent"},
    "qwen3_5": {"kv", "conv", "recurrent"},
    "gemma3": {"kv", "window"},
    "gpt_oss": {"kv", "window"},
    "deepseek_v32": {"kv", "index"},
    "glm_moe_dsa": {"kv", "index"},
    "deepseek_v4": {"window", "compressed_4", "compressed_8", "index", "tail_4", "tail_8", "overlap"},
    "mamba2": {"conv", "recurrent"},
    "falcon_h1": {"kv", "conv", "recurrent"},
}


def test_every_architecture_is_listed():
    assert COMPONENTS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_concurrent_requests_answer_as_one_process_does(name):
    prompts = [prompt(tokens) for tokens in LENGTHS]
    # Two of the same length, so that models without padding stack too.
    prompts.append(prompt(25, seed=1))
    with Pair(name) as pair:
        assert pair.answers(prompts) == [single(name, ids).token_ids for ids in prompts]
        handle = pair.submit(prompts[-1])[1]
        assert handle.result(60)[1].finish == "length"
        assert {component for component, count in handle.bytes_by_component.items() if count} == COMPONENTS[name] | {
            "aux"
        }
        pair.settle()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("chunk_tokens", [12, 32])
def test_chunked_prefill_answers_as_one_process_with_the_same_split(name, chunk_tokens):
    prompts = [prompt(tokens) for tokens in (12, 13, 64, 70)]
    with Pair(name, chunk_tokens=chunk_tokens) as pair:
        assert pair.answers(prompts) == [single(name, ids, split=chunk_tokens).token_ids for ids in prompts]
        pair.settle()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gemma3", "deepseek_v4"])
@pytest.mark.parametrize(("prefill_page", "decode_page"), [(16, 8), (4, 16), (1, 16)])
def test_page_sizes_may_differ(name, prefill_page, decode_page):
    prompts = [prompt(tokens) for tokens in (1, 17, 41)]
    with Pair(name, prefill={"page_size": prefill_page}, decode={"page_size": decode_page}) as pair:
        assert pair.answers(prompts) == [single(name, ids).token_ids for ids in prompts]
        pair.settle()


def test_tcp_carries_the_same():
    prompts = [prompt(tokens) for tokens in (1, 40)]
    tcp = {"manager_options": {"transports": ("tcp",)}}
    with Pair("qwen3_5", prefill=tcp, decode=tcp) as pair:
        assert pair.answers(prompts) == [single("qwen3_5", ids).token_ids for ids in prompts]


@pytest.mark.parametrize("name", ["qwen3", "mamba2", "gpt_oss"])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.5}, {"temperature": 2.0, "top_p": 0.8}, {"temperature": 2.0, "top_k": 20, "top_p": 0.9}],
    ids=["temperature", "top_p", "top_k"],
)
def test_sampling_with_a_seed_answers_as_one_process_does(name, options):
    prompts = [prompt(tokens, seed=2) for tokens in (5, 33)]
    seeded = Sampling(max_new_tokens=12, ignore_eos=True, seed=7, **options)
    other = Sampling(max_new_tokens=12, ignore_eos=True, seed=8, **options)
    with Pair(name) as pair:
        answers = pair.answers(prompts, seeded)
        assert answers == [single(name, ids, seeded).token_ids for ids in prompts]
        assert answers != pair.answers(prompts, other)
        assert answers != pair.answers(prompts, GREEDY)


def test_the_token_that_ends_an_answer_is_named_and_not_emitted():
    ids = prompt(20)
    answer = single("qwen3", ids).token_ids
    stop = next(token for position, token in enumerate(answer) if position > 3 and token not in answer[:position])
    sampling = Sampling(max_new_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    with Pair("qwen3") as pair:
        tokens, end = pair.submit(ids, sampling)[1].result(60)
        assert (tokens, end.finish, end.matched) == (answer[: answer.index(stop)], "stop", stop)
        # Also when it is the very first token, which the prefill side chose.
        at_once = Sampling(max_new_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(answer[0],))
        tokens, end = pair.submit(ids, at_once)[1].result(60)
        assert (tokens, end.finish, end.matched) == ((), "stop", answer[0])
        pair.settle()


def test_the_models_end_of_text_counts_unless_it_is_ignored():
    ids = prompt(20)
    answer = single("qwen3", ids).token_ids
    model = cached_model("qwen3")
    before = model.generation_config.eos_token_id
    try:
        model.generation_config.eos_token_id = [answer[5]]
        with Pair("qwen3") as pair:
            tokens, end = pair.submit(ids, Sampling(max_new_tokens=12, temperature=0.0))[1].result(60)
            assert (tokens, end.finish, end.matched) == (answer[: answer.index(answer[5])], "stop", answer[5])
            assert pair.submit(ids, GREEDY)[1].result(60)[0] == answer
    finally:
        model.generation_config.eos_token_id = before


@pytest.mark.parametrize(("wanted", "expected"), [(0, 0), (1, 1), (3, 3)])
def test_answers_end_at_max_new_tokens(wanted, expected):
    sampling = Sampling(max_new_tokens=wanted, temperature=0.0, ignore_eos=True)
    with Pair("qwen3") as pair:
        tokens, end = pair.submit(prompt(9), sampling)[1].result(60)
        assert (tokens, end.finish) == (single("qwen3", prompt(9)).token_ids[:expected], "length")
        pair.settle()


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("qwen3_5", [10, 17, 24, 31, 38, 45]),
        ("falcon_h1", [3, 40, 20]),
        ("gemma3", [30, 30, 30, 12]),
        ("deepseek_v4", [21, 21]),
    ],
)
def test_requests_that_join_and_leave_a_batch_keep_their_answers(name, lengths, monkeypatch):
    sizes = []
    step = Runner.step

    def counted(self, cache, tokens, held):
        sizes.append(len(tokens))
        return step(self, cache, tokens, held)

    limits = [3, 12, 7, 12, 1, 9][: len(lengths)]
    prompts = [clear_prompt(name, tokens) for tokens in lengths]
    expected = [single(name, ids).token_ids[:limit] for ids, limit in zip(prompts, limits, strict=True)]
    with Pair(name, max_batch=4) as pair:
        monkeypatch.setattr(Runner, "step", counted)
        engine, began = pair.decode, []
        begin = engine._begin

        def begin_together(job):
            # All transfers end before the first step, so that the requests do meet.
            arrived = [other for other in engine._receiving if other.room.poll().terminal]
            if len(arrived) == len(prompts):
                began.extend(arrived)
                for other in arrived:
                    begin(other)
            assert job in (began or arrived)

        monkeypatch.setattr(engine, "_begin", begin_together)
        handles = [
            pair.submit(ids, Sampling(max_new_tokens=limit, temperature=0.0, ignore_eos=True))[1]
            for ids, limit in zip(prompts, limits, strict=True)
        ]
        assert [handle.result(60)[0] for handle in handles] == expected
        pair.settle()
    assert 1 < max(sizes) <= 4


def test_figures_of_the_transfer_are_kept():
    with Pair("qwen3_5") as pair:
        sent, received = pair.submit(prompt(40))
        end = received.result(60)[1]
        sent.result(60)
        # Two attention layers: key and value, 2 heads of 16, 4 bytes. Two layers of state.
        expected = {"kv": 2 * 40 * 2 * 2 * 16 * 4, "conv": 2 * 128 * 4 * 4, "recurrent": 2 * 4 * 16 * 16 * 4, "aux": 24}
        assert received.bytes_by_component == sent.bytes_by_component == expected
        assert end.metrics["bytes_by_component"] == expected
        assert end.metrics["bytes"] == sum(expected.values())
        assert end.metrics["prompt_tokens"] == 40
        assert end.metrics["completion_tokens"] == 12
        assert received.transfer_seconds > 0
