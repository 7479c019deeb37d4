/* The rows that an open snapshot is being filled with.

   Rows stand in columns as in a chunk, with room to grow: one block for the columns of one width
   each, one for the keys and one for the values. The flags of the newest numbers are a bytearray,
   which Python reads and changes, too. */

#include "open_rows.h"

#include <stdlib.h>
#include <structmember.h>

/* Room. */

/* At first what is needed, as a snapshot often has one run; then half as much more each time. */
static uint64_t
larger(uint64_t size, uint64_t needed)
{
    return size + size / 2 > needed ? size + size / 2 : needed;
}

/* Where the columns begin in a block for so many rows. */
static void
place_columns(Chunk *rows, const uint8_t *block, uint64_t size)
{
    rows->seqs = block;
    rows->cas = block += 8 * size;
    rows->expiries = block += 8 * size;
    rows->flags = block += 4 * size;
    rows->key_offsets = block += 4 * size;
    rows->value_offsets = block += 4 * size + 4;
    rows->operations = block + 4 * size + 4;
}

static bool
reserve_rows(OpenRows *self, uint64_t needed)
{
    if (needed <= self->row_size)
        return true;
    uint64_t size = (larger(self->row_size, needed) + ROWS_STEP - 1) & ~(uint64_t)(ROWS_STEP - 1);
    uint8_t *block = malloc(ROW_BYTES * size + OFFSETS_BYTES);
    if (block == NULL)
        return no_memory();
    Chunk *rows = &self->columns, before = *rows;
    size_t count = rows->count;
    place_columns(rows, block, size);
    store_u32(column(rows->key_offsets), 0);
    store_u32(column(rows->value_offsets), 0);
    if (before.seqs != NULL) {
        memcpy(column(rows->seqs), before.seqs, 8 * count);
        memcpy(column(rows->cas), before.cas, 8 * count);
        memcpy(column(rows->expiries), before.expiries, 4 * count);
        memcpy(column(rows->flags), before.flags, 4 * count);
        memcpy(column(rows->key_offsets), before.key_offsets, 4 * count + 4);
        memcpy(column(rows->value_offsets), before.value_offsets, 4 * count + 4);
        memcpy(column(rows->operations), before.operations, count);
        free(column(before.seqs));
    }
    self->row_size = size;
    return true;
}

static bool
reserve_bytes(const uint8_t **bytes, uint64_t *size, uint64_t needed)
{
    if (needed <= *size)
        return true;
    uint64_t more = larger(*size, needed);
    uint8_t *moved = realloc(column(*bytes), more);
    if (moved == NULL)
        return no_memory();
    *bytes = moved;
    *size = more;
    return true;
}

bool
rows_reserve(OpenRows *self, const Sizes *more)
{
    Chunk *rows = &self->columns;
    uint64_t count = rows->count + more->count, keys = rows->key_length + more->key_length,
             values = rows->value_length + more->value_length;
    if (count > INT32_MAX || keys > INT32_MAX || values > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a chunk holds 2 GiB of keys, and of values, at most");
        return false;
    }
    return reserve_rows(self, count) && reserve_bytes(&rows->keys, &self->key_size, keys) &&
           reserve_bytes(&rows->values, &self->value_size, values);
}

static void
forget_rows(OpenRows *self)
{
    free(column(self->columns.seqs));
    free(column(self->columns.keys));
    free(column(self->columns.values));
    memset(&self->columns, 0, sizeof self->columns);
    self->row_size = self->key_size = self->value_size = self->first = 0;
}

/* Adding rows. */

void
rows_add_part(OpenRows *self, const Part *part)
{
    Chunk *rows = &self->columns;
    Sizes written = {rows->count, rows->key_length, rows->value_length};
    uint64_t before = row_bytes_of(self);
    copy_rows(part, part->low, part->high, rows, &written);
    if (!self->first && part->low < part->high)
        self->first = load_u64(rows->seqs);
    rows->count = (uint32_t)written.count;
    rows->key_length = (uint32_t)written.key_length;
    rows->value_length = (uint32_t)written.value_length;
    self->added += row_bytes_of(self) - before;
}

