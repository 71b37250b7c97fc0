/* Runs of a box whose elements change on their way. */
#ifndef KVBATON_CASTS_H
#define KVBATON_CASTS_H

#include "_boxes.h"

/* Writes the bytes [begin, end) of the box as it is in the packed stream. `source`, `scale` (NULL: none) and
 * `destination` are where the box's first run is read and written; `to0` and `to1` the steps of what is written. */
void cast_box(const Box *box, const char *source, const char *scale, char *destination, int64_t to0, int64_t to1,
              int64_t begin, int64_t end);

#endif
