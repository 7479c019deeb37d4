/* What a partition has answered to publishers, by writer and counter, for Python.
   upr_kernel/pure/answers.py says what each call does. */

#include "answers.h"

#include <stdlib.h>
#include <structmember.h>

static bool
writer_of(PyObject *object, const uint8_t **writer)
{
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(object, &bytes, &length) < 0)
        return false;
    if (length != WRITER_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a writer's ID has 16 bytes");
        return false;
    }
    *writer = (const uint8_t *)bytes;
    return true;
}

/* How much more it takes than before, as a Python number. */
static PyObject *
growth_since(const Answers *self, uint64_t nbytes_before)
{
    return PyLong_FromLongLong((long long)(self->nbytes - nbytes_before));
}

static bool
is_above_newest(const Writer *writer, uint64_t counter)
{
    if (writer == NULL || !writer->count || counter > newest_of(writer)->counter)
        return true;
    PyErr_SetString(PyExc_ValueError, "a writer's counters rise");
    return false;
}

static PyObject *
remember(Answers *self, PyObject *const *args, Py_ssize_t count)
{
    const uint8_t *writer;
    uint64_t counter, high, attempt, nbytes_before = self->nbytes;
    if (!takes("remember", count, 5, 5) || !writer_of(args[0], &writer) ||
        !number_of(args[1], &counter) || !number_of(args[3], &high) ||
        !number_of(args[4], &attempt) ||
        !is_above_newest(answers_find_writer(self, writer), counter))
        return NULL;
    if (!PyBytes_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "an answer is bytes");
    Py_INCREF(args[2]);
    if (!answers_keep_bytes(self, writer, counter, args[2], high, attempt))
        return NULL;
    return growth_since(self, nbytes_before);
}

static PyObject *
replace_newest(Answers *self, PyObject *const *args, Py_ssize_t count)
{
    const uint8_t *id;
    uint64_t high, attempt, nbytes_before = self->nbytes;
    if (!takes("replace_newest", count, 4, 4) || !writer_of(args[0], &id) ||
        !number_of(args[2], &high) || !number_of(args[3], &attempt))
        return NULL;
    if (!PyBytes_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "an answer is bytes");
    Writer *writer = answers_find_writer(self, id);
    if (writer == NULL)
        return PyErr_Format(PyExc_KeyError, "no such writer");
    Answer *replaced = newest_of(writer);
    uint64_t applied_high = effect_high(replaced);
    /* All memory is taken first: a batch without an answer would count as new. */
    Answer *answer = answers_reserve_order(self) ? answer_new(id, replaced->counter, high) : NULL;
    if (answer == NULL)
        return NULL;
    if (!answers_forget(self, writer, replaced, high)) {
        free(answer);
        return NULL;
    }
    /* Its place in the ring is free. */
    writer->count--;
    answers_touch(self, writer);
    answers_set_applied_high(self, answer, applied_high);
    answers_place(self, writer, answer, Py_NewRef(args[1]), attempt);
    return growth_since(self, nbytes_before);
}

static PyObject *
note_applied(Answers *self, PyObject *const *args, Py_ssize_t count)
{
    const uint8_t *id;
    uint64_t counter, applied_high;
    if (!takes("note_applied", count, 3, 3) || !writer_of(args[0], &id) ||
        !number_of(args[1], &counter) || !number_of(args[2], &applied_high))
        return NULL;
    Writer *writer = answers_find_writer(self, id);
    Answer *answer = writer == NULL ? NULL : writer_find_answer(writer, counter);
    if (answer == NULL)
        return PyErr_Format(PyExc_KeyError, "no such answer");
    answers_set_applied_high(self, answer, applied_high);
    Py_RETURN_NONE;
}

/* Asking. */

