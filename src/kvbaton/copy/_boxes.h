/* Boxes as the kernel walks them: the tables of `kvbaton.plan.boxes` with base addresses added. */
#ifndef KVBATON_BOXES_H
#define KVBATON_BOXES_H

#include <stddef.h>
#include <stdint.h>

enum { REGION, OFFSET, ROW_STRIDE, UNITS_PER_ROW, UNIT_STRIDE, STRIDE0, STRIDE1, SIDE_COLUMNS };
enum { COUNT0, COUNT1, RUN, SHAPE_COLUMNS };
enum { OPERATION, SOURCE_DTYPE, DESTINATION_DTYPE, ELEMENTS, CAST_COLUMNS };
enum { MOVE, CONVERT, QUANTISE, SCALE, OPERATIONS };

/* One side of a box, its base address and offset added. */
typedef struct {
    char *origin;
    int64_t row_stride, units_per_row, unit_stride, stride0, stride1;
} Side;

typedef struct {
    int64_t start, bytes; /* where the box begins in the packed unit, and how long it is there */
    int64_t count0, count1, run;
    Side source, destination;
    /* How its elements change; all of it is unused where operation is MOVE. */
    int operation, source_dtype, destination_dtype;
    int64_t elements;
    float factor;
    Side scale; /* the source's scales; origin is NULL where there are none */
} Box;

/* Strided on both sides (units given twice), or packed on one of them (units NULL). */
typedef struct {
    const Box *boxes;
    ptrdiff_t count;
    int64_t unit_bytes;
    const int64_t *source_units, *destination_units;
    char *packed;
    int64_t packed_begin;
} Job;

static inline char *unit_address(const Side *side, int64_t unit)
{
    if (side->units_per_row == 1)
        return side->origin + unit * side->row_stride;
    return side->origin + (unit / side->units_per_row) * side->row_stride
           + (unit % side->units_per_row) * side->unit_stride;
}

#endif
