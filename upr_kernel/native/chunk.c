/* Chunks: checking one, and gathering rows of several into a new one. */

#include "kernel.h"

#include <stdlib.h>

static inline size_t
padded(size_t length)
{
    return (length + 7) & ~(size_t)7;
}

/* The columns of a chunk of these sizes whose bytes begin at `bytes`; returns its length. */
static uint64_t
lay_out(Chunk *chunk, const uint8_t *bytes)
{
    size_t count = chunk->count;
    const uint8_t *at = bytes + HEAD_BYTES;
    chunk->seqs = at;
    chunk->cas = at += 8 * count;
    chunk->expiries = at += 8 * count;
    chunk->flags = at += padded(4 * count);
    chunk->key_offsets = at += padded(4 * count);
    chunk->value_offsets = at += padded(4 * count + 4);
    chunk->operations = at += padded(4 * count + 4);
    chunk->keys = at += padded(count);
    chunk->values = at += padded(chunk->key_length);
    return (uint64_t)(at - bytes) + padded(chunk->value_length);
}

uint64_t
encoded_bytes(uint64_t count, uint64_t key_length, uint64_t value_length)
{
    return HEAD_BYTES + 16 * count + 2 * padded(4 * count) + 2 * padded(4 * count + 4) +
           padded(count) + padded(key_length) + padded(value_length);
}

bool
chunk_fits(Chunk *chunk, const uint8_t *bytes, size_t nbytes)
{
    if (nbytes < HEAD_BYTES)
        return false;
    chunk->count = load_u32(bytes);
    chunk->key_length = load_u32(bytes + 4);
    chunk->value_length = load_u32(bytes + 8);
    chunk->start = load_u64(bytes + 16);
    chunk->end = load_u64(bytes + 24);
    if (encoded_bytes(chunk->count, chunk->key_length, chunk->value_length) != nbytes)
        return false;
    lay_out(chunk, bytes);
    return true;
}

bool
chunk_read(Chunk *chunk, const Py_buffer *buffer)
{
    return chunk_fits(chunk, buffer->buf, (size_t)buffer->len) ||
           set_defect(DEFECT_LAYOUT) != NULL;
}

bool
offsets_are_sound(const uint8_t *offsets, uint32_t low, uint32_t high, uint32_t length)
{
    /* As unsigned numbers, so that a negative one is beyond every length. */
    uint32_t last = load_u32(offsets + 4 * (size_t)low), rising = 1;
    for (size_t row = low; row < high; row++) {
        uint32_t next = load_u32(offsets + 4 * row + 4);
        rising &= last <= next;
        last = next;
    }
    return rising && last <= length;
}

/* Checking. */

/* Returns 0, or the code of what is wrong: `span`, or the two behind it. */
static int
check_strings(const uint8_t *offsets, uint32_t count, uint32_t length, uint32_t shortest,
              uint64_t longest, int span)
{
    if (load_i32(offsets) != 0 || load_u32(offsets + 4 * (size_t)count) != length ||
        length > INT32_MAX)
        return span;
    int32_t last = 0;
    uint32_t least = UINT32_MAX, most = 0, falls = 0;
    for (size_t row = 1; row <= count; row++) {
        int32_t next = load_i32(offsets + 4 * row);
        uint32_t size = (uint32_t)next - (uint32_t)last;
        falls |= next < last;
        least = size < least ? size : least;
        most = size > most ? size : most;
        last = next;
    }
    if (falls)
        return span + 1;
    if (count && (least < shortest || most > longest))
        return span + 2;
    return 0;
}

static bool
is_zero(const uint8_t *bytes, size_t nbytes)
{
    uint64_t any = 0;
    for (size_t index = 0; index + 8 <= nbytes; index += 8)
        any |= load_u64(bytes + index);
    return !any && (!(nbytes & 4) || !load_u32(bytes + nbytes - 4));
}

static bool
is_all_set(const uint8_t *operations, size_t count)
{
    uint8_t other = 0;
    for (size_t row = 0; row < count; row++)
        other |= operations[row] ^ SET;
    return !other;
}

