"""What Triton makes of the kernels for a GPU; that can be seen without one."""

import re

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: make setup-gpu")


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="an interpreter compiles nothing")
@pytest.mark.parametrize("by_piece", [True, False])
def test_bytes_are_moved_sixteen_at_a_time(by_piece):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvbaton.copy.gpu.configuration import WHOLE
    from kvbaton.copy.gpu.kernels import move

    constants = {"WIDTH": 16, "BLOCK": WHOLE.move_bytes // 16, "PARTS": False, "CLIP": False, "BY_PIECE": by_piece}
    signature = {name: "constexpr" if name in constants else "i64" for name in move.arg_names}
    source = ASTSource(move, signature, {(move.arg_names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WHOLE.warps})
    each = WHOLE.move_bytes // 16 // (32 * WHOLE.warps)
    for kind in ("ld", "st"):
        assert len(re.findall(rf"\b{kind}\.global\S*\.v2\.b64", compiled.asm["ptx"])) == each
    assert ".local" not in compiled.asm["ptx"]
