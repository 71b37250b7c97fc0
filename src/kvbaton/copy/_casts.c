#include "_casts.h"

#include <float.h>
#include <string.h>

#include "_formats.h"

static float multiplier(const Box *box, const char *scale)
{
    float value = 1.0f;
    if (scale)
        memcpy(&value, scale, sizeof value);
    return value * box->factor;
}

/* The values of `count` (at most NUMBERS) elements from element `first` of a run. */
static void read_values(const Box *box, const char *run, float times, int64_t first, int64_t count, Numbers *numbers)
{
    decode(box->source_dtype, run + first * dtype_bytes[box->source_dtype], count, numbers);
    if (times != 1.0f)
        multiply(numbers, count, times);
}

static int64_t chunk(int64_t first, int64_t last)
{
    return last - first < NUMBERS ? last - first : NUMBERS;
}

static float scale_of_run(const Box *box, const char *run, float times)
{
    Numbers numbers;
    float most = 0.0f;
    for (int64_t first = 0; first < box->elements; first += NUMBERS) {
        int64_t count = chunk(first, box->elements);
        read_values(box, run, times, first, count, &numbers);
        most = largest_magnitude(&numbers, count, most);
    }
    if (most == 0.0f)
        return 1.0f;
    float scale = most / dtype_largest[box->destination_dtype];
    return scale < FLT_MIN ? FLT_MIN : scale;
}

/* Writes the elements [first, last) of a run; `divisor` is their scale at the destination. */
static void write_elements(const Box *box, const char *run, float times, float divisor, int64_t first, int64_t last,
                           char *to)
{
    Numbers numbers;
    while (first < last) {
        int64_t count = chunk(first, last);
        read_values(box, run, times, first, count, &numbers);
        if (divisor != 1.0f)
            divide(&numbers, count, divisor);
        encode(box->destination_dtype, &numbers, count, to);
        first += count;
        to += count * dtype_bytes[box->destination_dtype];
    }
}

/* Writes the bytes [begin, end) of what a run gives; the range may cut elements. */
static void cast_run(const Box *box, const char *run, const char *scale, char *to, int64_t begin, int64_t end)
{
    float times = multiplier(box, scale);
    float divisor = box->operation == CONVERT ? 1.0f : scale_of_run(box, run, times);
    if (box->operation == SCALE) {
        char bytes[sizeof divisor];
        memcpy(bytes, &divisor, sizeof divisor);
        memcpy(to, bytes + begin, (size_t)(end - begin));
        return;
    }
    int64_t size = dtype_bytes[box->destination_dtype];
    while (begin < end) {
        int64_t first = begin / size, inside = begin % size, bytes = end - begin;
        if (inside == 0 && bytes >= size) {
            int64_t last = end / size;
            write_elements(box, run, times, divisor, first, last, to);
            bytes = (last - first) * size;
        } else {
            char element[sizeof(float)];
            if (bytes > size - inside)
                bytes = size - inside;
            write_elements(box, run, times, divisor, first, first + 1, element);
            memcpy(to, element + inside, (size_t)bytes);
        }
        begin += bytes;
        to += bytes;
    }
}

void cast_box(const Box *box, const char *source, const char *scale, char *destination, int64_t to0, int64_t to1,
              int64_t begin, int64_t end)
{
    for (int64_t at = begin; at < end;) {
        int64_t piece = at / box->run, inside = at % box->run;
        int64_t i0 = piece / box->count1, i1 = piece % box->count1;
        int64_t bytes = box->run - inside < end - at ? box->run - inside : end - at;
        cast_run(box, source + i0 * box->source.stride0 + i1 * box->source.stride1,
                 scale ? scale + i0 * box->scale.stride0 + i1 * box->scale.stride1 : NULL,
                 destination + i0 * to0 + i1 * to1 + inside, inside, inside + bytes);
        at += bytes;
    }
}
