/* Runs of a bundle that go to open snapshots at once. upr_kernel/pure/runs.py says what the call
   does. */

#include "open_rows.h"

typedef struct {
    uint64_t attempt;
    uint64_t cas;
    uint64_t partition_count;
    uint64_t rows_max;
    uint64_t bytes_max;
} Limits;

/* Whether a run may be added here as it is. */
static bool
run_fits(const OpenRows *self, const Chunk *chunk, uint64_t low, uint64_t high,
         const Limits *limits)
{
    if (is_full(self) || low >= high || high - low >= limits->rows_max ||
        !keys_fit(chunk, low, high) ||
        !offsets_are_sound(chunk->value_offsets, (uint32_t)low, (uint32_t)high,
                           chunk->value_length))
        return false;
    if (load_u32(chunk->value_offsets + 4 * high) - load_u32(chunk->value_offsets + 4 * low) >=
        limits->bytes_max)
        return false;
    if ((self->high + (high - low) + 1) >> 63 || self->last_cas > UINT64_MAX - (high - low) - 1 ||
        limits->cas > UINT64_MAX - (high - low))
        return false;
    for (uint64_t row = low; row < high; row++) {
        uint32_t begin = load_u32(chunk->key_offsets + 4 * row);
        uint32_t end = load_u32(chunk->key_offsets + 4 * row + 4);
        if (partition_of(chunk->keys + begin, end - begin, limits->partition_count) !=
            self->partition)
            return false;
    }
    return true;
}

/* Covers so many numbers more behind `high` with flags that are not set. */
static bool
cover(OpenRows *self, uint64_t count)
{
    Py_ssize_t covered = PyByteArray_Size(self->flags);
    if (!covered)
        self->base = self->high + 1;
    if (PyByteArray_Resize(self->flags, covered + (Py_ssize_t)count) < 0)
        return false;
    memset(PyByteArray_AsString(self->flags) + covered, 0, (size_t)count);
    return true;
}

static bool
has_writer(const uint8_t *writer)
{
    return load_u64(writer) || load_u64(writer + 8);
}

/* Enters the keys of a run, and keeps its answer. False with an exception set; then nothing has
   changed. */
static bool
enter_run(OpenRows *self, const Chunk *chunk, uint32_t low, uint32_t high, Run *run,
          const PlainRun *added)
{
    uint64_t few[FEW_ROWS], *previous = room_for_previous(few, high - low);
    if (previous == NULL)
        return false;
    bool is_done = table_put_rows(self->table, chunk, low, high, run, previous);
    if (is_done && has_writer(added->writer) && !answers_keep(self->answers, added)) {
        table_take_back(self->table, chunk, low, high, run, previous);
        is_done = false;
    }
    free_previous(few, previous);
    return is_done;
}

/* Adds a run that fits, and fills in which numbers it gets; appends to `superseded` the numbers that
   have no flag. False with an exception set; then nothing else has changed. */
static bool
add_run(OpenRows *self, const Chunk *chunk, uint32_t low, uint32_t high, uint64_t cas,
        PlainRun *added, PyObject *superseded)
{
    Part part = {.chunk = *chunk, .low = low, .high = high, .is_numbered = true};
    Sizes sizes = {0};
    Py_ssize_t covered = PyByteArray_Size(self->flags);
    if (!part_measure(&part, &sizes) || !rows_reserve(self, &sizes) || !cover(self, sizes.count))
        return false;
    added->history_id = self->history_id;
    added->first_seq = part.first_seq = self->high + 1;
    added->last_seq = self->high + sizes.count;
    added->first_cas = part.first_cas = self->last_cas + 1 > cas ? self->last_cas + 1 : cas;
    Run run = {
        .first_seq = part.first_seq,
        .start = self->start,
        .base = self->base,
        .flags = (uint8_t *)PyByteArray_AsString(self->flags),
        .flag_count = self->has_counters ? 0 : (size_t)PyByteArray_Size(self->flags),
        .superseded = superseded,
    };
    if (!enter_run(self, chunk, low, high, &run, added)) {
        PyByteArray_Resize(self->flags, covered);
        return false;
    }
    rows_add_part(self, &part);
    self->high += sizes.count;
    self->last_cas = part.first_cas + sizes.count - 1;
    self->live += (uint64_t)run.fresh;
    self->superseded += sizes.count - (uint64_t)run.fresh;
    return true;
}

