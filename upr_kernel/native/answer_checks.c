/* Whether the parts of what a partition has answered fit together. */

#include "answers.h"

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

bool
answers_are_sound(const Answers *self)
{
    uint64_t nbytes = 0, count = 0, writers = 0, remembered = 0, applied = 0, last = 0;
    for (const Writer *writer = self->oldest; writer != NULL; writer = writer->behind, writers++)
        if (answers_find_writer(self, writer->id) != writer ||
            !check_writer(self, writer, &nbytes, &count))
            return PyErr_Occurred() ? false : broken("a lost writer");
    if (!check_total(self, nbytes, count))
        return false;
    for (uint64_t at = 0; at < self->order_count; at++) {
        if (self->order[at]->high < last)
            return broken("numbers do not rise");
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
            return broken("unsaved numbers do not rise");
        last = answer->high;
        nbytes += self->unsaved_bytes + (answer->is_forgotten ? answer->nbytes : 0);
    }
    if (writers != self->writer_count || writers > self->writers_max ||
        count != self->answer_count || remembered != count || applied != self->applied_count ||
        self->order_count > 2 * count + self->order_slack || nbytes != self->nbytes)
        return broken("answers or bytes are counted wrong");
    return true;
}
