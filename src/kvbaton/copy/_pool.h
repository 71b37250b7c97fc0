/* Threads that copy the batches of writes, oldest first. Knows nothing of Python: its threads never want the GIL.
 *
 * Every function may be called from any thread. A process that forks keeps the pool in the parent only.
 */
#ifndef KVBATON_POOL_H
#define KVBATON_POOL_H

#include "_batch.h"

enum { POOL_COPIED, POOL_PEER_DEAD, POOL_FORGOTTEN };

/* A process that is written to. */
typedef struct PoolPeer PoolPeer;

/* One write. It belongs to the pool from `pool_submit` until `pool_drain` gives it back. */
typedef struct PoolJob {
    struct PoolJob *next;
    PoolPeer *peer;
    int64_t ticket;
    int outcome;
    int copying; /* chunks in progress */
    Batch batch;
} PoolJob;

typedef struct Pool Pool;

/* A pool of up to `workers` threads with that name and a number; they start with the first job that is queued. NULL
 * where there is no memory. */
Pool *pool_open(int workers, const char *name);

/* A peer that is dead once `descriptor` (a pidfd, of which a copy is taken; -1: none) is readable. NULL with errno. */
PoolPeer *pool_peer(int descriptor, const int64_t *bases, ptrdiff_t regions, const char *dead);

const int64_t *pool_peer_bases(const PoolPeer *peer, ptrdiff_t *regions);

/* Why its jobs ended with that outcome; valid as long as the peer is. */
const char *pool_reason(const PoolPeer *peer, int outcome);

/* Gives the caller's hold of it up; jobs that it still has keep it. */
void pool_release_peer(PoolPeer *peer);

PoolJob *pool_job(PoolPeer *peer, int64_t ticket);
void pool_free_job(PoolJob *job);

enum { POOL_QUEUED, POOL_ENDED, POOL_REFUSED, POOL_NO_THREAD };

/* Queues a job whose batch is cut, for `pool_drain` to report; or copies it before it returns, where `at_once` says so.
 * Only a job that is queued becomes the pool's. Refused are jobs of a peer that was forgotten, and all once the pool is
 * closed. */
int pool_submit(Pool *pool, PoolJob *job, int at_once);

/* All jobs that ended since the last call, in the order of their ends, as a list that is the caller's. */
PoolJob *pool_drain(Pool *pool);

/* Writes 8 bytes to a copy of `descriptor` (an eventfd; -1: none) whenever `pool_drain` has something new. -1 with
 * errno. */
int pool_wake_by(Pool *pool, int descriptor);

/* Ends all jobs of a peer, takes no more, and waits until no copy to it is in progress. */
void pool_forget(Pool *pool, PoolPeer *peer, const char *reason);

/* Ends all jobs for `reason`, then the threads; no copy is in progress any more. `pool_drain` still works. */
void pool_close(Pool *pool, const char *reason);

/* After `pool_close`, when nobody uses it any more. */
void pool_free(Pool *pool);

#endif