static bool
seqs_rise(const Chunk *chunk)
{
    uint64_t last = chunk->start;
    bool rise = true;
    for (size_t row = 0; row < chunk->count; row++) {
        uint64_t next = load_u64(chunk->seqs + 8 * row);
        rise &= last < next;
        last = next;
    }
    return rise && last <= chunk->end;
}

static inline bool
begins_with(const Chunk *chunk, uint32_t row, const uint8_t *prefix, size_t length)
{
    uint32_t begin = load_u32(chunk->key_offsets + 4 * (size_t)row);
    uint32_t end = load_u32(chunk->key_offsets + 4 * (size_t)row + 4);
    return end - begin >= length && memcmp(chunk->keys + begin, prefix, length) == 0;
}

static bool
has_prefix(const Chunk *chunk, const uint8_t *prefix, size_t length)
{
    for (uint32_t row = 0; row < chunk->count; row++)
        if (begins_with(chunk, row, prefix, length))
            return true;
    return false;
}

static bool
has_only(const uint8_t *operations, size_t count, const uint8_t *allowed, size_t allowed_count)
{
    uint8_t refused[256];
    memset(refused, 1, sizeof refused);
    for (size_t index = 0; index < allowed_count; index++)
        refused[allowed[index]] = 0;
    uint8_t any = 0;
    for (size_t row = 0; row < count; row++)
        any |= refused[operations[row]];
    return !any;
}

PyObject *
check(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    char *operations, *prefix;
    Py_ssize_t operation_count, prefix_length;
    uint64_t key_bytes_max, value_bytes_max;
    Py_buffer buffer;
    Chunk chunk;
    if (count != 5)
        return PyErr_Format(PyExc_TypeError, "check takes 5 arguments, not %zd", count);
    if (PyBytes_AsStringAndSize(args[1], &operations, &operation_count) < 0 ||
        !number_of(args[2], &key_bytes_max) || !number_of(args[3], &value_bytes_max) ||
        PyBytes_AsStringAndSize(args[4], &prefix, &prefix_length) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[0], &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *result = NULL;
    if (!chunk_read(&chunk, &buffer))
        goto done;
    int defect = check_strings(chunk.key_offsets, chunk.count, chunk.key_length, 1, key_bytes_max,
                               DEFECT_KEY_SPAN);
    if (!defect)
        defect = check_strings(chunk.value_offsets, chunk.count, chunk.value_length, 0,
                               value_bytes_max, DEFECT_VALUE_SPAN);
    bool all_set = is_all_set(chunk.operations, chunk.count);
    if (!defect && !(all_set && memchr(operations, SET, (size_t)operation_count) != NULL) &&
        !has_only(chunk.operations, chunk.count, (const uint8_t *)operations,
                  (size_t)operation_count))
        defect = DEFECT_OPERATION;
    if (defect) {
        set_defect(defect);
        goto done;
    }
    long flags = 0;
    if (all_set && is_zero(chunk.cas, 8 * (size_t)chunk.count))
        flags |= UNCONDITIONAL;
    if (!is_zero(chunk.expiries, 4 * (size_t)chunk.count))
        flags |= MAY_EXPIRE;
    if (has_prefix(&chunk, (const uint8_t *)prefix, (size_t)prefix_length))
        flags |= HAS_PREFIX;
    if (!is_zero(chunk.seqs, 8 * (size_t)chunk.count))
        flags |= HAS_SEQS;
    if (seqs_rise(&chunk))
        flags |= SEQS_RISE;
    result = PyLong_FromLong(flags);
done:
    PyBuffer_Release(&buffer);
    return result;
}

/* Gathering. */

static void
part_release(Part *part)
{
    PyBuffer_Release(&part->buffer);
    if (part->skip_buffer.obj != NULL)
        PyBuffer_Release(&part->skip_buffer);
}

/* Reads (chunk, low, high, skip, first_seq, first_cas). False with an exception set, and then
   nothing is to be released. */
static bool
part_read(Part *part, PyObject *tuple)
{
    uint64_t low, high;
    memset(part, 0, sizeof *part);
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 6) {
        PyErr_SetString(PyExc_TypeError, "a part is a tuple of 6 items");
        return false;
    }
    PyObject *skip = PyTuple_GetItem(tuple, 3), *first_seq = PyTuple_GetItem(tuple, 4);
    part->is_numbered = first_seq != Py_None;
    if (!number_of(PyTuple_GetItem(tuple, 1), &low) || !number_of(PyTuple_GetItem(tuple, 2), &high))
        return false;
    if (part->is_numbered && (!number_of(first_seq, &part->first_seq) ||
                              !number_of(PyTuple_GetItem(tuple, 5), &part->first_cas)))
        return false;
    if (PyObject_GetBuffer(PyTuple_GetItem(tuple, 0), &part->buffer, PyBUF_SIMPLE) < 0)
        return false;
    if (skip != Py_None && PyObject_GetBuffer(skip, &part->skip_buffer, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&part->buffer);
        return false;
    }
    const Chunk *chunk = &part->chunk;
    if (!chunk_read(&part->chunk, &part->buffer))
        goto failed;
    if (low > high || high > chunk->count) {
        PyErr_SetString(PyExc_IndexError, "the chunk does not have these rows");
        goto failed;
    }
    part->low = (uint32_t)low;
    part->high = (uint32_t)high;
    if (skip != Py_None) {
        part->skip = part->skip_buffer.buf;
        if ((uint64_t)part->skip_buffer.len != high - low) {
            PyErr_SetString(PyExc_ValueError, "there is not one flag for each row");
            goto failed;
        }
    }
    return true;
failed:
    part_release(part);
    return false;
}

