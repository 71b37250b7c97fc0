"""The Triton kernels. All walk boxes tile by tile; a tile is a block of items of one box.

An item is a vector of bytes (`move`), a vector of elements (`convert`), or a whole run (`quantise`). Items have
numbers, from which their addresses follow: see `kvbaton.plan.boxes`. What the tables hold is in
`kvbaton.copy.gpu.tables`. Everything is passed by address: Triton shall not compile anew for what changes.
"""

# Triton reads annotations as they are: they must not be strings here.
import triton
import triton.language as tl

from kvbaton.copy.gpu.formats import INFINITE, MAGNITUDE, as_bits, decode, encode, scale_of

# Columns of the table of boxes and of the header of a call; `kvbaton.copy.gpu.tables` has the same, for numpy.
_ITEMS = tl.constexpr(0)
_PER_RUN = tl.constexpr(3)
_COUNT1 = tl.constexpr(6)
_START = tl.constexpr(9)
_STEP = tl.constexpr(10)
_SOURCE = tl.constexpr(11)
_DESTINATION = tl.constexpr(19)
_SCALE = tl.constexpr(27)
_ELEMENTS = tl.constexpr(35)
_FACTOR = tl.constexpr(36)
_COLUMNS = tl.constexpr(37)
_HEADER = tl.constexpr(11)
_SEARCHED = tl.constexpr(128)


