/* Entries of the key index: the newest mutation of each key of some chunks, in the order of the
   keys, as they are stored. */

#include "kernel.h"

#include <stdlib.h>

enum { KEY_LENGTH_MAX = 255, BODY_BYTES = 12, ENTRY_BYTES = 16 };

typedef struct {
    const uint8_t *key;
    uint64_t seq;
    uint32_t expiry;
    uint8_t length;
    bool is_tombstone;
} Row;

/* The rows of all chunks; `spare` has room for as many. */
typedef struct {
    Row *rows;
    Row *spare;
    size_t *runs;
    size_t count;
} Rows;

/* Reads a chunk's rows behind those before. False with an exception set. */
static bool
add_rows(Rows *rows, const Chunk *chunk)
{
    if (!offsets_are_sound(chunk->key_offsets, 0, chunk->count, chunk->key_length))
        return set_defect(DEFECT_OFFSETS) != NULL;
    uint32_t begin = load_u32(chunk->key_offsets), wrong_length = 0;
    uint64_t seq_bits = 0;
    for (size_t index = 0; index < chunk->count; index++) {
        uint32_t end = load_u32(chunk->key_offsets + 4 * index + 4), length = end - begin;
        Row *row = rows->rows + rows->count + index;
        wrong_length |= length - 1 >= KEY_LENGTH_MAX;
        row->key = chunk->keys + begin;
        row->length = (uint8_t)length;
        row->seq = load_u64(chunk->seqs + 8 * index);
        seq_bits |= row->seq;
        row->is_tombstone = chunk->operations[index] != SET;
        /* A tombstone does not expire, even if the node that it came from says so. */
        row->expiry = row->is_tombstone ? 0 : load_u32(chunk->expiries + 4 * index);
        begin = end;
    }
    rows->count += chunk->count;
    if (wrong_length)
        return set_defect(DEFECT_KEY_LENGTH) != NULL;
    if (seq_bits > INT64_MAX) {
        PyErr_SetString(PyExc_OverflowError, "an entry holds a number of 63 bits");
        return false;
    }
    return true;
}

static inline int
order_of(const Row *a, const Row *b)
{
    int order = memcmp(a->key, b->key, a->length < b->length ? a->length : b->length);
    return order ? order : (int)a->length - (int)b->length;
}

/* Merges the sorted rows [low, middle) and [middle, high) into `to`; of equal ones the former come
   first. */
static void
merge(const Row *from, size_t low, size_t middle, size_t high, Row *to)
{
    size_t left = low, right = middle;
    for (size_t at = low; at < high; at++)
        if (left < middle && (right == high || order_of(from + left, from + right) <= 0))
            to[at] = from[left++];
        else
            to[at] = from[right++];
}

/* Sorts by key; rows of one key stay in their order. What comes in order costs little: the rows of
   a bulk load do. */
static void
sort(Rows *rows)
{
    size_t *runs = rows->runs, run_count = 0;
    for (size_t row = 0; row < rows->count; row++)
        if (!row || order_of(rows->rows + row - 1, rows->rows + row) > 0)
            runs[run_count++] = row;
    while (run_count > 1) {
        size_t merged_count = 0;
        for (size_t run = 0; run < run_count; run += 2) {
            size_t low = runs[run], middle = run + 1 < run_count ? runs[run + 1] : rows->count;
            size_t high = run + 2 < run_count ? runs[run + 2] : rows->count;
            merge(rows->rows, low, middle, high, rows->spare);
            runs[merged_count++] = low;
        }
        run_count = merged_count;
        Row *sorted = rows->spare;
        rows->spare = rows->rows;
        rows->rows = sorted;
    }
}

