#define _GNU_SOURCE
#include "_pool_peer.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void pool_set_reason(char *reason, const char *text)
{
    size_t length = strlen(text);
    if (length >= REASON_BYTES) {
        length = REASON_BYTES - 1;
        /* Not in the middle of a character. */
        while (length && ((unsigned char)text[length] & 0xC0) == 0x80)
            length--;
    }
    memcpy(reason, text, length);
    reason[length] = 0;
}

PoolPeer *pool_peer(int descriptor, const int64_t *bases, ptrdiff_t regions, const char *dead)
{
    PoolPeer *peer = calloc(1, sizeof(PoolPeer));
    if (!peer)
        return NULL;
    peer->references = 1;
    peer->descriptor = -1;
    peer->regions = regions;
    pool_set_reason(peer->dead_reason, dead);
    peer->bases = malloc((regions ? (size_t)regions : 1) * sizeof(int64_t));
    if (!peer->bases || (descriptor >= 0 && (peer->descriptor = fcntl(descriptor, F_DUPFD_CLOEXEC, 0)) < 0)) {
        int error = errno;
        pool_release_peer(peer);
        errno = error;
        return NULL;
    }
    memcpy(peer->bases, bases, (size_t)regions * sizeof(int64_t));
    return peer;
}

const int64_t *pool_peer_bases(const PoolPeer *peer, ptrdiff_t *regions)
{
    *regions = peer->regions;
    return peer->bases;
}

const char *pool_reason(const PoolPeer *peer, int outcome)
{
    return outcome == POOL_COPIED ? "" : outcome == POOL_PEER_DEAD ? peer->dead_reason : peer->forgotten_reason;
}

void pool_hold_peer(PoolPeer *peer)
{
    __atomic_add_fetch(&peer->references, 1, __ATOMIC_RELAXED);
}

void pool_release_peer(PoolPeer *peer)
{
    if (__atomic_sub_fetch(&peer->references, 1, __ATOMIC_ACQ_REL))
        return;
    pool_unwatch_peer(peer);
    free(peer->bases);
    free(peer);
}

int pool_peer_ended(const PoolPeer *peer)
{
    if (peer->descriptor < 0)
        return 0;
    struct pollfd watched = {.fd = peer->descriptor, .events = POLLIN};
    return poll(&watched, 1, 0) > 0;
}

void pool_unwatch_peer(PoolPeer *peer)
{
    if (peer->descriptor >= 0)
        close(peer->descriptor);
    peer->descriptor = -1;
}
