/* Remembering what a partition has answered to publishers, and forgetting what is over its limits.

   An answer is in up to three places: in its writer's ring, by rising counter, while it is
   remembered; in the order of all answers by high number; and in the list of what the disk does not
   know. It is freed when it has left all three. */

#include "answers.h"
#include "siphash.h"

#include <stdlib.h>

enum { HOMES_MIN = 8, RING_MIN = 8, PACKED_MAX = 96 };

/* Answers. */

Answer *
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

void
answer_release(Answer *answer)
{
    if (--answer->places)
        return;
    Py_XDECREF(answer->bytes);
    free(answer);
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

void
answers_remove_unsaved(Answers *self, Answer *answer)
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

static inline uint64_t
home_of(const Answers *self, const uint8_t *id)
{
    return siphash13(id, WRITER_BYTES, hash_secret) & (self->home_count - 1);
}

Writer *
answers_find_writer(const Answers *self, const uint8_t *id)
{
    if (!self->home_count)
        return NULL;
    Writer *writer = self->homes[home_of(self, id)];
    while (writer != NULL && memcmp(writer->id, id, WRITER_BYTES))
        writer = writer->next;
    return writer;
}

Answer *
writer_find_answer(const Writer *writer, uint64_t counter)
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

void
answers_remove_writer(Answers *self, Writer *writer)
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

bool
answers_reserve_order(Answers *self)
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

void
answers_tidy_order(Answers *self)
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

uint64_t
answers_bisect_order(const Answers *self, uint64_t high)
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

void
answers_uncount(Answers *self, Writer *writer, const Answer *answer)
{
    writer->nbytes -= answer->nbytes;
    self->total_bytes -= answer->nbytes;
    if (writer->is_reduced)
        self->reduced_bytes -= answer->nbytes;
    self->answer_count--;
    self->applied_count -= answer->has_applied_high;
}

bool
answers_forget(Answers *self, Writer *writer, Answer *answer, uint64_t high)
{
    /* If it came and goes at one high number, the disk need not know of it. */
    bool is_brief = answer->is_unsaved && answer->high == high;
    Answer *change = NULL;
    if (self->tracks_unsaved && !is_brief) {
        change = answer_new(answer->writer, answer->counter, high);
        if (change == NULL)
            return false;
    }
    answers_uncount(self, writer, answer);
    answer->is_forgotten = true;
    bool is_gone = true;
    if (change == NULL) {
        self->nbytes -= answer->nbytes;
        if (self->tracks_unsaved) {
            self->nbytes -= self->unsaved_bytes;
            answers_remove_unsaved(self, answer);
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

void
answers_note_forgotten(Answers *self, Writer *writer, uint64_t high)
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
    if (!answers_forget(self, writer, oldest, high))
        return false;
    answers_note_forgotten(self, writer, oldest_high);
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
    answers_remove_writer(self, writer);
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

void
answers_set_applied_high(Answers *self, Answer *answer, uint64_t applied_high)
{
    self->applied_count += !answer->has_applied_high;
    answer->applied_high = applied_high;
    answer->has_applied_high = true;
}

void
answers_touch(Answers *self, Writer *writer)
{
    if (writer != self->newest || writer->is_reduced) {
        unlink_writer(self, writer);
        link_newest(self, writer);
    }
}

void
answers_place(Answers *self, Writer *writer, Answer *answer, PyObject *bytes, uint64_t attempt)
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
    answers_tidy_order(self);
}

bool
answers_keep_bytes(Answers *self, const uint8_t *id, uint64_t counter, PyObject *bytes,
                   uint64_t high, uint64_t attempt)
{
    Answer *answer = NULL;
    Writer *writer = answers_find_writer(self, id);
    if (writer == NULL) {
        writer = add_writer(self, id, high);
        if (writer != NULL)
            forget_surplus_writers(self, high);
    }
    else
        answers_touch(self, writer);
    if (writer != NULL && reserve_ring(writer) && answers_reserve_order(self))
        answer = answer_new(id, counter, high);
    if (answer == NULL) {
        Py_DECREF(bytes);
        if (writer != NULL && !writer->count)
            answers_remove_writer(self, writer);
        return false;
    }
    answers_place(self, writer, answer, bytes, attempt);
    return true;
}

/* For the runs of a bundle. */

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
    return bytes != NULL && answers_keep_bytes((Answers *)object, run->writer, run->counter, bytes,
                                 run->last_seq, run->attempt);
}

bool
answers_expect(PyObject *object, const uint8_t *id, uint64_t counter, uint64_t attempt)
{
    const Answers *self = (const Answers *)object;
    if (self->has_refused)
        return false;
    const Writer *writer = answers_find_writer(self, id);
    if (writer == NULL)
        return counter > 0;
    return counter > newest_of(writer)->counter && attempt >= writer->attempt;
}

uint64_t
answers_bytes(PyObject *object)
{
    return ((const Answers *)object)->nbytes;
}
