/* What a partition has answered to publishers, by writer and counter. upr_kernel/pure/answers.py says
   what each call does.

   An answer is in up to three places: in its writer's ring, by rising counter, while it is
   remembered; in the order of all answers by high number; and in the list of what the disk does not
   know. It is freed when it has left all three. */

#include "kernel.h"
#include "siphash.h"

#include <stdlib.h>
#include <structmember.h>

enum { HOMES_MIN = 8, RING_MIN = 8, PACKED_MAX = 96 };

typedef struct Answer {
    struct Answer *unsaved_before;
    struct Answer *unsaved_behind;
    PyObject *bytes; /* NULL for a change that forgets an answer, and once nobody needs it */
    uint8_t writer[WRITER_BYTES];
    uint64_t counter;
    uint64_t high;
    uint64_t applied_high;
    uint64_t nbytes;
    uint32_t places;
    bool has_applied_high;
    bool is_forgotten;
    bool is_unsaved;
} Answer;

typedef struct Writer {
    uint8_t id[WRITER_BYTES];
    struct Writer *next;   /* of the same home */
    struct Writer *before; /* heard from before */
    struct Writer *behind; /* heard from later */
    Answer **ring;
    uint32_t ring_size; /* a power of two */
    uint32_t first;
    uint32_t count;
    uint64_t attempt;
    uint64_t nbytes;
    uint64_t first_high;     /* the number of its first answer */
    uint64_t forgotten_high; /* the highest number of an answer that was pushed out */
    bool is_reduced; /* to its newest answer: nothing was heard from it for long */
} Writer;

typedef struct {
    PyObject_HEAD
    uint64_t batches_max;
    uint64_t bytes_max;
    uint64_t writers_max;
    uint64_t total_bytes_max;
    uint64_t writer_bytes;
    uint64_t answer_bytes;
    uint64_t unsaved_bytes;
    uint64_t order_slack;
    Writer **homes; /* `home_count`, a power of two */
    uint64_t home_count;
    uint64_t writer_count;
    Writer *oldest; /* by when each was last heard from */
    Writer *newest;
    Writer *first_recent; /* all before it are reduced; NULL if all are */
    uint64_t total_bytes; /* of all writers and answers that are remembered */
    uint64_t reduced_bytes; /* of reduced writers and their answers */
    Answer **order;
    uint64_t order_size;
    uint64_t order_count;
    uint64_t answer_count;
    uint64_t applied_count; /* those of them that know where their batches had their effects */
    uint64_t forgotten_high; /* the highest of all writers', or more */
    Answer *unsaved_first;
    Answer *unsaved_last;
    bool tracks_unsaved;
    char has_refused;
    uint64_t nbytes;
} Answers;

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

/* Answers. */