static PyObject *
extend(OpenRows *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t low, high;
    Part part = {.is_numbered = true};
    Sizes sizes = {0};
    if (!takes("extend", count, 5, 5) || !number_of(args[1], &low) || !number_of(args[2], &high) ||
        !number_of(args[3], &part.first_seq) || !number_of(args[4], &part.first_cas))
        return NULL;
    if (PyObject_GetBuffer(args[0], &part.buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *result = NULL;
    if (!chunk_read(&part.chunk, &part.buffer))
        goto done;
    if (low > high || high > part.chunk.count) {
        PyErr_SetString(PyExc_IndexError, "the chunk does not have these rows");
        goto done;
    }
    part.low = (uint32_t)low;
    part.high = (uint32_t)high;
    if (part_measure(&part, &sizes) && rows_reserve(self, &sizes)) {
        rows_add_part(self, &part);
        result = Py_None;
        Py_INCREF(result);
    }
done:
    PyBuffer_Release(&part.buffer);
    return result;
}

static PyObject *
append(OpenRows *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t operation, seq, cas, flags, expiry;
    char *key, *value;
    Py_ssize_t key_length, value_length;
    if (!takes("append", count, 7, 7) || !number_of(args[0], &operation) ||
        PyBytes_AsStringAndSize(args[1], &key, &key_length) < 0 ||
        PyBytes_AsStringAndSize(args[2], &value, &value_length) < 0 || !number_of(args[3], &seq) ||
        !number_of(args[4], &cas) || !number_of(args[5], &flags) || !number_of(args[6], &expiry))
        return NULL;
    if (operation > UINT8_MAX || flags > UINT32_MAX || expiry > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "operation, flags or expiry out of range");
        return NULL;
    }
    Sizes more = {1, (uint64_t)key_length, (uint64_t)value_length};
    if (!rows_reserve(self, &more))
        return NULL;
    Chunk *rows = &self->columns;
    size_t at = rows->count;
    store_u64(column(rows->seqs) + 8 * at, seq);
    store_u64(column(rows->cas) + 8 * at, cas);
    store_u32(column(rows->expiries) + 4 * at, (uint32_t)expiry);
    store_u32(column(rows->flags) + 4 * at, (uint32_t)flags);
    column(rows->operations)[at] = (uint8_t)operation;
    /* Of no bytes there may be no block. */
    if (key_length)
        memcpy(column(rows->keys) + rows->key_length, key, (size_t)key_length);
    if (value_length)
        memcpy(column(rows->values) + rows->value_length, value, (size_t)value_length);
    rows->key_length += (uint32_t)key_length;
    rows->value_length += (uint32_t)value_length;
    store_u32(column(rows->key_offsets) + 4 * at + 4, rows->key_length);
    store_u32(column(rows->value_offsets) + 4 * at + 4, rows->value_length);
    if (!self->first)
        self->first = seq;
    rows->count++;
    self->added += ROW_BYTES + (uint64_t)key_length + (uint64_t)value_length;
    Py_RETURN_NONE;
}

static PyObject *
pop(OpenRows *self, PyObject *Py_UNUSED(ignored))
{
    Chunk *rows = &self->columns;
    if (!rows->count) {
        PyErr_SetString(PyExc_IndexError, "there are no rows");
        return NULL;
    }
    size_t at = --rows->count;
    rows->key_length = load_u32(rows->key_offsets + 4 * at);
    rows->value_length = load_u32(rows->value_offsets + 4 * at);
    Py_RETURN_NONE;
}

static PyObject *
clear(OpenRows *self, PyObject *Py_UNUSED(ignored))
{
    forget_rows(self);
    Py_RETURN_NONE;
}

static PyObject *
begin(OpenRows *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t start, tidy_at;
    if (!takes("begin", count, 2, 2) || !number_of(args[0], &start) || !number_of(args[1], &tidy_at))
        return NULL;
    if (PyByteArray_Resize(self->flags, 0) < 0)
        return NULL;
    forget_rows(self);
    self->start = self->high = start;
    self->tidy_at = tidy_at;
    self->live = self->base = self->added = self->superseded = self->mean_bytes = 0;
    self->has_counters = 0;
    Py_RETURN_NONE;
}

/* Reading rows. */

/* The first row with this number or a higher one. */
static uint32_t
bisect(const Chunk *rows, uint64_t seq)
{
    uint32_t low = 0, high = rows->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (load_u64(rows->seqs + 8 * (size_t)middle) < seq)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static PyObject *
find(OpenRows *self, PyObject *object)
{
    uint64_t seq;
    if (!number_of(object, &seq))
        return NULL;
    const Chunk *rows = &self->columns;
    size_t row = bisect(rows, seq);
    if (row == rows->count || load_u64(rows->seqs + 8 * row) != seq)
        Py_RETURN_NONE;
    uint32_t key = load_u32(rows->key_offsets + 4 * row),
             value = load_u32(rows->value_offsets + 4 * row);
    PyObject *key_bytes = PyBytes_FromStringAndSize(
        (const char *)rows->keys + key, load_u32(rows->key_offsets + 4 * row + 4) - key);
    PyObject *value_bytes = PyBytes_FromStringAndSize(
        (const char *)rows->values + value, load_u32(rows->value_offsets + 4 * row + 4) - value);
    PyObject *result = NULL;
    if (key_bytes != NULL && value_bytes != NULL)
        result = Py_BuildValue("iOOKKkk", (int)rows->operations[row], key_bytes, value_bytes,
                               (unsigned long long)seq,
                               (unsigned long long)load_u64(rows->cas + 8 * row),
                               (unsigned long)load_u32(rows->flags + 4 * row),
                               (unsigned long)load_u32(rows->expiries + 4 * row));
    Py_XDECREF(key_bytes);
    Py_XDECREF(value_bytes);
    return result;
}

static PyObject *
seqs(OpenRows *self, PyObject *Py_UNUSED(ignored))
{
    const Chunk *rows = &self->columns;
    PyObject *list = PyList_New(rows->count);
    for (size_t row = 0; list != NULL && row < rows->count; row++) {
        PyObject *seq = PyLong_FromUnsignedLongLong(load_u64(rows->seqs + 8 * row));
        if (seq == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, (Py_ssize_t)row, seq);
    }
    return list;
}

/* A byte for each row, 1 for those that are superseded; NULL without memory. */
static uint8_t *
skipped_rows(const OpenRows *self)
{
    const Chunk *rows = &self->columns;
    const uint8_t *flags = (const uint8_t *)PyByteArray_AsString(self->flags);
    uint64_t flag_count = (uint64_t)PyByteArray_Size(self->flags);
    uint8_t *skip = malloc(rows->count + 1);
    for (size_t row = 0; skip != NULL && row < rows->count; row++) {
        uint64_t at = load_u64(rows->seqs + 8 * row) - self->base;
        skip[row] = at < flag_count && flags[at];
    }
    return skip;
}

static PyObject *
encoded(OpenRows *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t start, end;
    if (!takes("encoded", count, 3, 3) || !number_of(args[0], &start) || !number_of(args[1], &end))
        return NULL;
    int only_live = PyObject_IsTrue(args[2]);
    if (only_live < 0)
        return NULL;
    Part part = {.chunk = self->columns, .high = self->columns.count};
    Sizes sizes = {0};
    if (!part.high)
        return gathered(&part, 0, &sizes, start, end);
    uint8_t *skip = NULL;
    if (only_live && (skip = skipped_rows(self)) == NULL)
        return PyErr_NoMemory();
    part.skip = skip;
    PyObject *result = part_measure(&part, &sizes) ? gathered(&part, 1, &sizes, start, end) : NULL;
    free(skip);
    return result;
}

/* Figures and checks. */

static PyObject *
get_last(OpenRows *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(last_of(self));
}

static PyObject *
get_row_bytes(OpenRows *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(row_bytes_of(self));
}

static PyObject *
get_nbytes(OpenRows *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(allocated_bytes(self));
}

static PyObject *
get_is_full(OpenRows *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(is_full(self));
}

static PyObject *
get_wants_tidying(OpenRows *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(wants_tidying(self));
}

static Py_ssize_t
length(OpenRows *self)
{
    return self->columns.count;
}

/* The type. */

static PyObject *
new_rows(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *table, *answers;
    unsigned long long partition, rows_max, bytes_max, span_max;
    if (kwargs != NULL && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "OpenRows takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OOKKKK", &table, &answers, &partition, &rows_max, &bytes_max,
                          &span_max))
        return NULL;
    if (!is_key_table(table) || !is_answers(answers)) {
        PyErr_SetString(PyExc_TypeError, "the first arguments are a KeyTable and Answers");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    OpenRows *rows = (OpenRows *)allocate(type, 0); /* zeroed: no rows */
    if (rows == NULL)
        return NULL;
    rows->partition = partition;
    rows->rows_max = rows_max;
    rows->bytes_max = bytes_max;
    rows->span_max = span_max;
    Py_INCREF(table);
    rows->table = table;
    Py_INCREF(answers);
    rows->answers = answers;
    rows->flags = PyByteArray_FromStringAndSize(NULL, 0);
    if (rows->flags == NULL)
        Py_CLEAR(rows);
    return (PyObject *)rows;
}

static void
dealloc(OpenRows *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    forget_rows(self);
    Py_XDECREF(self->table);
    Py_XDECREF(self->answers);
    Py_XDECREF(self->flags);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"append", (PyCFunction)(void (*)(void))append, METH_FASTCALL, NULL},
    {"begin", (PyCFunction)(void (*)(void))begin, METH_FASTCALL, NULL},
    {"clear", (PyCFunction)clear, METH_NOARGS, NULL},
    {"encoded", (PyCFunction)(void (*)(void))encoded, METH_FASTCALL, NULL},
    {"extend", (PyCFunction)(void (*)(void))extend, METH_FASTCALL, NULL},
    {"find", (PyCFunction)find, METH_O, NULL},
    {"pop", (PyCFunction)pop, METH_NOARGS, NULL},
    {"seqs", (PyCFunction)seqs, METH_NOARGS, NULL},
    {0},
};

static PyGetSetDef properties[] = {
    {"is_full", (getter)get_is_full, NULL, NULL, NULL},
    {"last", (getter)get_last, NULL, NULL, NULL},
    {"nbytes", (getter)get_nbytes, NULL, NULL, NULL},
    {"row_bytes", (getter)get_row_bytes, NULL, NULL, NULL},
    {"wants_tidying", (getter)get_wants_tidying, NULL, NULL, NULL},
    {0},
};

static PyMemberDef members[] = {
    {"answers", T_OBJECT_EX, offsetof(OpenRows, answers), READONLY, NULL},
    {"added", T_ULONGLONG, offsetof(OpenRows, added), 0, NULL},
    {"base", T_ULONGLONG, offsetof(OpenRows, base), 0, NULL},
    {"first", T_ULONGLONG, offsetof(OpenRows, first), READONLY, NULL},
    {"flags", T_OBJECT_EX, offsetof(OpenRows, flags), READONLY, NULL},
    {"has_counters", T_BOOL, offsetof(OpenRows, has_counters), 0, NULL},
    {"high", T_ULONGLONG, offsetof(OpenRows, high), 0, NULL},
    {"history_id", T_ULONGLONG, offsetof(OpenRows, history_id), 0, NULL},
    {"is_awaited", T_BOOL, offsetof(OpenRows, is_awaited), 0, NULL},
    {"last_cas", T_ULONGLONG, offsetof(OpenRows, last_cas), 0, NULL},
    {"live", T_ULONGLONG, offsetof(OpenRows, live), 0, NULL},
    {"mean_bytes", T_ULONGLONG, offsetof(OpenRows, mean_bytes), 0, NULL},
    {"start", T_ULONGLONG, offsetof(OpenRows, start), READONLY, NULL},
    {"table", T_OBJECT_EX, offsetof(OpenRows, table), READONLY, NULL},
    {"superseded", T_ULONGLONG, offsetof(OpenRows, superseded), 0, NULL},
    {"tidy_at", T_ULONGLONG, offsetof(OpenRows, tidy_at), 0, NULL},
    {0},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, "See upr_kernel/pure/open_rows.py."},
    {Py_tp_new, new_rows},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_members, members},
    {Py_sq_length, length},
    {0},
};

static PyType_Spec type_spec = {
    .name = "upr_kernel._native.OpenRows",
    .basicsize = sizeof(OpenRows),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = type_slots,
};

static PyTypeObject *open_rows_type;

bool
is_open_rows(PyObject *object)
{
    return Py_TYPE(object) == open_rows_type;
}

int
add_open_rows(PyObject *module)
{
    open_rows_type = (PyTypeObject *)PyType_FromSpec(&type_spec);
    if (open_rows_type == NULL)
        return -1;
    return PyModule_AddObjectRef(module, "OpenRows", (PyObject *)open_rows_type);
}
