/* What a partition has answered to publishers: its parts, for the files that work on them. */

#ifndef UPR_ANSWERS_H
#define UPR_ANSWERS_H

#include "kernel.h"

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
    struct Writer *before; /* the writer heard from just before this one */
    struct Writer *behind; /* the writer heard from just after this one */
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

/* The high number with the batch's effect. */
static inline uint64_t
effect_high(const Answer *answer)
{
    return answer->has_applied_high ? answer->applied_high : answer->high;
}

/* Whether it stays where all above `seq` is undone: its batch had its effect before. */
static inline bool
outlives(const Answer *answer, uint64_t seq)
{
    return !answer->is_forgotten && answer->has_applied_high && answer->applied_high <= seq;
}

/* The answer at a place of the writer's ring, by rising counter. */
static inline Answer **
ring_at(const Writer *writer, uint32_t index)
{
    return writer->ring + ((writer->first + index) & (writer->ring_size - 1));
}

static inline Answer *
newest_of(const Writer *writer)
{
    return *ring_at(writer, writer->count - 1);
}

/* Answers. */

/* An answer without bytes, in none of its places. NULL with an exception set. */
Answer *answer_new(const uint8_t *writer, uint64_t counter, uint64_t high);

/* Notes that an answer has left one of its places. */
void answer_release(Answer *answer);

/* Notes at which high number the batch of a remembered answer had its effect. */
void answers_set_applied_high(Answers *self, Answer *answer, uint64_t applied_high);

/* Takes an answer out of the list of what the disk does not know. */
void answers_remove_unsaved(Answers *self, Answer *answer);

/* Writers. */

/* NULL where nothing of the writer is remembered. */
Writer *answers_find_writer(const Answers *self, const uint8_t *id);

/* The answer of a writer with this counter; NULL where there is none. */
Answer *writer_find_answer(const Writer *writer, uint64_t counter);

/* A writer was heard from. */
void answers_touch(Answers *self, Writer *writer);

/* Removes a writer that has no answers. */
void answers_remove_writer(Answers *self, Writer *writer);

/* The order. */

/* Makes room for one more answer. False with an exception set. */
bool answers_reserve_order(Answers *self);

/* The first of the order with at least this high number. */
uint64_t answers_bisect_order(const Answers *self, uint64_t high);

/* Takes the forgotten answers out once they are more than half. */
void answers_tidy_order(Answers *self);

/* Remembering and forgetting. */

/* Keeps an answer, whose bytes are given away. False with an exception set. */
bool answers_keep_bytes(Answers *self, const uint8_t *id, uint64_t counter, PyObject *bytes,
                        uint64_t high, uint64_t attempt);

/* Puts an answer, whose bytes are given away, in its places, where there is room for it. */
void answers_place(Answers *self, Writer *writer, Answer *answer, PyObject *bytes,
                   uint64_t attempt);

/* Forgets an answer, which the caller then takes out of its writer's ring: the ring's place goes
   with it. False without memory; then nothing has changed. */
bool answers_forget(Answers *self, Writer *writer, Answer *answer, uint64_t high);

/* An answer of a writer is remembered no more. */
void answers_uncount(Answers *self, Writer *writer, const Answer *answer);

/* An answer with this high number was forgotten. */
void answers_note_forgotten(Answers *self, Writer *writer, uint64_t high);

/* Whether all of it fits together. False with an exception set. */
bool answers_are_sound(const Answers *self);

#endif