static Answer *
answer_new(const uint8_t *writer, uint64_t counter, uint64_t high)
{
    Answer *answer = calloc(1, sizeof *answer);
    if (answer == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    memcpy(answer->writer, writer, WRITER_BYTES);
    answer->counter = counter;
    answer->high = high;
    return answer;
}

/* It has left one of its places. */
static void
answer_release(Answer *answer)
{
    if (--answer->places)
        return;
    Py_XDECREF(answer->bytes);
    free(answer);
}

/* The high number with the batch's effect. */
static uint64_t
effect_high(const Answer *answer)
{
    return answer->has_applied_high ? answer->applied_high : answer->high;
}

static bool
outlives(const Answer *answer, uint64_t seq)
{
    return !answer->is_forgotten && answer->has_applied_high && answer->applied_high <= seq;
}

static void
add_unsaved(Answers *self, Answer *answer)
{
    answer->is_unsaved = true;
    answer->unsaved_before = self->unsaved_last;
    answer->unsaved_behind = NULL;
    if (self->unsaved_last != NULL)
        self->unsaved_last->unsaved_behind = answer;
    else
        self->unsaved_first = answer;
    self->unsaved_last = answer;
    answer->places++;
}

static void
remove_unsaved(Answers *self, Answer *answer)
{
    if (answer->unsaved_before != NULL)
        answer->unsaved_before->unsaved_behind = answer->unsaved_behind;
    else
        self->unsaved_first = answer->unsaved_behind;
    if (answer->unsaved_behind != NULL)
        answer->unsaved_behind->unsaved_before = answer->unsaved_before;
    else
        self->unsaved_last = answer->unsaved_before;
    answer->is_unsaved = false;
    answer_release(answer);
}

/* Writers. */

static inline Answer **
ring_at(const Writer *writer, uint32_t index)
{
    return writer->ring + ((writer->first + index) & (writer->ring_size - 1));
}

static Answer *
newest_of(const Writer *writer)
{
    return *ring_at(writer, writer->count - 1);
}

static inline uint64_t
home_of(const Answers *self, const uint8_t *id)
{
    return siphash13(id, WRITER_BYTES, hash_secret) & (self->home_count - 1);
}

static Writer *
find_writer(const Answers *self, const uint8_t *id)
{
    if (!self->home_count)
        return NULL;
    Writer *writer = self->homes[home_of(self, id)];
    while (writer != NULL && memcmp(writer->id, id, WRITER_BYTES))
        writer = writer->next;
    return writer;
}

/* The answer of a writer with this counter; NULL where there is none. */
static Answer *
find_answer(const Writer *writer, uint64_t counter)
{
    uint32_t low = 0, high = writer->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if ((*ring_at(writer, middle))->counter < counter)
            low = middle + 1;
        else
            high = middle;
    }
    Answer *answer = low < writer->count ? *ring_at(writer, low) : NULL;
    return answer != NULL && answer->counter == counter ? answer : NULL;
}

static void
unlink_writer(Answers *self, Writer *writer)
{
    if (self->first_recent == writer)
        self->first_recent = writer->behind;
    if (writer->is_reduced)
        self->reduced_bytes -= self->writer_bytes + writer->nbytes;
    writer->is_reduced = false;
    if (writer->before != NULL)
        writer->before->behind = writer->behind;
    else
        self->oldest = writer->behind;
    if (writer->behind != NULL)
        writer->behind->before = writer->before;
    else
        self->newest = writer->before;
}

static void
link_newest(Answers *self, Writer *writer)
{
    writer->before = self->newest;
    writer->behind = NULL;
    if (self->first_recent == NULL)
        self->first_recent = writer;
    if (self->newest != NULL)
        self->newest->behind = writer;
    else
        self->oldest = writer;
    self->newest = writer;
}

static bool
widen_homes(Answers *self)
{
    uint64_t count = self->home_count ? 2 * self->home_count : HOMES_MIN;
    Writer **homes = calloc(count, sizeof *homes);
    if (homes == NULL)
        return no_memory();
    free(self->homes);
    self->homes = homes;
    self->home_count = count;
    for (Writer *writer = self->oldest; writer != NULL; writer = writer->behind) {
        Writer **home = homes + home_of(self, writer->id);
        writer->next = *home;
        *home = writer;
    }
    return true;
}

