"""Stock SGLang servers on the CPU, started as a user starts them: their answers are those of one process."""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
import time

import pytest
from sglang_here import PYTHON, ROOT, SERVERS, needs
from sglang_servers import Pair, Server, free_port, post

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [needs(SERVERS), pytest.mark.long, pytest.mark.end_to_end, pytest.mark.timeout(900)]
NEW = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def model(folder):
    """A Llama with random weights, and the folder where it is."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=512,
        max_position_embeddings=1024,
    )
    made = transformers.LlamaForCausalLM(config).eval()
    made.save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "recall" / name, folder / "model")
    return made


@pytest.fixture(scope="module")
def pair(folder, model):
    find = "from importlib.metadata import entry_points as e; print(*(p.name for p in e(group='sglang.srt.plugins')))"
    if "kvbaton" not in subprocess.run([PYTHON, "-c", find], capture_output=True, text=True, check=True).stdout:
        pytest.skip("kvbaton is not installed, or was before it had a plug-in (make setup)")
    made = Pair(folder, folder / "model")
    try:
        made.wait()
        yield made
    finally:
        made.close()


def prompt(seed, length):
    return [random.Random(seed * 1000 + at).randrange(2, 500) for at in range(length)]


def patiently(ask):
    """An answer, from a server that is there but may not know the others yet."""
    for _ in range(30):
        answer = ask()
        if "error" not in answer:
            break
        time.sleep(1)
    return answer


def expected(model, ids):
    with torch.no_grad():
        whole = model.generate(torch.tensor([ids]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    return whole[0, len(ids) :].tolist()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 100, 200])
def test_answers_are_those_of_one_process(pair, model, length):
    ids = prompt(1, length)
    answer = pair.ask(ids, NEW)
    assert answer.get("output_ids") == expected(model, ids), answer


def test_many_at_once(pair, model):
    prompts, answers = [prompt(seed, 20 + 7 * seed) for seed in range(8)], {}
    threads = [
        threading.Thread(target=lambda at=at, ids=ids: answers.__setitem__(at, pair.ask(ids, NEW)))
        for at, ids in enumerate(prompts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[at].get("output_ids") for at in range(8)] == [expected(model, ids) for ids in prompts]


def test_a_request_that_only_decode_got_is_given_up_and_others_go_on(pair, model):
    assert "error" in pair.ask(prompt(2, 40), NEW, roles=("decode",), timeout=2)
    ids = prompt(3, 40)
    assert pair.ask(ids, NEW).get("output_ids") == expected(model, ids)


def test_behind_sglangs_router(pair, model, folder):
    port = free_port()
    prefill, decode = pair.servers["prefill"], pair.servers["decode"]
    router = Server(
        folder,
        "router",
        port,
        [
            *(PYTHON, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"),
            *("--port", str(port), "--prefill", f"http://127.0.0.1:{prefill.port}", str(pair.bootstrap)),
            *("--decode", f"http://127.0.0.1:{decode.port}", "--prometheus-port", str(free_port())),
        ],
    )
    try:
        router.wait(120)
        for seed, length in ((4, 30), (5, 70)):
            ids = prompt(seed, length)
            body = {
                "input_ids": ids,
                "sampling_params": {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True},
            }
            assert patiently(lambda body=body: post(port, body)).get("output_ids") == expected(model, ids)
    finally:
        router.close()


def test_a_prefill_server_that_is_started_again_is_found(pair, model):
    pair.servers["prefill"].close()
    pair.start("prefill").wait()
    ids = prompt(6, 50)
    # The first one may find out that the old one is gone.
    assert patiently(lambda: pair.ask(ids, NEW)).get("output_ids") == expected(model, ids)
