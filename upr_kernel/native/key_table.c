/* The key table: key -> number of its newest mutation, and whether that is a tombstone.

   Two structures.

   The *arena* (key_arena.h) holds each key once, as a byte of length and the key, in segments. Keys
   are added at its end and forgotten at its front only (`evict`, which adds what it keeps at the end
   again). So no hole ever arises within it, a segment that the front has passed is freed whole, and
   the order of the keys is the order of a dict: the pure twin does the same things in the same
   order.

   The *slots* (key_slots.h) find a key: 16 bytes each, open addressing with linear probing, ordered
   by hash. A slot's home is `hash * homes >> 28`, so the order of the slots is the order of the
   hashes whatever the number of homes is. That gives three things at once. A search ends at the
   first higher hash, not only at a gap. Growing is one sweep over both arrays, and may stop anywhere:
   hashes below `moved_below` are in the new array, the others in the old one. And the number of homes
   need not be a power of two: a table that grows by a quarter is never less than five eighths full.

   Slots lie in blocks, which are allocated as the sweep comes to them and freed behind it. So a
   table that grows takes little more than before or after, and no call allocates or frees much. */

#include "key_table.h"

#include <stdlib.h>
#include <structmember.h>

_Static_assert(OFFSET_BITS + SEGMENT_BITS == PLACE_BITS, "a slot has the bits of a place");

enum {
    HOMES_MIN = 8,
    /* Up to here a table grows at once, and doubles: 20 microseconds at most. */
    HOMES_AT_ONCE = BLOCK_SLOTS,
    /* Slots looked at for each key that comes in while the table grows or shrinks. A growth by a
       quarter must end before a fifth of `homes` keys have come: 7 would do. A table that shrinks at
       three tenths, to half as much again, is full once six hundredths of `homes` keys have come: 17
       would do, and the slots that stand behind the last home. */
    STEPS_PER_KEY = 20,
    /* Rows that are looked up together: their slots and keys fit in the first-level cache. */
    GROUP = 32,
};

uint64_t hash_secret[2];

/* The slot of the key that the arena has at `place`. */
static Slot *
find_place(KeyTable *table, uint32_t hash, uint64_t place, Slots **slots, size_t *index)
{
    *slots = slots_for(table, hash);
    for (*index = home_of(*slots, hash);; (*index)++) {
        Slot *slot = slot_at(*slots, *index);
        if (slot_hash(slot) == hash && slot_place(slot) == place)
            return slot;
    }
}

/* Growing, and shrinking, which is the same. */

static bool
move_some(KeyTable *table, uint64_t budget)
{
    Slots *slots = &table->slots, *grown = &table->grown;
    uint64_t passed = 0;
    while (passed < budget && slots->begin < slots->end) {
        size_t begin = slots->begin, length = 1;
        if (slot_at(slots, begin)->entry) {
            /* Slots of one hash move together: `moved_below` cannot tell them apart. */
            uint32_t hash = slot_hash(slot_at(slots, begin));
            while (!is_free(slots, begin + length) &&
                   slot_hash(slot_at(slots, begin + length)) == hash)
                length++;
            size_t to = home_of(grown, hash);
            while (!is_free(grown, to))
                to++;
            if (!slots_reach(grown, to + length - 1, &table->nbytes))
                return false;
            for (size_t index = 0; index < length; index++)
                *slot_at(grown, to + index) = *slot_at(slots, begin + index);
            table->moved_below = hash + 1;
        }
        slots->begin = begin + length;
        passed += length;
        for (size_t block = begin >> BLOCK_BITS; block < slots->begin >> BLOCK_BITS; block++)
            slots_release(slots, block, &table->nbytes);
    }
    if (slots->begin >= slots->end) {
        slots_clear(slots, &table->nbytes);
        *slots = *grown;
        memset(grown, 0, sizeof *grown);
    }
    return true;
}

static inline bool
go_on_moving(KeyTable *table, uint64_t keys)
{
    return !is_moving(table) || move_some(table, STEPS_PER_KEY * keys);
}

