/* What Python passes, checked and made into a job. */
#ifndef KVBATON_ARGUMENTS_H
#define KVBATON_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_boxes.h"

/* The buffers that one call holds, and what is made of them. */
typedef struct {
    Py_buffer view[10];
    int held;
    Box *boxes;
    Job job;
} Call;

/* How elements change: all NULL, or none. */
typedef struct {
    const Py_buffer *how, *factor, *scale;
} CastTables;

/* Holds a C-contiguous int64 table of `columns` columns (0: one dimension); NULL with an exception set. */
Py_buffer *hold_table(Call *call, PyObject *object, const char *name, Py_ssize_t columns);

/* Holds the three tables of a cast, none where `object` is None; -1 with an exception set. */
int hold_cast(Call *call, PyObject *object, CastTables *cast);

/* Prepares the boxes; gives the bytes of the whole packed stream, or -1 with an exception set. Each side is NULL where
 * it is packed. */
int64_t prepare(Call *call, const Py_buffer *shape, const Py_buffer *source, const Py_buffer *source_bases,
                const Py_buffer *destination, const Py_buffer *destination_bases, const CastTables *cast,
                Py_ssize_t units);

/* As `prepare` for one side that is read, but each piece stays as the tables say: what a piece is must not depend on how
 * this side happens to be laid out. */
int64_t prepare_pieces(Call *call, const Py_buffer *shape, const Py_buffer *side, const Py_buffer *bases,
                       Py_ssize_t units);

/* The range lies in the stream, and no unit that it touches is negative; -1 with an exception set. */
int check_range(const Job *job, int64_t begin, int64_t end, int64_t total);

void release_call(Call *call);

#endif
