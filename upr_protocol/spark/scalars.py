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


def int32_array(values: Sequence[int]) -> pa.Array:
    """An array of signed numbers of 32 bits."""
    return _array(pa.int32(), struct.pack(f"<{len(values)}i", *values), len(values))


def int64_array(values: Sequence[int]) -> pa.Array:
    """An array of signed numbers of 64 bits."""
    return _array(pa.int64(), struct.pack(f"<{len(values)}q", *values), len(values))


def text_scalar(text: str) -> pa.Scalar:
    """A string."""
    return text_array([text])[0]


def int8_scalar(value: int) -> pa.Scalar:
    """A signed number of 8 bits."""
    return _array(pa.int8(), struct.pack("<b", value), 1)[0]


def int32_scalar(value: int) -> pa.Scalar:
    """A signed number of 32 bits."""
    return int32_array([value])[0]


def int64_scalar(value: int) -> pa.Scalar:
    """A signed number of 64 bits."""
    return int64_array([value])[0]


def bool_scalar(flag: bool) -> pa.Scalar:
    """A truth value."""
    return _array(pa.bool_(), bytes([flag]), 1)[0]


def _array(kind: pa.DataType, data: bytes, count: int) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])
