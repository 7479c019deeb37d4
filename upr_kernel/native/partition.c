/* Which partition a key belongs to: Couchbase's rule, over the CRC-32 of zlib. */

#include "kernel.h"

/* What a byte adds to the CRC when so many bytes follow it: four bytes are taken in at a time. */
static uint32_t tables[4][256];

void
fill_crc_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
        tables[0][byte] = crc;
    }
    for (int distance = 1; distance < 4; distance++)
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t crc = tables[distance - 1][byte];
            tables[distance][byte] = crc >> 8 ^ tables[0][crc & 0xFF];
        }
}

static uint32_t
crc32_of(const uint8_t *bytes, size_t length)
{
    uint32_t crc = 0xFFFFFFFFu;
    for (; length >= 4; bytes += 4, length -= 4) {
        crc ^= load_u32(bytes);
        crc = tables[3][crc & 0xFF] ^ tables[2][crc >> 8 & 0xFF] ^ tables[1][crc >> 16 & 0xFF] ^
              tables[0][crc >> 24];
    }
    for (; length; bytes++, length--)
        crc = crc >> 8 ^ tables[0][(crc ^ *bytes) & 0xFF];
    return ~crc;
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
                uint32_t hash = crc32_of(chunk.keys + begin, end - begin) >> 16 & 0x7FFF;
                if (hash % partition_count != partition)
                    break;
            }
            result = PyLong_FromUnsignedLongLong(row);
        }
    }
    PyBuffer_Release(&buffer);
    return result;
}