static bool
resize(KeyTable *table, size_t homes)
{
    if (is_moving(table) && !move_some(table, UINT64_MAX))
        return false;
    if (!slots_begin(&table->grown, homes, &table->nbytes))
        return false;
    table->moved_below = 0;
    bool at_once = table->slots.homes <= HOMES_AT_ONCE && homes <= HOMES_AT_ONCE;
    return move_some(table, at_once ? UINT64_MAX : 1);
}

/* Makes room for one more key. */
static bool
grow(KeyTable *table)
{
    const Slots *slots = is_moving(table) ? &table->grown : &table->slots;
    size_t homes = slots->homes;
    if (table->keys < limit_of(slots))
        return true;
    if (!homes)
        return slots_begin(&table->slots, HOMES_MIN, &table->nbytes);
    return resize(table, homes < HOMES_AT_ONCE ? 2 * homes : homes + homes / 4);
}

static bool
shrink(KeyTable *table)
{
    size_t homes = table->slots.homes;
    if (is_moving(table) || homes <= HOMES_MIN || table->keys >= homes - homes / 10 * 7)
        return true;
    size_t fewer = table->keys + table->keys / 2 + HOMES_MIN;
    return fewer >= homes || resize(table, fewer);
}

/* Entering one mutation. */

/* Enters a key's newest mutation; `previous` is the entry that it had, or 0. False without memory:
   then nothing has changed. */
static bool
enter(KeyTable *table, uint32_t hash, const uint8_t *key, size_t length, uint64_t entry,
      uint64_t *previous)
{
    size_t where;
    Slots *slots = slots_for(table, hash);
    Slot *slot = find(table, slots, hash, key, length, &where);
    *previous = 0;
    if (slot != NULL) {
        *previous = slot->entry;
        slot->entry = entry;
        table->items += (uint64_t)!is_tombstone(entry) - (uint64_t)!is_tombstone(*previous);
        return true;
    }
    uint64_t place;
    if (!grow(table) || !arena_add(&table->arena, key, length, &place, &table->nbytes))
        return false;
    slots = slots_for(table, hash); /* growing may have moved it */
    find(table, slots, hash, key, length, &where);
    if (!slots_insert(slots, where, (Slot){(uint64_t)hash << PLACE_BITS | place, entry},
                      &table->nbytes)) {
        arena_undo_add(&table->arena, length);
        return false;
    }
    table->keys++;
    table->items += !is_tombstone(entry);
    return true;
}

/* Starts to load what `enter` will look at first. */
static inline void
prefetch_slot(KeyTable *table, uint32_t hash)
{
    const Slots *slots = slots_for(table, hash);
    size_t home = home_of(slots, hash);
    if (home < slots->end)
        __builtin_prefetch(slot_at(slots, home), 1);
}

/* Starts to load the key of the slot that has the same hash, if there is one. */
static inline void
prefetch_key(KeyTable *table, uint32_t hash)
{
    const Slots *slots = slots_for(table, hash);
    for (size_t index = home_of(slots, hash); !is_free(slots, index); index++) {
        const Slot *slot = slot_at(slots, index);
        if (slot_hash(slot) >= hash) {
            if (slot_hash(slot) == hash)
                __builtin_prefetch(record_at(&table->arena, slot_place(slot)));
            return;
        }
    }
}

/* Methods. */

static bool
key_of(PyObject *object, const uint8_t **key, size_t *length)
{
    char *bytes;
    Py_ssize_t nbytes;
    if (PyBytes_AsStringAndSize(object, &bytes, &nbytes) < 0)
        return false;
    *key = (const uint8_t *)bytes;
    *length = (size_t)nbytes;
    return true;
}

static bool
seq_of(PyObject *object, uint64_t *seq)
{
    if (!number_of(object, seq))
        return false;
    if (*seq && *seq >> 63 == 0)
        return true;
    PyErr_SetString(PyExc_ValueError, "a sequence number is 1 to 2**63 - 1");
    return false;
}

static PyObject *
seq_and_kind(uint64_t entry)
{
    PyObject *pair = PyTuple_New(2), *seq = PyLong_FromUnsignedLongLong(entry >> 1);
    if (pair == NULL || seq == NULL) {
        Py_XDECREF(pair);
        Py_XDECREF(seq);
        return NULL;
    }
    PyTuple_SetItem(pair, 0, seq);
    PyTuple_SetItem(pair, 1, PyBool_FromLong((long)is_tombstone(entry)));
    return pair;
}

