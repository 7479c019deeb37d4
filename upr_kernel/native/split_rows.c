/* Rows of columns as Arrow has them, split into a published chunk for each partition. */

#include "kernel.h"

#include <stdlib.h>

enum { FIELDS = 8, REQUIRED_FIELDS = 5, OPERATION = 4 };

/* Key offsets, keys, value offsets, values, operations, CAS, flags and expiry times. */
typedef struct {
    Py_buffer buffers[FIELDS];
    size_t count;
} Columns;

static const size_t widths[FIELDS] = {8, 0, 8, 0, 1, 8, 4, 4};

static inline const uint8_t *
field(const Columns *columns, int index)
{
    return columns->buffers[index].buf;
}

static void
release(Columns *columns)
{
    for (int index = 0; index < FIELDS; index++)
        if (columns->buffers[index].obj != NULL)
            PyBuffer_Release(&columns->buffers[index]);
}

/* Whether the strings of all rows lie in order within their bytes. */
static bool
are_sound(const uint8_t *offsets, size_t count, size_t length)
{
    uint64_t last = load_u64(offsets), rising = 1;
    for (size_t row = 0; row < count; row++) {
        uint64_t next = load_u64(offsets + 8 * row + 8);
        rising &= last <= next;
        last = next;
    }
    return rising && last <= length;
}

/* Whether the keys and values of all rows lie within their bytes; an exception is set where not. */
static bool
are_strings_sound(const Columns *columns)
{
    return (are_sound(field(columns, 0), columns->count, (size_t)columns->buffers[1].len) &&
            are_sound(field(columns, 2), columns->count, (size_t)columns->buffers[3].len)) ||
           set_defect(DEFECT_OFFSETS) != NULL;
}

/* Reads a tuple of columns. False with an exception set; then nothing is to be released. */
static bool
read_columns(Columns *columns, PyObject *tuple)
{
    memset(columns, 0, sizeof *columns);
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != FIELDS) {
        PyErr_SetString(PyExc_TypeError, "the columns are tuples of 8 items");
        return false;
    }
    for (int index = 0; index < FIELDS; index++) {
        PyObject *item = PyTuple_GetItem(tuple, index);
        if ((index < REQUIRED_FIELDS || item != Py_None) &&
            PyObject_GetBuffer(item, &columns->buffers[index], PyBUF_SIMPLE) < 0)
            goto failed;
    }
    columns->count = (size_t)columns->buffers[OPERATION].len;
    for (int index = 0; index < FIELDS; index++) {
        bool is_offsets = index == 0 || index == 2;
        size_t nbytes = widths[index] * (columns->count + is_offsets);
        if (widths[index] && columns->buffers[index].obj != NULL &&
            (size_t)columns->buffers[index].len != nbytes) {
            PyErr_SetString(PyExc_ValueError, "the columns have not as many items as operations");
            goto failed;
        }
    }
    return true;
failed:
    release(columns);
    return false;
}

/* A row's string. */
typedef struct {
    const uint8_t *bytes;
    size_t length;
} String;

static inline String
string_of(const Columns *columns, int offsets, size_t row)
{
    uint64_t begin = load_u64(field(columns, offsets) + 8 * row);
    uint64_t end = load_u64(field(columns, offsets) + 8 * row + 8);
    return (String){field(columns, offsets + 1) + begin, (size_t)(end - begin)};
}

/* The chunk of a partition, and what of it is written. */
typedef struct {
    Sizes sizes;
    Sizes written;
    Chunk chunk;
    PyObject *bytes;
} Target;

static bool
begin_chunk(Target *target)
{
    const Sizes *sizes = &target->sizes;
    if (sizes->count > INT32_MAX || sizes->key_length > INT32_MAX ||
        sizes->value_length > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a chunk holds 2 GiB of keys, and of values, at most");
        return false;
    }
    uint64_t nbytes = encoded_bytes(sizes->count, sizes->key_length, sizes->value_length);
    target->bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)nbytes);
    if (target->bytes == NULL)
        return false;
    target->chunk = (Chunk){
        .count = (uint32_t)sizes->count,
        .key_length = (uint32_t)sizes->key_length,
        .value_length = (uint32_t)sizes->value_length,
    };
    chunk_begin(&target->chunk, (uint8_t *)PyBytes_AsString(target->bytes), 0, 0);
    return true;
}

static inline uint64_t
put_string(String string, uint8_t *ends, uint8_t *bytes, size_t at, uint64_t written)
{
    if (string.length)
        memcpy(bytes + written, string.bytes, string.length);
    store_u32(ends + 4 * at + 4, (uint32_t)(written + string.length));
    return written + string.length;
}

