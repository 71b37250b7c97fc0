#include "_formats.h"

#include <string.h>

/* The loops twice, for processors with and without 32-byte vectors; which one runs is decided when it is loaded. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define VECTORS
#endif

#define MAGNITUDE 0x7FFFFFFF
#define INFINITE 0x7F800000

const int64_t dtype_bytes[DTYPES] = {1, 4, 2, 2, 1};
const float dtype_largest[DTYPES] = {0.0f, 0x1.fffffep127f, 0x1.fep127f, 65504.0f, 448.0f};

static inline int32_t bits_of(float value)
{
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float value_of(int32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* ---- to float32 ---- */

VECTORS static void decode_bfloat16(const char *from, int64_t count, Numbers *numbers)
{
    for (int64_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, from + 2 * i, 2);
        numbers->bits[i] = (int32_t)((uint32_t)half << 16);
    }
}

VECTORS static void decode_float16(const char *from, int64_t count, Numbers *numbers)
{
    for (int64_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, from + 2 * i, 2);
        int32_t sign = (int32_t)((uint32_t)(half & 0x8000) << 16), body = (half & 0x7FFF) << 13;
        int32_t normal = body + (112 << 23);
        int32_t infinite = body + (224 << 23);
        /* Below the smallest normal number: the fraction behind 2**-14, which is taken off again. */
        int32_t small = bits_of(value_of(body | 0x38800000) - 0x1p-14f);
        int32_t bits = body < 0x00800000 ? small : normal;
        numbers->bits[i] = (body >= 0x0F800000 ? infinite : bits) | sign;
    }
}

VECTORS static void decode_float8(const char *from, int64_t count, Numbers *numbers)
{
    for (int64_t i = 0; i < count; i++) {
        uint8_t byte = (uint8_t)from[i];
        int32_t sign = (int32_t)((uint32_t)(byte & 0x80) << 24), body = (byte & 0x7F) << 20;
        int32_t normal = body + (120 << 23);
        int32_t small = bits_of(value_of(body | 0x3C800000) - 0x1p-6f);
        int32_t bits = body < 0x00800000 ? small : normal;
        numbers->bits[i] = (body == 0x07F00000 ? 0x7FC00000 : bits) | sign;
    }
}

void decode(int dtype, const char *from, int64_t count, Numbers *numbers)
{
    switch (dtype) {
    case FLOAT32:
        memcpy(numbers->bits, from, 4 * (size_t)count);
        break;
    case BFLOAT16:
        decode_bfloat16(from, count, numbers);
        break;
    case FLOAT16:
        decode_float16(from, count, numbers);
        break;
    case FLOAT8_E4M3FN:
        decode_float8(from, count, numbers);
        break;
    }
}

/* ---- from float32 ---- */

static inline int32_t at_most(int32_t magnitude, int32_t largest)
{
    int32_t capped = magnitude > largest ? largest : magnitude;
    return magnitude < INFINITE ? capped : magnitude;
}

/* Drops `places` bits of a fraction, to nearest, ties to even. */
static inline int32_t rounded(int32_t bits, int places)
{
    return (bits + (1 << (places - 1)) - 1 + ((bits >> places) & 1)) >> places;
}

VECTORS static void encode_float32(const Numbers *numbers, int64_t count, char *to)
{
    for (int64_t i = 0; i < count; i++) {
        int32_t bits = numbers->bits[i];
        int32_t result = (bits & MAGNITUDE) > INFINITE ? 0x7FC00000 : bits;
        memcpy(to + 4 * i, &result, 4);
    }
}

VECTORS static void encode_bfloat16(const Numbers *numbers, int64_t count, char *to)
{
    for (int64_t i = 0; i < count; i++) {
        int32_t bits = numbers->bits[i], magnitude = bits & MAGNITUDE;
        int32_t capped = at_most(magnitude, 0x7F7F0000);
        int32_t number = rounded(capped, 16) | ((bits >> 16) & 0x8000);
        uint16_t result = (uint16_t)(magnitude > INFINITE ? 0x7FC0 : number);
        memcpy(to + 2 * i, &result, 2);
    }
}

VECTORS static void encode_float16(const Numbers *numbers, int64_t count, char *to)
{
    for (int64_t i = 0; i < count; i++) {
        int32_t bits = numbers->bits[i], magnitude = bits & MAGNITUDE;
        int32_t capped = at_most(magnitude, 0x477FE000);
        int32_t normal = rounded(capped, 13) - (112 << 10);
        /* Adding 0.5 leaves multiples of 2**-24 in the fraction, rounded as the processor rounds. */
        int32_t small = bits_of(value_of(magnitude) + 0.5f) - 0x3F000000;
        int32_t body = magnitude < 0x38800000 ? small : normal;
        body = magnitude >= INFINITE ? 0x7C00 : body;
        body |= (bits >> 16) & 0x8000;
        uint16_t result = (uint16_t)(magnitude > INFINITE ? 0x7E00 : body);
        memcpy(to + 2 * i, &result, 2);
    }
}

VECTORS static void encode_float8(const Numbers *numbers, int64_t count, char *to)
{
    for (int64_t i = 0; i < count; i++) {
        int32_t bits = numbers->bits[i], magnitude = bits & MAGNITUDE;
        int32_t capped = at_most(magnitude, 0x43E00000);
        int32_t normal = rounded(capped, 20) - (120 << 3);
        /* As above, with multiples of 2**-9. */
        int32_t small = bits_of(value_of(magnitude) + 16384.0f) - 0x46800000;
        int32_t body = magnitude < 0x3C800000 ? small : normal;
        body |= (bits >> 24) & 0x80;
        to[i] = (char)(uint8_t)(magnitude >= INFINITE ? 0x7F : body);
    }
}

void encode(int dtype, const Numbers *numbers, int64_t count, char *to)
{
    switch (dtype) {
    case FLOAT32:
        encode_float32(numbers, count, to);
        break;
    case BFLOAT16:
        encode_bfloat16(numbers, count, to);
        break;
    case FLOAT16:
        encode_float16(numbers, count, to);
        break;
    case FLOAT8_E4M3FN:
        encode_float8(numbers, count, to);
        break;
    }
}

VECTORS float largest_magnitude(const Numbers *numbers, int64_t count, float most)
{
    int32_t largest = bits_of(most);
    for (int64_t i = 0; i < count; i++) {
        int32_t magnitude = numbers->bits[i] & MAGNITUDE;
        int32_t finite = magnitude < INFINITE ? magnitude : 0;
        largest = finite > largest ? finite : largest;
    }
    return value_of(largest);
}

VECTORS void multiply(Numbers *numbers, int64_t count, float by)
{
    for (int64_t i = 0; i < count; i++)
        numbers->value[i] *= by;
}

VECTORS void divide(Numbers *numbers, int64_t count, float by)
{
    for (int64_t i = 0; i < count; i++)
        numbers->value[i] /= by;
}
