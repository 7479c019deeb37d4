/* Allocating the slots of a key table, block by block; putting slots in, and taking them out. */

#include "key_slots.h"

bool
slots_begin(Slots *slots, size_t homes, uint64_t *nbytes)
{
    size_t size = (homes >> BLOCK_BITS) + 2;
    slots->blocks = calloc(size, sizeof *slots->blocks);
    if (slots->blocks == NULL)
        return false;
    slots->blocks_size = size;
    slots->homes = homes;
    slots->begin = slots->end = 0;
    *nbytes += size * sizeof *slots->blocks;
    return true;
}

/* Only the first block may be smaller than the others. */
bool
slots_extend(Slots *slots, size_t index, uint64_t *nbytes)
{
    while (index >= slots->end) {
        size_t end = slots->end, block = end >> BLOCK_BITS, more;
        if (end < BLOCK_SLOTS) {
            more = end ? end / 4 + 8 : slots->homes + slots->homes / 8 + 8;
            if (end + more > BLOCK_SLOTS)
                more = BLOCK_SLOTS - end;
            Slot *grown = realloc(slots->blocks[0], (end + more) * sizeof(Slot));
            if (grown == NULL)
                return false;
            memset(grown + end, 0, more * sizeof(Slot));
            slots->blocks[0] = grown;
        }
        else {
            if (block == slots->blocks_size) {
                size_t size = block + block / 4 + 2;
                Slot **blocks = realloc(slots->blocks, size * sizeof *blocks);
                if (blocks == NULL)
                    return false;
                *nbytes += (size - block) * sizeof *blocks;
                memset(blocks + block, 0, (size - block) * sizeof *blocks);
                slots->blocks = blocks;
                slots->blocks_size = size;
            }
            more = BLOCK_SLOTS;
            slots->blocks[block] = calloc(BLOCK_SLOTS, sizeof(Slot));
            if (slots->blocks[block] == NULL)
                return false;
        }
        slots->end = end + more;
        *nbytes += more * sizeof(Slot);
    }
    return true;
}

void
slots_release(Slots *slots, size_t block, uint64_t *nbytes)
{
    size_t first = block << BLOCK_BITS;
    size_t count = slots->end - first < BLOCK_SLOTS ? slots->end - first : BLOCK_SLOTS;
    free(slots->blocks[block]);
    slots->blocks[block] = NULL;
    *nbytes -= count * sizeof(Slot);
}

void
slots_clear(Slots *slots, uint64_t *nbytes)
{
    if (slots->blocks == NULL)
        return;
    for (size_t block = 0; block << BLOCK_BITS < slots->end; block++)
        if (slots->blocks[block] != NULL)
            slots_release(slots, block, nbytes);
    *nbytes -= slots->blocks_size * sizeof *slots->blocks;
    free(slots->blocks);
    memset(slots, 0, sizeof *slots);
}

void
slots_take_out(Slots *slots, size_t index)
{
    for (; !is_free(slots, index + 1); index++) {
        Slot *next = slot_at(slots, index + 1);
        if (home_of(slots, slot_hash(next)) == index + 1)
            break;
        *slot_at(slots, index) = *next;
    }
    *slot_at(slots, index) = (Slot){0};
}
