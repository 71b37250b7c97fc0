"""Requests between SGLang's own pools, where SGLang is installed: see `sglang_real_pools`."""

from __future__ import annotations

import pytest
from sglang_here import HERE, needs_sglang, outcomes

pytestmark = needs_sglang

CASES = "Attention Latent Window Hybrid Kimi Sparse SparseTail Scaled ScaledByHead Quick SparseLayers Compressed"


@pytest.fixture(scope="module")
def ended():
    """What went wrong, by case: all of them run in one process, since SGLang takes seconds to import."""
    return outcomes(HERE / "sglang_real_pools.py")


@pytest.mark.parametrize("grid", ["1->1", "2->1", "1->2", "4->2"])
@pytest.mark.parametrize("case", CASES.split())
def test_what_comes_out_of_pools_of_sglang(ended, case, grid):
    assert ended[f"{case} {grid}"] == ""
