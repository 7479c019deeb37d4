"""Rows of changed answers to publishers, as `PublisherAnswers.take_unsaved` returns them."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final

_ROW: Final = Struct("<16sQI")


def pack_rows(changes: Iterable[tuple[bytes, int, bytes]]) -> bytes:
    """The rows of these changes: writer, counter and answer; the answer is empty if it was
    forgotten."""
    return b"".join(
        _ROW.pack(writer, counter, len(answer)) + answer for writer, counter, answer in changes
    )


def unpack_rows(rows: bytes) -> dict[tuple[bytes, int], bytes | None]:
    """The answer to each batch after these changes, by writer and counter; None if it was
    forgotten."""
    changes, begin = dict[tuple[bytes, int], bytes | None](), 0
    while begin < len(rows):
        writer, counter, length = _ROW.unpack_from(rows, begin)
        begin += _ROW.size + length
        assert begin <= len(rows)
        changes[writer, counter] = rows[begin - length : begin] or None
    return changes
