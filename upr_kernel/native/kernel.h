/* What the files of the native kernel share: the limited API, reads without alignment, errors. */

#ifndef UPR_KERNEL_H
#define UPR_KERNEL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "chunks are read in place, which needs a little-endian processor"
#endif

/* A run in the directory of a bundle: partition, rows, counter and chain. A line of the answer to a
   bundle: partition, status, history, first and last number, first CAS. upr_protocol describes
   both. */
enum { RUN_BYTES = 24, LINE_BYTES = 40 };

/* A buffer may be a slice that begins anywhere. Compilers make one load of each of these. */

static inline uint32_t
load_u32(const uint8_t *at)
{
    uint32_t number;
    memcpy(&number, at, sizeof number);
    return number;
}

static inline int32_t
load_i32(const uint8_t *at)
{
    int32_t number;
    memcpy(&number, at, sizeof number);
    return number;
}

static inline uint64_t
load_u64(const uint8_t *at)
{
    uint64_t number;
    memcpy(&number, at, sizeof number);
    return number;
}

static inline void
store_u32(uint8_t *at, uint32_t number)
{
    memcpy(at, &number, sizeof number);
}

static inline void
store_u64(uint8_t *at, uint64_t number)
{
    memcpy(at, &number, sizeof number);
}

/* These give false once they have set an error of Python. */

static inline bool
no_memory(void)
{
    PyErr_NoMemory();
    return false;
}

static inline bool
takes(const char *name, Py_ssize_t count, Py_ssize_t least, Py_ssize_t most)
{
    if (least <= count && count <= most)
        return true;
    if (least == most)
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, most, count);
    else
        PyErr_Format(PyExc_TypeError, "%s takes %zd to %zd arguments, not %zd", name, least, most,
                     count);
    return false;
}

/* An item of a list, with a reference of our own: an exporter of buffers may run Python, which may
   change the list. NULL with an exception set where the list has become shorter. */
static inline PyObject *
list_item(PyObject *list, Py_ssize_t index)
{
    return Py_XNewRef(PyList_GetItem(list, index));
}

/* An encoded chunk: upr_protocol/chunk describes the columns. */

enum { HEAD_BYTES = 32, SET = 1 };

typedef struct {
    uint32_t count;
    uint32_t key_length;
    uint32_t value_length;
    uint64_t start;
    uint64_t end;
    const uint8_t *seqs;
    const uint8_t *cas;
    const uint8_t *expiries;
    const uint8_t *flags;
    const uint8_t *key_offsets;
    const uint8_t *value_offsets;
    const uint8_t *operations;
    const uint8_t *keys;
    const uint8_t *values;
} Chunk;

/* Finds the columns in so many bytes. False where their lengths do not add up. */
bool chunk_fits(Chunk *chunk, const uint8_t *bytes, size_t nbytes);

/* Finds the columns in a buffer. False, with an exception set, where its lengths do not add up. */
bool chunk_read(Chunk *chunk, const Py_buffer *buffer);

/* Whether the strings of the rows [low, high) lie in order within so many bytes. */
bool offsets_are_sound(const uint8_t *offsets, uint32_t low, uint32_t high, uint32_t length);

/* The length of a chunk of these sizes. */
uint64_t encoded_bytes(uint64_t count, uint64_t key_length, uint64_t value_length);

/* Lays a new chunk out in `bytes`, `encoded_bytes` long: its head and all padding are written. */
void chunk_begin(Chunk *chunk, uint8_t *bytes, uint64_t start, uint64_t end);

/* Rows of a chunk that are to be copied, and how much was measured or written. */

typedef struct {
    Py_buffer buffer;
    Py_buffer skip_buffer;
    Chunk chunk;
    uint32_t low;
    uint32_t high;
    const uint8_t *skip; /* a byte for each of the rows [low, high), or NULL */
    bool is_numbered;
    uint64_t first_seq;
    uint64_t first_cas;
} Part;

typedef struct {
    uint64_t count;
    uint64_t key_length;
    uint64_t value_length;
} Sizes;

/* Checks the part's rows and adds up what is kept. False, with an exception set, where the offsets
   are damaged. */
bool part_measure(const Part *part, Sizes *sizes);

/* Copies the rows [low, high) behind what was written. */
void copy_rows(const Part *part, uint32_t low, uint32_t high, const Chunk *to, Sizes *written);

/* A new chunk of the parts, which were measured; NULL with an exception set. */
PyObject *gathered(const Part *parts, Py_ssize_t part_count, const Sizes *sizes, uint64_t start,
                   uint64_t end);

