/* Copies boxes: small strided blocks of rows, as `kvbaton.plan.boxes` defines them.
 *
 * The packed stream of a transfer is its pieces in the order unit, box, i0, i1. Every function here works on a byte range
 * of that stream, so that a caller can cut a transfer into slabs or into equal shares for threads at any byte.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define MAX_THREADS 64
#define MIN_BYTES_PER_THREAD (256 * 1024)

enum { REGION, OFFSET, ROW_STRIDE, UNITS_PER_ROW, UNIT_STRIDE, STRIDE0, STRIDE1, SIDE_COLUMNS };
enum { COUNT0, COUNT1, RUN, SHAPE_COLUMNS };

/* One side of a box, its base address and offset added. */
typedef struct {
    char *origin;
    int64_t row_stride, units_per_row, unit_stride, stride0, stride1;
} Side;

typedef struct {
    int64_t start, bytes; /* where the box begins in the packed unit, and how long it is there */
    int64_t count0, count1, run;
    Side source, destination;
} Box;

/* Strided on both sides (units given twice), or packed on one of them (units NULL). */
typedef struct {
    const Box *boxes;
    Py_ssize_t count;
    int64_t unit_bytes;
    const int64_t *source_units, *destination_units;
    char *packed;
    int64_t packed_begin;
} Job;

typedef struct {
    const Job *job;
    int64_t begin, end;
} Share;

static inline char *unit_address(const Side *side, int64_t unit)
{
    if (side->units_per_row == 1)
        return side->origin + unit * side->row_stride;
    return side->origin + (unit / side->units_per_row) * side->row_stride
           + (unit % side->units_per_row) * side->unit_stride;
}

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
        for (Py_ssize_t index = 0; index < job->count; index++) {
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
            if (start >= begin && start + box->bytes <= end)
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

static void run_job(const Job *job, int64_t begin, int64_t end, int threads)
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

/* ---- arguments ---- */

static int is_int64(const Py_buffer *view)
{
    const char *format = view->format ? view->format : "B";
    if (*format == '@' || *format == '=' || *format == '<')
        format++;
    return view->itemsize == 8 && (*format == 'l' || *format == 'q') && format[1] == 0;
}

/* A C-contiguous int64 table of `columns` columns (0: one dimension). On failure nothing is held. */
static int take_table(PyObject *object, Py_buffer *view, const char *name, Py_ssize_t columns)
{
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0)
        return -1;
    if (!is_int64(view)) {
        PyErr_Format(PyExc_TypeError, "%s must be int64", name);
    } else if (columns == 0 && view->ndim != 1) {
        PyErr_Format(PyExc_ValueError, "%s must have 1 dimension, not %d", name, view->ndim);
    } else if (columns != 0 && (view->ndim != 2 || view->shape[1] != columns)) {
        PyErr_Format(PyExc_ValueError, "%s must have the shape [n, %zd]", name, columns);
    } else if ((uintptr_t)view->buf % sizeof(int64_t) != 0) {
        PyErr_Format(PyExc_ValueError, "%s must be aligned to 8 bytes", name);
    } else {
        return 0;
    }
    PyBuffer_Release(view);
    return -1;
}

static int fill_side(Side *side, const int64_t *row, const Py_buffer *bases, const char *name, Py_ssize_t index)
{
    int64_t region = row[REGION];
    if (region < 0 || region >= bases->shape[0]) {
        PyErr_Format(PyExc_ValueError, "%s box %zd names region %lld of %zd", name, index, (long long)region,
                     bases->shape[0]);
        return -1;
    }
    if (row[OFFSET] < 0 || row[ROW_STRIDE] < 0 || row[UNITS_PER_ROW] < 1 || row[UNIT_STRIDE] < 0 || row[STRIDE0] < 0
        || row[STRIDE1] < 0) {
        PyErr_Format(PyExc_ValueError, "%s box %zd has a negative offset or stride, or no units per row", name, index);
        return -1;
    }
    *side = (Side){(char *)(uintptr_t)(((const int64_t *)bases->buf)[region] + row[OFFSET]), row[ROW_STRIDE],
                   row[UNITS_PER_ROW], row[UNIT_STRIDE], row[STRIDE0], row[STRIDE1]};
    return 0;
}

