/* The slots of a key table, which find a key by its hash: key_table.c says how. */

#ifndef UPR_KEY_SLOTS_H
#define UPR_KEY_SLOTS_H

#include "kernel.h"

enum {
    HASH_BITS = 28,
    PLACE_BITS = 36,
    BLOCK_BITS = 12,
    BLOCK_SLOTS = 1 << BLOCK_BITS,
};

typedef struct {
    /* The hash in the upper 28 bits; below, the place of the key in the arena: a segment's number,
       which wraps around, and an offset. */
    uint64_t tag;
    /* The number, shifted by one, and whether it is a tombstone; 0 for an empty slot. */
    uint64_t entry;
} Slot;

typedef struct {
    Slot **blocks;
    size_t blocks_size;
    size_t homes;
    size_t begin; /* slots below were moved to the new array; their blocks may be freed */
    size_t end;   /* slots from here on do not exist yet, and count as empty */
} Slots;

static inline uint32_t
slot_hash(const Slot *slot)
{
    return (uint32_t)(slot->tag >> PLACE_BITS);
}

static inline uint64_t
slot_place(const Slot *slot)
{
    return slot->tag & (((uint64_t)1 << PLACE_BITS) - 1);
}

static inline Slot *
slot_at(const Slots *slots, size_t index)
{
    return slots->blocks[index >> BLOCK_BITS] + (index & (BLOCK_SLOTS - 1));
}

static inline bool
is_free(const Slots *slots, size_t index)
{
    return index >= slots->end || !slot_at(slots, index)->entry;
}

static inline size_t
home_of(const Slots *slots, uint32_t hash)
{
    size_t home = (size_t)(((uint64_t)hash * slots->homes) >> HASH_BITS);
    return home > slots->begin ? home : slots->begin;
}

static inline uint64_t
limit_of(const Slots *slots)
{
    return slots->homes - slots->homes / 5;
}

/* These count in `nbytes` what the slots take. Those that return a bool are false without
   memory. */

/* Begins empty slots with so many homes. */
bool slots_begin(Slots *slots, size_t homes, uint64_t *nbytes);

/* Makes the slots up to `index` exist, which is not below `end`. */
bool slots_extend(Slots *slots, size_t index, uint64_t *nbytes);

/* Makes the slot at `index` exist. */
static inline bool
slots_reach(Slots *slots, size_t index, uint64_t *nbytes)
{
    return index < slots->end || slots_extend(slots, index, nbytes);
}

/* Frees a block that ends at or before `begin`, if `begin` has just come out of it. */
void slots_release(Slots *slots, size_t block, uint64_t *nbytes);

void slots_clear(Slots *slots, uint64_t *nbytes);

/* Puts a slot at `index`, and what stands there and behind it one further. */
static inline bool
slots_insert(Slots *slots, size_t index, Slot fresh, uint64_t *nbytes)
{
    size_t gap = index;
    while (!is_free(slots, gap))
        gap++;
    if (!slots_reach(slots, gap, nbytes))
        return false;
    for (; gap > index; gap--)
        *slot_at(slots, gap) = *slot_at(slots, gap - 1);
    *slot_at(slots, index) = fresh;
    return true;
}

/* Empties the slot at `index`, and moves those behind it nearer to their homes. */
void slots_take_out(Slots *slots, size_t index);

#endif
