/* The transfers of one write, owned, and cut into chunks that are fast to copy. */
#ifndef KVBATON_BATCH_H
#define KVBATON_BATCH_H

#include "_boxes.h"

/* The tables of one transfer. `units` holds all of the source's, then all of the destination's. */
typedef struct {
    Box *boxes;
    int64_t *units;
    ptrdiff_t count, unit_count;
} Table;

/* All units of some boxes of one table, to be copied in steps of so many bytes. */
typedef struct {
    Job job;
    int64_t nbytes, step;
} Part;

typedef struct {
    Table *tables;
    ptrdiff_t table_count;
    Part *parts;
    ptrdiff_t part_count;
    int64_t nbytes;
    /* What comes next. */
    ptrdiff_t part;
    int64_t at;
} Batch;

/* Place for the tables of `count` transfers, which the caller fills; 0 where there is no memory. */
int batch_open(Batch *batch, ptrdiff_t count);

/* Cuts the tables into parts, and those into chunks of at most `chunk` bytes; 0 where there is no memory. */
int batch_cut(Batch *batch, int64_t chunk);

/* How many chunks are left, at least: those of the part that comes next, and one of each other. */
ptrdiff_t batch_left(const Batch *batch);

/* Takes the next chunk: the bytes [*begin, *end) of the part that it gives. There must be one. */
const Part *batch_take(Batch *batch, int64_t *begin, int64_t *end);

void batch_free(Batch *batch);

#endif
