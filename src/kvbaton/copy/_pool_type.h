/* `_kernel.Pool`: the pool of threads as Python sees it. */
#ifndef KVBATON_POOL_TYPE_H
#define KVBATON_POOL_TYPE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Adds the type to the module; -1 with an exception set. */
int add_pool_type(PyObject *module);

#endif
