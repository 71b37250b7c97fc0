#define _GNU_SOURCE
#include "_pool.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "_pool_peer.h"
#include "_walk.h"

enum { NAME_BYTES = 16 };

typedef struct {
    PoolJob *first, *last;
} List;

struct Pool {
    pthread_mutex_t lock;
    pthread_cond_t work;  /* a job was queued, or the pool is closed */
    pthread_cond_t quiet; /* the last copy to a forgotten peer is over, or the pool's last */
    List queue;           /* jobs with chunks to take */
    List ended;
    int idle, copying, closed, joined;
    int workers, started;
    pthread_t *threads;
    pid_t process; /* a forked child has the memory of the pool, but none of its threads */
    char name[NAME_BYTES];
    /* Held while the descriptor is written to, never together with `lock`: the write may hand the processor to the
     * thread that it wakes, and that one wants `lock` at once. */
    pthread_mutex_t waking;
    int descriptor;
};

static void append(List *list, PoolJob *job)
{
    job->next = NULL;
    if (list->last)
        list->last->next = job;
    else
        list->first = job;
    list->last = job;
}

static void wake(Pool *pool)
{
    const uint64_t one = 1;
    pthread_mutex_lock(&pool->waking);
    /* It fails if the counter is full; then it is readable anyway. */
    if (pool->descriptor >= 0 && write(pool->descriptor, &one, sizeof one) < 0)
        errno = 0;
    pthread_mutex_unlock(&pool->waking);
}

/* ---- jobs ---- */

PoolJob *pool_job(PoolPeer *peer, int64_t ticket)
{
    PoolJob *job = calloc(1, sizeof(PoolJob));
    if (!job)
        return NULL;
    pool_hold_peer(peer);
    job->peer = peer;
    job->ticket = ticket;
    return job;
}

void pool_free_job(PoolJob *job)
{
    batch_free(&job->batch);
    pool_release_peer(job->peer);
    free(job);
}

/* Ends a job when no chunk of it is left or in progress. Gives whether the owner must be woken: one that finds a job
 * there already was woken for that one, and takes both. The lock is held, here and below. */
static int end_if_over(Pool *pool, PoolJob *job)
{
    if (job->copying || (job->outcome == POOL_COPIED && batch_left(&job->batch)))
        return 0;
    if (job->peer->forgotten)
        job->outcome = POOL_FORGOTTEN;
    int wakes = !pool->ended.first;
    append(&pool->ended, job);
    return wakes;
}

/* Takes a job out of the queue, where it is there. */
static void take_out(Pool *pool, PoolJob *job)
{
    PoolJob *before = NULL;
    for (PoolJob *at = pool->queue.first; at; before = at, at = at->next) {
        if (at != job)
            continue;
        *(before ? &before->next : &pool->queue.first) = job->next;
        if (pool->queue.last == job)
            pool->queue.last = before;
        return;
    }
}

static void forget(PoolPeer *peer, const char *reason)
{
    if (!peer->forgotten)
        pool_set_reason(peer->forgotten_reason, reason);
    peer->forgotten = 1;
}

/* Takes the jobs of forgotten peers out of the queue. Gives whether the owner must be woken. */
static int end_forgotten(Pool *pool)
{
    int wakes = 0;
    PoolJob *job = pool->queue.first, *next;
    pool->queue = (List){0};
    for (; job; job = next) {
        next = job->next;
        if (job->peer->forgotten) {
            job->outcome = POOL_FORGOTTEN;
            wakes |= end_if_over(pool, job);
        } else {
            append(&pool->queue, job);
        }
    }
    return wakes;
}

/* ---- copies ---- */

/* Gives whether the peer is known to be dead. */
static int begin_chunk(Pool *pool, PoolJob *job)
{
    job->copying++;
    job->peer->copying++;
    pool->copying++;
    return job->peer->dead;
}

static void end_chunk(Pool *pool, PoolJob *job, int dead)
{
    PoolPeer *peer = job->peer;
    job->copying--;
    peer->copying--;
    pool->copying--;
    if (dead) {
        peer->dead = 1;
        if (job->outcome == POOL_COPIED) {
            job->outcome = POOL_PEER_DEAD;
            take_out(pool, job);
        }
    }
    if ((peer->forgotten && !peer->copying) || (pool->closed && !pool->copying))
        pthread_cond_broadcast(&pool->quiet);
}

