/* Copies boxes: small strided blocks of rows, as `kvbaton.plan.boxes` defines them.
 *
 * The packed stream of a transfer is its pieces in the order unit, box, i0, i1. Every function here works on a byte range
 * of that stream, so that a caller can cut a transfer into slabs or into equal shares for threads at any byte.
 */
#include "_arguments.h"
#include "_bounds.h"
#include "_digest.h"
#include "_pool_type.h"
#include "_vectors.h"
#include "_walk.h"

#include <errno.h>

#define DIGEST_AT_ONCE_BYTES (64 * 1024)

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
    PyObject *objects[7], *cast_object = Py_None;
    long long begin, end;
    int threads;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOLLi|O", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4],
                          &objects[5], &objects[6], &begin, &end, &threads, &cast_object))
        return NULL;
    Call call = {0};
    CastTables cast = {0};
    Py_buffer *shape, *source, *destination, *source_units, *destination_units, *source_bases, *destination_bases;
    if (!(shape = hold_table(&call, objects[0], "shape", SHAPE_COLUMNS))
        || !(source = hold_table(&call, objects[1], "source", SIDE_COLUMNS))
        || !(destination = hold_table(&call, objects[2], "destination", SIDE_COLUMNS))
        || !(source_units = hold_table(&call, objects[3], "source_units", 0))
        || !(destination_units = hold_table(&call, objects[4], "destination_units", 0))
        || !(source_bases = hold_table(&call, objects[5], "source_bases", 0))
        || !(destination_bases = hold_table(&call, objects[6], "destination_bases", 0))
        || hold_cast(&call, cast_object, &cast) < 0) {
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
    int64_t total = prepare(&call, shape, source, source_bases, destination, destination_bases, &cast,
                            source_units->shape[0]);
    return execute(&call, begin, end, total, threads);
}

