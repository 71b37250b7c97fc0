#include "_runs.h"

#include <string.h>

#define LINE 64
/* A few units ahead, and more of them where units are tiny; of each the lines at its beginning, because the processor
 * sees by itself how a longer run goes on. Measured: streaming past the caches does not pay, runs are too short. */
#define AHEAD_BYTES 2048
#define MIN_AHEAD 8
#define MAX_AHEAD 32
#define FIRST_BYTES 512

static int64_t units_ahead(const Box *box)
{
    int64_t ahead = AHEAD_BYTES / (box->count0 * box->count1 * box->run);
    return ahead < MIN_AHEAD ? MIN_AHEAD : ahead > MAX_AHEAD ? MAX_AHEAD : ahead;
}

static inline void prefetch(const char *from, const char *to, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += LINE) {
        __builtin_prefetch(from + at, 0);
        __builtin_prefetch(to + at, 1);
    }
}

void prefetch_units(const Box *box, const Lane *source, const Lane *destination, int64_t first, int64_t last)
{
    int64_t ahead = units_ahead(box), beginning = box->run < FIRST_BYTES ? box->run : FIRST_BYTES;
    for (int64_t unit = first; unit < last && unit < first + ahead; unit++)
        prefetch(lane_address(source, unit), lane_address(destination, unit), beginning);
}

#define UNITS(BYTES)                                                                                                   \
    for (int64_t unit = first; unit < last; unit++) {                                                                  \
        char *to = lane_address(destination, unit);                                                                    \
        const char *from = lane_address(source, unit);                                                                 \
        if (unit + ahead < last)                                                                                       \
            prefetch(lane_address(source, unit + ahead), lane_address(destination, unit + ahead), beginning);          \
        for (int64_t i0 = 0; i0 < count0; i0++) {                                                                      \
            char *to_run = to + i0 * to0;                                                                              \
            const char *from_run = from + i0 * from0;                                                                  \
            for (int64_t i1 = 0; i1 < count1; i1++, to_run += to1, from_run += from1)                                  \
                memcpy(to_run, from_run, BYTES);                                                                       \
        }                                                                                                              \
    }                                                                                                                  \
    break

/* A size that the compiler knows becomes a few vector moves instead of a call. */
void copy_units(const Box *box, const Lane *source, const Lane *destination, int64_t first, int64_t last)
{
    int64_t count0 = box->count0, count1 = box->count1, run = box->run;
    int64_t from0 = source->side.stride0, from1 = source->side.stride1;
    int64_t to0 = destination->side.stride0, to1 = destination->side.stride1;
    int64_t ahead = units_ahead(box), beginning = run < FIRST_BYTES ? run : FIRST_BYTES;
    switch (run) {
    case 2: UNITS(2);
    case 4: UNITS(4);
    case 8: UNITS(8);
    case 16: UNITS(16);
    case 32: UNITS(32);
    case 64: UNITS(64);
    case 128: UNITS(128);
    case 256: UNITS(256);
    default: UNITS((size_t)run);
    }
}

void copy_part(const Box *box, const Lane *source, const Lane *destination, int64_t unit, int64_t begin, int64_t end)
{
    const Side *from = &source->side, *to = &destination->side;
    const char *read = lane_address(source, unit);
    char *write = lane_address(destination, unit);
    for (int64_t at = begin; at < end;) {
        int64_t piece = at / box->run, inside = at % box->run;
        int64_t i0 = piece / box->count1, i1 = piece % box->count1;
        int64_t bytes = box->run - inside < end - at ? box->run - inside : end - at;
        memcpy(write + i0 * to->stride0 + i1 * to->stride1 + inside,
               read + i0 * from->stride0 + i1 * from->stride1 + inside, (size_t)bytes);
        at += bytes;
    }
}
