"""What the GPU's kernels are told of boxes: plain arithmetic, without a GPU."""

import subprocess
import sys

import copy_oracle as oracle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.copy.gpu import tables
from kvbaton.copy.gpu.configuration import WHOLE
from kvbaton.copy.gpu.tables import Cut, Tables
from kvbaton.errors import RowsError
from kvbaton.plan.boxes import CONVERT, MOVE, Boxes, Cast

BASES = np.array([1 << 40, 1 << 41])
LIMIT = 1 << 31


@given(st.integers(1, 1 << 30), st.lists(st.integers(0, LIMIT - 1), min_size=1))
def test_multiplying_divides(divisor, numbers):
    ((by, multiplier, shift),) = tables._division(np.array([divisor])).tolist()
    assert (by, multiplier < 1 << 32) == (divisor, True)
    for number in (*numbers, 0, divisor - 1, divisor, LIMIT - 1, (LIMIT - 1) // divisor * divisor - 1):
        if number >= 0:
            assert number * multiplier >> shift == number // divisor


@given(oracle.transfers(), st.integers(0, 3), st.booleans())
def test_a_vector_never_crosses_what_it_must_not(case, shift, packed):
    """Every address, and every end of a run, is a multiple of the width that its launch has."""
    (shape, source, destination, _), *units = case[0]
    made = Tables(Boxes(shape, source, destination), BASES, None if packed else BASES)
    launches = made.launches(shift, 0, Cut(), WHOLE)
    assert sum(len(launch.table) for launch in launches) == len(shape)
    widths = {}
    for launch in launches:
        for row in launch.table:
            widths[int(row[9])] = launch.constants["WIDTH"]
    starts = np.cumsum(shape.prod(axis=1)) - shape.prod(axis=1)
    for box, start in enumerate(starts.tolist()):
        width = widths[start]
        assert width in (1, 2, 4, 8, 16)
        assert shape[box, 2] % width == 0
        for unit in units[0].tolist():
            for i0, i1 in np.ndindex(*shape[box, :2]):
                assert (oracle.address(source[box], unit, i0, i1)[1] + shift) % width == 0


def sides(count, stride):
    return np.array([[0, at * 4096, stride, 1, 0, 0, 0] for at in range(count)])


def test_a_plan_that_moves_bytes_is_one_launch():
    shape = np.array([[1, 1, 256]] * 200)
    (launch,) = Tables(Boxes(shape, sides(200, 256), sides(200, 512)), BASES, BASES).launches(0, 0, Cut(), WHOLE)
    assert (launch.kernel, launch.constants["WIDTH"], len(launch.table)) == ("move", 16, 200)
    each, order = launch.tiles(4096)
    assert order == {"BY_PIECE": True}
    assert each.tolist() == [4096 * 256 // 4096] * 200
    each, order = launch.tiles(3)
    assert (each.tolist(), order) == ([1] * 200, {"BY_PIECE": False})


def test_boxes_of_unlike_kinds_are_launches_of_their_own():
    how = np.array([(MOVE, 0, 0, 256), (CONVERT, 1, 2, 128), (CONVERT, 1, 2, 128), (MOVE, 0, 0, 6)])
    shape, none = np.array([(1, 1, 256), (1, 1, 256), (1, 1, 256), (1, 1, 6)]), np.array([[-1, 0, 0, 1, 0, 0, 0]] * 4)
    boxes = Boxes(shape, sides(4, 512), sides(4, 256), Cast(how, np.ones(4, np.float32), none))
    launches = Tables(boxes, BASES, BASES).launches(0, 0, Cut(), WHOLE)
    assert sorted((launch.kernel, len(launch.table)) for launch in launches) == [
        ("convert", 2),
        ("move", 1),
        ("move", 1),
    ]


def test_a_unit_of_more_than_is_counted_is_refused():
    shape = np.array([[1, 1, (1 << 30) + 1]])
    made = Tables(Boxes(shape, sides(1, 1 << 40), sides(1, 1 << 40)), BASES, BASES)
    with pytest.raises(RowsError, match=f"{(1 << 30) + 1} vectors of 1 bytes"):
        made.launches(0, 0, Cut(), WHOLE)


def test_the_package_says_what_it_needs():
    script = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import kvbaton.copy.gpu as gpu\n"
        "assert 'torch' not in sys.modules\n"
        "try: gpu.Copier\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("ConfigurationError copying on a GPU needs torch and Triton"), done.stderr
