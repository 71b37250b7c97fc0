/* Executes a byte range of a job's packed stream. */
#ifndef KVBATON_WALK_H
#define KVBATON_WALK_H

#include "_boxes.h"

/* Moves the bytes [begin, end) with up to `threads` threads; returns when all of them are in place. */
void run_job(const Job *job, int64_t begin, int64_t end, int threads);

#endif