/* Fewer, longer runs where neighbours touch; the order of bytes stays. */
static void join_runs(Box *box, int has_source, int has_destination)
{
    for (int level = 0; level < 2; level++) {
        if (box->count1 == 1) {
            box->count1 = box->count0, box->count0 = 1;
            box->source.stride1 = box->source.stride0;
            box->destination.stride1 = box->destination.stride0;
        }
        if (box->count1 > 1 && (!has_source || box->source.stride1 == box->run)
            && (!has_destination || box->destination.stride1 == box->run)) {
            box->run *= box->count1;
            box->count1 = 1;
        }
    }
}

typedef struct {
    Py_buffer view[7];
    int held;
    Box *boxes;
    Job job;
} Call;

static void release_call(Call *call)
{
    PyMem_Free(call->boxes);
    for (int index = 0; index < call->held; index++)
        PyBuffer_Release(&call->view[index]);
}

static Py_buffer *hold_table(Call *call, PyObject *object, const char *name, Py_ssize_t columns)
{
    Py_buffer *view = &call->view[call->held];
    if (take_table(object, view, name, columns) < 0)
        return NULL;
    call->held++;
    return view;
}

/* Prepares the boxes; gives the bytes of the whole packed stream, or -1 with an exception set. */
static int64_t prepare(Call *call, const Py_buffer *shape, const Py_buffer *source, const Py_buffer *source_bases,
                       const Py_buffer *destination, const Py_buffer *destination_bases, Py_ssize_t units)
{
    Py_ssize_t count = shape->shape[0];
    if ((source && source->shape[0] != count) || (destination && destination->shape[0] != count)) {
        PyErr_SetString(PyExc_ValueError, "shape and side tables differ in length");
        return -1;
    }
    Box *boxes = PyMem_Calloc(count ? (size_t)count : 1, sizeof(Box));
    if (!boxes) {
        PyErr_NoMemory();
        return -1;
    }
    call->boxes = boxes;
    int64_t start = 0, total = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        const int64_t *row = (const int64_t *)shape->buf + index * SHAPE_COLUMNS;
        Box *box = &boxes[index];
        int64_t bytes;
        if (row[COUNT0] < 1 || row[COUNT1] < 1 || row[RUN] < 1) {
            PyErr_Format(PyExc_ValueError, "box %zd has a count or run below 1", index);
            return -1;
        }
        if (__builtin_mul_overflow(row[COUNT0], row[COUNT1], &bytes) || __builtin_mul_overflow(bytes, row[RUN], &bytes)
            || __builtin_add_overflow(start, bytes, &total)) {
            PyErr_SetString(PyExc_ValueError, "the boxes move more bytes than an int64 counts");
            return -1;
        }
        box->start = start, box->bytes = bytes;
        box->count0 = row[COUNT0], box->count1 = row[COUNT1], box->run = row[RUN];
        start = total;
        if (source && fill_side(&box->source, (const int64_t *)source->buf + index * SIDE_COLUMNS, source_bases,
                                "source", index) < 0)
            return -1;
        if (destination && fill_side(&box->destination, (const int64_t *)destination->buf + index * SIDE_COLUMNS,
                                     destination_bases, "destination", index) < 0)
            return -1;
        join_runs(box, source != NULL, destination != NULL);
    }
    call->job.boxes = boxes;
    call->job.count = count;
    call->job.unit_bytes = start;
    if (__builtin_mul_overflow(start, (int64_t)units, &total)) {
        PyErr_SetString(PyExc_ValueError, "the units move more bytes than an int64 counts");
        return -1;
    }
    return total;
}

/* The range lies in the stream, and no unit that it touches is negative. */
static int check_range(const Job *job, int64_t begin, int64_t end, int64_t total)
{
    if (begin < 0 || end < begin || end > total) {
        PyErr_Format(PyExc_ValueError, "bytes [%lld, %lld) are not in a stream of %lld bytes", (long long)begin,
                     (long long)end, (long long)total);
        return -1;
    }
    if (begin == end)
        return 0;
    for (int64_t unit = begin / job->unit_bytes; unit <= (end - 1) / job->unit_bytes; unit++) {
        if ((job->source_units && job->source_units[unit] < 0)
            || (job->destination_units && job->destination_units[unit] < 0)) {
            PyErr_Format(PyExc_ValueError, "unit %lld is negative", (long long)unit);
            return -1;
        }
    }
    return 0;
}

