#include "_pool_type.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "_arguments.h"
#include "_pool.h"

static const char peer_name[] = "kvbaton.copy.pool_peer";

typedef struct {
    PyObject_HEAD
    Pool *pool;
    long long chunk, least_chunk;
    int workers;
} PoolObject;

static PyObject *pool_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    const char *name;
    int workers;
    long long chunk, least_chunk;
    if (keywords && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "Pool takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(arguments, "isLL", &workers, &name, &chunk, &least_chunk))
        return NULL;
    if (workers < 1 || workers > 1024 || least_chunk < 1 || chunk < least_chunk) {
        PyErr_SetString(PyExc_ValueError, "a pool needs 1 to 1,024 workers and chunks of at least one byte");
        return NULL;
    }
    PoolObject *self = (PoolObject *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->chunk = chunk, self->least_chunk = least_chunk, self->workers = workers;
    if (!(self->pool = pool_open(workers, name))) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void close_without_lock(PoolObject *self, const char *reason)
{
    Py_BEGIN_ALLOW_THREADS
    pool_close(self->pool, reason);
    Py_END_ALLOW_THREADS
}

static void pool_dealloc(PyObject *object)
{
    PoolObject *self = (PoolObject *)object;
    if (self->pool) {
        close_without_lock(self, "the pool is gone");
        pool_free(self->pool);
    }
    Py_TYPE(object)->tp_free(object);
}

static void release_capsule(PyObject *capsule)
{
    pool_release_peer(PyCapsule_GetPointer(capsule, peer_name));
}

static PyObject *pool_attach(PyObject *object, PyObject *arguments)
{
    (void)object;
    PyObject *bases_object;
    int descriptor;
    const char *dead;
    if (!PyArg_ParseTuple(arguments, "Ois", &bases_object, &descriptor, &dead))
        return NULL;
    Call call = {0};
    Py_buffer *bases = hold_table(&call, bases_object, "bases", 0);
    if (!bases)
        return NULL;
    PoolPeer *peer = pool_peer(descriptor, bases->buf, bases->shape[0], dead);
    release_call(&call);
    if (!peer)
        return PyErr_SetFromErrno(PyExc_OSError);
    PyObject *capsule = PyCapsule_New(peer, peer_name, release_capsule);
    if (!capsule)
        pool_release_peer(peer);
    return capsule;
}

/* ---- submit ---- */

static PyObject *field(PyObject *tuple, Py_ssize_t index)
{
    return PyTuple_GET_ITEM(tuple, index);
}

/* Fills a table with what a `Transfer` says, copied; its bytes, or -1 with an exception set. */
static int64_t read_transfer(PyObject *transfer, const Py_buffer *source_bases, const Py_buffer *destination_bases,
                             Table *table)
{
    if (!PyTuple_Check(transfer) || PyTuple_GET_SIZE(transfer) != 3 || !PyTuple_Check(field(transfer, 0))
        || PyTuple_GET_SIZE(field(transfer, 0)) != 4) {
        PyErr_SetString(PyExc_TypeError, "a transfer is (boxes, source_units, destination_units)");
        return -1;
    }
    PyObject *boxes = field(transfer, 0);
    Call call = {0};
    CastTables cast = {0};
    Py_buffer *shape, *source, *destination, *source_units, *destination_units;
    int64_t total = -1;
    if ((shape = hold_table(&call, field(boxes, 0), "shape", SHAPE_COLUMNS))
        && (source = hold_table(&call, field(boxes, 1), "source", SIDE_COLUMNS))
        && (destination = hold_table(&call, field(boxes, 2), "destination", SIDE_COLUMNS))
        && (source_units = hold_table(&call, field(transfer, 1), "source_units", 0))
        && (destination_units = hold_table(&call, field(transfer, 2), "destination_units", 0))
        && hold_cast(&call, field(boxes, 3), &cast) == 0) {
        Py_ssize_t units = source_units->shape[0];
        size_t bytes = (size_t)units * sizeof(int64_t);
        if (units != destination_units->shape[0]) {
            PyErr_Format(PyExc_ValueError, "%zd source units but %zd destination units", units,
                         destination_units->shape[0]);
        } else if (!(table->units = malloc(bytes ? 2 * bytes : 1))) {
            PyErr_NoMemory();
        } else {
            memcpy(table->units, source_units->buf, bytes);
            memcpy(table->units + units, destination_units->buf, bytes);
            call.job.source_units = table->units;
            call.job.destination_units = table->units + units;
            total = prepare(&call, shape, source, source_bases, destination, destination_bases, &cast, units);
            if (total >= 0 && check_range(&call.job, 0, total, total) < 0)
                total = -1;
            table->boxes = call.boxes, call.boxes = NULL;
            table->count = call.job.count, table->unit_count = units;
        }
    }
    release_call(&call);
    return total;
}

/* Fills the batch of a job; -1 with an exception set. */
static int read_transfers(PoolObject *self, PyObject *transfers, const Py_buffer *source_bases, PoolJob *job)
{
    Batch *batch = &job->batch;
    ptrdiff_t regions;
    const int64_t *addresses = pool_peer_bases(job->peer, &regions);
    Py_ssize_t length = regions;
    const Py_buffer destination_bases = {.buf = (void *)addresses, .shape = &length};
    if (!batch_open(batch, PyTuple_GET_SIZE(transfers))) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t index = 0; index < batch->table_count; index++) {
        int64_t bytes = read_transfer(field(transfers, index), source_bases, &destination_bases, &batch->tables[index]);
        if (bytes < 0)
            return -1;
        if (__builtin_add_overflow(batch->nbytes, bytes, &batch->nbytes)) {
            PyErr_SetString(PyExc_ValueError, "the transfers move more bytes than an int64 counts");
            return -1;
        }
    }
    int64_t chunk = batch->nbytes / self->workers;
    chunk = chunk > self->chunk ? self->chunk : chunk < self->least_chunk ? self->least_chunk : chunk;
    if (!batch_cut(batch, chunk)) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyObject *pool_submit_method(PyObject *object, PyObject *arguments)
{
    PoolObject *self = (PoolObject *)object;
    PyObject *capsule, *transfers, *bases_object;
    long long ticket, at_once;
    PoolPeer *peer;
    if (!PyArg_ParseTuple(arguments, "OLOOL", &capsule, &ticket, &transfers, &bases_object, &at_once)
        || !(peer = PyCapsule_GetPointer(capsule, peer_name)))
        return NULL;
    if (!(transfers = PySequence_Tuple(transfers)))
        return NULL;
    Call call = {0};
    PoolJob *job = NULL;
    PyObject *result = NULL;
    Py_buffer *source_bases = hold_table(&call, bases_object, "source_bases", 0);
    if (source_bases && !(job = pool_job(peer, ticket))) {
        PyErr_NoMemory();
    } else if (source_bases && read_transfers(self, transfers, source_bases, job) == 0) {
        /* The GIL is kept, also for a small copy: whoever lets go of it waits for longer than that takes. */
        switch (pool_submit(self->pool, job, job->batch.nbytes <= at_once)) {
        case POOL_QUEUED:
            job = NULL;
            result = Py_NewRef(Py_None);
            break;
        case POOL_ENDED:
            result = PyUnicode_FromString(pool_reason(peer, job->outcome));
            break;
        case POOL_REFUSED:
            PyErr_SetString(PyExc_ConnectionError, "the peer was forgotten, or the pool is closed");
            break;
        default:
            PyErr_SetString(PyExc_RuntimeError, "can't start new thread");
        }
    }
    release_call(&call);
    Py_DECREF(transfers);
    if (job)
        pool_free_job(job);
    return result;
}

/* ---- the rest ---- */

static PyObject *pool_drain_method(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyObject *list = PyList_New(0);
    if (!list)
        return NULL;
    for (PoolJob *job = pool_drain(((PoolObject *)object)->pool), *next; job; job = next) {
        next = job->next;
        PyObject *pair = list ? Py_BuildValue("(Ls)", (long long)job->ticket, pool_reason(job->peer, job->outcome)) : NULL;
        if (!pair || PyList_Append(list, pair) < 0)
            Py_CLEAR(list);
        Py_XDECREF(pair);
        pool_free_job(job);
    }
    return list;
}

static PyObject *pool_forget_method(PyObject *object, PyObject *arguments)
{
    PyObject *capsule;
    const char *reason;
    PoolPeer *peer;
    if (!PyArg_ParseTuple(arguments, "Os", &capsule, &reason) || !(peer = PyCapsule_GetPointer(capsule, peer_name)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pool_forget(((PoolObject *)object)->pool, peer, reason);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *pool_wake_by_method(PyObject *object, PyObject *arguments)
{
    int descriptor;
    if (!PyArg_ParseTuple(arguments, "i", &descriptor))
        return NULL;
    if (pool_wake_by(((PoolObject *)object)->pool, descriptor) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *pool_close_method(PyObject *object, PyObject *arguments)
{
    const char *reason;
    if (!PyArg_ParseTuple(arguments, "s", &reason))
        return NULL;
    close_without_lock((PoolObject *)object, reason);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"attach", pool_attach, METH_VARARGS, "A peer with those bases, dead once the pidfd (-1: none) is readable."},
    {"submit", pool_submit_method, METH_VARARGS, "Copy transfers to a peer: None if queued, else the error of a copy that is over."},
    {"drain", pool_drain_method, METH_NOARGS, "The (ticket, error) of all that ended since the last call."},
    {"forget", pool_forget_method, METH_VARARGS, "End all of a peer's tickets and wait for its copies in progress."},
    {"wake_by", pool_wake_by_method, METH_VARARGS, "Write to an eventfd (-1: none) whenever drain has something new."},
    {"close", pool_close_method, METH_VARARGS, "End all tickets and threads."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject pool_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kvbaton.copy._kernel.Pool",
    .tp_doc = "Pool(workers, name, chunk, least_chunk): threads that copy and never take the GIL.",
    .tp_basicsize = sizeof(PoolObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = pool_new,
    .tp_dealloc = pool_dealloc,
    .tp_methods = methods,
};

int add_pool_type(PyObject *module)
{
    if (PyType_Ready(&pool_type) < 0)
        return -1;
    Py_INCREF(&pool_type);
    if (PyModule_AddObject(module, "Pool", (PyObject *)&pool_type) == 0)
        return 0;
    Py_DECREF(&pool_type);
    return -1;
}