static Writer *
add_writer(Answers *self, const uint8_t *id, uint64_t high)
{
    if (self->writer_count >= self->home_count && !widen_homes(self))
        return NULL;
    Writer *writer = calloc(1, sizeof *writer);
    if (writer == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    memcpy(writer->id, id, WRITER_BYTES);
    writer->first_high = high;
    Writer **home = self->homes + home_of(self, id);
    writer->next = *home;
    *home = writer;
    link_newest(self, writer);
    self->writer_count++;
    self->nbytes += self->writer_bytes;
    self->total_bytes += self->writer_bytes;
    return writer;
}

/* Removes a writer that has no answers. */
static void
remove_writer(Answers *self, Writer *writer)
{
    Writer **link = self->homes + home_of(self, writer->id);
    while (*link != writer)
        link = &(*link)->next;
    *link = writer->next;
    unlink_writer(self, writer);
    self->writer_count--;
    self->nbytes -= self->writer_bytes;
    self->total_bytes -= self->writer_bytes;
    free(writer->ring);
    free(writer);
}

static bool
reserve_ring(Writer *writer)
{
    if (writer->count < writer->ring_size)
        return true;
    uint32_t size = writer->ring_size ? 2 * writer->ring_size : RING_MIN;
    Answer **ring = malloc(size * sizeof *ring);
    if (ring == NULL)
        return no_memory();
    for (uint32_t index = 0; index < writer->count; index++)
        ring[index] = *ring_at(writer, index);
    free(writer->ring);
    writer->ring = ring;
    writer->ring_size = size;
    writer->first = 0;
    return true;
}

/* The order. */

static bool
reserve_order(Answers *self)
{
    if (self->order_count < self->order_size)
        return true;
    uint64_t size = self->order_size ? 2 * self->order_size : RING_MIN;
    Answer **order = realloc(self->order, size * sizeof *order);
    if (order == NULL)
        return no_memory();
    self->order = order;
    self->order_size = size;
    return true;
}

/* Takes the forgotten answers out once they are more than half. */
static void
tidy_order(Answers *self)
{
    if (self->order_count <= 2 * self->answer_count + self->order_slack)
        return;
    uint64_t kept = 0;
    for (uint64_t index = 0; index < self->order_count; index++) {
        Answer *answer = self->order[index];
        if (answer->is_forgotten)
            answer_release(answer);
        else
            self->order[kept++] = answer;
    }
    self->order_count = kept;
}

/* The first of the order with at least this high number. */
static uint64_t
bisect_order(const Answers *self, uint64_t high)
{
    uint64_t low = 0, behind = self->order_count;
    while (low < behind) {
        uint64_t middle = low + (behind - low) / 2;
        if (self->order[middle]->high < high)
            low = middle + 1;
        else
            behind = middle;
    }
    return low;
}

/* Remembering and forgetting. */

/* An answer of a writer is remembered no more. */
static void
uncount(Answers *self, Writer *writer, const Answer *answer)
{
    writer->nbytes -= answer->nbytes;
    self->total_bytes -= answer->nbytes;
    if (writer->is_reduced)
        self->reduced_bytes -= answer->nbytes;
    self->answer_count--;
    self->applied_count -= answer->has_applied_high;
}

/* Forgets an answer, which the caller then takes out of its writer's ring: the ring's place goes
   with it. False without memory; then nothing has changed. */
static bool
forget(Answers *self, Writer *writer, Answer *answer, uint64_t high)
{
    /* If it came and goes at one high number, the disk need not know of it. */
    bool is_brief = answer->is_unsaved && answer->high == high;
    Answer *change = NULL;
    if (self->tracks_unsaved && !is_brief) {
        change = answer_new(answer->writer, answer->counter, high);
        if (change == NULL)
            return false;
    }
    uncount(self, writer, answer);
    answer->is_forgotten = true;
    bool is_gone = true;
    if (change == NULL) {
        self->nbytes -= answer->nbytes;
        if (self->tracks_unsaved) {
            self->nbytes -= self->unsaved_bytes;
            remove_unsaved(self, answer);
        }
    }
    else {
        self->nbytes += self->unsaved_bytes;
        /* A commit up to a lower number may still have to write the answer: then it stays. */
        is_gone = !answer->is_unsaved;
        if (is_gone)
            self->nbytes -= answer->nbytes;
        add_unsaved(self, change);
    }
    if (is_gone)
        Py_CLEAR(answer->bytes);
    answer_release(answer);
    return true;
}

static void
note_forgotten(Answers *self, Writer *writer, uint64_t high)
{
    if (high > writer->forgotten_high)
        writer->forgotten_high = high;
    if (high > self->forgotten_high)
        self->forgotten_high = high;
}

/* Later answers push the oldest one out. */
static bool
forget_oldest(Answers *self, Writer *writer, uint64_t high)
{
    Answer *oldest = *ring_at(writer, 0);
    uint64_t oldest_high = oldest->high;
    if (!forget(self, writer, oldest, high))
        return false;
    note_forgotten(self, writer, oldest_high);
    writer->first++;
    writer->count--;
    return true;
}

static bool
forget_writer(Answers *self, Writer *writer, uint64_t high)
{
    while (writer->count)
        if (!forget_oldest(self, writer, high))
            return false;
    remove_writer(self, writer);
    return true;
}

/* These forget what is over a limit. Without memory to note that for the disk, it stays until the
   next answer comes: the new answer is of a batch that was applied, and must be remembered. */

static void
forget_surplus_writers(Answers *self, uint64_t high)
{
    while (self->writer_count > self->writers_max)
        if (!forget_writer(self, self->oldest, high)) {
            PyErr_Clear();
            return;
        }
}

static void
forget_surplus_answers(Answers *self, Writer *writer, uint64_t high)
{
    while (writer->count > self->batches_max ||
           (writer->nbytes > self->bytes_max && writer->count > 1))
        if (!forget_oldest(self, writer, high)) {
            PyErr_Clear();
            return;
        }
}

/* First the writers heard from longest ago are reduced to their newest answers: of these the older
   batches are still known to be old. Reduced writers have at most half of the room, so that the
   others keep what their batches in flight need. */
static void
forget_surplus_bytes(Answers *self, uint64_t high)
{
    bool has_memory = true;
    while (has_memory && self->total_bytes > self->total_bytes_max) {
        Writer *writer = self->first_recent;
        bool is_last = writer == self->newest && writer->count == 1;
        if (is_last && self->writer_count == 1)
            return;
        if (is_last || self->reduced_bytes > self->total_bytes_max / 2)
            has_memory = forget_writer(self, self->oldest, high);
        else if (writer->count > 1)
            has_memory = forget_oldest(self, writer, high);
        else {
            writer->is_reduced = true;
            self->reduced_bytes += self->writer_bytes + writer->nbytes;
            self->first_recent = writer->behind;
        }
    }
    if (!has_memory)
        PyErr_Clear();
}

/* Notes at which high number the batch of a remembered answer had its effect. */
static void
set_applied_high(Answers *self, Answer *answer, uint64_t applied_high)
{
    self->applied_count += !answer->has_applied_high;
    answer->applied_high = applied_high;
    answer->has_applied_high = true;
}

/* A writer was heard from. */
static void
touch(Answers *self, Writer *writer)
{
    if (writer != self->newest || writer->is_reduced) {
        unlink_writer(self, writer);
        link_newest(self, writer);
    }
}

/* Puts an answer, whose bytes are given away, in its places, where there is room for it. */
static void
place(Answers *self, Writer *writer, Answer *answer, PyObject *bytes, uint64_t attempt)
{
    answer->bytes = bytes;
    answer->nbytes = self->answer_bytes + (uint64_t)PyBytes_Size(bytes);
    answer->places = 2;
    writer->attempt = attempt > writer->attempt ? attempt : writer->attempt;
    *ring_at(writer, writer->count++) = answer;
    writer->nbytes += answer->nbytes;
    self->total_bytes += answer->nbytes;
    self->order[self->order_count++] = answer;
    self->answer_count++;
    self->nbytes += answer->nbytes;
    if (self->tracks_unsaved) {
        add_unsaved(self, answer);
        self->nbytes += self->unsaved_bytes;
    }
    forget_surplus_answers(self, writer, answer->high);
    forget_surplus_bytes(self, answer->high);
    tidy_order(self);
}

/* Keeps an answer, whose bytes are given away. False with an exception set. */
static bool
keep(Answers *self, const uint8_t *id, uint64_t counter, PyObject *bytes, uint64_t high,
     uint64_t attempt)
{
    Answer *answer = NULL;
    Writer *writer = find_writer(self, id);
    if (writer == NULL) {
        writer = add_writer(self, id, high);
        if (writer != NULL)
            forget_surplus_writers(self, high);
    }
    else
        touch(self, writer);
    if (writer != NULL && reserve_ring(writer) && reserve_order(self))
        answer = answer_new(id, counter, high);
    if (answer == NULL) {
        Py_DECREF(bytes);
        if (writer != NULL && !writer->count)
            remove_writer(self, writer);
        return false;
    }
    place(self, writer, answer, bytes, attempt);
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
        !number_of(args[4], &attempt) || !is_above_newest(find_writer(self, writer), counter))
        return NULL;
    if (!PyBytes_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "an answer is bytes");
    Py_INCREF(args[2]);
    if (!keep(self, writer, counter, args[2], high, attempt))
        return NULL;
    return growth_since(self, nbytes_before);
}

