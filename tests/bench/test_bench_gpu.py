"""What the GPU benchmark moves, and that its check finds what is wrong; here the CPU's kernel moves it."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvbaton.bench.gpu.cases import conv_blocks, head_slices, in_pieces, request  # noqa: E402
from kvbaton.bench.gpu.checks import digests, places, sizes  # noqa: E402
from kvbaton.bench.gpu.start import run  # noqa: E402
from kvbaton.bench.transfer import size_words  # noqa: E402
from kvbaton.copy import copy_boxes  # noqa: E402
from kvbaton.errors import ConfigurationError  # noqa: E402

NBYTES = 2 << 20
CASES = {
    "pieces": lambda: in_pieces(640, NBYTES)[0],
    "contiguous": lambda: in_pieces(2048, NBYTES, shuffled=False)[0],
    "TP 2 to 1": lambda: head_slices(2, 1, 16, NBYTES),
    "TP 8 to 4": lambda: head_slices(8, 4, 1, NBYTES),
    "conv": lambda: conv_blocks(NBYTES),
}


def base(pool):
    return np.array([pool.data_ptr()], np.int64)


@pytest.fixture(params=CASES)
def moved(request):
    """A case with its pools after it was moved."""
    case = CASES[request.param]()
    sources = [torch.randint(1, 256, (nbytes,), dtype=torch.uint8) for nbytes in case.source_bytes]
    destination = torch.zeros(case.destination_bytes, dtype=torch.uint8)
    for pool, transfers in zip(sources, case.transfers, strict=True):
        for transfer in transfers:
            copy_boxes(transfer, base(pool), base(destination))
    return case, sources, destination


def both(case, sources, destination):
    pairs = zip(case.transfers, sources, strict=True)
    wanted = [each for some, pool in pairs for each in digests(some, "source", pool)]
    transfers = [transfer for some in case.transfers for transfer in some]
    return wanted, digests(transfers, "destination", destination, empty=True)


def test_what_was_moved_is_found_and_nothing_is_left(moved):
    case, sources, destination = moved
    wanted, found = both(case, sources, destination)
    assert found == wanted
    assert not destination.any()


def test_one_wrong_byte_is_found(moved):
    case, sources, destination = moved
    transfer = case.transfers[-1][-1]
    at = int(places(transfer, "destination")[-1] + sizes(transfer)[-1] - 1)
    destination[at] ^= 1
    wanted, found = both(case, sources, destination)
    assert found != wanted


def test_exchanged_pieces_are_found(moved):
    case, sources, destination = moved
    transfer = case.transfers[0][0]
    one, other = (places(transfer, "destination")[sizes(transfer) == sizes(transfer)[0]][:2]).tolist()
    length = int(sizes(transfer)[0])
    kept = destination[one : one + length].clone()
    destination[one : one + length] = destination[other : other + length]
    destination[other : other + length] = kept
    wanted, found = both(case, sources, destination)
    assert found != wanted


def test_a_request_has_all_its_bytes():
    plan, pages, nbytes = request(32, 2)
    transfers = plan.bind("kv", (0, 32), *pages)
    assert sum(transfer.nbytes for transfer in transfers) == 32 * 2 * 2 * 8 * 128 * 2
    assert nbytes == 2 * 32 * 2 * 2 * 8 * 128 * 2


def test_sizes_in_words():
    assert [size_words(size) for size in (128, 1536, 2048, 64 << 20)] == ["128 B", "1536 B", "2 KiB", "64 MiB"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so():
    with pytest.raises(ConfigurationError, match="there are 0 CUDA devices"):
        run((0, 0), [], [128], 1, 1)
