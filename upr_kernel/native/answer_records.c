/* Changes of the answers to publishers, as records of the disk. upr_kernel/pure/answer_records.py
   says what the rows and the records are. */

#include "kernel.h"

#include <stdlib.h>

enum { COUNTER_BYTES = 8, CRC_BYTES = 4 };

/* Key and value of a record. `key` has `key_length` bytes, and room for the answer behind them. */
static PyObject *
record_of(uint8_t *key, size_t key_length, const uint8_t *answer, size_t length)
{
    PyObject *value = PyBytes_FromStringAndSize(NULL,
                                                length ? (Py_ssize_t)(CRC_BYTES + length) : 0);
    if (value != NULL && length) {
        uint8_t *bytes = (uint8_t *)PyBytes_AsString(value);
        memcpy(key + key_length, answer, length);
        store_u32(bytes, crc32c_of(key, key_length + length));
        memcpy(bytes + CRC_BYTES, answer, length);
    }
    return value == NULL ? NULL
                         : Py_BuildValue("y#N", (const char *)key, (Py_ssize_t)key_length, value);
}

/* Appends the record of each row. False with an exception set. `key` begins with the prefix. */
static bool
add_records(PyObject *records, const uint8_t *rows, size_t nbytes, uint8_t *key,
            size_t prefix_length)
{
    uint8_t *counter_at = key + prefix_length + WRITER_BYTES;
    const uint8_t *row = rows, *behind = rows + nbytes;
    while (row < behind) {
        size_t left = (size_t)(behind - row);
        uint32_t length = left < ANSWER_ROW_BYTES ? 0 : load_u32(row + ANSWER_ROW_BYTES - 4);
        if (left < ANSWER_ROW_BYTES + (size_t)length) {
            PyErr_SetString(PyExc_ValueError, "a row of an answer is cut short");
            return false;
        }
        memcpy(key + prefix_length, row, WRITER_BYTES);
        for (int byte = 0; byte < COUNTER_BYTES; byte++)
            counter_at[byte] = row[WRITER_BYTES + COUNTER_BYTES - 1 - byte];
        PyObject *record = record_of(key, prefix_length + WRITER_BYTES + COUNTER_BYTES,
                                     row + ANSWER_ROW_BYTES, length);
        bool is_added = record != NULL && PyList_Append(records, record) == 0;
        Py_XDECREF(record);
        if (!is_added)
            return false;
        row += ANSWER_ROW_BYTES + length;
    }
    return true;
}

PyObject *
answer_records(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    char *rows, *prefix;
    Py_ssize_t nbytes, prefix_length;
    if (!takes("answer_records", count, 2, 2) ||
        PyBytes_AsStringAndSize(args[0], &rows, &nbytes) < 0 ||
        PyBytes_AsStringAndSize(args[1], &prefix, &prefix_length) < 0)
        return NULL;
    /* No answer is longer than all rows. */
    uint8_t *key = malloc((size_t)prefix_length + WRITER_BYTES + COUNTER_BYTES + (size_t)nbytes);
    if (key == NULL)
        return PyErr_NoMemory();
    memcpy(key, prefix, (size_t)prefix_length);
    PyObject *records = PyList_New(0);
    if (records != NULL &&
        !add_records(records, (uint8_t *)rows, (size_t)nbytes, key, (size_t)prefix_length))
        Py_CLEAR(records);
    free(key);
    return records;
}