static PyObject *
newest(KeyTable *self, PyObject *object)
{
    const uint8_t *key;
    size_t length;
    if (!key_of(object, &key, &length))
        return NULL;
    const Slot *slot = find_key(self, key, length);
    return seq_and_kind(slot == NULL ? 0 : slot->entry);
}

static PyObject *
holds_item(KeyTable *self, PyObject *const *args, Py_ssize_t count)
{
    const uint8_t *key;
    size_t length;
    uint64_t seq;
    if (!takes("holds_item", count, 2, 2) || !key_of(args[0], &key, &length) ||
        !number_of(args[1], &seq))
        return NULL;
    const Slot *slot = find_key(self, key, length);
    return PyBool_FromLong(slot != NULL && !is_tombstone(slot->entry) && slot->entry >> 1 == seq);
}

static PyObject *
put(KeyTable *self, PyObject *const *args, Py_ssize_t count)
{
    const uint8_t *key;
    size_t length;
    uint64_t seq, previous;
    int tombstone = 0;
    if (!takes("put", count, 2, 3) || !key_of(args[0], &key, &length) || !seq_of(args[1], &seq))
        return NULL;
    if (count == 3 && (tombstone = PyObject_IsTrue(args[2])) < 0)
        return NULL;
    if (!length || length > KEY_BYTES_MAX) {
        PyErr_SetString(PyExc_ValueError, "a key is 1 to 255 bytes");
        return NULL;
    }
    if (!go_on_moving(self, 1) ||
        !enter(self, hash_of(key, length), key, length, seq << 1 | (uint64_t)tombstone, &previous))
        return PyErr_NoMemory();
    return PyLong_FromUnsignedLongLong(previous >> 1);
}

/* The rows of a run: where their keys lie, and their hashes, a group at a time. */
typedef struct {
    const uint8_t *keys[GROUP];
    uint32_t lengths[GROUP];
    uint32_t hashes[GROUP];
} Group;

static void
load_group(KeyTable *table, const Chunk *chunk, uint32_t row, uint32_t count, Group *group)
{
    for (uint32_t index = 0; index < count; index++) {
        const uint8_t *offset = chunk->key_offsets + 4 * (size_t)(row + index);
        group->keys[index] = chunk->keys + load_u32(offset);
        group->lengths[index] = load_u32(offset + 4) - load_u32(offset);
        group->hashes[index] = hash_of(group->keys[index], group->lengths[index]);
        prefetch_slot(table, group->hashes[index]);
    }
    for (uint32_t index = 0; index < count; index++)
        prefetch_key(table, group->hashes[index]);
}

static bool
note_previous(Run *run, uint64_t previous)
{
    uint64_t seq = previous >> 1;
    if (seq <= run->start) {
        run->fresh++;
        return true;
    }
    if (seq >= run->base && seq - run->base < run->flag_count) {
        run->flags[seq - run->base] = 1;
        return true;
    }
    PyObject *number = PyLong_FromUnsignedLongLong(seq);
    int failed = number == NULL || PyList_Append(run->superseded, number) < 0;
    Py_XDECREF(number);
    return !failed;
}

/* Takes out the key that was added last. */
static void
take_back_key(KeyTable *table, const Slot *slot)
{
    uint64_t place = slot_place(slot);
    Slots *slots;
    size_t index;
    find_place(table, slot_hash(slot), place, &slots, &index);
    slots_take_out(slots, index);
    table->keys--;
    table->items--;
    arena_take_back(&table->arena, place, &table->nbytes);
}

static void
take_back(KeyTable *table, const Chunk *chunk, uint32_t low, uint32_t high, const Run *run,
          const uint64_t *previous)
{
    for (uint32_t row = high; row-- > low;) {
        const uint8_t *offset = chunk->key_offsets + 4 * (size_t)row;
        const uint8_t *key = chunk->keys + load_u32(offset);
        Slot *slot = find_key(table, key, load_u32(offset + 4) - load_u32(offset));
        uint64_t entry = previous[row - low], seq = entry >> 1;
        if (!entry) {
            take_back_key(table, slot);
            continue;
        }
        slot->entry = entry;
        table->items -= is_tombstone(entry);
        if (seq > run->start && seq >= run->base && seq - run->base < run->flag_count)
            run->flags[seq - run->base] = 0;
    }
}

