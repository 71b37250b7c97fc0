/* Moves a byte range of a job between its rows and a socket, without a packed copy in between. */
#ifndef KVBATON_VECTORS_H
#define KVBATON_VECTORS_H

#include "_boxes.h"

/* Sends (or receives) the bytes [begin, end) of the stream from (or into) the rows. Gives how many were moved
 * before the other end closed or `*error` was set to an errno; the descriptor must be blocking. */
int64_t send_rows(const Job *job, int descriptor, int64_t begin, int64_t end, int *error);
int64_t receive_rows(const Job *job, int descriptor, int64_t begin, int64_t end, int *error);

#endif