static void *work(void *argument)
{
    Pool *pool = argument;
    int64_t begin, end;
    pthread_mutex_lock(&pool->lock);
    while (!pool->closed) {
        PoolJob *job = pool->queue.first;
        if (!job) {
            pool->idle++;
            pthread_cond_wait(&pool->work, &pool->lock);
            pool->idle--;
            continue;
        }
        const Part *part = batch_take(&job->batch, &begin, &end);
        if (!batch_left(&job->batch))
            take_out(pool, job);
        int dead = begin_chunk(pool, job);
        pthread_mutex_unlock(&pool->lock);
        dead = dead || pool_peer_ended(job->peer);
        if (!dead)
            run_job(&part->job, begin, end, 1);
        pthread_mutex_lock(&pool->lock);
        end_chunk(pool, job, dead);
        if (end_if_over(pool, job)) {
            pthread_mutex_unlock(&pool->lock);
            wake(pool);
            pthread_mutex_lock(&pool->lock);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* The caller copies. The lock is held at the beginning, and not at the end. */
static void copy_at_once(Pool *pool, PoolJob *job)
{
    int64_t begin, end;
    int dead = begin_chunk(pool, job);
    pthread_mutex_unlock(&pool->lock);
    dead = dead || pool_peer_ended(job->peer);
    while (batch_left(&job->batch)) {
        const Part *part = batch_take(&job->batch, &begin, &end);
        if (!dead)
            run_job(&part->job, begin, end, 1);
    }
    pthread_mutex_lock(&pool->lock);
    end_chunk(pool, job, dead);
    if (job->peer->forgotten)
        job->outcome = POOL_FORGOTTEN;
    pthread_mutex_unlock(&pool->lock);
}

/* ---- threads ---- */

static void name_thread(const Pool *pool, pthread_t thread, int number)
{
#ifdef __linux__
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "%.12s-%u", pool->name, (unsigned)number % 100);
    pthread_setname_np(thread, name);
#else
    (void)pool, (void)thread, (void)number;
#endif
}

/* Signals are for the threads that were there before, but for those that say that a copy went wrong. */
static void start_threads(Pool *pool)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    sigset_t all, before;
    sigfillset(&all);
    for (size_t index = 0; index < sizeof faults / sizeof *faults; index++)
        sigdelset(&all, faults[index]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->started < pool->workers
           && pthread_create(&pool->threads[pool->started], NULL, work, pool) == 0) {
        name_thread(pool, pool->threads[pool->started], pool->started);
        pool->started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* ---- the pool ---- */

Pool *pool_open(int workers, const char *name)
{
    Pool *pool = calloc(1, sizeof(Pool));
    if (!pool)
        return NULL;
    pool->threads = calloc((size_t)workers, sizeof(pthread_t));
    if (!pool->threads) {
        free(pool);
        return NULL;
    }
    pool->workers = workers;
    pool->descriptor = -1;
    pool->process = getpid();
    snprintf(pool->name, sizeof pool->name, "%s", name);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_mutex_init(&pool->waking, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->quiet, NULL);
    return pool;
}

int pool_submit(Pool *pool, PoolJob *job, int at_once)
{
    pthread_mutex_lock(&pool->lock);
    int refused = pool->closed || job->peer->forgotten ? POOL_REFUSED : POOL_QUEUED;
    if (!refused && at_once) {
        copy_at_once(pool, job);
        return POOL_ENDED;
    }
    if (!refused && pool->started < pool->workers) {
        start_threads(pool);
        if (!pool->started)
            refused = POOL_NO_THREAD;
    }
    if (refused) {
        pthread_mutex_unlock(&pool->lock);
        return refused;
    }
    ptrdiff_t chunks = batch_left(&job->batch);
    int sleepers = pool->idle < chunks ? pool->idle : (int)chunks;
    append(&pool->queue, job);
    pthread_mutex_unlock(&pool->lock);
    while (sleepers-- > 0)
        pthread_cond_signal(&pool->work);
    return POOL_QUEUED;
}

PoolJob *pool_drain(Pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    PoolJob *ended = pool->ended.first;
    pool->ended = (List){0};
    pthread_mutex_unlock(&pool->lock);
    return ended;
}

int pool_wake_by(Pool *pool, int descriptor)
{
    if (descriptor >= 0 && (descriptor = fcntl(descriptor, F_DUPFD_CLOEXEC, 0)) < 0)
        return -1;
    pthread_mutex_lock(&pool->waking);
    int before = pool->descriptor;
    pool->descriptor = descriptor;
    pthread_mutex_unlock(&pool->waking);
    if (before >= 0)
        close(before);
    pthread_mutex_lock(&pool->lock);
    int waiting = pool->ended.first != NULL;
    pthread_mutex_unlock(&pool->lock);
    if (waiting)
        wake(pool);
    return 0;
}

void pool_forget(Pool *pool, PoolPeer *peer, const char *reason)
{
    if (pool->process != getpid())
        return;
    pthread_mutex_lock(&pool->lock);
    forget(peer, reason);
    int wakes = end_forgotten(pool);
    while (peer->copying)
        pthread_cond_wait(&pool->quiet, &pool->lock);
    pool_unwatch_peer(peer);
    pthread_mutex_unlock(&pool->lock);
    if (wakes)
        wake(pool);
}

void pool_close(Pool *pool, const char *reason)
{
    if (pool->process != getpid())
        return;
    pthread_mutex_lock(&pool->lock);
    int first = !pool->closed;
    pool->closed = 1;
    for (PoolJob *job = pool->queue.first; job; job = job->next)
        forget(job->peer, reason);
    int wakes = end_forgotten(pool);
    pthread_cond_broadcast(&pool->work);
    while (pool->copying || (!first && !pool->joined))
        pthread_cond_wait(&pool->quiet, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    if (first) {
        for (int index = 0; index < pool->started; index++)
            pthread_join(pool->threads[index], NULL);
        pthread_mutex_lock(&pool->lock);
        pool->joined = 1;
        pthread_cond_broadcast(&pool->quiet);
        pthread_mutex_unlock(&pool->lock);
    }
    if (wakes)
        wake(pool);
}

void pool_free(Pool *pool)
{
    if (pool->process != getpid())
        return;
    for (PoolJob *job = pool->ended.first, *next; job; job = next) {
        next = job->next;
        pool_free_job(job);
    }
    if (pool->descriptor >= 0)
        close(pool->descriptor);
    pthread_cond_destroy(&pool->quiet);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->waking);
    pthread_mutex_destroy(&pool->lock);
    free(pool->threads);
    free(pool);
}