/* The next rows [*low, *high) that are neighbours and kept, from *high on; false at the end. */
static inline bool
next_kept(const Part *part, uint32_t *low, uint32_t *high)
{
    uint32_t row = *high;
    if (part->skip == NULL) {
        *low = row;
        *high = part->high;
        return row < part->high;
    }
    const uint8_t *skip = part->skip - part->low;
    while (row < part->high && skip[row])
        row++;
    *low = row;
    while (row < part->high && !skip[row])
        row++;
    *high = row;
    return *low < row;
}

static inline uint32_t
length_between(const uint8_t *offsets, uint32_t low, uint32_t high)
{
    return load_u32(offsets + 4 * (size_t)high) - load_u32(offsets + 4 * (size_t)low);
}

bool
part_measure(const Part *part, Sizes *sizes)
{
    const Chunk *chunk = &part->chunk;
    uint32_t low, high = part->low;
    if (!offsets_are_sound(chunk->key_offsets, part->low, part->high, chunk->key_length) ||
        !offsets_are_sound(chunk->value_offsets, part->low, part->high, chunk->value_length))
        return set_defect(DEFECT_OFFSETS) != NULL;
    while (next_kept(part, &low, &high)) {
        sizes->count += high - low;
        sizes->key_length += length_between(part->chunk.key_offsets, low, high);
        sizes->value_length += length_between(part->chunk.value_offsets, low, high);
    }
    return true;
}

/* Strings of neighbours: their bytes, and where each of them ends. */
static uint32_t
copy_strings(const uint8_t *offsets, const uint8_t *bytes, uint32_t low, uint32_t high,
             uint8_t *to_ends, uint8_t *to_bytes, uint32_t written)
{
    uint32_t begin = load_u32(offsets + 4 * (size_t)low), shift = written - begin;
    for (size_t row = low; row < high; row++)
        store_u32(to_ends + 4 * (row - low), load_u32(offsets + 4 * row + 4) + shift);
    uint32_t length = length_between(offsets, low, high);
    /* Of no bytes there may be no block. */
    if (length)
        memcpy(to_bytes + written, bytes + begin, length);
    return written + length;
}

