#include "_walk.h"

#include <pthread.h>
#include <string.h>

#include "_casts.h"

#define MAX_THREADS 64
#define MIN_BYTES_PER_THREAD (256 * 1024)

typedef struct {
    const Job *job;
    int64_t begin, end;
} Share;

#define RUNS(BYTES)                                                                                                    \
    for (int64_t i0 = 0; i0 < count0; i0++) {                                                                          \
        char *to = destination + i0 * to0;                                                                             \
        const char *from = source + i0 * from0;                                                                        \
        for (int64_t i1 = 0; i1 < count1; i1++, to += to1, from += from1)                                              \
            memcpy(to, from, BYTES);                                                                                   \
    }                                                                                                                  \
    break

/* A size that the compiler knows becomes a few vector moves instead of a call. */
static void copy_runs(char *destination, int64_t to0, int64_t to1, const char *source, int64_t from0, int64_t from1,
                      int64_t count0, int64_t count1, int64_t run)
{
    switch (run) {
    case 2: RUNS(2);
    case 4: RUNS(4);
    case 8: RUNS(8);
    case 16: RUNS(16);
    case 32: RUNS(32);
    case 64: RUNS(64);
    case 128: RUNS(128);
    case 256: RUNS(256);
    default: RUNS((size_t)run);
    }
}

static void copy_part(const Box *box, char *destination, int64_t to0, int64_t to1, const char *source, int64_t from0,
                      int64_t from1, int64_t begin, int64_t end)
{
    for (int64_t at = begin; at < end;) {
        int64_t piece = at / box->run, inside = at % box->run;
        int64_t i0 = piece / box->count1, i1 = piece % box->count1;
        int64_t bytes = box->run - inside < end - at ? box->run - inside : end - at;
        memcpy(destination + i0 * to0 + i1 * to1 + inside, source + i0 * from0 + i1 * from1 + inside, (size_t)bytes);
        at += bytes;
    }
}

static void walk(const Job *job, int64_t begin, int64_t end)
{
    for (int64_t unit = begin / job->unit_bytes; unit * job->unit_bytes < end; unit++) {
        int64_t unit_start = unit * job->unit_bytes;
        for (ptrdiff_t index = 0; index < job->count; index++) {
            const Box *box = &job->boxes[index];
            int64_t start = unit_start + box->start;
            if (start + box->bytes <= begin)
                continue;
            if (start >= end)
                break;
            int64_t from0, from1, to0, to1;
            char *source, *destination;
            if (job->source_units) {
                source = unit_address(&box->source, job->source_units[unit]);
                from0 = box->source.stride0, from1 = box->source.stride1;
            } else {
                source = job->packed + (start - job->packed_begin);
                from0 = box->count1 * box->run, from1 = box->run;
            }
            if (job->destination_units) {
                destination = unit_address(&box->destination, job->destination_units[unit]);
                to0 = box->destination.stride0, to1 = box->destination.stride1;
            } else {
                destination = job->packed + (start - job->packed_begin);
                to0 = box->count1 * box->run, to1 = box->run;
            }
            if (box->operation != MOVE)
                cast_box(box, source, box->scale.origin ? unit_address(&box->scale, job->source_units[unit]) : NULL,
                         destination, to0, to1, begin > start ? begin - start : 0,
                         end - start < box->bytes ? end - start : box->bytes);
            else if (start >= begin && start + box->bytes <= end)
                copy_runs(destination, to0, to1, source, from0, from1, box->count0, box->count1, box->run);
            else
                copy_part(box, destination, to0, to1, source, from0, from1, begin > start ? begin - start : 0,
                          end - start < box->bytes ? end - start : box->bytes);
        }
    }
}

static void *walk_share(void *argument)
{
    const Share *share = argument;
    walk(share->job, share->begin, share->end);
    return NULL;
}

void run_job(const Job *job, int64_t begin, int64_t end, int threads)
{
    Share shares[MAX_THREADS];
    pthread_t handles[MAX_THREADS];
    int64_t total = end - begin;
    if (threads > MAX_THREADS)
        threads = MAX_THREADS;
    if (threads > total / MIN_BYTES_PER_THREAD)
        threads = (int)(total / MIN_BYTES_PER_THREAD);
    if (threads < 1)
        threads = 1;
    int64_t each = total / threads;
    /* Whole units where there are many: no piece is cut, and no two threads write into one cache line of a row. */
    if (each >= 4 * job->unit_bytes)
        each -= each % job->unit_bytes;
    int started = 0;
    for (; started < threads - 1; started++) {
        shares[started] = (Share){job, begin + started * each, begin + (started + 1) * each};
        if (pthread_create(&handles[started], NULL, walk_share, &shares[started]) != 0)
            break;
    }
    walk(job, begin + started * each, end);
    for (int index = 0; index < started; index++)
        pthread_join(handles[index], NULL);
}
