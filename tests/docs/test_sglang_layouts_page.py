"""docs/sglang-layouts.md is true: its code runs, and its tables name all that the code has."""

import dataclasses

from code_blocks import DOCS, blocks, run_blocks

from kvbaton.engines.sglang.layout import Ranks
from kvbaton.engines.sglang.layout.states import TYPES

PAGE = DOCS / "sglang-layouts.md"
TEXT = PAGE.read_text()


def test_the_code_runs_and_prints_what_the_page_says():
    run_blocks(PAGE, blocks(TEXT))


def test_every_state_type_has_its_row():
    rows = [line for line in TEXT.splitlines() if line.startswith("| `")]
    for kind in TYPES:
        assert any(f"`{kind}`" in row.split("|")[1] for row in rows), kind


def test_every_argument_beside_the_role_is_explained():
    explained = TEXT.split("## What SGLang does not say")[1].split("## ")[0]
    for field in dataclasses.fields(Ranks):
        if field.name not in ("role", "dcp", "is_mla", "kv_shard"):
            assert f"`{field.name}" in explained, field.name


def test_named_tests_exist():
    tests = DOCS.parent / "tests" / "engines"
    names = {
        name for row in TEXT.splitlines() if row.startswith("| ") for name in row.rsplit("|", 2)[1].split("`")[1::2]
    }
    listed = {name for name in names if name.startswith(("layout_", "real_"))}
    assert listed
    for name in listed:
        assert (tests / f"test_sglang_{name}.py").exists(), name
