/* Headers of frames; frames that publish one plain `SET` each, joined to one chunk; and the answers
   to bundles. */

#include "kernel.h"

#include <stdlib.h>

/* upr_protocol/wire describes these layouts: the header; the fields of `Mutate`; its only run; and
   what stands before and behind the lines of a `MutateReply` without failures and counters. */
enum {
    HEADER_BYTES = 24,
    CHECKED_BYTES = 20,
    MUTATE_BYTES = 32,
    CHUNK_AT = HEADER_BYTES + MUTATE_BYTES + RUN_BYTES,
    REPLY_HEAD_BYTES = 16,
    REPLY_TAIL_BYTES = 16,
};

/* Magic, version and opcode, as they lie. */
static const uint32_t MUTATE_BEGIN = 0x11015055u, REPLY_BEGIN = 0x91015055u;

/* Headers. */

enum { MAGIC = 0x5055, VERSION = 1 };

PyObject *
pack_header(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    /* Opcode, status, partition, opaque, length, and the body's CRC. */
    static const uint64_t most[] = {UINT8_MAX,  UINT16_MAX, UINT16_MAX,
                                    UINT32_MAX, UINT32_MAX, UINT32_MAX};
    uint64_t fields[6];
    if (!takes("pack_header", count, 6, 6))
        return NULL;
    for (int field = 0; field < 6; field++) {
        if (!number_of(args[field], fields + field))
            return NULL;
        if (fields[field] > most[field])
            return PyErr_Format(PyExc_OverflowError, "a field of a header is out of range");
    }
    PyObject *header = PyBytes_FromStringAndSize(NULL, HEADER_BYTES);
    if (header == NULL)
        return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AsString(header);
    store_u32(at, (uint32_t)(MAGIC | VERSION << 16 | fields[0] << 24));
    store_u32(at + 4, (uint32_t)(fields[1] | fields[2] << 16));
    for (int field = 3; field < 6; field++)
        store_u32(at + 4 * (field - 1), (uint32_t)fields[field]);
    store_u32(at + CHECKED_BYTES, crc32c_of(at, CHECKED_BYTES));
    return header;
}

PyObject *
read_header(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    uint64_t offset;
    if (!takes("read_header", count, 2, 2) || !number_of(args[1], &offset))
        return NULL;
    if (!PyBytes_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "what was received is not bytes");
    uint64_t nbytes = (uint64_t)PyBytes_Size(args[0]);
    if (offset > nbytes || nbytes - offset < HEADER_BYTES)
        return PyErr_Format(PyExc_ValueError, "the header is not whole");
    const uint8_t *at = (const uint8_t *)PyBytes_AsString(args[0]) + offset;
    if ((load_u32(at) & 0xFFFFFF) != (MAGIC | VERSION << 16) || load_u32(at + 12) & 7 ||
        crc32c_of(at, CHECKED_BYTES) != load_u32(at + CHECKED_BYTES))
        Py_RETURN_NONE;
    return Py_BuildValue("iiikkk", (int)at[3], (int)(load_u32(at + 4) & 0xFFFF),
                         (int)(load_u32(at + 4) >> 16), (unsigned long)load_u32(at + 8),
                         (unsigned long)load_u32(at + 12), (unsigned long)load_u32(at + 16));
}

/* Single operations. */

typedef struct {
    const uint8_t *frame;
    size_t nbytes;
    const uint8_t *key;
    const uint8_t *value;
    uint32_t key_length;
    uint32_t value_length;
    uint32_t expiry;
    uint32_t flags;
} Set;

typedef struct {
    uint64_t partition_count;
    uint64_t key_bytes_max;
    uint64_t value_bytes_max;
    const char *prefix;
    Py_ssize_t prefix_length;
} Limits;

/* Reads the frame at `at`, of which so many bytes have come. False where it is not whole, or is
   anything but a sound `Mutate` of one plain `SET` that is to be answered from memory. */