/* What `add_runs` takes. */
typedef struct {
    Py_buffer chunk_buffer;
    Py_buffer run_buffer;
    Chunk chunk;
    PyObject *targets;
    const uint8_t *writers;
    size_t writer_step; /* 0 where all runs have one writer */
    const uint8_t *skip;
    Limits limits;
} Runs;

/* What `add_runs` returns, as it grows. */
typedef struct {
    PyObject *lines;
    PyObject *left;
    PyObject *notes;
    PyObject *awaited;
    PyObject *superseded; /* an empty list for what the next run supersedes, or NULL */
    uint64_t table_bytes;
    uint64_t row_bytes;
    uint64_t answer_bytes;
} Report;

static bool
append_number(PyObject *list, uint64_t number)
{
    PyObject *object = PyLong_FromUnsignedLongLong(number);
    bool is_done = object != NULL && PyList_Append(list, object) == 0;
    Py_XDECREF(object);
    return is_done;
}

/* Notes what the caller has to do with a partition, with the list of what was superseded. */
static bool
note(Report *report, const OpenRows *rows)
{
    if (!PyList_Size(report->superseded) && !is_full(rows) && !wants_tidying(rows))
        return true;
    PyObject *pair = Py_BuildValue("KN", (unsigned long long)rows->partition, report->superseded);
    report->superseded = NULL;
    bool is_done = pair != NULL && PyList_Append(report->notes, pair) == 0;
    Py_XDECREF(pair);
    return is_done;
}

/* Where a run goes; NULL where it is left out. `run` is its entry in the directory. */
static OpenRows *
target_of(const Runs *runs, Py_ssize_t index, const uint8_t *run, uint64_t low, uint64_t high)
{
    uint64_t partition = load_u32(run);
    if ((runs->skip != NULL && runs->skip[index]) || load_u32(run + 16) ||
        partition >= runs->limits.partition_count)
        return NULL;
    OpenRows *rows = (OpenRows *)PyTuple_GetItem(runs->targets, (Py_ssize_t)partition);
    const uint8_t *writer = runs->writers + (size_t)index * runs->writer_step;
    if (!rows->history_id || rows->partition != partition ||
        !run_fits(rows, &runs->chunk, low, high, &runs->limits) ||
        (has_writer(writer) &&
         !answers_expect(rows->answers, writer, load_u64(run + 8), runs->limits.attempt)))
        return NULL;
    return rows;
}

/* Adds one run, keeps its answer, and writes its line. False where that failed; then there is only
   more room. */
static bool
add_and_answer(Report *report, const Runs *runs, Py_ssize_t index, const uint8_t *run,
               OpenRows *rows, uint64_t low, uint64_t high)
{
    uint64_t table_before = table_bytes(rows->table), rows_before = allocated_bytes(rows);
    uint64_t answers_before = answers_bytes(rows->answers);
    PlainRun added = {
        .writer = runs->writers + (size_t)index * runs->writer_step,
        .counter = load_u64(run + 8),
        .attempt = runs->limits.attempt,
    };
    bool is_added = add_run(rows, &runs->chunk, (uint32_t)low, (uint32_t)high, runs->limits.cas,
                            &added, report->superseded);
    report->table_bytes += table_bytes(rows->table) - table_before;
    report->row_bytes += allocated_bytes(rows) - rows_before;
    report->answer_bytes += answers_bytes(rows->answers) - answers_before;
    if (!is_added) {
        /* An error would hide what became of the runs before. The caller tries this run again, and
           gets the error then. */
        PyErr_Clear();
        Py_CLEAR(report->superseded);
        return false;
    }
    uint8_t *line = (uint8_t *)PyBytes_AsString(report->lines) + LINE_BYTES * (size_t)index;
    store_u32(line, (uint32_t)rows->partition);
    store_u64(line + 8, added.history_id);
    store_u64(line + 16, added.first_seq);
    store_u64(line + 24, added.last_seq);
    store_u64(line + 32, added.first_cas);
    return true;
}

/* Adds the runs one after the other. False with an exception set. */
static bool
report_runs(Report *report, const Runs *runs, uint64_t first_row, bool in_order)
{
    Py_ssize_t run_count = runs->run_buffer.len / RUN_BYTES;
    uint64_t low, high = first_row;
    bool is_over = false;
    for (Py_ssize_t index = 0; index < run_count; index++) {
        const uint8_t *run = (const uint8_t *)runs->run_buffer.buf + RUN_BYTES * index;
        low = high;
        high += load_u32(run + 4);
        /* Before the run is checked: Python 3.11 may collect, and so run anything, when it makes a
           list. */
        if (report->superseded == NULL && (report->superseded = PyList_New(0)) == NULL)
            return false;
        OpenRows *rows = is_over ? NULL : target_of(runs, index, run, low, high);
        if (rows == NULL || !add_and_answer(report, runs, index, run, rows, low, high)) {
            is_over = in_order;
            if (!append_number(report->left, (uint64_t)index))
                return false;
        }
        else if (!note(report, rows) ||
                 (rows->is_awaited && !append_number(report->awaited, rows->partition)))
            return false;
    }
    return true;
}