static PyObject *
answer_to(Answers *self, PyObject *const *args, Py_ssize_t count)
{
    const uint8_t *id;
    uint64_t counter;
    if (!takes("answer_to", count, 2, 2) || !writer_of(args[0], &id) || !number_of(args[1], &counter))
        return NULL;
    const Writer *writer = answers_find_writer(self, id);
    const Answer *answer = writer == NULL ? NULL : writer_find_answer(writer, counter);
    bool may_be_forgotten =
        writer != NULL && answer == NULL && counter <= newest_of(writer)->counter;
    return Py_BuildValue("OO", answer == NULL ? Py_None : answer->bytes,
                         may_be_forgotten ? Py_True : Py_False);
}

static PyObject *
is_new(Answers *self, PyObject *const *args, Py_ssize_t count)
{
    const uint8_t *id;
    uint64_t counter, attempt;
    if (!takes("is_new", count, 3, 3) || !writer_of(args[0], &id) || !number_of(args[1], &counter) ||
        !number_of(args[2], &attempt))
        return NULL;
    return PyBool_FromLong(answers_expect((PyObject *)self, id, counter, attempt));
}

static PyObject *
attempt_of(Answers *self, PyObject *object)
{
    const uint8_t *id;
    if (!writer_of(object, &id))
        return NULL;
    const Writer *writer = answers_find_writer(self, id);
    return PyLong_FromUnsignedLongLong(writer == NULL ? 0 : writer->attempt);
}

static PyObject *
newest(Answers *self, PyObject *object)
{
    const uint8_t *id;
    if (!writer_of(object, &id))
        return NULL;
    const Writer *writer = answers_find_writer(self, id);
    if (writer == NULL)
        Py_RETURN_NONE;
    const Answer *answer = newest_of(writer);
    return Py_BuildValue("KO", (unsigned long long)answer->counter, answer->bytes);
}

/* Appends the answer to a batch, with a number. False with an exception set. */
static bool
append_row(PyObject *list, const Answer *answer, uint64_t number)
{
    PyObject *row = Py_BuildValue("y#KKO", (const char *)answer->writer, (Py_ssize_t)WRITER_BYTES,
                                  (unsigned long long)answer->counter, (unsigned long long)number,
                                  answer->bytes);
    bool is_done = row != NULL && PyList_Append(list, row) == 0;
    Py_XDECREF(row);
    return is_done;
}

static PyObject *
between(Answers *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t start, end, count_max, found = 0, last_high = 0;
    if (!takes("between", count, 3, 3) || !number_of(args[0], &start) ||
        !number_of(args[1], &end) || !number_of(args[2], &count_max))
        return NULL;
    PyObject *list = PyList_New(0);
    for (uint64_t at = answers_bisect_order(self, start);
         list != NULL && at < self->order_count && self->order[at]->high <= end; at++) {
        const Answer *answer = self->order[at];
        if (answer->bytes == NULL || answer->is_forgotten)
            continue;
        if (found && found >= count_max && answer->high != last_high)
            break;
        found++;
        last_high = answer->high;
        if (!append_row(list, answer, answer->high))
            Py_CLEAR(list);
    }
    return list;
}

/* The first of the order above `seq`. */
static uint64_t
bisect_above(const Answers *self, uint64_t seq)
{
    return seq == UINT64_MAX ? self->order_count : answers_bisect_order(self, seq + 1);
}

