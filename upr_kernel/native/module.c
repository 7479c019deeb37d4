/* The module `upr_kernel._native`: what it offers, and what it asks of Python when it is loaded. */

#include "kernel.h"

/* Raised from any file of the module, so it is kept here as well as in the module. */
static PyObject *chunk_defect;

PyObject *
set_defect(int code)
{
    PyObject *number = PyLong_FromLong(code);
    if (number != NULL)
        PyErr_SetObject(chunk_defect, number);
    Py_XDECREF(number);
    return NULL;
}

bool
number_of(PyObject *object, uint64_t *number)
{
    unsigned long long value = PyLong_AsUnsignedLongLong(object);
    if (value == (unsigned long long)-1 && PyErr_Occurred())
        return false;
    *number = value;
    return true;
}

static int
draw_secret(void)
{
    PyObject *os = PyImport_ImportModule("os");
    PyObject *bytes = os == NULL ? NULL : PyObject_CallMethod(os, "urandom", "n",
                                                              (Py_ssize_t)sizeof hash_secret);
    char *drawn;
    Py_ssize_t length;
    int failed = bytes == NULL || PyBytes_AsStringAndSize(bytes, &drawn, &length) < 0 ||
                 length != sizeof hash_secret;
    if (!failed)
        memcpy(hash_secret, drawn, sizeof hash_secret);
    Py_XDECREF(bytes);
    Py_XDECREF(os);
    return failed ? -1 : 0;
}

static int
load_defect(void)
{
    PyObject *module = PyImport_ImportModule("upr_kernel.defects");
    chunk_defect = module == NULL ? NULL : PyObject_GetAttrString(module, "ChunkDefectError");
    Py_XDECREF(module);
    return chunk_defect == NULL ? -1 : 0;
}

static PyMethodDef functions[] = {
    {"add_runs", (PyCFunction)(void (*)(void))add_runs, METH_FASTCALL, NULL},
    {"answer_records", (PyCFunction)(void (*)(void))answer_records, METH_FASTCALL, NULL},
    {"check", (PyCFunction)(void (*)(void))check, METH_FASTCALL, NULL},
    {"encode_replies", (PyCFunction)(void (*)(void))encode_replies, METH_FASTCALL, NULL},
    {"gather", (PyCFunction)(void (*)(void))gather, METH_FASTCALL, NULL},
    {"index_entries", (PyCFunction)(void (*)(void))index_entries, METH_FASTCALL, NULL},
    {"join_runs", (PyCFunction)(void (*)(void))join_runs, METH_FASTCALL, NULL},
    {"join_sets", (PyCFunction)(void (*)(void))join_sets, METH_FASTCALL, NULL},
    {"number_rows", (PyCFunction)(void (*)(void))number_rows, METH_FASTCALL, NULL},
    {"pack_header", (PyCFunction)(void (*)(void))pack_header, METH_FASTCALL, NULL},
    {"read_header", (PyCFunction)(void (*)(void))read_header, METH_FASTCALL, NULL},
    {"record_mark", (PyCFunction)(void (*)(void))record_mark, METH_FASTCALL, NULL},
    {"select_prefix", (PyCFunction)(void (*)(void))select_prefix, METH_FASTCALL, NULL},
    {"split_rows", (PyCFunction)(void (*)(void))split_rows, METH_FASTCALL, NULL},
    {"find_misplaced", (PyCFunction)(void (*)(void))find_misplaced, METH_FASTCALL, NULL},
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "upr_kernel._native",
    .m_doc = "The native kernel; upr_kernel says what each name is.",
    .m_size = -1, /* the secret is the process's: no second module in one process */
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    fill_crc_tables();
    if (draw_secret() < 0 || load_defect() < 0 || add_key_table(module) < 0 ||
        add_open_rows(module) < 0 || add_answers(module) < 0 ||
        PyModule_AddIntConstant(module, "REVISION", UPR_KERNEL_REVISION) < 0)
        Py_CLEAR(module);
    return module;
}
