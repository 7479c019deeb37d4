/* Adding keys at the end of a key table's arena, and taking them out at its front. */

#include "key_arena.h"

enum { SEGMENT_BYTES_MIN = 512 };

static bool
arena_widen_ring(Arena *arena, uint64_t *nbytes)
{
    uint32_t size = arena->ring_size ? 2 * arena->ring_size : 2;
    if (size > 1u << SEGMENT_BITS)
        return false;
    Segment *segments = calloc(size, sizeof *segments);
    if (segments == NULL)
        return false;
    for (uint32_t index = 0; index < arena->segment_count; index++) {
        uint32_t number = arena->first_segment + index;
        segments[number & (size - 1)] = *segment_at(arena, number);
    }
    free(arena->segments);
    arena->segments = segments;
    *nbytes += (size - arena->ring_size) * sizeof *segments;
    arena->ring_size = size;
    return true;
}

Segment *
arena_new_segment(Arena *arena, uint64_t *nbytes)
{
    /* A quarter of what there is: so what stands empty, or was passed by the front, stays little
       beside the keys, in small tables too. */
    uint64_t size = arena->live_bytes / 4;
    size = size < SEGMENT_BYTES_MIN ? SEGMENT_BYTES_MIN : size;
    size = size > SEGMENT_BYTES_MAX ? SEGMENT_BYTES_MAX : size;
    if (arena->segment_count == arena->ring_size && !arena_widen_ring(arena, nbytes))
        return NULL;
    uint8_t *fresh = malloc(size);
    if (fresh == NULL)
        return NULL;
    Segment *segment = segment_at(arena, arena->first_segment + arena->segment_count);
    *segment = (Segment){fresh, 0, (uint32_t)size};
    arena->segment_count++;
    *nbytes += size;
    return segment;
}

void
arena_undo_add(Arena *arena, size_t length)
{
    segment_at(arena, arena->first_segment + arena->segment_count - 1)->used -=
        (uint32_t)length + 1;
    arena->live_bytes -= length + 1;
}

void
arena_take_back(Arena *arena, uint64_t place, uint64_t *nbytes)
{
    uint32_t length = record_at(arena, place)[0] + 1u;
    segment_at(arena, (uint32_t)(place >> OFFSET_BITS))->used -= length;
    arena->live_bytes -= length;
    while (arena->segment_count) {
        Segment *last = segment_at(arena, arena->first_segment + arena->segment_count - 1);
        if (last->used)
            break;
        *nbytes -= last->size;
        free(last->bytes);
        *last = (Segment){0};
        arena->segment_count--;
    }
}

void
arena_pass_front(Arena *arena, size_t length, uint64_t *nbytes)
{
    arena->live_bytes -= length + 1;
    arena->front += (uint32_t)length + 1;
    while (arena->segment_count && arena->front == segment_at(arena, arena->first_segment)->used) {
        Segment *segment = segment_at(arena, arena->first_segment);
        *nbytes -= segment->size;
        free(segment->bytes);
        *segment = (Segment){0};
        arena->first_segment = (arena->first_segment + 1) & ((1u << SEGMENT_BITS) - 1);
        arena->segment_count--;
        arena->front = 0;
    }
}

void
arena_clear(Arena *arena, uint64_t *nbytes)
{
    for (uint32_t index = 0; index < arena->segment_count; index++) {
        Segment *segment = segment_at(arena, arena->first_segment + index);
        *nbytes -= segment->size;
        free(segment->bytes);
    }
    *nbytes -= arena->ring_size * sizeof *arena->segments;
    free(arena->segments);
    arena->segments = NULL;
    arena->ring_size = arena->first_segment = arena->segment_count = arena->front = 0;
    arena->live_bytes = 0;
}