static PyObject *
moved_between(Answers *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t start, end;
    if (!takes("moved_between", count, 2, 2) || !number_of(args[0], &start) ||
        !number_of(args[1], &end))
        return NULL;
    PyObject *list = PyList_New(0);
    uint64_t at = self->applied_count ? bisect_above(self, end) : self->order_count;
    for (; list != NULL && at < self->order_count; at++) {
        const Answer *answer = self->order[at];
        if (!answer->is_forgotten && answer->has_applied_high && start < answer->applied_high &&
            answer->applied_high <= end && !append_row(list, answer, answer->applied_high))
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *
assume_forgotten_answers(Answers *self, PyObject *Py_UNUSED(ignored))
{
    for (Writer *writer = self->oldest; writer != NULL; writer = writer->behind) {
        writer->first_high = 0;
        answers_note_forgotten(self, writer, (*ring_at(writer, 0))->high);
    }
    Py_RETURN_NONE;
}

static PyObject *
too_old_tokens(Answers *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t start, end;
    if (!takes("too_old_tokens", count, 2, 2) || !number_of(args[0], &start) ||
        !number_of(args[1], &end))
        return NULL;
    PyObject *list = PyList_New(0);
    const Writer *writer = self->forgotten_high > start ? self->oldest : NULL;
    for (; list != NULL && writer != NULL; writer = writer->behind) {
        const Answer *oldest = *ring_at(writer, 0);
        if (writer->first_high > end || writer->forgotten_high <= start || oldest->high <= end ||
            !oldest->counter)
            continue;
        PyObject *row = Py_BuildValue("y#KK", (const char *)writer->id, (Py_ssize_t)WRITER_BYTES,
                                      (unsigned long long)(oldest->counter - 1),
                                      (unsigned long long)writer->attempt);
        if (row == NULL || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *
newest_at(Answers *self, PyObject *object)
{
    uint64_t seq;
    if (!number_of(object, &seq))
        return NULL;
    PyObject *list = PyList_New(0);
    const Writer *writer = self->oldest;
    for (; list != NULL && writer != NULL; writer = writer->behind) {
        uint32_t index = writer->count;
        while (index && effect_high(*ring_at(writer, index - 1)) > seq)
            index--;
        if (index && !append_row(list, *ring_at(writer, index - 1), seq))
            Py_CLEAR(list);
    }
    return list;
}

/* For the disk. */

static PyObject *
track_unsaved(Answers *self, PyObject *Py_UNUSED(ignored))
{
    self->tracks_unsaved = true;
    Py_RETURN_NONE;
}

static size_t
row_bytes(PyObject *bytes)
{
    return ANSWER_ROW_BYTES + (bytes == NULL ? 0 : (size_t)PyBytes_Size(bytes));
}

/* Writes the row of an answer that was remembered, or of one that was forgotten, without bytes;
   returns what is behind it. */
static uint8_t *
write_row(uint8_t *row, const Answer *answer, PyObject *bytes)
{
    size_t length = row_bytes(bytes) - ANSWER_ROW_BYTES;
    memcpy(row, answer->writer, WRITER_BYTES);
    store_u64(row + WRITER_BYTES, answer->counter);
    store_u32(row + ANSWER_ROW_BYTES - 4, (uint32_t)length);
    if (length)
        memcpy(row + ANSWER_ROW_BYTES, PyBytes_AsString(bytes), length);
    return row + ANSWER_ROW_BYTES + length;
}

static PyObject *
take_unsaved(Answers *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t through, count_max, row_count = 0;
    if (!takes("take_unsaved", count, 2, 2) || !number_of(args[0], &through) ||
        !number_of(args[1], &count_max))
        return NULL;
    Answer *behind = self->unsaved_first;
    size_t nbytes = 0;
    for (; behind != NULL && behind->high <= through && row_count < count_max; row_count++) {
        nbytes += row_bytes(behind->bytes);
        behind = behind->unsaved_behind;
    }
    PyObject *rows = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)nbytes);
    PyObject *result = rows == NULL ? NULL
                                    : Py_BuildValue("NK", rows, (unsigned long long)row_count);
    if (result == NULL)
        return NULL;
    uint8_t *row = (uint8_t *)PyBytes_AsString(rows);
    while (self->unsaved_first != behind) {
        Answer *answer = self->unsaved_first;
        row = write_row(row, answer, answer->bytes);
        self->nbytes -= self->unsaved_bytes;
        if (answer->is_forgotten) {
            self->nbytes -= answer->nbytes;
            Py_CLEAR(answer->bytes);
        }
        answers_remove_unsaved(self, answer);
    }
    return result;
}

/* Truncating. */

/* Whether the answer that is remembered of the same batch outlives a truncation to `seq`. */
static bool
is_outlived(const Answers *self, const Answer *answer, uint64_t seq)
{
    const Writer *writer = answers_find_writer(self, answer->writer);
    const Answer *remembered = writer == NULL ? NULL : writer_find_answer(writer, answer->counter);
    return remembered != NULL && outlives(remembered, seq);
}

static PyObject *
rows_above(Answers *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t seq, place, count_max, undone_count = 0;
    if (!takes("rows_above", count, 3, 3) || !number_of(args[0], &seq) ||
        !number_of(args[1], &place) || !number_of(args[2], &count_max))
        return NULL;
    uint64_t first = bisect_above(self, seq), begin = place > first ? place : first;
    uint64_t left = begin < self->order_count ? self->order_count - begin : 0;
    uint64_t end = begin + (count_max < left ? count_max : left);
    for (uint64_t at = begin; at < end; at++)
        undone_count += !is_outlived(self, self->order[at], seq);
    PyObject *rows = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(ANSWER_ROW_BYTES * undone_count));
    if (rows == NULL)
        return NULL;
    uint8_t *row = (uint8_t *)PyBytes_AsString(rows);
    for (uint64_t at = begin; at < end; at++)
        if (!is_outlived(self, self->order[at], seq))
            row = write_row(row, self->order[at], NULL);
    return Py_BuildValue("NK", rows, (unsigned long long)(end < self->order_count ? end : 0));
}

/* Takes an answer out of the middle of its writer's ring. */
static void
take_out(Answers *self, Answer *answer)
{
    Writer *writer = answers_find_writer(self, answer->writer);
    uint32_t index = 0;
    while (*ring_at(writer, index) != answer)
        index++;
    for (; index + 1 < writer->count; index++)
        *ring_at(writer, index) = *ring_at(writer, index + 1);
    writer->count--;
    answers_uncount(self, writer, answer);
    self->nbytes -= answer->nbytes;
    answer_release(answer);
    if (!writer->count)
        answers_remove_writer(self, writer);
}

/* Undoes what the disk does not know of changes above `seq`. What outlives that stays: an answer, or
   that the one before it is forgotten, which then counts as if it was at `seq`. */
static void
truncate_unsaved(Answers *self, uint64_t seq)
{
    for (Answer *answer = self->unsaved_last; answer != NULL && answer->high > seq;) {
        Answer *before = answer->unsaved_before;
        if (answer->is_forgotten || !is_outlived(self, answer, seq)) {
            self->nbytes -= self->unsaved_bytes + (answer->is_forgotten ? answer->nbytes : 0);
            answers_remove_unsaved(self, answer);
        }
        else if (answer->bytes == NULL)
            answer->high = seq;
        answer = before;
    }
}

static PyObject *
truncate_to(Answers *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t seq, count_max;
    if (!takes("truncate", count, 2, 2) || !number_of(args[0], &seq) ||
        !number_of(args[1], &count_max))
        return NULL;
    truncate_unsaved(self, seq);
    if (self->forgotten_high > seq)
        self->forgotten_high = seq;
    uint64_t kept = bisect_above(self, seq), at = kept;
    for (; at < self->order_count && count_max; at++, count_max--) {
        Answer *answer = self->order[at];
        if (outlives(answer, seq)) {
            answer->high = seq;
            self->order[kept++] = answer;
            continue;
        }
        if (!answer->is_forgotten)
            take_out(self, answer);
        answer_release(answer);
    }
    uint64_t left = self->order_count - at;
    if (at > kept)
        memmove(self->order + kept, self->order + at, left * sizeof *self->order);
    self->order_count = kept + left;
    answers_tidy_order(self);
    return PyBool_FromLong(left > 0);
}

static PyObject *
check_invariants(Answers *self, PyObject *Py_UNUSED(ignored))
{
    if (!answers_are_sound(self))
        return NULL;
    Py_RETURN_NONE;
}

/* The type. */

static Py_ssize_t
length(Answers *self)
{
    return (Py_ssize_t)self->writer_count;
}

static PyObject *
new_answers(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    unsigned long long limits[8];
    if (kwargs != NULL && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Answers takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "KKKKKKKK", limits, limits + 1, limits + 2, limits + 3, limits + 4,
                          limits + 5, limits + 6, limits + 7))
        return NULL;
    if (!limits[0] || limits[0] > 1 << 16 || !limits[2]) {
        PyErr_SetString(PyExc_ValueError, "at least one answer and one writer are remembered");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Answers *self = (Answers *)allocate(type, 0); /* zeroed: no answers */
    if (self == NULL)
        return NULL;
    self->batches_max = limits[0];
    self->bytes_max = limits[1];
    self->writers_max = limits[2];
    self->total_bytes_max = limits[3];
    self->writer_bytes = limits[4];
    self->answer_bytes = limits[5];
    self->unsaved_bytes = limits[6];
    self->order_slack = limits[7];
    return (PyObject *)self;
}

static void
dealloc(Answers *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    while (self->unsaved_first != NULL)
        answers_remove_unsaved(self, self->unsaved_first);
    for (uint64_t at = 0; at < self->order_count; at++)
        answer_release(self->order[at]);
    free(self->order);
    for (Writer *writer = self->oldest, *behind; writer != NULL; writer = behind) {
        behind = writer->behind;
        for (uint32_t index = 0; index < writer->count; index++)
            answer_release(*ring_at(writer, index));
        free(writer->ring);
        free(writer);
    }
    free(self->homes);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"answer_to", (PyCFunction)(void (*)(void))answer_to, METH_FASTCALL, NULL},
    {"assume_forgotten_answers", (PyCFunction)assume_forgotten_answers, METH_NOARGS, NULL},
    {"attempt", (PyCFunction)attempt_of, METH_O, NULL},
    {"between", (PyCFunction)(void (*)(void))between, METH_FASTCALL, NULL},
    {"check_invariants", (PyCFunction)check_invariants, METH_NOARGS, NULL},
    {"is_new", (PyCFunction)(void (*)(void))is_new, METH_FASTCALL, NULL},
    {"moved_between", (PyCFunction)(void (*)(void))moved_between, METH_FASTCALL, NULL},
    {"newest", (PyCFunction)newest, METH_O, NULL},
    {"newest_at", (PyCFunction)newest_at, METH_O, NULL},
    {"note_applied", (PyCFunction)(void (*)(void))note_applied, METH_FASTCALL, NULL},
    {"remember", (PyCFunction)(void (*)(void))remember, METH_FASTCALL, NULL},
    {"replace_newest", (PyCFunction)(void (*)(void))replace_newest, METH_FASTCALL, NULL},
    {"rows_above", (PyCFunction)(void (*)(void))rows_above, METH_FASTCALL, NULL},
    {"take_unsaved", (PyCFunction)(void (*)(void))take_unsaved, METH_FASTCALL, NULL},
    {"too_old_tokens", (PyCFunction)(void (*)(void))too_old_tokens, METH_FASTCALL, NULL},
    {"track_unsaved", (PyCFunction)track_unsaved, METH_NOARGS, NULL},
    {"truncate", (PyCFunction)(void (*)(void))truncate_to, METH_FASTCALL, NULL},
    {0},
};

static PyMemberDef members[] = {
    {"has_refused", T_BOOL, offsetof(Answers, has_refused), 0, NULL},
    {"nbytes", T_ULONGLONG, offsetof(Answers, nbytes), READONLY, NULL},
    {0},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, "See upr_kernel/pure/answers.py."},
    {Py_tp_new, new_answers},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_sq_length, length},
    {0},
};

static PyType_Spec type_spec = {
    .name = "upr_kernel._native.Answers",
    .basicsize = sizeof(Answers),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = type_slots,
};

static PyTypeObject *answers_type;

bool
is_answers(PyObject *object)
{
    return Py_TYPE(object) == answers_type;
}

int
add_answers(PyObject *module)
{
    answers_type = (PyTypeObject *)PyType_FromSpec(&type_spec);
    if (answers_type == NULL)
        return -1;
    return PyModule_AddObjectRef(module, "Answers", (PyObject *)answers_type);
}
