/* A process that is written to, as the pool sees it. */
#ifndef KVBATON_POOL_PEER_H
#define KVBATON_POOL_PEER_H

#include "_pool.h"

enum { REASON_BYTES = 512 };

struct PoolPeer {
    int references; /* atomic */
    /* Below: under the pool's lock, but for what never changes. */
    int copying; /* chunks in progress */
    int dead, forgotten;
    int descriptor;
    ptrdiff_t regions;
    int64_t *bases;
    char dead_reason[REASON_BYTES], forgotten_reason[REASON_BYTES];
};

void pool_hold_peer(PoolPeer *peer);

/* Whether its process has ended. Between the moments when a chunk is taken and when it is over. */
int pool_peer_ended(const PoolPeer *peer);

/* When no chunk is in progress and none will be: the descriptor is not needed any more. */
void pool_unwatch_peer(PoolPeer *peer);

void pool_set_reason(char *reason, const char *text);

#endif
