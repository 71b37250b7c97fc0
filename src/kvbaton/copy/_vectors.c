#include "_vectors.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* What Linux takes in one call. */
#define VECTORS 1024

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

typedef struct {
    struct iovec vectors[VECTORS];
    int count;
} List;

/* A run that goes on where the one before it ended makes it longer. Gives 0 where the list is full. */
static int append(List *list, char *address, int64_t bytes)
{
    if (list->count) {
        struct iovec *last = &list->vectors[list->count - 1];
        if ((char *)last->iov_base + last->iov_len == address) {
            last->iov_len += (size_t)bytes;
            return 1;
        }
    }
    if (list->count == VECTORS)
        return 0;
    list->vectors[list->count++] = (struct iovec){address, (size_t)bytes};
    return 1;
}

/* Lists where the bytes [begin, end) of one unit's box lie. */
static int list_box(List *list, const Box *box, const Side *side, int64_t unit, int64_t begin, int64_t end)
{
    char *origin = unit_address(side, unit);
    int64_t piece = begin / box->run, inside = begin % box->run;
    int64_t i0 = piece / box->count1, i1 = piece % box->count1;
    for (int64_t at = begin; at < end; inside = 0) {
        int64_t bytes = box->run - inside < end - at ? box->run - inside : end - at;
        if (!append(list, origin + i0 * side->stride0 + i1 * side->stride1 + inside, bytes))
            return 0;
        at += bytes;
        if (++i1 == box->count1)
            i1 = 0, i0++;
    }
    return 1;
}

/* Lists as much of [begin, end) as there is place for. */
static void list_rows(List *list, const Job *job, int64_t begin, int64_t end)
{
    const int64_t *units = job->source_units ? job->source_units : job->destination_units;
    list->count = 0;
    for (int64_t unit = begin / job->unit_bytes; unit * job->unit_bytes < end; unit++) {
        int64_t base = unit * job->unit_bytes;
        for (ptrdiff_t index = 0; index < job->count && base + job->boxes[index].start < end; index++) {
            const Box *box = &job->boxes[index];
            int64_t start = base + box->start;
            if (start + box->bytes <= begin)
                continue;
            if (!list_box(list, box, job->source_units ? &box->source : &box->destination, units[unit],
                          begin > start ? begin - start : 0, end - start < box->bytes ? end - start : box->bytes))
                return;
        }
    }
}

static int64_t move(const Job *job, int descriptor, int64_t begin, int64_t end, int *error, int sends)
{
    List list;
    int64_t at = begin;
    *error = 0;
    while (at < end) {
        list_rows(&list, job, at, end);
        struct msghdr message = {.msg_iov = list.vectors, .msg_iovlen = (size_t)list.count};
        ssize_t moved = sends ? sendmsg(descriptor, &message, MSG_NOSIGNAL) : recvmsg(descriptor, &message, MSG_WAITALL);
        if (moved < 0)
            *error = errno;
        if (moved <= 0)
            break;
        at += moved;
    }
    return at - begin;
}

int64_t send_rows(const Job *job, int descriptor, int64_t begin, int64_t end, int *error)
{
    return move(job, descriptor, begin, end, error, 1);
}

int64_t receive_rows(const Job *job, int descriptor, int64_t begin, int64_t end, int *error)
{
    return move(job, descriptor, begin, end, error, 0);
}
