"""The oracle: knows only logical tensors, who holds which logical element, and the definition of a layout.

It fills the memory of ranks element by element, runs transfers with the naive executor of `run_transfer`, and says what
every byte of the destination must be. It shares no code with the planner beyond the nouns.
"""

import itertools

import numpy as np

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int64": 8}
SLACK = 7


class Rank:
    """One rank: its layout, its memory, and the rows of one request (``rows[component]``, ``start[component]``)."""

    def __init__(self, layout, seed):
        self.layout = layout
        self.rows = {}
        self.start = {}
        generator = np.random.default_rng(seed)
        self.regions = [generator.integers(0, 256, size + SLACK, dtype=np.uint8) for size in region_sizes(layout)]
        self.writes = [np.zeros(len(region), np.int64) for region in self.regions]


def region_sizes(layout):
    ends = {}
    for component in layout.components:
        for tensor in component.tensors:
            end = tensor.offset
            if tensor.rows:
                last = [(len(local_indices(axis)) - 1) * axis.stride for axis in tensor.axes]
                end = tensor.offset + (tensor.rows - 1) * tensor.row_stride + sum(last) + ITEMSIZE[tensor.dtype]
            ends[tensor.region] = max(ends.get(tensor.region, 0), end)
    return [ends.get(region, 0) for region in range(max(ends, default=-1) + 1)]


def local_indices(axis):
    """The global index at each local position."""
    return [index for start, count in axis.spans for index in range(start, start + count)]


def local_tokens(owned, total):
    """The global token at each local position."""
    return [token for token in range(total) if token // owned.unit % owned.modulus == owned.remainder]


def content(component, role, layer, token, indices, itemsize):
    """The bytes of logical elements; ``indices`` maps axis names to arrays of global indices."""
    names = f"{component}/{role}"
    value = np.uint64(int.from_bytes(names.encode()[-7:], "little") + 1000003 * layer + 7919 * (token + 1))
    total = np.asarray(value)
    for position, name in enumerate(sorted(indices)):
        total = total * np.uint64(6364136223846793005) + indices[name].astype(np.uint64) + np.uint64(position + 1)
    total = (total ^ (total >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (total[..., None] >> (np.arange(itemsize, dtype=np.uint64) * np.uint64(8))).astype(np.uint8)


def walk(rank, component, wanted):
    """``(tensor, token, addresses, indices)`` for each token of ``wanted`` (or slot) of each tensor with rows."""
    rows, start = rank.rows[component.name], rank.start.get(component.name, 0)
    with_tokens = component.kind.has_tokens
    places = []
    if with_tokens:
        here = {
            token: local for local, token in enumerate(local_tokens(rank.layout.owned, max(wanted, default=-1) + 1))
        }
        for token in wanted:
            if token in here:
                page, inside = divmod(here[token] - start, component.page_size)
                places.append((token, rows[page], inside))
    else:
        places = [(number, row, 0) for number, row in enumerate(rows)]
    for tensor in component.tensors:
        if not tensor.rows:
            continue
        axes = [axis for axis in tensor.axes if axis.name != "token"]
        token_stride = next((axis.stride for axis in tensor.axes if axis.name == "token"), 0)
        inner = np.zeros([1] * len(axes), np.int64)
        indices = {}
        for position, axis in enumerate(axes):
            shape = [1] * len(axes)
            shape[position] = -1
            found = np.array(local_indices(axis), np.int64)
            inner = inner + (np.arange(len(found)) * axis.stride).reshape(shape)
            indices[axis.name] = found.reshape(shape)
        for token, row, inside in places:
            yield tensor, token, tensor.offset + int(row) * tensor.row_stride + inside * token_stride + inner, indices


def write_content(rank, component, wanted, regions):
    """Write the logical content of ``wanted`` tokens (or of all slots) into ``regions``, as this rank lays it out."""
    for tensor, token, addresses, indices in walk(rank, component, wanted):
        size = ITEMSIZE[tensor.dtype]
        values = content(component.name, tensor.role, tensor.layer, token, indices, size)
        values = np.broadcast_to(values, (*addresses.shape, size))
        regions[tensor.region][addresses[..., None] + np.arange(size)] = values


def run_transfer(transfer, source, destination):
    """Execute a transfer piece by piece, as the formula of boxes.py says; counts the writes to each byte."""
    shape, at, to = (table.tolist() for table in transfer.boxes)
    assert len(transfer.source_units) == len(transfer.destination_units)
    for table in (*transfer.boxes, transfer.source_units, transfer.destination_units):
        assert table.dtype == np.int64
        assert table.flags.c_contiguous
    for source_unit, destination_unit in zip(
        transfer.source_units.tolist(), transfer.destination_units.tolist(), strict=True
    ):
        for (count0, count1, run), mine, theirs in zip(shape, at, to, strict=True):
            assert min(count0, count1, run) >= 1
            assert min(mine) >= 0
            assert min(theirs) >= 0
            first, last = _begin(mine, source_unit), _begin(theirs, destination_unit)
            for i0, i1 in itertools.product(range(count0), range(count1)):
                a = first + i0 * mine[5] + i1 * mine[6]
                b = last + i0 * theirs[5] + i1 * theirs[6]
                assert 0 <= a <= a + run <= len(source.regions[mine[0]]) - SLACK
                assert 0 <= b <= b + run <= len(destination.regions[theirs[0]]) - SLACK
                destination.regions[theirs[0]][b : b + run] = source.regions[mine[0]][a : a + run]
                destination.writes[theirs[0]][b : b + run] += 1


def _begin(side, unit):
    _, offset, row_stride, units_per_row, unit_stride, _, _ = side
    return offset + unit // units_per_row * row_stride + unit % units_per_row * unit_stride


def expected_regions(destination, wanted):
    """What the memory of ``destination`` must be: ``wanted[component]`` (or all slots) in place, the rest untouched."""
    regions = [region.copy() for region in destination.regions]
    for component in destination.layout.components:
        if component.name in wanted:
            write_content(destination, component, wanted[component.name], regions)
    return regions
