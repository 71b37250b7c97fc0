/* Moves bytes: whole units of a box, or a part of one. */
#ifndef KVBATON_RUNS_H
#define KVBATON_RUNS_H

#include "_boxes.h"

/* One side of a box for all units of a job: a strided side, or the box's place in a packed buffer. */
typedef struct {
    Side side;
    const int64_t *units; /* NULL: unit i of the job is unit i of the side */
} Lane;

static inline char *lane_address(const Lane *lane, int64_t unit)
{
    return unit_address(&lane->side, lane->units ? lane->units[unit] : unit);
}

/* Copies the units [first, last) of a box that moves bytes as they are. */
void copy_units(const Box *box, const Lane *source, const Lane *destination, int64_t first, int64_t last);

/* Asks for the first of these units, so that they are there when `copy_units` begins with them. */
void prefetch_units(const Box *box, const Lane *source, const Lane *destination, int64_t first, int64_t last);

/* Copies the bytes [begin, end) of what a box moves in one unit. */
void copy_part(const Box *box, const Lane *source, const Lane *destination, int64_t unit, int64_t begin, int64_t end);

#endif