static bool
put_rows(KeyTable *table, const Chunk *chunk, uint32_t low, uint32_t high, Run *run,
         uint64_t *previous)
{
    Group group;
    uint64_t seq = run->first_seq;
    uint32_t row = low;
    while (row < high) {
        uint32_t count = high - row < GROUP ? high - row : GROUP;
        if (!go_on_moving(table, count))
            goto failed;
        load_group(table, chunk, row, count, &group);
        for (uint32_t index = 0; index < count; index++, seq++) {
            uint64_t *entry = previous + (row - low);
            if (!enter(table, group.hashes[index], group.keys[index], group.lengths[index], seq << 1,
                       entry))
                goto failed;
            row++;
            if (!note_previous(run, *entry))
                goto failed;
        }
    }
    return true;
failed:
    take_back(table, chunk, low, row, run, previous);
    return no_memory();
}

/* What keeps the keys of the rows [low, high), which the chunk has, from being entered; or 0. */
static int
keys_defect(const Chunk *chunk, uint32_t low, uint32_t high)
{
    if (!offsets_are_sound(chunk->key_offsets, low, high, chunk->key_length))
        return DEFECT_OFFSETS;
    for (size_t row = low; row < high; row++) {
        const uint8_t *offset = chunk->key_offsets + 4 * row;
        uint32_t length = load_u32(offset + 4) - load_u32(offset);
        if (!length || length > KEY_BYTES_MAX)
            return DEFECT_KEY_LENGTH;
    }
    return 0;
}

bool
keys_fit(const Chunk *chunk, uint64_t low, uint64_t high)
{
    return low <= high && high <= chunk->count &&
           !keys_defect(chunk, (uint32_t)low, (uint32_t)high);
}

/* Whether the keys of the rows [low, high) can be entered; an exception is set where not. */
static bool
are_rows_sound(const Chunk *chunk, uint64_t low, uint64_t high)
{
    if (low > high || high > chunk->count) {
        PyErr_SetString(PyExc_IndexError, "the chunk does not have these rows");
        return false;
    }
    int defect = keys_defect(chunk, (uint32_t)low, (uint32_t)high);
    return !defect || set_defect(defect) != NULL;
}

bool
table_put_rows(PyObject *table, const Chunk *chunk, uint32_t low, uint32_t high, Run *run,
               uint64_t *previous)
{
    return put_rows((KeyTable *)table, chunk, low, high, run, previous);
}

void
table_take_back(PyObject *table, const Chunk *chunk, uint32_t low, uint32_t high, const Run *run,
                const uint64_t *previous)
{
    take_back((KeyTable *)table, chunk, low, high, run, previous);
}

uint64_t
table_bytes(PyObject *table)
{
    return ((KeyTable *)table)->nbytes;
}

static PyObject *
put_run(KeyTable *self, PyObject *const *args, Py_ssize_t count)
{
    Py_buffer buffer, flags;
    Chunk chunk;
    uint64_t low, high, few[FEW_ROWS], *previous;
    Run run = {0};
    PyObject *result = NULL;
    if (!takes("put_run", count, 7, 7) || !number_of(args[1], &low) || !number_of(args[2], &high) ||
        !seq_of(args[3], &run.first_seq) || !number_of(args[4], &run.start) ||
        !number_of(args[5], &run.base))
        return NULL;
    if (PyObject_GetBuffer(args[0], &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[6], &flags, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&buffer);
        return NULL;
    }
    run.flags = flags.buf;
    run.flag_count = (size_t)flags.len;
    /* The offsets are checked once: setting a flag must not change one. */
    const uint8_t *bytes = buffer.buf;
    if (run.flags < bytes + buffer.len && bytes < run.flags + flags.len) {
        PyErr_SetString(PyExc_ValueError, "the flags lie in the chunk");
        goto done;
    }
    /* Before the check: Python 3.11 may collect, and so run anything, when it makes a list. */
    run.superseded = PyList_New(0);
    if (run.superseded == NULL || !chunk_read(&chunk, &buffer) || !are_rows_sound(&chunk, low, high))
        goto done;
    if ((run.first_seq + (high - low)) >> 63) {
        PyErr_SetString(PyExc_ValueError, "a sequence number is 1 to 2**63 - 1");
        goto done;
    }
    previous = room_for_previous(few, (size_t)(high - low));
    if (previous == NULL)
        goto done;
    if (put_rows(self, &chunk, (uint32_t)low, (uint32_t)high, &run, previous)) {
        PyObject *fresh = PyLong_FromSsize_t(run.fresh);
        result = fresh == NULL ? NULL : PyTuple_Pack(2, run.superseded, fresh);
        Py_XDECREF(fresh);
        if (result == NULL)
            take_back(self, &chunk, (uint32_t)low, (uint32_t)high, &run, previous);
    }
    free_previous(few, previous);
done:
    Py_XDECREF(run.superseded);
    PyBuffer_Release(&flags);
    PyBuffer_Release(&buffer);
    return result;
}

