"""Arrow scalars and texts, made without the import of pandas.

`pyarrow.scalar` and `pyarrow.array` import pandas where it is installed, to see whether they were
given one of its objects. That takes a quarter of a second, and Spark starts a Python process for
each plan of a query.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa


def text_array(texts: Sequence[str]) -> pa.Array:
    """An array of strings."""
    encoded = [text.encode() for text in texts]
    ends = accumulate(map(len, encoded), initial=0)
    offsets = struct.pack(f"<{len(encoded) + 1}i", *ends)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def text_scalar(text: str) -> pa.Scalar:
    """A string."""
    return text_array([text])[0]


def int8_scalar(value: int) -> pa.Scalar:
    """A signed number of 8 bits."""
    return _scalar(pa.int8(), struct.pack("<b", value))


def int32_scalar(value: int) -> pa.Scalar:
    """A signed number of 32 bits."""
    return _scalar(pa.int32(), struct.pack("<i", value))


def int64_scalar(value: int) -> pa.Scalar:
    """A signed number of 64 bits."""
    return _scalar(pa.int64(), struct.pack("<q", value))


def bool_scalar(flag: bool) -> pa.Scalar:
    """A truth value."""
    return _scalar(pa.bool_(), bytes([flag]))


def _scalar(kind: pa.DataType, data: bytes) -> pa.Scalar:
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(data)])[0]
