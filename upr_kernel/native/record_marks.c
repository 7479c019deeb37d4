/* Marks of the log's records. upr_kernel/pure/record_marks.py says what they are. */

#include "kernel.h"

enum {
    KEY_BYTES_MAX = 511,
    MARKED_BYTES_MAX = 1024,
    FRONT_BYTES = 16,
    CRC_BYTES = 4,
    LENGTH_BYTES = 8,
    CHUNK_TAG = 's',
};

/* Whether the checksum of a record matches. `bytes` begins with the key, and has room for
   `MARKED_BYTES_MAX` more. */
static bool
front_is_intact(uint8_t *bytes, size_t key_length, const uint8_t *value, size_t length)
{
    uint8_t *behind = bytes + key_length;
    if (key_length && *bytes == CHUNK_TAG) {
        uint64_t ends_snapshot = length < FRONT_BYTES ? UINT64_MAX : load_u64(value + 8);
        if (ends_snapshot > 1)
            return false;
        memcpy(behind, value, CRC_BYTES);
        behind[CRC_BYTES] = 1;
        return crc32c_of(bytes, key_length + CRC_BYTES + ends_snapshot) == load_u32(value + 4);
    }
    if (length < CRC_BYTES)
        return false;
    memcpy(behind, value + CRC_BYTES, length - CRC_BYTES);
    return crc32c_of(bytes, key_length + length - CRC_BYTES) == load_u32(value);
}

/* The mark, or -1. */
static long long
mark_of(uint8_t *bytes, size_t key_length, const uint8_t *value, size_t length, bool is_checked)
{
    bool is_front_marked = length <= MARKED_BYTES_MAX;
    if (is_front_marked && is_checked && !front_is_intact(bytes, key_length, value, length))
        return -1;
    uint8_t *behind = bytes + key_length;
    for (int byte = 0; byte < LENGTH_BYTES; byte++)
        *behind++ = (uint8_t)((uint64_t)length >> (56 - 8 * byte));
    size_t front = !is_front_marked ? 0 : length < FRONT_BYTES ? length : FRONT_BYTES;
    if (front)
        memcpy(behind, value, front);
    return crc32_of(bytes, key_length + LENGTH_BYTES + front);
}

PyObject *
record_mark(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    char *key;
    Py_ssize_t key_length;
    Py_buffer value;
    if (!takes("record_mark", count, 3, 3) ||
        PyBytes_AsStringAndSize(args[0], &key, &key_length) < 0)
        return NULL;
    if (key_length > KEY_BYTES_MAX)
        return PyErr_Format(PyExc_ValueError, "a key of %zd bytes", key_length);
    int is_checked = PyObject_IsTrue(args[2]);
    if (is_checked < 0 || PyObject_GetBuffer(args[1], &value, PyBUF_SIMPLE) < 0)
        return NULL;
    uint8_t bytes[KEY_BYTES_MAX + MARKED_BYTES_MAX];
    memcpy(bytes, key, (size_t)key_length);
    long long mark = mark_of(bytes, (size_t)key_length, value.buf, (size_t)value.len, is_checked);
    PyBuffer_Release(&value);
    return PyLong_FromLongLong(mark);
}
