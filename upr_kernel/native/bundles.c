/* A bundle made of runs that lie in chunks of their own. */

#include "kernel.h"

#include <stdlib.h>

/* Reads (partition, chunk, counter, chain), and writes the run's entry of the directory. False with
   an exception set, and then nothing is to be released. */
static bool
run_read(Part *part, uint8_t *entry, PyObject *tuple, int64_t *last_partition)
{
    uint64_t partition, counter, chain;
    memset(part, 0, sizeof *part);
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 4) {
        PyErr_SetString(PyExc_TypeError, "a run is a tuple of 4 items");
        return false;
    }
    if (!number_of(PyTuple_GetItem(tuple, 0), &partition) ||
        !number_of(PyTuple_GetItem(tuple, 2), &counter) ||
        !number_of(PyTuple_GetItem(tuple, 3), &chain))
        return false;
    if (partition > UINT32_MAX || chain > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a partition or chain is out of range");
        return false;
    }
    if (PyObject_GetBuffer(PyTuple_GetItem(tuple, 1), &part->buffer, PyBUF_SIMPLE) < 0)
        return false;
    if (!chunk_read(&part->chunk, &part->buffer))
        goto failed;
    if (!part->chunk.count || (int64_t)partition <= *last_partition) {
        PyErr_SetString(PyExc_ValueError, "a run has no rows, or the partitions do not rise");
        goto failed;
    }
    *last_partition = (int64_t)partition;
    part->high = part->chunk.count;
    store_u32(entry, (uint32_t)partition);
    store_u32(entry + 4, part->chunk.count);
    store_u64(entry + 8, counter);
    store_u32(entry + 16, (uint32_t)chain);
    store_u32(entry + 20, 0);
    return true;
failed:
    PyBuffer_Release(&part->buffer);
    return false;
}

/* The rows of all runs in one chunk, without numbers; NULL with an exception set. */
static PyObject *
rows_joined(const Part *parts, Py_ssize_t run_count)
{
    Sizes sizes = {0};
    /* Checked and copied without a step of Python between them: a buffer may be one that changes. */
    for (Py_ssize_t index = 0; index < run_count; index++)
        if (!part_measure(parts + index, &sizes))
            return NULL;
    PyObject *chunk = gathered(parts, run_count, &sizes, 0, 0);
    if (chunk != NULL)
        memset(PyBytes_AsString(chunk) + HEAD_BYTES, 0, 8 * sizes.count);
    return chunk;
}

PyObject *
join_runs(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (!takes("join_runs", count, 1, 1))
        return NULL;
    if (!PyList_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "the runs are a list");
    Py_ssize_t run_count = PyList_Size(args[0]), read = 0;
    PyObject *directory = PyBytes_FromStringAndSize(NULL, RUN_BYTES * run_count);
    if (directory == NULL)
        return NULL;
    PyObject *chunk = NULL, *result = NULL;
    Part *parts = malloc((size_t)run_count * sizeof *parts + 1);
    if (parts == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    uint8_t *entries = (uint8_t *)PyBytes_AsString(directory);
    int64_t last_partition = -1;
    for (; read < run_count; read++) {
        PyObject *tuple = list_item(args[0], read);
        bool is_read = tuple != NULL && run_read(parts + read, entries + RUN_BYTES * read, tuple,
                                                 &last_partition);
        Py_XDECREF(tuple);
        if (!is_read)
            goto done;
    }
    chunk = rows_joined(parts, run_count);
    if (chunk != NULL)
        result = PyTuple_Pack(2, directory, chunk);
done:
    while (read)
        PyBuffer_Release(&parts[--read].buffer);
    free(parts);
    Py_XDECREF(chunk);
    Py_DECREF(directory);
    return result;
}