/* MessagePack, in the shortest form. */
static uint8_t *
pack_number(uint8_t *at, uint64_t number)
{
    int length = number < 1u << 7            ? 0
                 : number < 1u << 8          ? 1
                 : number < 1u << 16         ? 2
                 : number < (uint64_t)1 << 32 ? 4
                                             : 8;
    if (!length) {
        *at++ = (uint8_t)number;
        return at;
    }
    *at++ = (uint8_t)(length == 1 ? 0xcc : length == 2 ? 0xcd : length == 4 ? 0xce : 0xcf);
    for (int shift = 8 * (length - 1); shift >= 0; shift -= 8)
        *at++ = (uint8_t)(number >> shift);
    return at;
}

bool
answers_keep(PyObject *object, const PlainRun *run)
{
    /* An array of ten: no failures, reasons, counters and values, and no chain. */
    uint8_t packed[PACKED_MAX], *at = packed;
    *at++ = 0x9a;
    at = pack_number(at, run->history_id);
    at = pack_number(at, run->first_seq);
    at = pack_number(at, run->last_seq);
    at = pack_number(at, run->first_cas);
    *at++ = 0x90;
    *at++ = 0xc4;
    *at++ = 0;
    *at++ = 0x90;
    *at++ = 0x90;
    *at++ = 0;
    at = pack_number(at, run->attempt);
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)packed, at - packed);
    return bytes != NULL && keep((Answers *)object, run->writer, run->counter, bytes,
                                 run->last_seq, run->attempt);
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
    Writer *writer = find_writer(self, id);
    if (writer == NULL)
        return PyErr_Format(PyExc_KeyError, "no such writer");
    Answer *replaced = newest_of(writer);
    uint64_t applied_high = effect_high(replaced);
    /* All memory first: without any answer the batch would count as new. */
    Answer *answer = reserve_order(self) ? answer_new(id, replaced->counter, high) : NULL;
    if (answer == NULL)
        return NULL;
    if (!forget(self, writer, replaced, high)) {
        free(answer);
        return NULL;
    }
    /* Its place in the ring is free. */
    writer->count--;
    touch(self, writer);
    set_applied_high(self, answer, applied_high);
    place(self, writer, answer, Py_NewRef(args[1]), attempt);
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
    Writer *writer = find_writer(self, id);
    Answer *answer = writer == NULL ? NULL : find_answer(writer, counter);
    if (answer == NULL)
        return PyErr_Format(PyExc_KeyError, "no such answer");
    set_applied_high(self, answer, applied_high);
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
    const Writer *writer = find_writer(self, id);
    const Answer *answer = writer == NULL ? NULL : find_answer(writer, counter);
    bool may_be_forgotten =
        writer != NULL && answer == NULL && counter <= newest_of(writer)->counter;
    return Py_BuildValue("OO", answer == NULL ? Py_None : answer->bytes,
                         may_be_forgotten ? Py_True : Py_False);
}

