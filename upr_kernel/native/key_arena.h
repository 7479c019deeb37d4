/* The arena of a key table, which holds each key once: key_table.c says how. */

#ifndef UPR_KEY_ARENA_H
#define UPR_KEY_ARENA_H

#include "kernel.h"

enum {
    /* A place in the arena: a segment's number, which wraps around, and an offset. */
    OFFSET_BITS = 16,
    SEGMENT_BITS = 20,
    SEGMENT_BYTES_MAX = 1 << OFFSET_BITS,
};

typedef struct {
    uint8_t *bytes;
    uint32_t used;
    uint32_t size;
} Segment;

typedef struct {
    Segment *segments; /* a ring of `ring_size`, a power of two; in use are [first, last] */
    uint32_t ring_size;
    uint32_t first_segment;
    uint32_t segment_count;
    uint32_t front; /* where the first key stands in the first segment */
    uint64_t live_bytes;
} Arena;

static inline Segment *
segment_at(const Arena *arena, uint32_t number)
{
    return arena->segments + (number & (arena->ring_size - 1));
}

static inline const uint8_t *
record_at(const Arena *arena, uint64_t place)
{
    return segment_at(arena, (uint32_t)(place >> OFFSET_BITS))->bytes +
           (place & (SEGMENT_BYTES_MAX - 1));
}

/* These count in `nbytes` what the arena takes. */

/* Adds a segment, with room for any key. NULL without memory. */
Segment *arena_new_segment(Arena *arena, uint64_t *nbytes);

/* The last segment with room for so many bytes; NULL without memory. */
static inline Segment *
arena_room(Arena *arena, size_t bytes, uint64_t *nbytes)
{
    if (arena->segment_count) {
        Segment *last = segment_at(arena, arena->first_segment + arena->segment_count - 1);
        if (last->size - last->used >= bytes)
            return last;
    }
    return arena_new_segment(arena, nbytes);
}

/* Adds a key at the end; `place` is where. False without memory. */
static inline bool
arena_add(Arena *arena, const uint8_t *key, size_t length, uint64_t *place, uint64_t *nbytes)
{
    Segment *segment = arena_room(arena, length + 1, nbytes);
    if (segment == NULL)
        return false;
    uint32_t number = arena->first_segment + arena->segment_count - 1;
    *place = (uint64_t)(number & ((1u << SEGMENT_BITS) - 1)) << OFFSET_BITS | segment->used;
    uint8_t *record = segment->bytes + segment->used;
    record[0] = (uint8_t)length;
    memcpy(record + 1, key, length);
    segment->used += (uint32_t)length + 1;
    arena->live_bytes += length + 1;
    return true;
}

/* Takes out the key of so many bytes that was added last, and leaves its room. */
void arena_undo_add(Arena *arena, size_t length);

/* Takes out the key at the end, which stands at `place`. */
void arena_take_back(Arena *arena, uint64_t place, uint64_t *nbytes);

/* Takes out the key at the front, of so many bytes. Frees segments that the front has passed. */
void arena_pass_front(Arena *arena, size_t length, uint64_t *nbytes);

void arena_clear(Arena *arena, uint64_t *nbytes);

#endif