static bool
are_open_rows(PyObject *targets)
{
    bool are_rows = PyTuple_Check(targets);
    for (Py_ssize_t index = 0; are_rows && index < PyTuple_Size(targets); index++)
        are_rows = is_open_rows(PyTuple_GetItem(targets, index));
    if (!are_rows)
        PyErr_SetString(PyExc_TypeError, "the targets are a tuple of OpenRows");
    return are_rows;
}

/* Takes the writers, one for all runs or one for each, and which runs to skip. False with an
   exception set. */
static bool
read_writers(Runs *runs, PyObject *writers, PyObject *skip)
{
    Py_ssize_t run_count = runs->run_buffer.len / RUN_BYTES;
    if (runs->run_buffer.len % RUN_BYTES || !PyBytes_Check(writers) ||
        (PyBytes_Size(writers) != WRITER_BYTES &&
         PyBytes_Size(writers) != WRITER_BYTES * run_count) ||
        (skip != Py_None && (!PyBytes_Check(skip) || PyBytes_Size(skip) != run_count))) {
        PyErr_SetString(PyExc_ValueError, "runs, writers and skip flags are not for as many runs");
        return false;
    }
    runs->writers = (const uint8_t *)PyBytes_AsString(writers);
    runs->writer_step = PyBytes_Size(writers) == WRITER_BYTES ? 0 : WRITER_BYTES;
    runs->skip = skip == Py_None ? NULL : (const uint8_t *)PyBytes_AsString(skip);
    return true;
}

/* Adds the runs, whose buffers are held, and builds what is returned; NULL with an exception set. */
static PyObject *
added_runs(const Runs *runs, uint64_t first_row, bool in_order)
{
    size_t lines_bytes = LINE_BYTES * (size_t)(runs->run_buffer.len / RUN_BYTES);
    Report report = {
        .lines = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)lines_bytes),
        .left = PyList_New(0),
        .notes = PyList_New(0),
        .awaited = PyList_New(0),
    };
    PyObject *result = NULL;
    if (report.lines != NULL && report.left != NULL && report.notes != NULL &&
        report.awaited != NULL) {
        memset(PyBytes_AsString(report.lines), 0, lines_bytes);
        if (report_runs(&report, runs, first_row, in_order))
            result = Py_BuildValue("OOOOLLL", report.lines, report.left, report.notes,
                                   report.awaited, (long long)report.table_bytes,
                                   (long long)report.row_bytes, (long long)report.answer_bytes);
    }
    Py_XDECREF(report.lines);
    Py_XDECREF(report.left);
    Py_XDECREF(report.notes);
    Py_XDECREF(report.awaited);
    Py_XDECREF(report.superseded);
    return result;
}

PyObject *
add_runs(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Runs runs = {0};
    uint64_t first_row;
    if (!takes("add_runs", count, 11, 11) || !number_of(args[1], &first_row) ||
        !number_of(args[5], &runs.limits.attempt) || !are_open_rows(args[4]) ||
        !number_of(args[7], &runs.limits.cas) || !number_of(args[8], &runs.limits.rows_max) ||
        !number_of(args[9], &runs.limits.bytes_max))
        return NULL;
    int in_order = PyObject_IsTrue(args[10]);
    if (in_order < 0)
        return NULL;
    runs.targets = args[4];
    runs.limits.partition_count = (uint64_t)PyTuple_Size(args[4]);
    if (first_row > UINT32_MAX)
        return PyErr_Format(PyExc_OverflowError, "no chunk has so many rows");
    if (PyObject_GetBuffer(args[0], &runs.chunk_buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[2], &runs.run_buffer, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&runs.chunk_buffer);
        return NULL;
    }
    PyObject *result = NULL;
    if (read_writers(&runs, args[3], args[6]) && chunk_read(&runs.chunk, &runs.chunk_buffer))
        result = added_runs(&runs, first_row, in_order);
    PyBuffer_Release(&runs.run_buffer);
    PyBuffer_Release(&runs.chunk_buffer);
    return result;
}
