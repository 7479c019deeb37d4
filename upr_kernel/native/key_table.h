/* A key table, and how a key is found: key_table.c says how it is made. */

#ifndef UPR_KEY_TABLE_H
#define UPR_KEY_TABLE_H

#include "key_arena.h"
#include "key_slots.h"
#include "siphash.h"

enum { KEY_BYTES_MAX = 255 };

typedef struct {
    PyObject_HEAD
    Slots slots;
    Slots grown; /* what the slots move to; without blocks when they do not move */
    uint32_t moved_below;
    Arena arena;
    uint64_t keys;
    uint64_t items;
    uint64_t nbytes;
} KeyTable;

static inline uint32_t
hash_of(const uint8_t *key, size_t length)
{
    return (uint32_t)(siphash13(key, length, hash_secret) >> (64 - HASH_BITS));
}

static inline bool
is_moving(const KeyTable *table)
{
    return table->grown.blocks != NULL;
}

static inline Slots *
slots_for(KeyTable *table, uint32_t hash)
{
    return is_moving(table) && hash < table->moved_below ? &table->grown : &table->slots;
}

static inline bool
is_tombstone(uint64_t entry)
{
    return entry & 1;
}

/* Searching. */

static inline bool
holds_key(const KeyTable *table, const Slot *slot, const uint8_t *key, size_t length)
{
    const uint8_t *record = record_at(&table->arena, slot_place(slot));
    return record[0] == length && memcmp(record + 1, key, length) == 0;
}

/* The key's slot. NULL if it has none; `where` is then set to where one belongs. */
static Slot *
find(KeyTable *table, Slots *slots, uint32_t hash, const uint8_t *key, size_t length, size_t *where)
{
    size_t index = home_of(slots, hash);
    for (; index < slots->end; index++) {
        Slot *slot = slot_at(slots, index);
        if (!slot->entry || slot_hash(slot) > hash)
            break;
        if (slot_hash(slot) == hash && holds_key(table, slot, key, length))
            return slot;
    }
    *where = index;
    return NULL;
}

static Slot *
find_key(KeyTable *table, const uint8_t *key, size_t length)
{
    size_t where;
    if (!length || length > KEY_BYTES_MAX)
        return NULL;
    uint32_t hash = hash_of(key, length);
    return find(table, slots_for(table, hash), hash, key, length, &where);
}

/* Calls `visit` with each record of the arena, in order. */
typedef bool Visit(KeyTable *table, uint64_t place, const uint8_t *record, void *context);
bool visit_arena(KeyTable *table, Visit *visit, void *context);

/* A method: raises AssertionError where something does not fit together. */
PyObject *check_table(KeyTable *self, PyObject *ignored);

#endif