static inline uint64_t
front_place(const KeyTable *table)
{
    return (uint64_t)table->arena.first_segment << OFFSET_BITS | table->arena.front;
}

/* Takes the first key out of the arena; it is forgotten, or added at the end again. */
static bool
pass_front(KeyTable *table, uint64_t through, bool tombstones_only, Py_ssize_t *evicted)
{
    uint8_t key[KEY_BYTES_MAX];
    uint64_t place = front_place(table);
    const uint8_t *record = record_at(&table->arena, place);
    size_t index, length = record[0];
    Slots *slots;
    memcpy(key, record + 1, length);
    uint32_t hash = hash_of(key, length);
    Slot *slot = find_place(table, hash, place, &slots, &index);
    if (slot->entry >> 1 > through || (tombstones_only && !is_tombstone(slot->entry))) {
        if (!arena_add(&table->arena, key, length, &place, &table->nbytes))
            return false;
        slot->tag = (uint64_t)hash << PLACE_BITS | place;
    }
    else {
        table->items -= !is_tombstone(slot->entry);
        table->keys--;
        slots_take_out(slots, index);
        ++*evicted;
    }
    arena_pass_front(&table->arena, length, &table->nbytes);
    return true;
}

/* Starts to load the slots of the keys that stand first, up to the end of their segment. */
static uint64_t
prefetch_front(KeyTable *table, uint64_t count)
{
    const Segment *segment = segment_at(&table->arena, table->arena.first_segment);
    uint32_t offset = table->arena.front;
    uint64_t seen = 0;
    for (; seen < count && seen < GROUP && offset < segment->used; seen++) {
        const uint8_t *record = segment->bytes + offset;
        prefetch_slot(table, hash_of(record + 1, record[0]));
        offset += record[0] + 1;
    }
    return seen;
}

static PyObject *
evict(KeyTable *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t through, budget;
    Py_ssize_t evicted = 0;
    if (!takes("evict", count, 2, 3) || !number_of(args[0], &through) || !number_of(args[1], &budget))
        return NULL;
    int tombstones_only = count == 3 ? PyObject_IsTrue(args[2]) : 0;
    if (tombstones_only < 0)
        return NULL;
    budget = budget < self->keys ? budget : self->keys;
    while (budget) {
        bool has_memory = go_on_moving(self, GROUP);
        uint64_t together = has_memory ? prefetch_front(self, budget) : 0;
        for (; together && has_memory; together--, budget--)
            has_memory = pass_front(self, through, tombstones_only, &evicted);
        /* The caller must learn what was forgotten. So this reports fewer keys looked at, and no
           error. */
        if (!has_memory && !evicted)
            return PyErr_NoMemory();
        if (!has_memory)
            break;
    }
    /* Without memory it does not shrink now, but after a later call. */
    shrink(self);
    return PyLong_FromSsize_t(evicted);
}

static void
forget_all(KeyTable *table)
{
    slots_clear(&table->slots, &table->nbytes);
    slots_clear(&table->grown, &table->nbytes);
    arena_clear(&table->arena, &table->nbytes);
    table->keys = table->items = 0;
}

static PyObject *
clear(KeyTable *self, PyObject *Py_UNUSED(ignored))
{
    forget_all(self);
    Py_RETURN_NONE;
}

