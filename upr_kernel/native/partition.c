/* Which partition a key belongs to: Couchbase's rule, over the CRC-32 of zlib. */

#include "kernel.h"

uint32_t
partition_of(const uint8_t *key, size_t length, uint64_t partition_count)
{
    return (uint32_t)((crc32_of(key, length) >> 16 & 0x7FFF) % partition_count);
}

PyObject *
find_misplaced(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    uint64_t low, high, partition, partition_count, key_bytes_max;
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "find_misplaced takes 6 arguments");
        return NULL;
    }
    if (!number_of(args[1], &low) || !number_of(args[2], &high) ||
        !number_of(args[3], &partition) || !number_of(args[4], &partition_count) ||
        !number_of(args[5], &key_bytes_max))
        return NULL;
    Py_buffer buffer;
    if (PyObject_GetBuffer(args[0], &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    Chunk chunk;
    PyObject *result = NULL;
    if (chunk_read(&chunk, &buffer)) {
        if (low > high || high > chunk.count || partition_count < 1) {
            PyErr_SetString(PyExc_ValueError, "rows or partitions out of range");
        } else if (!offsets_are_sound(chunk.key_offsets, (uint32_t)low, (uint32_t)high,
                                      chunk.key_length)) {
            set_defect(DEFECT_OFFSETS);
        } else {
            uint64_t row = low;
            for (; row < high; row++) {
                uint32_t begin = load_u32(chunk.key_offsets + 4 * row);
                uint32_t end = load_u32(chunk.key_offsets + 4 * row + 4);
                if (begin == end || end - begin > key_bytes_max)
                    continue;
                if (partition_of(chunk.keys + begin, end - begin, partition_count) != partition)
                    break;
            }
            result = PyLong_FromUnsignedLongLong(row);
        }
    }
    PyBuffer_Release(&buffer);
    return result;
}