/* The key and the value of an entry. `bytes` begins with the prefix, and has room for both. */
static PyObject *
entry_of(const Row *row, uint8_t *bytes, size_t prefix_length)
{
    size_t key_length = prefix_length + row->length;
    uint8_t *body = bytes + key_length;
    memcpy(bytes + prefix_length, row->key, row->length);
    store_u64(body, row->is_tombstone ? -row->seq : row->seq);
    store_u32(body + 8, row->expiry);
    store_u32(body + BODY_BYTES, crc32c_of(bytes, key_length + BODY_BYTES));
    PyObject *key = PyBytes_FromStringAndSize((char *)bytes, (Py_ssize_t)key_length);
    PyObject *value = PyBytes_FromStringAndSize((char *)body, ENTRY_BYTES);
    PyObject *pair = key == NULL || value == NULL ? NULL : PyTuple_Pack(2, key, value);
    Py_XDECREF(key);
    Py_XDECREF(value);
    return pair;
}

/* (entries, how many of them are no tombstones, whether any expires) of sorted rows. */
static PyObject *
entries_of(const Rows *rows, const char *prefix, size_t prefix_length)
{
    uint8_t *bytes = malloc(prefix_length + KEY_LENGTH_MAX + ENTRY_BYTES);
    PyObject *entries = bytes == NULL ? PyErr_NoMemory() : PyList_New(0), *result = NULL;
    Py_ssize_t items = 0;
    uint32_t expiries = 0;
    if (entries == NULL)
        goto done;
    memcpy(bytes, prefix, prefix_length);
    for (size_t index = 0; index < rows->count; index++) {
        const Row *row = rows->rows + index;
        if (index + 1 < rows->count && order_of(row, row + 1) == 0)
            continue; /* superseded */
        PyObject *entry = entry_of(row, bytes, prefix_length);
        int failed = entry == NULL || PyList_Append(entries, entry) < 0;
        Py_XDECREF(entry);
        if (failed)
            goto done;
        items += !row->is_tombstone;
        expiries |= row->expiry;
    }
    result = Py_BuildValue("OnO", entries, items, expiries ? Py_True : Py_False);
done:
    Py_XDECREF(entries);
    free(bytes);
    return result;
}

static bool
make_room(Rows *rows, const Chunk *chunks, Py_ssize_t chunk_count)
{
    size_t count = 1; /* of no bytes there may be no block */
    for (Py_ssize_t index = 0; index < chunk_count; index++)
        count += chunks[index].count;
    rows->rows = malloc(count * sizeof *rows->rows);
    rows->spare = malloc(count * sizeof *rows->spare);
    rows->runs = malloc(count * sizeof *rows->runs);
    return (rows->rows != NULL && rows->spare != NULL && rows->runs != NULL) || no_memory();
}

PyObject *
index_entries(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    char *prefix;
    Py_ssize_t prefix_length;
    if (!takes("index_entries", count, 2, 2) ||
        PyBytes_AsStringAndSize(args[1], &prefix, &prefix_length) < 0)
        return NULL;
    if (!PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "the chunks are a list");
        return NULL;
    }
    Py_ssize_t chunk_count = PyList_Size(args[0]), read = 0;
    Py_buffer *buffers = malloc(((size_t)chunk_count + 1) * sizeof *buffers);
    Chunk *chunks = malloc(((size_t)chunk_count + 1) * sizeof *chunks);
    PyObject *result = NULL;
    Rows rows = {0};
    if (buffers == NULL || chunks == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; read < chunk_count; read++) {
        PyObject *buffer = list_item(args[0], read);
        bool is_read =
            buffer != NULL && PyObject_GetBuffer(buffer, buffers + read, PyBUF_SIMPLE) == 0;
        Py_XDECREF(buffer);
        if (!is_read)
            goto done;
        if (!chunk_read(chunks + read, buffers + read)) {
            read++;
            goto done;
        }
    }
    if (!make_room(&rows, chunks, chunk_count))
        goto done;
    for (Py_ssize_t index = 0; index < chunk_count; index++)
        if (!add_rows(&rows, chunks + index))
            goto done;
    sort(&rows);
    result = entries_of(&rows, prefix, (size_t)prefix_length);
done:
    free(rows.rows);
    free(rows.spare);
    free(rows.runs);
    while (read)
        PyBuffer_Release(buffers + --read);
    free(buffers);
    free(chunks);
    return result;
}