/* A column of a new chunk, which is ours to write. */
static inline uint8_t *
column(const uint8_t *at)
{
    return (uint8_t *)at;
}

/* Which partition a key belongs to. */
uint32_t partition_of(const uint8_t *key, size_t length, uint64_t partition_count);

uint32_t crc32_of(const uint8_t *bytes, size_t length);
uint32_t crc32c_of(const uint8_t *bytes, size_t length);

/* Sets `ChunkDefectError` with this code; returns NULL. */
PyObject *set_defect(int code);

/* What a check says, as in upr_kernel/flags.py. */
enum {
    UNCONDITIONAL = 1,
    MAY_EXPIRE = 2,
    HAS_PREFIX = 4,
    HAS_SEQS = 8,
    SEQS_RISE = 16,
};

/* The defects, as in upr_kernel/defects.py. */
enum {
    DEFECT_LAYOUT = 1,
    DEFECT_KEY_SPAN,
    DEFECT_KEY_ORDER,
    DEFECT_KEY_LENGTH,
    DEFECT_VALUE_SPAN,
    DEFECT_VALUE_ORDER,
    DEFECT_VALUE_LENGTH,
    DEFECT_OPERATION,
    DEFECT_OFFSETS,
};

/* What entering rows into a key table finds. */
typedef struct {
    uint64_t first_seq;
    uint64_t start;
    uint64_t base;
    uint8_t *flags;
    size_t flag_count;
    PyObject *superseded; /* a list */
    Py_ssize_t fresh;
} Run;

/* A run of up to so many rows needs no memory for what its keys had before. */
enum { FEW_ROWS = 64 };

bool is_key_table(PyObject *object);
bool is_answers(PyObject *object);

/* A row of a change begins with a writer, a counter and the length of the answer. */
enum { WRITER_BYTES = 16, ANSWER_ROW_BYTES = 28 };

/* A run that was added for a publisher: its token, and what it is answered. */
typedef struct {
    const uint8_t *writer;
    uint64_t counter;
    uint64_t attempt;
    uint64_t history_id;
    uint64_t first_seq;
    uint64_t last_seq;
    uint64_t first_cas;
} PlainRun;

/* Whether a batch comes behind all of its writer, in no older attempt, and no batch was refused. */
bool answers_expect(PyObject *answers, const uint8_t *writer, uint64_t counter, uint64_t attempt);

/* Keeps the answer to a run that is new. False with an exception set. */
bool answers_keep(PyObject *answers, const PlainRun *run);

/* What the answers take. */
uint64_t answers_bytes(PyObject *answers);

/* Whether the keys of the rows [low, high) can be entered. */
bool keys_fit(const Chunk *chunk, uint64_t low, uint64_t high);

/* Room for what the keys of so many rows had before: `few`, or memory to be freed with
   `free_previous`. NULL with an exception set. */
static inline uint64_t *
room_for_previous(uint64_t few[FEW_ROWS], size_t count)
{
    uint64_t *previous = count > FEW_ROWS ? malloc(count * sizeof *previous) : few;
    if (previous == NULL)
        PyErr_NoMemory();
    return previous;
}

static inline void
free_previous(const uint64_t few[FEW_ROWS], uint64_t *previous)
{
    if (previous != few)
        free(previous);
}

/* Enters rows whose keys fit, and writes the entry that each key had. False with an exception set;
   then nothing has changed. */
bool table_put_rows(PyObject *table, const Chunk *chunk, uint32_t low, uint32_t high, Run *run,
                    uint64_t *previous);

/* Takes back the rows that were entered last. */
void table_take_back(PyObject *table, const Chunk *chunk, uint32_t low, uint32_t high,
                     const Run *run, const uint64_t *previous);

/* What a table takes. */
uint64_t table_bytes(PyObject *table);

/* Integers from Python. False with an exception set; negative numbers are refused. */
bool number_of(PyObject *object, uint64_t *number);

/* The parts of the module, one a file. */
PyObject *check(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *gather(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *number_rows(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *select_prefix(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *split_rows(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *find_misplaced(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *index_entries(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *join_runs(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *join_sets(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *pack_header(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *read_header(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *encode_replies(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *add_runs(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *answer_records(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *record_mark(PyObject *module, PyObject *const *args, Py_ssize_t count);
void fill_crc_tables(void);
int add_open_rows(PyObject *module);
int add_answers(PyObject *module);
int add_key_table(PyObject *module);

/* The secret of the hash: 16 bytes, drawn when the module is loaded. */
extern uint64_t hash_secret[2];

#endif
