/* Whether the parts of a key table fit together. */

#include "key_table.h"

static bool
broken(const char *what)
{
    PyErr_SetString(PyExc_AssertionError, what);
    return false;
}

static bool
check_slots(KeyTable *table, const Slots *slots, uint32_t lowest, uint64_t *keys, uint64_t *items)
{
    for (size_t index = slots->begin; index < slots->end; index++) {
        const Slot *slot = slot_at(slots, index);
        if (!slot->entry)
            continue;
        uint32_t hash = slot_hash(slot);
        const uint8_t *record = record_at(&table->arena, slot_place(slot));
        if (hash < lowest)
            return broken("the slots are not in the order of their hashes");
        if (hash != hash_of(record + 1, record[0]))
            return broken("a slot has another key's hash");
        for (size_t between = home_of(slots, hash); between < index; between++)
            if (is_free(slots, between))
                return broken("a gap between a slot and its home");
        if (slots_for(table, hash) != slots)
            return broken("a slot is in the other array");
        lowest = hash;
        ++*keys;
        *items += !is_tombstone(slot->entry);
    }
    return true;
}

static bool
check_record(KeyTable *table, uint64_t place, const uint8_t *record, void *context)
{
    const Slot *slot = find_key(table, record + 1, record[0]);
    uint64_t *counts = context;
    counts[0]++;
    counts[1] += record[0] + 1u;
    return slot != NULL && slot_place(slot) == place ? true : broken("a key of the arena has no slot");
}

static uint64_t
counted_bytes(const KeyTable *table)
{
    uint64_t nbytes = sizeof *table + table->arena.ring_size * sizeof(Segment);
    for (uint32_t index = 0; index < table->arena.segment_count; index++)
        nbytes += segment_at(&table->arena, table->arena.first_segment + index)->size;
    const Slots *both[] = {&table->slots, &table->grown};
    for (int which = 0; which < 2; which++) {
        size_t freed = both[which]->begin >> BLOCK_BITS << BLOCK_BITS;
        if (both[which]->begin >= both[which]->end)
            freed = both[which]->end;
        nbytes += both[which]->blocks_size * sizeof(Slot *);
        nbytes += (both[which]->end - freed) * sizeof(Slot);
    }
    return nbytes;
}

PyObject *
check_table(KeyTable *self, PyObject *Py_UNUSED(ignored))
{
    uint64_t keys = 0, items = 0, counts[2] = {0, 0};
    if (!check_slots(self, &self->grown, 0, &keys, &items) ||
        !check_slots(self, &self->slots, is_moving(self) ? self->moved_below : 0, &keys, &items) ||
        !visit_arena(self, check_record, counts))
        return NULL;
    if (keys != self->keys || items != self->items || counts[0] != keys)
        broken("keys or items are counted wrong");
    else if (counts[1] != self->arena.live_bytes || counted_bytes(self) != self->nbytes)
        broken("bytes are counted wrong");
    else
        Py_RETURN_NONE;
    return NULL;
}
