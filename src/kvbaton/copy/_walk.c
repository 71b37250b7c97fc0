#include "_walk.h"

#include <pthread.h>

#include "_casts.h"
#include "_runs.h"

#define MAX_THREADS 64
#define MIN_BYTES_PER_THREAD (256 * 1024)

typedef struct {
    const Job *job;
    int64_t begin, end;
} Share;

static char *packed_place(const Job *job, int64_t at)
{
    return (char *)((uintptr_t)job->packed + (uintptr_t)(at - job->packed_begin));
}

static Lane lane_of(const Job *job, const Box *box, const Side *side, const int64_t *units)
{
    if (units)
        return (Lane){*side, units};
    return (Lane){{packed_place(job, box->start), job->unit_bytes, 1, 0, box->count1 * box->run, box->run}, NULL};
}

static void lanes_of(const Job *job, const Box *box, Lane *source, Lane *destination)
{
    *source = lane_of(job, box, &box->source, job->source_units);
    *destination = lane_of(job, box, &box->destination, job->destination_units);
}

/* Moves or casts the bytes [begin, end) of the stream as far as they are of this box and unit. */
static void walk_box(const Job *job, const Box *box, int64_t unit, int64_t begin, int64_t end)
{
    int64_t start = unit * job->unit_bytes + box->start;
    begin = begin > start ? begin - start : 0;
    end = end - start < box->bytes ? end - start : box->bytes;
    if (begin >= end)
        return;
    Lane source, destination;
    lanes_of(job, box, &source, &destination);
    if (box->operation == MOVE)
        copy_part(box, &source, &destination, unit, begin, end);
    else
        cast_box(box, lane_address(&source, unit),
                 box->scale.origin ? unit_address(&box->scale, job->source_units[unit]) : NULL,
                 lane_address(&destination, unit), destination.side.stride0, destination.side.stride1, begin, end);
}

static void walk_unit(const Job *job, int64_t unit, int64_t begin, int64_t end)
{
    const Box *past = job->boxes + job->count;
    for (const Box *box = job->boxes; box < past && unit * job->unit_bytes + box->start < end; box++)
        walk_box(job, box, unit, begin, end);
}

/* Box by box: what follows each other is near each other, where a tensor's rows are, and one loop does it. */
static void walk_whole(const Job *job, int64_t first, int64_t last)
{
    Lane source, destination, next_source, next_destination;
    const Box *past = job->boxes + job->count;
    lanes_of(job, job->boxes, &source, &destination);
    for (const Box *box = job->boxes; box < past; box++) {
        if (box + 1 < past) {
            lanes_of(job, box + 1, &next_source, &next_destination);
            prefetch_units(box + 1, &next_source, &next_destination, first, last);
        }
        if (box->operation == MOVE)
            copy_units(box, &source, &destination, first, last);
        else
            for (int64_t unit = first; unit < last; unit++)
                walk_box(job, box, unit, unit * job->unit_bytes, (unit + 1) * job->unit_bytes);
        source = next_source, destination = next_destination;
    }
}

static void walk(const Job *job, int64_t begin, int64_t end)
{
    int64_t first = begin / job->unit_bytes + (begin % job->unit_bytes != 0), last = end / job->unit_bytes;
    if (first > last) {
        walk_unit(job, last, begin, end);
        return;
    }
    if (begin < first * job->unit_bytes)
        walk_unit(job, first - 1, begin, end);
    if (first < last)
        walk_whole(job, first, last);
    if (end > last * job->unit_bytes)
        walk_unit(job, last, begin, end);
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
