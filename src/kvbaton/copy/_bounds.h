/* Whether the pieces of a table stay inside regions. */
#ifndef KVBATON_BOUNDS_H
#define KVBATON_BOUNDS_H

#include <stddef.h>
#include <stdint.h>

/* The bytes that `count` boxes (rows of `shape` and `table`) with `unit_count` units move; -1 unless every byte of every
 * piece is certainly inside its region. Any numbers may stand in the tables; nothing is touched but them. */
int64_t bytes_inside(const int64_t *shape, const int64_t *table, ptrdiff_t count, const int64_t *units,
                     ptrdiff_t unit_count, const int64_t *region_bytes, ptrdiff_t regions);

/* The smallest and the largest of `count` numbers, at least one. */
void find_extent(const int64_t *numbers, ptrdiff_t count, int64_t *lowest, int64_t *highest);

#endif