@triton.jit
def _numbers(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def _divide(number, by):
    """Quotient and remainder of int32 from 0 up; ``by`` points to the divisor, a multiplier and a shift."""
    multiplier = tl.load(by + 1).to(tl.uint32).to(tl.uint64)
    shift = tl.load(by + 2).to(tl.uint64)
    quotient = ((number.to(tl.uint32).to(tl.uint64) * multiplier) >> shift).to(tl.int32)
    return quotient, number - quotient * tl.load(by).to(tl.int32)


@triton.jit
def _box_of(tile, header):
    """The box that a tile belongs to, and its number there: the last box whose first tile is not behind it."""
    each = tl.load(header + 10)
    if each > 0:
        box = (tile // each).to(tl.int32)
        first = box * each
    else:
        boxes = tl.load(header + 9).to(tl.int32)
        box = tl.full([], -1, tl.int32)
        start = tl.full([], 0, tl.int32)
        while start < boxes:
            number = start + tl.arange(0, _SEARCHED)
            found = tl.load(header + _HEADER + number, mask=number < boxes, other=1 << 62)
            box += tl.sum((found <= tile).to(tl.int32), axis=0)
            start += _SEARCHED
        first = tl.load(header + _HEADER + box)
    return box, tile - first


@triton.jit
def _items(tile, header, row, BLOCK: tl.constexpr, BY_PIECE: tl.constexpr):
    """Of each item of a tile: the number of its unit, its place in its run, the run's in both repeats, its own place.

    The tiles of a box follow each other unit by unit. BY_PIECE, for many units: run by run, so that a tile has the same
    run of many units, and what is read at a time lies closer together.
    """
    number = tl.arange(0, BLOCK)
    if BY_PIECE:
        per_run = tl.load(row + _PER_RUN)
        tiles = tl.cdiv(tl.load(header + 1) * per_run, BLOCK)
        piece = (tile // tiles).to(tl.int32)
        start = (tile - piece * tiles) * BLOCK
        first = start // per_run
        unit, inside = _divide((start - first * per_run).to(tl.int32) + number, row + _PER_RUN)
        rest = piece * per_run.to(tl.int32) + inside
    else:
        start = tile * BLOCK
        per_unit = tl.load(row + _ITEMS)
        first = start // per_unit
        unit, rest = _divide((start - first * per_unit).to(tl.int32) + number, row + _ITEMS)
        piece, inside = _divide(rest, row + _PER_RUN)
    i0, i1 = _divide(piece, row + _COUNT1)
    return first + unit.to(tl.int64), inside, i0, i1, rest


@triton.jit
def _place(index, rest, row, header):
    """The place of an item in the packed stream."""
    return index * tl.load(header + 8) + tl.load(row + _START) + rest.to(tl.int64) * tl.load(row + _STEP)


@triton.jit
def _moves(index, place, row, header, CLIP: tl.constexpr):
    """Whether there is such an item, and the range that moves has (a part of) it."""
    valid = index < tl.load(header + 1)
    if CLIP:
        valid &= (place + tl.load(row + _STEP) > tl.load(header + 2)) & (place < tl.load(header + 3))
    return valid


@triton.jit
def _unit(units, listed, index, valid):
    """The unit of that number: from the list, or the number itself where the side is packed."""
    given = tl.load(units.to(tl.pointer_type(tl.int32)) + index, mask=valid & (tl.load(listed) != 0), other=0)
    return tl.where(tl.load(listed) != 0, given.to(tl.int64), index)


@triton.jit
def _address(side, unit, i0, i1, PARTS: tl.constexpr):
    address = tl.load(side) + i0.to(tl.int64) * tl.load(side + 6) + i1.to(tl.int64) * tl.load(side + 7)
    if PARTS:
        line, part = _divide(unit.to(tl.int32), side + 2)
        return address + line.to(tl.int64) * tl.load(side + 1) + part.to(tl.int64) * tl.load(side + 5)
    return address + unit * tl.load(side + 1)


@triton.jit(do_not_specialize=["header", "table", "sources", "destinations"])
def move(
    header: tl.int64,
    table: tl.int64,
    sources: tl.int64,
    destinations: tl.int64,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    CLIP: tl.constexpr,
    BY_PIECE: tl.constexpr,
):
    """Moves bytes as they are, in vectors of WIDTH bytes."""
    header = _numbers(header)
    tiles = tl.load(header)
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        box, own = _box_of(tile, header)
        row = _numbers(table) + box * _COLUMNS
        index, inside, i0, i1, rest = _items(own, header, row, BLOCK, BY_PIECE)
        valid = _moves(index, _place(index, rest, row, header), row, header, CLIP)
        skip = inside.to(tl.int64) * WIDTH
        source = _address(row + _SOURCE, _unit(sources, header + 6, index, valid), i0, i1, PARTS)
        destination = _address(row + _DESTINATION, _unit(destinations, header + 7, index, valid), i0, i1, PARTS)
        source += skip + tl.load(header + 4)
        destination += skip + tl.load(header + 5)
        if WIDTH == 16:
            pair = tl.arange(0, 2)[None, :]
            at = source.to(tl.pointer_type(tl.int64))[:, None] + pair
            to = destination.to(tl.pointer_type(tl.int64))[:, None] + pair
            at = tl.max_contiguous(tl.multiple_of(at, [1, 16]), [1, 2])
            to = tl.max_contiguous(tl.multiple_of(to, [1, 16]), [1, 2])
            # Bytes pass once: they shall not drive the tables out of the nearest cache.
            pairs = tl.load(at, mask=valid[:, None], cache_modifier=".cg")
            tl.store(to, pairs, mask=valid[:, None], cache_modifier=".cs")
        else:
            if WIDTH == 8:
                kind: tl.constexpr = tl.int64
            elif WIDTH == 4:
                kind: tl.constexpr = tl.int32
            elif WIDTH == 2:
                kind: tl.constexpr = tl.int16
            else:
                kind: tl.constexpr = tl.int8
            word = tl.load(source.to(tl.pointer_type(kind)), mask=valid)
            tl.store(destination.to(tl.pointer_type(kind)), word, mask=valid)
        tile += tl.num_programs(0)


@triton.jit
def _read(address, mask, SIZE: tl.constexpr, VECTOR: tl.constexpr, WHOLE: tl.constexpr):
    """Codes of SIZE bytes as uint32, VECTOR next to each other; byte by byte unless WHOLE."""
    if WHOLE:
        if SIZE == 4:
            kind: tl.constexpr = tl.uint32
        elif SIZE == 2:
            kind: tl.constexpr = tl.uint16
        else:
            kind: tl.constexpr = tl.uint8
        at = address.to(tl.pointer_type(kind))
        if VECTOR > 1:
            at = tl.max_contiguous(tl.multiple_of(at, [1, SIZE * VECTOR]), [1, VECTOR])
        return tl.load(at, mask=mask, other=0).to(tl.uint32)
    code = tl.load(address.to(tl.pointer_type(tl.uint8)), mask=mask, other=0).to(tl.uint32)
    for byte in tl.static_range(1, SIZE):
        more = tl.load((address + byte).to(tl.pointer_type(tl.uint8)), mask=mask, other=0)
        code |= more.to(tl.uint32) << (8 * byte)
    return code


@triton.jit
def _write(address, code, mask, place, header, SIZE: tl.constexpr, VECTOR: tl.constexpr, WHOLE: tl.constexpr):
    """The opposite of `_read`; byte by byte the range that moves may begin and end within an element."""
    if WHOLE:
        if SIZE == 4:
            kind: tl.constexpr = tl.uint32
        elif SIZE == 2:
            kind: tl.constexpr = tl.uint16
        else:
            kind: tl.constexpr = tl.uint8
        to = address.to(tl.pointer_type(kind))
        if VECTOR > 1:
            to = tl.max_contiguous(tl.multiple_of(to, [1, SIZE * VECTOR]), [1, VECTOR])
        tl.store(to, code.to(kind), mask=mask)
    else:
        for byte in tl.static_range(SIZE):
            inside = mask & (place + byte >= tl.load(header + 2)) & (place + byte < tl.load(header + 3))
            to = (address + byte).to(tl.pointer_type(tl.uint8))
            tl.store(to, (code >> (8 * byte)).to(tl.uint8), mask=inside)


@triton.jit
def _times(row, unit, i0, i1, valid, WHOLE: tl.constexpr):
    """What the values of each item are multiplied by."""
    factor = tl.load(row + _FACTOR).to(tl.uint32).to(tl.float32, bitcast=True)
    scaled = valid & (tl.load(row + _SCALE) != 0)
    code = _read(_address(row + _SCALE, unit, i0, i1, True), scaled, 4, 1, WHOLE)
    return tl.where(scaled, code.to(tl.float32, bitcast=True), 1.0) * factor


@triton.jit(do_not_specialize=["header", "table", "sources", "destinations"])
def convert(
    header: tl.int64,
    table: tl.int64,
    sources: tl.int64,
    destinations: tl.int64,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    FROM_SIZE: tl.constexpr,
    TO_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_PIECE: tl.constexpr,
):
    """Reads elements of one dtype and writes them in another, in vectors of VECTOR elements."""
    header = _numbers(header)
    tiles = tl.load(header)
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        box, own = _box_of(tile, header)
        row = _numbers(table) + box * _COLUMNS
        index, inside, i0, i1, rest = _items(own, header, row, BLOCK, BY_PIECE)
        place = _place(index, rest, row, header)
        valid = _moves(index, place, row, header, not WHOLE)
        unit = _unit(sources, header + 6, index, valid)
        source = _address(row + _SOURCE, unit, i0, i1, True) + tl.load(header + 4)
        to = _unit(destinations, header + 7, index, valid)
        destination = _address(row + _DESTINATION, to, i0, i1, True) + tl.load(header + 5)
        element = tl.arange(0, VECTOR)[None, :]
        first = inside.to(tl.int64)[:, None] * VECTOR + element
        mask = valid[:, None] & (element >= 0)
        times = _times(row, unit, i0, i1, valid, WHOLE)
        code = _read(source[:, None] + first * FROM_SIZE, mask, FROM_SIZE, VECTOR, WHOLE)
        made = encode(decode(code, FROM) * times[:, None], TO)
        places = place[:, None] + element * TO_SIZE
        _write(destination[:, None] + first * TO_SIZE, made, mask, places, header, TO_SIZE, VECTOR, WHOLE)
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["header", "table", "sources", "destinations"])
def quantise(
    header: tl.int64,
    table: tl.int64,
    sources: tl.int64,
    destinations: tl.int64,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    FROM_SIZE: tl.constexpr,
    TO_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    WHOLE: tl.constexpr,
    ONLY_SCALE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds the scale of each run, and writes it (ONLY_SCALE) or the run's elements divided by it.

    STEP elements of each of BLOCK runs are looked at together.
    """
    header = _numbers(header)
    tiles = tl.load(header)
    tile = tl.program_id(0).to(tl.int64)
    while tile < tiles:
        box, own = _box_of(tile, header)
        row = _numbers(table) + box * _COLUMNS
        index, _, i0, i1, rest = _items(own, header, row, BLOCK, False)
        place = _place(index, rest, row, header)
        valid = _moves(index, place, row, header, not WHOLE)
        unit = _unit(sources, header + 6, index, valid)
        source = _address(row + _SOURCE, unit, i0, i1, True) + tl.load(header + 4)
        to = _unit(destinations, header + 7, index, valid)
        destination = _address(row + _DESTINATION, to, i0, i1, True) + tl.load(header + 5)
        times = _times(row, unit, i0, i1, valid, WHOLE)
        elements = tl.multiple_of(tl.load(row + _ELEMENTS).to(tl.int32), VECTOR)
        most = tl.full([BLOCK], 0, tl.uint32)
        first = tl.full([], 0, tl.int32)
        while first < elements:
            element = first + tl.arange(0, STEP)[None, :]
            mask = valid[:, None] & (element < elements)
            at = source[:, None] + element.to(tl.int64) * FROM_SIZE
            value = decode(_read(at, mask, FROM_SIZE, VECTOR, WHOLE), FROM) * times[:, None]
            magnitude = as_bits(value) & MAGNITUDE
            most = tl.maximum(most, tl.max(tl.where(mask & (magnitude < INFINITE), magnitude, 0), axis=1))
            first += STEP
        scale = scale_of(most, TO)
        if ONLY_SCALE:
            _write(destination, as_bits(scale), valid, place, header, 4, 1, WHOLE)
        else:
            first = tl.full([], 0, tl.int32)
            while first < elements:
                element = first + tl.arange(0, STEP)[None, :]
                mask = valid[:, None] & (element < elements)
                at = source[:, None] + element.to(tl.int64) * FROM_SIZE
                value = decode(_read(at, mask, FROM_SIZE, VECTOR, WHOLE), FROM) * times[:, None]
                made = encode(tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape)), TO)
                places = place[:, None] + element * TO_SIZE
                into = destination[:, None] + element.to(tl.int64) * TO_SIZE
                _write(into, made, mask, places, header, TO_SIZE, VECTOR, WHOLE)
                first += STEP
        tile += tl.num_programs(0)
