/* Number formats: to float32 and back. Every loop here is one that compilers turn into vector instructions. */
#ifndef KVBATON_FORMATS_H
#define KVBATON_FORMATS_H

#include <stdint.h>

enum { BYTES, FLOAT32, BFLOAT16, FLOAT16, FLOAT8_E4M3FN, DTYPES };

/* Numbers that are converted at a time: they stay in the first cache. */
#define NUMBERS 1024

typedef union {
    float value[NUMBERS];
    int32_t bits[NUMBERS];
} Numbers;

extern const int64_t dtype_bytes[DTYPES];
/* The largest finite value of each dtype. */
extern const float dtype_largest[DTYPES];

/* Reads `count` (at most NUMBERS) elements. Exact. */
void decode(int dtype, const char *from, int64_t count, Numbers *numbers);

/* Writes `count` elements, rounded to nearest, ties to even. Finite values beyond the largest one become it; infinities
 * stay where the dtype has them and are NaN in float8_e4m3fn; every NaN becomes the positive quiet one. */
void encode(int dtype, const Numbers *numbers, int64_t count, char *to);

void multiply(Numbers *numbers, int64_t count, float by);
void divide(Numbers *numbers, int64_t count, float by);

/* The largest finite magnitude among `count` numbers and `most`. */
float largest_magnitude(const Numbers *numbers, int64_t count, float most);

#endif