bool
answers_expect(PyObject *object, const uint8_t *id, uint64_t counter, uint64_t attempt)
{
    const Answers *self = (const Answers *)object;
    if (self->has_refused)
        return false;
    const Writer *writer = find_writer(self, id);
    return writer == NULL || (counter > newest_of(writer)->counter && attempt >= writer->attempt);
}

uint64_t
answers_bytes(PyObject *object)
{
    return ((const Answers *)object)->nbytes;
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
    const Writer *writer = find_writer(self, id);
    return PyLong_FromUnsignedLongLong(writer == NULL ? 0 : writer->attempt);
}

static PyObject *
newest(Answers *self, PyObject *object)
{
    const uint8_t *id;
    if (!writer_of(object, &id))
        return NULL;
    const Writer *writer = find_writer(self, id);
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
    for (uint64_t at = bisect_order(self, start);
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
    return seq == UINT64_MAX ? self->order_count : bisect_order(self, seq + 1);
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
        note_forgotten(self, writer, (*ring_at(writer, 0))->high);
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
        remove_unsaved(self, answer);
    }
    return result;
}

/* Truncating. */

/* Whether the answer that is remembered of the same batch outlives a truncation to `seq`. */
static bool
is_outlived(const Answers *self, const Answer *answer, uint64_t seq)
{
    const Writer *writer = find_writer(self, answer->writer);
    const Answer *remembered = writer == NULL ? NULL : find_answer(writer, answer->counter);
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
    Writer *writer = find_writer(self, answer->writer);
    uint32_t index = 0;
    while (*ring_at(writer, index) != answer)
        index++;
    for (; index + 1 < writer->count; index++)
        *ring_at(writer, index) = *ring_at(writer, index + 1);
    writer->count--;
    uncount(self, writer, answer);
    self->nbytes -= answer->nbytes;
    answer_release(answer);
    if (!writer->count)
        remove_writer(self, writer);
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
            remove_unsaved(self, answer);
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
    tidy_order(self);
    return PyBool_FromLong(left > 0);
}