static inline void
put_row(Target *target, const Columns *columns, size_t row)
{
    const Chunk *chunk = &target->chunk;
    Sizes *written = &target->written;
    size_t at = written->count++;
    const uint8_t *cas = field(columns, 5), *flags = field(columns, 6), *expiries = field(columns, 7);
    store_u64(column(chunk->seqs) + 8 * at, 0);
    store_u64(column(chunk->cas) + 8 * at, cas == NULL ? 0 : load_u64(cas + 8 * row));
    store_u32(column(chunk->expiries) + 4 * at, expiries == NULL ? 0 : load_u32(expiries + 4 * row));
    store_u32(column(chunk->flags) + 4 * at, flags == NULL ? 0 : load_u32(flags + 4 * row));
    column(chunk->operations)[at] = field(columns, OPERATION)[row];
    written->key_length = put_string(string_of(columns, 0, row), column(chunk->key_offsets),
                                     column(chunk->keys), at, written->key_length);
    written->value_length = put_string(string_of(columns, 2, row), column(chunk->value_offsets),
                                       column(chunk->values), at, written->value_length);
}

/* Finds the partition of each row, and adds up what each partition gets. */
static void
measure(const Columns *parts, Py_ssize_t part_count, uint32_t partition_count, uint16_t *homes,
        Target *targets)
{
    for (Py_ssize_t part = 0; part < part_count; part++)
        for (size_t row = 0; row < parts[part].count; row++) {
            String key = string_of(parts + part, 0, row);
            uint32_t home = partition_of(key.bytes, key.length, partition_count);
            Sizes *sizes = &targets[home].sizes;
            *homes++ = (uint16_t)home;
            sizes->count++;
            sizes->key_length += key.length;
            sizes->value_length += string_of(parts + part, 2, row).length;
        }
}

static PyObject *
chunks_of(Target *targets, uint32_t partition_count)
{
    PyObject *chunks = PyList_New(0);
    for (uint32_t home = 0; chunks != NULL && home < partition_count; home++) {
        if (targets[home].bytes == NULL)
            continue;
        PyObject *pair = Py_BuildValue("kO", (unsigned long)home, targets[home].bytes);
        if (pair == NULL || PyList_Append(chunks, pair) < 0)
            Py_CLEAR(chunks);
        Py_XDECREF(pair);
    }
    return chunks;
}

/* The result for columns that were read. */
static PyObject *
split(const Columns *parts, Py_ssize_t part_count, uint32_t partition_count)
{
    size_t count = 0;
    for (Py_ssize_t part = 0; part < part_count; part++)
        count += parts[part].count;
    /* Of no bytes there may be no block. */
    uint16_t *homes = malloc((count + 1) * sizeof *homes), *home = homes;
    Target *targets = calloc(partition_count, sizeof *targets);
    PyObject *result = NULL;
    if (homes == NULL || targets == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    measure(parts, part_count, partition_count, homes, targets);
    for (uint32_t index = 0; index < partition_count; index++)
        if (targets[index].sizes.count && !begin_chunk(targets + index))
            goto done;
    for (Py_ssize_t part = 0; part < part_count; part++)
        for (size_t row = 0; row < parts[part].count; row++)
            put_row(targets + *home++, parts + part, row);
    result = chunks_of(targets, partition_count);
done:
    for (uint32_t index = 0; targets != NULL && index < partition_count; index++)
        Py_XDECREF(targets[index].bytes);
    free(targets);
    free(homes);
    return result;
}

PyObject *
split_rows(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    uint64_t partition_count;
    if (!takes("split_rows", count, 2, 2) || !number_of(args[1], &partition_count))
        return NULL;
    if (!PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "the parts are a list");
        return NULL;
    }
    if (partition_count < 1 || partition_count > 1 << 15) {
        PyErr_SetString(PyExc_ValueError, "a bucket has 1 to 32,768 partitions");
        return NULL;
    }
    Py_ssize_t part_count = PyList_Size(args[0]), read = 0;
    Columns *parts = malloc(((size_t)part_count + 1) * sizeof *parts);
    PyObject *result = NULL;
    if (parts == NULL)
        return PyErr_NoMemory();
    for (; read < part_count; read++) {
        PyObject *tuple = list_item(args[0], read);
        bool is_read = tuple != NULL && read_columns(parts + read, tuple);
        Py_XDECREF(tuple);
        if (!is_read)
            goto done;
    }
    /* Checked and copied without a step of Python between them: a buffer may be one that changes. */
    for (Py_ssize_t part = 0; part < part_count; part++)
        if (!are_strings_sound(parts + part))
            goto done;
    result = split(parts, part_count, (uint32_t)partition_count);
done:
    while (read)
        release(parts + --read);
    free(parts);
    return result;
}
