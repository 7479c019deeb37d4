"""What a bucket's log holds, as lines of JSON: read without the index, and past what is damaged."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.errors import ChunkError
from upr_protocol.ids import Operation
from upr_server.storage.errors import StorageError
from upr_server.storage.lmdb_map import LmdbMap
from upr_server.storage.offline.check import (
    LOG_ADVICE,
    Checked,
    Finding,
    Problem,
    Stage,
    partition_count,
)
from upr_server.storage.records import (
    NUMBERS_END,
    PARTITION,
    PartitionRecord,
    chunk_key,
    parse_chunk,
    parse_record,
    partition_key,
)

_NAMES: Final = {operation.value: operation.name.lower() for operation in Operation}
_encode: Final = msgspec.json.Encoder().encode


class DumpOptions(msgspec.Struct, frozen=True):
    """What is wanted.

    Attributes:
        partition: Of which partition; -1 for all.
        keys_only: Whether to leave the values out.
        history: Whether to print every mutation that the log still has, and not only the newest
            of each key.
    """

    partition: int = -1
    keys_only: bool = False
    history: bool = False


class Dump:
    """Writes what a bucket holds.

    Args:
        name: The bucket's name.
        log: Its log.
        options: What is wanted of it.
        output: The descriptor that it is written to.
    """

    def __init__(self, name: str, log: LmdbMap, options: DumpOptions, output: int = 1) -> None:
        self._name = name
        self._log = log
        self._options = options
        self._output = output

    def run(self, first_stage: int = 0) -> Iterator[Finding]:
        """Writes partition by partition from `first_stage` on."""
        for number in range(first_stage, partition_count(self._log)):
            if self._options.partition in (-1, number):
                yield Stage(number, "the chunks", number)
                try:
                    yield from self._write(number)
                except StorageError as error:
                    yield self._left_out(number, str(error))

    def _write(self, number: int) -> Iterator[Finding]:
        newest: dict[bytes, int] = {}
        at = 0
        for found in self._chunks(number):
            if isinstance(found, str):
                yield self._left_out(number, found)
                continue
            if found.start != at:
                what = f"the log has nothing from {at} to {found.start}"
                yield self._left_out(number, what)
            at = found.end
            newest.update(zip(found.keys(), found.seqs.tolist(), strict=True))
        key = partition_key(PARTITION, number)
        with self._log.read() as transaction:
            sealed = transaction.get(key)
            high = at if sealed is None else parse_record(key, sealed, PartitionRecord).high
        if sealed is None or at != high:
            yield self._left_out(number, f"the log ends at {at}, and should not")
        for found in self._chunks(number):
            if isinstance(found, Chunk):
                lines = [
                    _encode(self._line(number, row)) + b"\n" for row in self._rows(found, newest)
                ]
                _write_all(self._output, b"".join(lines))
                yield Checked(1, found.nbytes, found.count)

    def _chunks(self, number: int) -> Iterator[Chunk | str]:
        """The chunks that can be read, and what is wrong with the others."""
        with self._log.read() as transaction:
            for key, value in transaction.scan(
                chunk_key(number, 0), chunk_key(number, NUMBERS_END)
            ):
                try:
                    chunk = parse_chunk(key, value)
                    chunk.check()
                except (StorageError, ChunkError) as error:
                    yield str(error)
                else:
                    yield chunk

    def _rows(self, chunk: Chunk, newest: dict[bytes, int]) -> Iterator[Any]:
        for row in chunk:
            if self._options.history or newest[row.key] == row.seq:
                yield row

    def _line(self, partition: int, row: Any) -> dict[str, object]:
        line: dict[str, object] = {
            "bucket": self._name,
            "partition": partition,
            "seq": row.seq,
            "cas": str(row.cas),
            "op": _NAMES[row.op],
            **_text_fields("key", row.key),
            "flags": row.flags,
            "expiry": row.expiry,
        }
        if row.op == Operation.SET and not self._options.keys_only:
            line |= _text_fields("value", row.value)
        return line

    def _left_out(self, partition: int, what: str) -> Problem:
        advice = "left out; older versions of its keys may be printed as if they were the newest"
        return Problem(self._name, partition, what, f"{advice}; {LOG_ADVICE}")


def _text_fields(name: str, data: bytes) -> dict[str, str]:
    # As `upr tail` writes them.
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name: b64encode(data).decode(), f"{name}_encoding": "base64"}


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