/* Checks. */

static bool
broken(const char *what)
{
    PyErr_SetString(PyExc_AssertionError, what);
    return false;
}

static bool
check_writer(const Answers *self, const Writer *writer, uint64_t *nbytes, uint64_t *count)
{
    uint64_t sum = 0;
    if (!writer->count || writer->count > self->batches_max)
        return broken("too many answers of a writer, or none");
    for (uint32_t index = 0; index < writer->count; index++) {
        const Answer *answer = *ring_at(writer, index);
        if (index && (*ring_at(writer, index - 1))->counter >= answer->counter)
            return broken("counters do not rise");
        if (answer->bytes == NULL || answer->is_forgotten)
            return broken("a remembered answer is gone");
        sum += answer->nbytes;
    }
    if (sum != writer->nbytes || (sum > self->bytes_max && writer->count > 1))
        return broken("a writer's bytes");
    *nbytes += self->writer_bytes + sum;
    *count += writer->count;
    return true;
}

/* What all writers and answers that are remembered take. */
static bool
check_total(const Answers *self, uint64_t total_bytes, uint64_t answer_count)
{
    uint64_t reduced_bytes = 0;
    const Writer *writer = self->oldest;
    for (; writer != NULL && writer->is_reduced; writer = writer->behind) {
        if (writer->count != 1)
            return broken("a reduced writer has several answers");
        reduced_bytes += self->writer_bytes + writer->nbytes;
    }
    if (writer != self->first_recent)
        return broken("the first writer that is not reduced");
    for (; writer != NULL; writer = writer->behind)
        if (writer->is_reduced)
            return broken("a reduced writer was heard from late");
    if (reduced_bytes != self->reduced_bytes || total_bytes != self->total_bytes ||
        (total_bytes > self->total_bytes_max && answer_count > 1))
        return broken("the bytes of all writers");
    return true;
}

static PyObject *
check_invariants(Answers *self, PyObject *Py_UNUSED(ignored))
{
    uint64_t nbytes = 0, count = 0, writers = 0, remembered = 0, applied = 0, last = 0;
    for (const Writer *writer = self->oldest; writer != NULL; writer = writer->behind, writers++)
        if (find_writer(self, writer->id) != writer ||
            !check_writer(self, writer, &nbytes, &count))
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_AssertionError, "a lost writer");
    if (!check_total(self, nbytes, count))
        return NULL;
    for (uint64_t at = 0; at < self->order_count; at++) {
        if (self->order[at]->high < last)
            return PyErr_Format(PyExc_AssertionError, "numbers do not rise");
        last = self->order[at]->high;
        if (!self->order[at]->is_forgotten) {
            remembered++;
            applied += self->order[at]->has_applied_high;
        }
    }
    last = 0;
    for (const Answer *answer = self->unsaved_first; answer != NULL;
         answer = answer->unsaved_behind) {
        if (answer->high < last || !answer->is_unsaved)
            return PyErr_Format(PyExc_AssertionError, "unsaved numbers do not rise");
        last = answer->high;
        nbytes += self->unsaved_bytes + (answer->is_forgotten ? answer->nbytes : 0);
    }
    if (writers != self->writer_count || writers > self->writers_max ||
        count != self->answer_count || remembered != count || applied != self->applied_count ||
        self->order_count > 2 * count + self->order_slack || nbytes != self->nbytes)
        broken("answers or bytes are counted wrong");
    else
        Py_RETURN_NONE;
    return NULL;
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
        remove_unsaved(self, self->unsaved_first);
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
