"""Changes of the answers to publishers, on their way to the disk: rows of bytes, and what the rows
become there."""

from __future__ import annotations

from struct import Struct
from typing import Final

from crc32c import crc32c

ROW: Final = Struct("<16sQI")
"""A writer's ID, the counter of one of its batches, and the length of the answer that follows; 0
where the answer was forgotten."""

_COUNTER: Final = Struct(">Q")
_CRC: Final = Struct("<I")


def answer_records(rows: bytes, prefix: bytes, /) -> list[tuple[bytes, bytes]]:
    """The records of answers that have changed, in the order of the changes. O(bytes).

    Args:
        rows: The changes, as `Answers.take_unsaved` gives them.
        prefix: What stands before the writer and the counter in the key of each record.

    Returns:
        Key and value of each record: the key ends with the counter, high byte first, and the value
        has the CRC32C of the key and the answer, and the answer. It is empty where the record is to
        be deleted.

    Raises:
        ValueError: The last row is cut short.
    """
    records: list[tuple[bytes, bytes]] = []
    begin = 0
    while begin < len(rows):
        end = begin + ROW.size
        writer, counter, length = ROW.unpack_from(rows, begin) if end <= len(rows) else (b"", 0, 0)
        if end + length > len(rows):
            raise ValueError("a row of an answer is cut short")
        key, answer = prefix + writer + _COUNTER.pack(counter), rows[end : end + length]
        records.append((key, _CRC.pack(crc32c(key + answer)) + answer if answer else b""))
        begin = end + length
    return records
