"""Every layout to every layout with real models: prefill and decode engines over virtual ranks of this process."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from covering import allowed_pairs, covering_rows, pairs_of
from hf_pair import WAIT_SECONDS, Pair, prompt, single
from rank_checks import Watch, bytes_of

from kvbaton.runtime import Settings

FACTORS = {
    "model": ("qwen3", "qwen3_5", "gemma3", "glm_moe_dsa", "deepseek_v4", "falcon_h1"),
    "prefill_tp": (1, 2, 4, 8),
    "prefill_pp": (1, 2, 3),
    "prefill_cp": (1, 2, 4),
    "prefill_page": (1, 16, 64),
    "prefill_order": ("NHD", "HND"),
    "prefill_ring": (False, True),
    "decode_tp": (1, 2, 4, 8),
    "decode_pp": (1, 2, 3),
    "decode_cp": (1, 2, 4),
    "decode_page": (1, 16, 64),
    "decode_order": ("NHD", "HND"),
    "decode_ring": (False, True),
    "chunk": (None, 16, 10),
    "striped": (True, False),
    "lengths": ((37, 70), (129, 3)),
}
# Partial pages of every size, longer and shorter than the windows and the sparse selections.
RANKS, PAIRS, COMBINATIONS, SEED = 16, 64, 64, 20261129


def ranks(row, side):
    return math.prod(row[f"{side}_{axis}"] for axis in ("tp", "pp", "cp"))


def within_bounds(row):
    """As many ranks as two processors can play in a second or two."""
    prefill, decode = ranks(row, "prefill"), ranks(row, "decode")
    return max(prefill, decode) <= RANKS and prefill * decode <= PAIRS


ROWS = covering_rows(FACTORS, within_bounds, at_least=COMBINATIONS, seed=SEED)


def transport_of(number):
    """Most run inside the process; some over shared memory and sockets."""
    return {3: "shm", 7: "tcp"}.get(number % 10, "loopback")


def name_of(number):
    row = ROWS[number]
    sides = []
    for side in ("prefill", "decode"):
        ring = " ring" if row[f"{side}_ring"] else ""
        sizes = "x".join(str(row[f"{side}_{axis}"]) for axis in ("tp", "pp", "cp"))
        sides.append(f"{sizes} page {row[f'{side}_page']} {row[f'{side}_order']}{ring}")
    return f"{row['model']}: {' to '.join(sides)}, {transport_of(number)}"


def test_the_array_covers_every_pair_of_values_within_the_bounds():
    assert len(ROWS) >= 60
    assert all(within_bounds(row) for row in ROWS)
    inside = allowed_pairs(FACTORS, within_bounds)
    assert inside == set().union(*map(pairs_of, ROWS))
    # Few pairs are outside: those of many ranks on one side.
    assert allowed_pairs(FACTORS, lambda row: True) - inside == {
        (("prefill_tp", 8), ("prefill_pp", 3)),
        (("prefill_tp", 8), ("prefill_cp", 4)),
        (("decode_tp", 8), ("decode_pp", 3)),
        (("decode_tp", 8), ("decode_cp", 4)),
    }


def options(row, side, number):
    """What `open_engine` is given."""
    given = {
        axis: row[f"{side}_{name}"]
        for axis, name in {
            "tp": "tp", "pp": "pp", "cp": "cp", "page_size": "page", "order": "order", "window_ring": "ring",
        }.items()
    }  # fmt: skip
    settings = Settings(striped=row["striped"])
    manager = {"transports": (transport_of(number),), "settings": settings}
    return {**given, "pool_tokens": 512, "max_running_requests": 4, "manager_options": manager}


@pytest.mark.parametrize("number", range(len(ROWS)), ids=name_of)
def test_answers_are_those_of_one_process_and_no_other_byte_changes(number):
    row = ROWS[number]
    prompts = [prompt(tokens, seed=number % 3) for tokens in row["lengths"]]
    sides = {side: options(row, side, number) for side in ("prefill", "decode")}
    with Pair(row["model"], **sides, chunk_tokens=row["chunk"]) as pair:
        watch = Watch(pair)
        handles = [pair.submit(ids) for ids in prompts]
        for ids, (sent, received) in zip(prompts, handles, strict=True):
            tokens, end = received.result(WAIT_SECONDS)
            assert (end.finish, end.error) == ("length", "")
            assert tokens == single(row["model"], ids, split=row["chunk"]).token_ids
            assert sent.result(WAIT_SECONDS)[1].finish == "length"
        pair.settle()
        moved = bytes_of(received for _, received in handles)
        watch.check(len(prompts), Counter({name: count for name, count in moved.items() if count}))