void
copy_rows(const Part *part, uint32_t low, uint32_t high, const Chunk *to, Sizes *written)
{
    const Chunk *from = &part->chunk;
    size_t at = written->count, count = high - low;
    /* For no rows there may be no block. */
    if (!count)
        return;
    if (part->is_numbered) {
        uint64_t seq = part->first_seq + (low - part->low), cas = part->first_cas + (low - part->low);
        for (size_t row = 0; row < count; row++) {
            store_u64(column(to->seqs) + 8 * (at + row), seq + row);
            store_u64(column(to->cas) + 8 * (at + row), cas + row);
        }
    }
    else {
        memcpy(column(to->seqs) + 8 * at, from->seqs + 8 * (size_t)low, 8 * count);
        memcpy(column(to->cas) + 8 * at, from->cas + 8 * (size_t)low, 8 * count);
    }
    memcpy(column(to->expiries) + 4 * at, from->expiries + 4 * (size_t)low, 4 * count);
    memcpy(column(to->flags) + 4 * at, from->flags + 4 * (size_t)low, 4 * count);
    memcpy(column(to->operations) + at, from->operations + low, count);
    written->key_length =
        copy_strings(from->key_offsets, from->keys, low, high, column(to->key_offsets) + 4 * at + 4,
                     column(to->keys), (uint32_t)written->key_length);
    written->value_length = copy_strings(from->value_offsets, from->values, low, high,
                                         column(to->value_offsets) + 4 * at + 4,
                                         column(to->values), (uint32_t)written->value_length);
    written->count += count;
}

static void
pad(const uint8_t *at, size_t length)
{
    memset(column(at) + length, 0, padded(length) - length);
}

void
chunk_begin(Chunk *to, uint8_t *bytes, uint64_t start, uint64_t end)
{
    lay_out(to, bytes);
    store_u32(bytes, to->count);
    store_u32(bytes + 4, to->key_length);
    store_u32(bytes + 8, to->value_length);
    store_u32(bytes + 12, 0);
    store_u64(bytes + 16, start);
    store_u64(bytes + 24, end);
    store_u32(column(to->key_offsets), 0);
    store_u32(column(to->value_offsets), 0);
    pad(to->expiries, 4 * (size_t)to->count);
    pad(to->flags, 4 * (size_t)to->count);
    pad(to->key_offsets, 4 * (size_t)to->count + 4);
    pad(to->value_offsets, 4 * (size_t)to->count + 4);
    pad(to->operations, to->count);
    pad(to->keys, to->key_length);
    pad(to->values, to->value_length);
}

static void
write_chunk(const Part *parts, Py_ssize_t part_count, const Sizes *sizes, uint64_t start,
            uint64_t end, uint8_t *bytes)
{
    Chunk to = {
        .count = (uint32_t)sizes->count,
        .key_length = (uint32_t)sizes->key_length,
        .value_length = (uint32_t)sizes->value_length,
    };
    chunk_begin(&to, bytes, start, end);
    Sizes written = {0};
    for (Py_ssize_t index = 0; index < part_count; index++) {
        uint32_t low, high = parts[index].low;
        while (next_kept(parts + index, &low, &high))
            copy_rows(parts + index, low, high, &to, &written);
    }
}

PyObject *
gathered(const Part *parts, Py_ssize_t part_count, const Sizes *sizes, uint64_t start, uint64_t end)
{
    if (sizes->count > INT32_MAX || sizes->key_length > INT32_MAX || sizes->value_length > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a chunk holds 2 GiB of keys, and of values, at most");
        return NULL;
    }
    uint64_t nbytes = encoded_bytes(sizes->count, sizes->key_length, sizes->value_length);
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)nbytes);
    if (result != NULL)
        write_chunk(parts, part_count, sizes, start, end, (uint8_t *)PyBytes_AsString(result));
    return result;
}