static PyObject *packed_call(PyObject *arguments, int gathers)
{
    PyObject *objects[4], *packed, *cast_object = Py_None;
    long long begin;
    int threads;
    if (!PyArg_ParseTuple(arguments, gathers ? "OOOOOLi|O" : "OOOOOLi", &objects[0], &objects[1], &objects[2],
                          &objects[3], &packed, &begin, &threads, &cast_object))
        return NULL;
    Call call = {0};
    CastTables cast = {0};
    Py_buffer *shape, *side, *units, *bases;
    if (!(shape = hold_table(&call, objects[0], "shape", SHAPE_COLUMNS))
        || !(side = hold_table(&call, objects[1], "side", SIDE_COLUMNS))
        || !(units = hold_table(&call, objects[2], "units", 0))
        || !(bases = hold_table(&call, objects[3], "bases", 0)) || hold_cast(&call, cast_object, &cast) < 0) {
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
    int64_t total = gathers ? prepare(&call, shape, side, bases, NULL, NULL, &cast, units->shape[0])
                            : prepare(&call, shape, NULL, NULL, side, bases, &cast, units->shape[0]);
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

static PyObject *socket_call(PyObject *arguments, int sends)
{
    PyObject *objects[4];
    long long begin, end;
    int descriptor, error = 0;
    if (!PyArg_ParseTuple(arguments, "iOOOOLL", &descriptor, &objects[0], &objects[1], &objects[2], &objects[3], &begin,
                          &end))
        return NULL;
    Call call = {0};
    CastTables cast = {0};
    Py_buffer *shape, *side, *units, *bases;
    if (!(shape = hold_table(&call, objects[0], "shape", SHAPE_COLUMNS))
        || !(side = hold_table(&call, objects[1], "side", SIDE_COLUMNS))
        || !(units = hold_table(&call, objects[2], "units", 0))
        || !(bases = hold_table(&call, objects[3], "bases", 0))) {
        release_call(&call);
        return NULL;
    }
    if (sends)
        call.job.source_units = units->buf;
    else
        call.job.destination_units = units->buf;
    int64_t total = sends ? prepare(&call, shape, side, bases, NULL, NULL, &cast, units->shape[0])
                          : prepare(&call, shape, NULL, NULL, side, bases, &cast, units->shape[0]);
    if (total < 0 || check_range(&call.job, begin, end, total) < 0) {
        release_call(&call);
        return NULL;
    }
    int64_t at = begin;
    do {
        Py_BEGIN_ALLOW_THREADS
        at += (sends ? send_rows : receive_rows)(&call.job, descriptor, at, end, &error);
        Py_END_ALLOW_THREADS
    } while (error == EINTR && PyErr_CheckSignals() == 0);
    release_call(&call);
    if (error == EINTR)
        return NULL;
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromLongLong(at - begin);
}

static PyObject *kernel_send(PyObject *module, PyObject *arguments)
{
    (void)module;
    return socket_call(arguments, 1);
}

static PyObject *kernel_receive(PyObject *module, PyObject *arguments)
{
    (void)module;
    return socket_call(arguments, 0);
}

static PyObject *kernel_digest(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *objects[5];
    unsigned long long stream;
    const char *with = "";
    int threads;
    if (!PyArg_ParseTuple(arguments, "OOOOOKi|s", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4], &stream,
                          &threads, &with))
        return NULL;
    Call call = {0};
    Py_buffer *shape, *side, *units, *numbers, *bases;
    if (!(shape = hold_table(&call, objects[0], "shape", SHAPE_COLUMNS))
        || !(side = hold_table(&call, objects[1], "side", SIDE_COLUMNS))
        || !(units = hold_table(&call, objects[2], "units", 0))
        || !(numbers = hold_table(&call, objects[3], "numbers", 0))
        || !(bases = hold_table(&call, objects[4], "bases", 0))) {
        release_call(&call);
        return NULL;
    }
    call.job.source_units = units->buf;
    int64_t total = prepare_pieces(&call, shape, side, bases, units->shape[0]);
    if (total >= 0 && numbers->shape[0] != units->shape[0]) {
        PyErr_Format(PyExc_ValueError, "%zd units but %zd numbers", units->shape[0], numbers->shape[0]);
        total = -1;
    }
    if (total >= 0 && !digest_has(with)) {
        PyErr_Format(PyExc_ValueError, "this processor has no instructions %s", with);
        total = -1;
    }
    if (total < 0 || check_range(&call.job, 0, total, total) < 0) {
        release_call(&call);
        return NULL;
    }
    uint64_t digest = 0;
    if (total > 0) {
        /* What a few microseconds do is not worth waiting for the interpreter's lock afterwards. */
        if (total <= DIGEST_AT_ONCE_BYTES)
            digest = digest_job(&call.job, numbers->buf, units->shape[0], stream, 1, with);
        else {
            Py_BEGIN_ALLOW_THREADS
            digest = digest_job(&call.job, numbers->buf, units->shape[0], stream, threads, with);
            Py_END_ALLOW_THREADS
        }
    }
    release_call(&call);
    return PyLong_FromUnsignedLongLong(digest);
}

static PyObject *kernel_check(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *objects[4];
    if (!PyArg_ParseTuple(arguments, "OOOO", &objects[0], &objects[1], &objects[2], &objects[3]))
        return NULL;
    Call call = {0};
    int64_t total = -1;
    Py_buffer *shape, *side, *units, *region_bytes;
    if ((shape = hold_table(&call, objects[0], "shape", SHAPE_COLUMNS))
        && (side = hold_table(&call, objects[1], "side", SIDE_COLUMNS))
        && (units = hold_table(&call, objects[2], "units", 0))
        && (region_bytes = hold_table(&call, objects[3], "region_bytes", 0))) {
        if (shape->shape[0] == side->shape[0])
            total = bytes_inside(shape->buf, side->buf, shape->shape[0], units->buf, units->shape[0],
                                 region_bytes->buf, region_bytes->shape[0]);
    } else {
        PyErr_Clear();
    }
    release_call(&call);
    return PyLong_FromLongLong(total);
}

static PyObject *kernel_extent(PyObject *module, PyObject *numbers)
{
    (void)module;
    Call call = {0};
    int64_t lowest = 0, highest = 0;
    Py_buffer *view = hold_table(&call, numbers, "numbers", 0);
    if (view && view->shape[0] == 0)
        PyErr_SetString(PyExc_ValueError, "there is no smallest of no numbers");
    else if (view)
        find_extent(view->buf, view->shape[0], &lowest, &highest);
    release_call(&call);
    return PyErr_Occurred() ? NULL : Py_BuildValue("LL", (long long)lowest, (long long)highest);
}

static PyMethodDef methods[] = {
    {"check", kernel_check, METH_VARARGS, "The bytes that a transfer moves if it is certainly inside, otherwise -1."},
    {"extent", kernel_extent, METH_O, "The smallest and the largest of some int64 numbers, the lock of the interpreter held."},
    {"copy", kernel_copy, METH_VARARGS, "Copy a byte range of a transfer from rows to rows."},
    {"gather", kernel_gather, METH_VARARGS, "Fill a buffer with a byte range of a transfer's packed stream."},
    {"scatter", kernel_scatter, METH_VARARGS, "Spread a buffer that holds a byte range of a transfer's packed stream."},
    {"digest", kernel_digest, METH_VARARGS, "One number for the content of units of rows."},
    {"send", kernel_send, METH_VARARGS, "Send a byte range of a transfer's packed stream straight from its rows."},
    {"receive", kernel_receive, METH_VARARGS, "Receive a byte range of a transfer's packed stream straight into its rows."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernel", "Copies boxes between rows and packed buffers.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module && add_pool_type(module) < 0)
        Py_CLEAR(module);
    return module;
}
