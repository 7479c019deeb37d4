"""Buffers of which each export runs a function of Python, in every version of Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

GET_BUFFER: Final = 1
"""The number of the slot `Py_bf_getbuffer`."""

_BufferGetter = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)


class _Slot(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("function", ctypes.c_void_p))


class _Specification(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("object_bytes", ctypes.c_int),
        ("item_bytes", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("slots", ctypes.POINTER(_Slot)),
    )


def exporter_of(data: bytes, action: Callable[[], None]) -> Any:
    """An object that runs `action` whenever its buffer is taken, and then exports `data`.

    Python 3.12 and later can define such a class (`__buffer__`); 3.11 can only by the C API.
    """
    interface = ctypes.PyDLL(None)
    get_buffer, new_type = interface.PyObject_GetBuffer, interface.PyType_FromSpec
    get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
    new_type.argtypes, new_type.restype = (ctypes.c_void_p,), ctypes.py_object

    def export(_: object, view: int, flags: int) -> int:
        action()
        return int(get_buffer(data, view, flags))

    getter = _BufferGetter(export)
    slots = (_Slot * 2)(_Slot(GET_BUFFER, ctypes.cast(getter, ctypes.c_void_p)), _Slot(0, None))
    specification = _Specification(b"tests.Exporter", 0, 0, 0, slots)
    exporter_type: Any = new_type(ctypes.byref(specification))
    # The type calls the function for as long as it is there.
    exporter_type.getter = getter
    return exporter_type()
