"""Number formats on the GPU: the same bits as those of the native kernel (``copy/_formats.c``), for any float32.

The dtypes are numbers of `kvbaton.plan.boxes.CAST_DTYPES`: 1 float32, 2 bfloat16, 3 float16, 4 float8_e4m3fn.
"""

# Triton reads annotations as they are: they must not be strings here.
import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def as_float(bits):
    """The float32 of these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bits(value):
    """The bits of a float32, as uint32."""
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def decode(code, DTYPE: tl.constexpr):
    """The float32 that ``code`` stands for (uint32, the stored bits). Exact."""
    if DTYPE == 1:
        return as_float(code)
    if DTYPE == 2:
        return as_float(code << 16)
    if DTYPE == 3:
        sign = (code & 0x8000) << 16
        body = (code & 0x7FFF) << 13
        # Below the smallest normal number: the fraction behind 2**-14, which is taken off again.
        small = as_bits(as_float(body | 0x38800000) - 6.103515625e-05)
        bits = tl.where(body < 0x00800000, small, body + (112 << 23))
        return as_float(tl.where(body >= 0x0F800000, body + (224 << 23), bits) | sign)
    sign = (code & 0x80) << 24
    body = (code & 0x7F) << 20
    small = as_bits(as_float(body | 0x3C800000) - 0.015625)
    bits = tl.where(body < 0x00800000, small, body + (120 << 23))
    return as_float(tl.where(body == 0x07F00000, 0x7FC00000, bits) | sign)


@triton.jit
def _at_most(magnitude, LARGEST: tl.constexpr):
    return tl.where(magnitude < INFINITE, tl.minimum(magnitude, LARGEST), magnitude)


@triton.jit
def _rounded(bits, PLACES: tl.constexpr):
    return (bits + ((1 << (PLACES - 1)) - 1) + ((bits >> PLACES) & 1)) >> PLACES


@triton.jit
def encode(value, DTYPE: tl.constexpr):
    """The code of each float32, as uint32: to nearest, ties to even, saturating; one NaN."""
    bits = as_bits(value)
    magnitude = bits & MAGNITUDE
    nan = magnitude > INFINITE
    if DTYPE == 1:
        return tl.where(nan, 0x7FC00000, bits)
    if DTYPE == 2:
        number = _rounded(_at_most(magnitude, 0x7F7F0000), 16) | ((bits >> 16) & 0x8000)
        return tl.where(nan, 0x7FC0, number)
    if DTYPE == 3:
        # Adding 0.5 leaves multiples of 2**-24 in the fraction, rounded as the processor rounds.
        small = as_bits(as_float(magnitude) + 0.5) - 0x3F000000
        normal = _rounded(_at_most(magnitude, 0x477FE000), 13) - (112 << 10)
        body = tl.where(magnitude < 0x38800000, small, normal)
        body = tl.where(magnitude >= INFINITE, 0x7C00, body) | ((bits >> 16) & 0x8000)
        return tl.where(nan, 0x7E00, body)
    # As above, with multiples of 2**-9.
    small = as_bits(as_float(magnitude) + 16384.0) - 0x46800000
    normal = _rounded(_at_most(magnitude, 0x43E00000), 20) - (120 << 3)
    body = tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(magnitude >= INFINITE, 0x7F, body)


@triton.jit
def scale_of(most, DTYPE: tl.constexpr):
    """The scale of a block whose largest finite magnitude has the bits ``most`` (uint32)."""
    if DTYPE == 1:
        largest = 3.4028234663852886e38
    elif DTYPE == 2:
        largest = 3.3895313892515355e38
    elif DTYPE == 3:
        largest = 65504.0
    else:
        largest = 448.0
    value = as_float(most)
    # Not the quick division of `/`, which may be off by two units in the last place.
    scale = tl.div_rn(value, tl.full(value.shape, largest, tl.float32))
    smallest = tl.full(value.shape, 1.1754943508222875e-38, tl.float32)
    return tl.where(most == 0, 1.0, tl.where(scale < smallest, smallest, scale))
