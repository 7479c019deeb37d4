/* The rows that an open snapshot is being filled with, for the files that fill it. */

#ifndef UPR_OPEN_ROWS_H
#define UPR_OPEN_ROWS_H

#include "kernel.h"

enum {
    /* What a row takes beside its key and value: its columns without the offsets before the first. */
    ROW_BYTES = 33,
    OFFSETS_BYTES = 8,
    /* Room for so many rows more, so that the columns are aligned. */
    ROWS_STEP = 8,
};

typedef struct {
    PyObject_HEAD
    PyObject *table;
    PyObject *answers;
    PyObject *flags;
    uint64_t history_id;
    uint64_t base;
    uint64_t partition;
    uint64_t rows_max;
    uint64_t bytes_max;
    uint64_t span_max;
    uint64_t start;
    uint64_t high;
    uint64_t last_cas;
    uint64_t live;
    uint64_t first;
    uint64_t added;
    uint64_t superseded;
    uint64_t mean_bytes;
    uint64_t tidy_at;
    char has_counters;
    char is_awaited;
    Chunk columns;
    uint64_t row_size;
    uint64_t key_size;
    uint64_t value_size;
} OpenRows;

static inline uint64_t
row_bytes_of(const OpenRows *self)
{
    const Chunk *rows = &self->columns;
    return (uint64_t)ROW_BYTES * rows->count + rows->key_length + rows->value_length;
}

static inline uint64_t
allocated_bytes(const OpenRows *self)
{
    uint64_t columns = self->row_size ? ROW_BYTES * self->row_size + OFFSETS_BYTES : 0;
    return columns + self->key_size + self->value_size;
}

static inline uint64_t
last_of(const OpenRows *self)
{
    uint32_t count = self->columns.count;
    return count ? load_u64(self->columns.seqs + 8 * (size_t)(count - 1)) : 0;
}

static inline bool
is_full(const OpenRows *self)
{
    return self->columns.count >= self->rows_max || row_bytes_of(self) >= self->bytes_max ||
           (self->columns.count && last_of(self) >= self->first + self->span_max);
}

static inline bool
wants_tidying(const OpenRows *self)
{
    return self->added > self->tidy_at ||
           2 * self->superseded * self->mean_bytes > self->tidy_at + self->added;
}

/* Makes room for so much more. False with an exception set. */
bool rows_reserve(OpenRows *self, const Sizes *more);

/* Adds a part's rows, none of which is left out, for which there is room. */
void rows_add_part(OpenRows *self, const Part *part);

bool is_open_rows(PyObject *object);

#endif