PyObject *
gather(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    uint64_t start, end;
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "gather takes 3 arguments, not %zd", count);
    if (!number_of(args[1], &start) || !number_of(args[2], &end))
        return NULL;
    if (!PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "the parts are a list");
        return NULL;
    }
    Py_ssize_t part_count = PyList_Size(args[0]), read = 0;
    Part few[4], *parts = few;
    if (part_count > 4 && (parts = malloc((size_t)part_count * sizeof *parts)) == NULL)
        return PyErr_NoMemory();
    PyObject *result = NULL;
    Sizes sizes = {0};
    for (; read < part_count; read++) {
        PyObject *tuple = list_item(args[0], read);
        bool is_read = tuple != NULL && part_read(parts + read, tuple);
        Py_XDECREF(tuple);
        if (!is_read)
            goto done;
    }
    /* Checked and copied without a step of Python between them: a buffer may be one that changes. */
    for (Py_ssize_t index = 0; index < part_count; index++)
        if (!part_measure(parts + index, &sizes))
            goto done;
    result = gathered(parts, part_count, &sizes, start, end);
done:
    while (read)
        part_release(parts + --read);
    if (parts != few)
        free(parts);
    return result;
}

/* Numbering in place. */

PyObject *
number_rows(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    uint64_t first_seq, first_cas, start, end;
    Py_buffer buffer;
    Chunk chunk;
    if (!takes("number_rows", count, 5, 5) || !number_of(args[1], &first_seq) ||
        !number_of(args[2], &first_cas) || !number_of(args[3], &start) || !number_of(args[4], &end))
        return NULL;
    if (PyObject_GetBuffer(args[0], &buffer, PyBUF_WRITABLE) < 0)
        return NULL;
    PyObject *result = NULL;
    if (!chunk_read(&chunk, &buffer))
        goto done;
    if (first_seq > UINT64_MAX - chunk.count || first_cas > UINT64_MAX - chunk.count) {
        PyErr_SetString(PyExc_OverflowError, "a number is out of range");
        goto done;
    }
    store_u32((uint8_t *)buffer.buf + 12, 0);
    store_u64((uint8_t *)buffer.buf + 16, start);
    store_u64((uint8_t *)buffer.buf + 24, end);
    for (size_t row = 0; row < chunk.count; row++)
        store_u64(column(chunk.seqs) + 8 * row, first_seq + row);
    for (size_t row = 0; row < chunk.count; row++)
        store_u64(column(chunk.cas) + 8 * row, first_cas + row);
    result = Py_NewRef(Py_None);
done:
    PyBuffer_Release(&buffer);
    return result;
}

/* Selecting by key. */

/* Writes a byte for each row: 1 where its key does not begin with the prefix. How many do not. */
static uint32_t
mark_others(const Chunk *chunk, const uint8_t *prefix, size_t length, uint8_t *skip)
{
    uint32_t others = 0;
    for (uint32_t row = 0; row < chunk->count; row++) {
        skip[row] = !begins_with(chunk, row, prefix, length);
        others += skip[row];
    }
    return others;
}

PyObject *
select_prefix(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    char *prefix;
    Py_ssize_t length;
    Part part = {0};
    Sizes sizes = {0};
    uint8_t *skip = NULL;
    PyObject *result = NULL;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "select_prefix takes 2 arguments, not %zd", count);
    if (PyBytes_AsStringAndSize(args[1], &prefix, &length) < 0 ||
        PyObject_GetBuffer(args[0], &part.buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    if (!chunk_read(&part.chunk, &part.buffer))
        goto done;
    if (!offsets_are_sound(part.chunk.key_offsets, 0, part.chunk.count, part.chunk.key_length)) {
        set_defect(DEFECT_OFFSETS);
        goto done;
    }
    part.high = part.chunk.count;
    part.skip = skip = malloc((size_t)part.high + 1);
    if (skip == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (!mark_others(&part.chunk, (const uint8_t *)prefix, (size_t)length, skip))
        result = Py_NewRef(Py_None);
    else if (part_measure(&part, &sizes))
        result = gathered(&part, 1, &sizes, part.chunk.start, part.chunk.end);
done:
    free(skip);
    PyBuffer_Release(&part.buffer);
    return result;
}