bool
visit_arena(KeyTable *table, Visit *visit, void *context)
{
    for (uint32_t index = 0; index < table->arena.segment_count; index++) {
        uint32_t number = (table->arena.first_segment + index) & ((1u << SEGMENT_BITS) - 1);
        const Segment *segment = segment_at(&table->arena, number);
        for (uint32_t offset = index ? 0 : table->arena.front; offset < segment->used;) {
            const uint8_t *record = segment->bytes + offset;
            uint64_t place = (uint64_t)number << OFFSET_BITS | offset;
            offset += record[0] + 1u;
            if (!visit(table, place, record, context))
                return false;
        }
    }
    return true;
}

static bool
append_entry(KeyTable *table, uint64_t place, const uint8_t *record, void *context)
{
    Slots *slots;
    size_t index;
    const Slot *slot = find_place(table, hash_of(record + 1, record[0]), place, &slots, &index);
    PyObject *entry = Py_BuildValue("y#KN", (const char *)record + 1, (Py_ssize_t)record[0],
                                    (unsigned long long)(slot->entry >> 1),
                                    PyBool_FromLong((long)is_tombstone(slot->entry)));
    int failed = entry == NULL || PyList_Append(context, entry) < 0;
    Py_XDECREF(entry);
    return !failed;
}

static PyObject *
entries(KeyTable *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *list = PyList_New(0);
    if (list != NULL && !visit_arena(self, append_entry, list))
        Py_CLEAR(list);
    return list;
}

static PyObject *
statistics(KeyTable *self, PyObject *Py_UNUSED(ignored))
{
    size_t slots = self->slots.homes + self->grown.homes;
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:O}", "keys", (unsigned long long)self->keys, "items",
                         (unsigned long long)self->items, "bytes", (unsigned long long)self->nbytes,
                         "slots", (unsigned long long)slots, "moving",
                         is_moving(self) ? Py_True : Py_False);
}

/* The type. */

static PyObject *
new_table(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_Size(args) || (kwargs != NULL && PyDict_Size(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "KeyTable takes no arguments");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    KeyTable *table = (KeyTable *)allocate(type, 0); /* zeroed: a table without keys */
    if (table != NULL)
        table->nbytes = sizeof *table;
    return (PyObject *)table;
}

static void
dealloc(KeyTable *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    forget_all(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static Py_ssize_t
length(KeyTable *self)
{
    return (Py_ssize_t)self->keys;
}

static PyMethodDef methods[] = {
    {"newest", (PyCFunction)newest, METH_O, NULL},
    {"holds_item", (PyCFunction)(void (*)(void))holds_item, METH_FASTCALL, NULL},
    {"put", (PyCFunction)(void (*)(void))put, METH_FASTCALL, NULL},
    {"put_run", (PyCFunction)(void (*)(void))put_run, METH_FASTCALL, NULL},
    {"evict", (PyCFunction)(void (*)(void))evict, METH_FASTCALL, NULL},
    {"clear", (PyCFunction)clear, METH_NOARGS, NULL},
    {"entries", (PyCFunction)entries, METH_NOARGS, NULL},
    {"statistics", (PyCFunction)statistics, METH_NOARGS, NULL},
    {"check_invariants", (PyCFunction)check_table, METH_NOARGS, NULL},
    {0},
};

static PyMemberDef members[] = {
    {"items", T_ULONGLONG, offsetof(KeyTable, items), READONLY, NULL},
    {"nbytes", T_ULONGLONG, offsetof(KeyTable, nbytes), READONLY, NULL},
    {0},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, "See upr_kernel/pure/key_table.py."},
    {Py_tp_new, new_table},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_sq_length, length},
    {0},
};

static PyType_Spec type_spec = {
    .name = "upr_kernel._native.KeyTable",
    .basicsize = sizeof(KeyTable),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = type_slots,
};

/* Kept as well as in the module, which there is once in a process. */
static PyObject *key_table_type;

bool
is_key_table(PyObject *object)
{
    return Py_TYPE(object) == (PyTypeObject *)key_table_type;
}

int
add_key_table(PyObject *module)
{
    key_table_type = PyType_FromSpec(&type_spec);
    if (key_table_type == NULL)
        return -1;
    return PyModule_AddObjectRef(module, "KeyTable", key_table_type);
}