static PyObject *execute(Call *call, int64_t begin, int64_t end, int64_t total, int threads)
{
    if (total < 0 || check_range(&call->job, begin, end, total) < 0) {
        release_call(call);
        return NULL;
    }
    if (begin < end) {
        Py_BEGIN_ALLOW_THREADS
        run_job(&call->job, begin, end, threads);
        Py_END_ALLOW_THREADS
    }
    release_call(call);
    Py_RETURN_NONE;
}

static PyObject *kernel_copy(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *objects[7];
    long long begin, end;
    int threads;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOLLi", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4],
                          &objects[5], &objects[6], &begin, &end, &threads))
        return NULL;
    Call call = {0};
    Py_buffer *shape, *source, *destination, *source_units, *destination_units, *source_bases, *destination_bases;
    if (!(shape = hold_table(&call, objects[0], "shape", SHAPE_COLUMNS))
        || !(source = hold_table(&call, objects[1], "source", SIDE_COLUMNS))
        || !(destination = hold_table(&call, objects[2], "destination", SIDE_COLUMNS))
        || !(source_units = hold_table(&call, objects[3], "source_units", 0))
        || !(destination_units = hold_table(&call, objects[4], "destination_units", 0))
        || !(source_bases = hold_table(&call, objects[5], "source_bases", 0))
        || !(destination_bases = hold_table(&call, objects[6], "destination_bases", 0))) {
        release_call(&call);
        return NULL;
    }
    if (source_units->shape[0] != destination_units->shape[0]) {
        PyErr_Format(PyExc_ValueError, "%zd source units but %zd destination units", source_units->shape[0],
                     destination_units->shape[0]);
        release_call(&call);
        return NULL;
    }
    call.job.source_units = source_units->buf;
    call.job.destination_units = destination_units->buf;
    int64_t total = prepare(&call, shape, source, source_bases, destination, destination_bases, source_units->shape[0]);
    return execute(&call, begin, end, total, threads);
}

static PyObject *packed_call(PyObject *arguments, int gathers)
{
    PyObject *objects[4], *packed;
    long long begin;
    int threads;
    if (!PyArg_ParseTuple(arguments, "OOOOOLi", &objects[0], &objects[1], &objects[2], &objects[3], &packed, &begin,
                          &threads))
        return NULL;
    Call call = {0};
    Py_buffer *shape, *side, *units, *bases;
    if (!(shape = hold_table(&call, objects[0], "shape", SHAPE_COLUMNS))
        || !(side = hold_table(&call, objects[1], "side", SIDE_COLUMNS))
        || !(units = hold_table(&call, objects[2], "units", 0))
        || !(bases = hold_table(&call, objects[3], "bases", 0))) {
        release_call(&call);
        return NULL;
    }
    Py_buffer *view = &call.view[call.held];
    if (PyObject_GetBuffer(packed, view, gathers ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) {
        release_call(&call);
        return NULL;
    }
    call.held++;
    if (gathers)
        call.job.source_units = units->buf;
    else
        call.job.destination_units = units->buf;
    call.job.packed = view->buf;
    call.job.packed_begin = begin;
    int64_t total = gathers ? prepare(&call, shape, side, bases, NULL, NULL, units->shape[0])
                            : prepare(&call, shape, NULL, NULL, side, bases, units->shape[0]);
    int64_t end;
    if (total >= 0 && __builtin_add_overflow((int64_t)begin, (int64_t)view->len, &end)) {
        PyErr_SetString(PyExc_ValueError, "begin is too large");
        total = -1;
    }
    return execute(&call, begin, total < 0 ? 0 : end, total, threads);
}

static PyObject *kernel_gather(PyObject *module, PyObject *arguments)
{
    (void)module;
    return packed_call(arguments, 1);
}

static PyObject *kernel_scatter(PyObject *module, PyObject *arguments)
{
    (void)module;
    return packed_call(arguments, 0);
}

static PyMethodDef methods[] = {
    {"copy", kernel_copy, METH_VARARGS, "Copy a byte range of a transfer from rows to rows."},
    {"gather", kernel_gather, METH_VARARGS, "Fill a buffer with a byte range of a transfer's packed stream."},
    {"scatter", kernel_scatter, METH_VARARGS, "Spread a buffer that holds a byte range of a transfer's packed stream."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernel", "Copies boxes between rows and packed buffers.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    return PyModule_Create(&definition);
}
