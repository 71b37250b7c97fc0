#include "_arguments.h"

#include <math.h>
#include <stdlib.h>

#include "_formats.h"

/* ---- tables ---- */

static const char *plain_format(const Py_buffer *view)
{
    const char *format = view->format ? view->format : "B";
    return *format == '@' || *format == '=' || *format == '<' ? format + 1 : format;
}

static int is_int64(const Py_buffer *view)
{
    const char *format = plain_format(view);
    return view->itemsize == 8 && (*format == 'l' || *format == 'q') && format[1] == 0;
}

static int is_float32(const Py_buffer *view)
{
    const char *format = plain_format(view);
    return view->itemsize == 4 && *format == 'f' && format[1] == 0;
}

/* A C-contiguous table of `columns` columns (0: one dimension). On failure nothing is held. */
static Py_buffer *hold(Call *call, PyObject *object, const char *name, Py_ssize_t columns,
                       int (*is_dtype)(const Py_buffer *), const char *dtype)
{
    Py_buffer *view = &call->view[call->held];
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0)
        return NULL;
    if (!is_dtype(view)) {
        PyErr_Format(PyExc_TypeError, "%s must be %s", name, dtype);
    } else if (columns == 0 && view->ndim != 1) {
        PyErr_Format(PyExc_ValueError, "%s must have 1 dimension, not %d", name, view->ndim);
    } else if (columns != 0 && (view->ndim != 2 || view->shape[1] != columns)) {
        PyErr_Format(PyExc_ValueError, "%s must have the shape [n, %zd]", name, columns);
    } else if ((uintptr_t)view->buf % (size_t)view->itemsize != 0) {
        PyErr_Format(PyExc_ValueError, "%s must be aligned to %zd bytes", name, view->itemsize);
    } else {
        call->held++;
        return view;
    }
    PyBuffer_Release(view);
    return NULL;
}

Py_buffer *hold_table(Call *call, PyObject *object, const char *name, Py_ssize_t columns)
{
    return hold(call, object, name, columns, is_int64, "int64");
}

int hold_cast(Call *call, PyObject *object, CastTables *cast)
{
    if (object == Py_None)
        return 0;
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 3) {
        PyErr_SetString(PyExc_TypeError, "cast must be None or a tuple of three tables");
        return -1;
    }
    cast->how = hold_table(call, PyTuple_GET_ITEM(object, 0), "how of the cast", CAST_COLUMNS);
    if (!cast->how)
        return -1;
    cast->factor = hold(call, PyTuple_GET_ITEM(object, 1), "factor of the cast", 0, is_float32, "float32");
    if (!cast->factor)
        return -1;
    cast->scale = hold_table(call, PyTuple_GET_ITEM(object, 2), "scale of the cast", SIDE_COLUMNS);
    return cast->scale ? 0 : -1;
}

void release_call(Call *call)
{
    free(call->boxes);
    for (int index = 0; index < call->held; index++)
        PyBuffer_Release(&call->view[index]);
}

/* ---- boxes ---- */

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

/* The operation is one, and elements and run agree. */
static int is_sound(const int64_t *how, int64_t run, float factor)
{
    int64_t bytes, operation = how[OPERATION], source = how[SOURCE_DTYPE], destination = how[DESTINATION_DTYPE];
    if (how[ELEMENTS] < 1 || __builtin_mul_overflow(how[ELEMENTS], (int64_t)sizeof(float), &bytes))
        return 0;
    if (operation == MOVE)
        return source == BYTES && destination == BYTES && how[ELEMENTS] == run;
    if (operation < MOVE || operation >= OPERATIONS || source <= BYTES || source >= DTYPES || destination <= BYTES
        || destination >= DTYPES || !isfinite(factor))
        return 0;
    return run == (operation == SCALE ? (int64_t)sizeof(float) : how[ELEMENTS] * dtype_bytes[destination]);
}

static int fill_cast(Box *box, const CastTables *cast, const Py_buffer *bases, Py_ssize_t index)
{
    const int64_t *how = (const int64_t *)cast->how->buf + index * CAST_COLUMNS;
    const int64_t *scale = (const int64_t *)cast->scale->buf + index * SIDE_COLUMNS;
    box->factor = ((const float *)cast->factor->buf)[index];
    if (!is_sound(how, box->run, box->factor)) {
        PyErr_Format(PyExc_ValueError, "the cast of box %zd does not hold together", index);
        return -1;
    }
    box->operation = (int)how[OPERATION];
    box->source_dtype = (int)how[SOURCE_DTYPE];
    box->destination_dtype = (int)how[DESTINATION_DTYPE];
    box->elements = how[ELEMENTS];
    return scale[REGION] == -1 ? 0 : fill_side(&box->scale, scale, bases, "scale", index);
}

/* Fewer, longer runs where neighbours touch; the order of bytes stays. */
static void join_runs(Box *box, int has_source, int has_destination)
{
    if (box->operation != MOVE && (box->operation != CONVERT || box->scale.origin))
        return;
    for (int level = 0; level < 2; level++) {
        int64_t read = box->operation == MOVE ? box->run : box->elements * dtype_bytes[box->source_dtype];
        if (box->count1 == 1) {
            box->count1 = box->count0, box->count0 = 1;
            box->source.stride1 = box->source.stride0;
            box->destination.stride1 = box->destination.stride0;
        }
        if (box->count1 > 1 && (!has_source || box->source.stride1 == read)
            && (!has_destination || box->destination.stride1 == box->run)) {
            box->run *= box->count1;
            box->elements *= box->count1;
            box->count1 = 1;
        }
    }
}

static int64_t prepare_boxes(Call *call, const Py_buffer *shape, const Py_buffer *source, const Py_buffer *source_bases,
                             const Py_buffer *destination, const Py_buffer *destination_bases, const CastTables *cast,
                             Py_ssize_t units, int joins)
{
    Py_ssize_t count = shape->shape[0];
    if ((source && source->shape[0] != count) || (destination && destination->shape[0] != count)
        || (cast->how
            && (cast->how->shape[0] != count || cast->factor->shape[0] != count || cast->scale->shape[0] != count))) {
        PyErr_SetString(PyExc_ValueError, "shape, side and cast tables differ in length");
        return -1;
    }
    Box *boxes = calloc(count ? (size_t)count : 1, sizeof(Box));
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
        if (cast->how && fill_cast(box, cast, source_bases, index) < 0)
            return -1;
        if (joins)
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

int64_t prepare(Call *call, const Py_buffer *shape, const Py_buffer *source, const Py_buffer *source_bases,
                const Py_buffer *destination, const Py_buffer *destination_bases, const CastTables *cast,
                Py_ssize_t units)
{
    return prepare_boxes(call, shape, source, source_bases, destination, destination_bases, cast, units, 1);
}

int64_t prepare_pieces(Call *call, const Py_buffer *shape, const Py_buffer *side, const Py_buffer *bases,
                       Py_ssize_t units)
{
    const CastTables none = {0};
    return prepare_boxes(call, shape, side, bases, NULL, NULL, &none, units, 0);
}

int check_range(const Job *job, int64_t begin, int64_t end, int64_t total)
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