static bool
set_read(Set *set, const uint8_t *at, size_t available, const Limits *limits)
{
    if (available < CHUNK_AT || load_u32(at) != MUTATE_BEGIN)
        return false;
    uint64_t nbytes = HEADER_BYTES + (uint64_t)load_u32(at + 12);
    /* No flags in the header, no attempt, level 0 and no copies, and one run. */
    const uint8_t *mutate = at + HEADER_BYTES, *run = mutate + MUTATE_BYTES;
    if (nbytes > available || nbytes < CHUNK_AT + HEAD_BYTES || nbytes & 7 ||
        at[4] || at[5] || load_u64(mutate + 16) || load_u32(mutate + 24) ||
        load_u32(mutate + 28) != 1)
        return false;
    /* Of one row and without a chain. */
    if (load_u32(run + 4) != 1 || load_u32(run + 16))
        return false;
    Chunk chunk;
    if (!chunk_fits(&chunk, at + CHUNK_AT, (size_t)nbytes - CHUNK_AT) || chunk.count != 1 ||
        load_u32(at + CHUNK_AT + 12) || chunk.start || chunk.end)
        return false;
    if (load_u64(chunk.seqs) || load_u64(chunk.cas) || chunk.operations[0] != SET ||
        load_u32(chunk.key_offsets) || load_u32(chunk.key_offsets + 4) != chunk.key_length ||
        load_u32(chunk.value_offsets) || load_u32(chunk.value_offsets + 4) != chunk.value_length)
        return false;
    if (!chunk.key_length || chunk.key_length > limits->key_bytes_max ||
        chunk.value_length > limits->value_bytes_max ||
        partition_of(chunk.keys, chunk.key_length, limits->partition_count) != load_u32(run))
        return false;
    if (crc32c_of(at, CHECKED_BYTES) != load_u32(at + CHECKED_BYTES) ||
        crc32c_of(at + HEADER_BYTES, (size_t)nbytes - HEADER_BYTES) != load_u32(at + 16))
        return false;
    *set = (Set){
        .frame = at,
        .nbytes = (size_t)nbytes,
        .key = chunk.keys,
        .value = chunk.values,
        .key_length = chunk.key_length,
        .value_length = chunk.value_length,
        .expiry = load_u32(chunk.expiries),
        .flags = load_u32(chunk.flags),
    };
    return true;
}

static PyObject *
joined(const Set *sets, size_t count)
{
    Chunk to = {.count = (uint32_t)count};
    for (size_t row = 0; row < count; row++) {
        to.key_length += sets[row].key_length;
        to.value_length += sets[row].value_length;
    }
    uint64_t nbytes = encoded_bytes(count, to.key_length, to.value_length);
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)nbytes);
    if (result == NULL)
        return NULL;
    chunk_begin(&to, (uint8_t *)PyBytes_AsString(result), 0, 0);
    memset(column(to.seqs), 0, 8 * count);
    memset(column(to.cas), 0, 8 * count);
    memset(column(to.operations), SET, count);
    uint32_t keys_end = 0, values_end = 0;
    for (size_t row = 0; row < count; row++) {
        const Set *set = sets + row;
        store_u32(column(to.expiries) + 4 * row, set->expiry);
        store_u32(column(to.flags) + 4 * row, set->flags);
        memcpy(column(to.keys) + keys_end, set->key, set->key_length);
        memcpy(column(to.values) + values_end, set->value, set->value_length);
        keys_end += set->key_length;
        values_end += set->value_length;
        store_u32(column(to.key_offsets) + 4 * row + 4, keys_end);
        store_u32(column(to.value_offsets) + 4 * row + 4, values_end);
    }
    return result;
}

/* What `check` would say of the chunk of these sets. */
static int
flags_of(const Set *sets, size_t count, const Limits *limits)
{
    int flags = UNCONDITIONAL;
    size_t length = (size_t)limits->prefix_length;
    for (size_t row = 0; row < count; row++) {
        if (sets[row].expiry)
            flags |= MAY_EXPIRE;
        if (sets[row].key_length >= length && !memcmp(sets[row].key, limits->prefix, length))
            flags |= HAS_PREFIX;
    }
    return flags;
}

/* The run, writer, opaque and end of each frame, as four objects of bytes. */
static PyObject *
described(PyObject *chunk, const Set *sets, size_t count, const uint8_t *bytes,
          const Limits *limits)
{
    size_t writer_count = 1;
    for (size_t row = 1; row < count; row++)
        if (memcmp(sets[row].frame + HEADER_BYTES, sets->frame + HEADER_BYTES, WRITER_BYTES))
            writer_count = count;
    PyObject *runs = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(RUN_BYTES * count));
    PyObject *writers = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(WRITER_BYTES * writer_count));
    PyObject *opaques = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * count));
    PyObject *ends = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * count)), *result = NULL;
    PyObject *flags = PyLong_FromLong(flags_of(sets, count, limits));
    if (runs != NULL && writers != NULL && opaques != NULL && ends != NULL && flags != NULL) {
        for (size_t row = 0; row < count; row++) {
            const uint8_t *frame = sets[row].frame, *mutate = frame + HEADER_BYTES;
            memcpy(PyBytes_AsString(runs) + RUN_BYTES * row, mutate + MUTATE_BYTES, RUN_BYTES);
            if (row < writer_count)
                memcpy(PyBytes_AsString(writers) + WRITER_BYTES * row, mutate, WRITER_BYTES);
            memcpy(PyBytes_AsString(opaques) + 4 * row, frame + 8, 4);
            store_u32((uint8_t *)PyBytes_AsString(ends) + 4 * row,
                      (uint32_t)(frame + sets[row].nbytes - bytes));
        }
        result = PyTuple_Pack(6, chunk, flags, runs, writers, opaques, ends);
    }
    Py_XDECREF(flags);
    Py_XDECREF(runs);
    Py_XDECREF(writers);
    Py_XDECREF(opaques);
    Py_XDECREF(ends);
    return result;
}

