/* Digests of pieces: one number for the content of many, whatever the order in which they are looked at. */
#ifndef KVBATON_DIGEST_H
#define KVBATON_DIGEST_H

#include "_boxes.h"

/* The digest of the units of a job whose source has rows; `kvbaton.copy.digests` has the formula. `numbers` has one for
 * each unit. Uses up to `threads` threads, and the instructions `with` ("": the best). */
uint64_t digest_job(const Job *job, const int64_t *numbers, int64_t units, uint64_t stream, int threads,
                    const char *with);

/* Whether this processor has the instructions "avx512", "avx2" or "plain". */
int digest_has(const char *with);

#endif