PyObject *
join_sets(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    uint64_t offset, frames_max;
    Limits limits;
    if (!takes("join_sets", count, 7, 7) || !number_of(args[1], &offset) || !number_of(args[2], &frames_max) ||
        !number_of(args[3], &limits.partition_count) ||
        !number_of(args[4], &limits.key_bytes_max) || !number_of(args[5], &limits.value_bytes_max) ||
        PyBytes_AsStringAndSize(args[6], (char **)&limits.prefix, &limits.prefix_length) < 0)
        return NULL;
    if (!PyBytes_Check(args[0]))
        /* What is checked here must be what is copied. */
        return PyErr_Format(PyExc_TypeError, "the frames are not bytes");
    const uint8_t *bytes = (const uint8_t *)PyBytes_AsString(args[0]);
    uint64_t nbytes = (uint64_t)PyBytes_Size(args[0]);
    if (offset > nbytes || !limits.partition_count || nbytes > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "offset, partitions or bytes out of range");
    Set few[16], *sets = few;
    uint64_t frames_most = (nbytes - offset) / (CHUNK_AT + HEAD_BYTES);
    frames_max = frames_most < frames_max ? frames_most : frames_max;
    if (frames_max > 16 && (sets = malloc(frames_max * sizeof *sets)) == NULL)
        return PyErr_NoMemory();
    size_t set_count = 0;
    while (set_count < frames_max &&
           set_read(sets + set_count, bytes + offset, (size_t)(nbytes - offset), &limits))
        offset += sets[set_count++].nbytes;
    PyObject *result = NULL;
    if (!set_count) {
        result = Py_None;
        Py_INCREF(result);
    }
    else {
        PyObject *chunk = joined(sets, set_count);
        result = chunk == NULL ? NULL : described(chunk, sets, set_count, bytes, &limits);
        Py_XDECREF(chunk);
    }
    if (sets != few)
        free(sets);
    return result;
}

/* Answers. */

/* Writes a `MutateReply` of these lines; returns where it ends. */
static uint8_t *
put_reply(uint8_t *at, uint32_t opaque, const uint8_t *lines, size_t lines_bytes)
{
    size_t body_bytes = REPLY_HEAD_BYTES + lines_bytes + REPLY_TAIL_BYTES;
    uint8_t *body = at + HEADER_BYTES;
    store_u64(body, 0); /* no map's revision */
    store_u64(body + 8, lines_bytes / LINE_BYTES);
    memcpy(body + REPLY_HEAD_BYTES, lines, lines_bytes);
    memset(body + REPLY_HEAD_BYTES + lines_bytes, 0, REPLY_TAIL_BYTES);
    store_u32(at, REPLY_BEGIN);
    at[4] = at[5] = 0;
    at[6] = at[7] = 0xff; /* no partition */
    store_u32(at + 8, opaque);
    store_u32(at + 12, (uint32_t)body_bytes);
    store_u32(at + 16, crc32c_of(body, body_bytes));
    store_u32(at + CHECKED_BYTES, crc32c_of(at, CHECKED_BYTES));
    return body + body_bytes;
}

PyObject *
encode_replies(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (!takes("encode_replies", count, 2, 2))
        return NULL;
    if (!PyBytes_Check(args[0]) || !PyBytes_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "opaques and lines are bytes");
    size_t opaques_bytes = (size_t)PyBytes_Size(args[0]), lines_bytes = (size_t)PyBytes_Size(args[1]);
    size_t reply_count = opaques_bytes / 4;
    if (!reply_count || opaques_bytes % 4 || lines_bytes % (LINE_BYTES * reply_count) ||
        lines_bytes > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "each reply has as many lines as the others");
    const uint8_t *opaques = (const uint8_t *)PyBytes_AsString(args[0]);
    const uint8_t *lines = (const uint8_t *)PyBytes_AsString(args[1]);
    size_t frame_bytes = HEADER_BYTES + REPLY_HEAD_BYTES + REPLY_TAIL_BYTES;
    PyObject *frames = PyBytes_FromStringAndSize(
        NULL, (Py_ssize_t)(lines_bytes + reply_count * frame_bytes));
    if (frames == NULL)
        return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AsString(frames);
    size_t step = lines_bytes / reply_count;
    for (size_t index = 0; index < reply_count; index++)
        at = put_reply(at, load_u32(opaques + 4 * index), lines + index * step, step);
    return frames;
}
