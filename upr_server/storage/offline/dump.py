"""Dumping what a bucket's log holds as lines of JSON, without the index, past what is damaged."""

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
from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.offline.bucket_files import partition_count
from upr_server.storage.offline.findings import LOG_ADVICE, Finding, Problem, Progress, Stage
from upr_server.storage.records import (
    PARTITION,
    SEQS_END,
    PartitionRecord,
    chunk_key,
    parse_chunk,
    parse_record,
    partition_key,
)

_NAMES: Final = {operation.value: operation.name.lower() for operation in Operation}
_encode: Final = msgspec.json.Encoder().encode


class OutputError(Exception):
    """What was read cannot be written: the disk of the output is full, for instance."""


class DumpOptions(msgspec.Struct, frozen=True):
    """What to dump.

    Attributes:
        partition: The partition; None for all.
        keys_only: Whether to leave the values out.
        history: Whether to print every mutation that the log still has, instead of the newest of
            each key.
    """

    partition: int | None = None
    keys_only: bool = False
    history: bool = False


class BucketDump:
    """Writes what a bucket holds.

    Args:
        name: The bucket's name.
        log: Its log.
        options: What to dump.
        output: The file descriptor to write to.
    """

    def __init__(
        self, name: str, log: LmdbOrderedMap, options: DumpOptions, output: int = 1
    ) -> None:
        self._name = name
        self._log = log
        self._options = options
        self._output = output

    def run(self, first_stage: int = 0) -> Iterator[Finding]:
        """Writes partition by partition from `first_stage` on.

        Raises:
            OutputError: What was read cannot be written.
        """
        for partition in range(first_stage, partition_count(self._log)):
            if self._options.partition in (None, partition):
                yield Stage(partition, "the chunks", partition)
                try:
                    yield from self._dump_partition(partition)
                except StorageError as error:
                    yield self._left_out(partition, str(error))

    def _dump_partition(self, partition: int) -> Iterator[Finding]:
        record, damage = self._record(partition)
        through = SEQS_END
        if record is not None and record.partial is not None and not self._options.history:
            # A replica has the beginning of a snapshot, without which its state is consistent.
            through = record.high
        # It reads the chunks twice: only at the end of the log is known which mutations are newest.
        newest: dict[bytes, int] = {}
        end = 0
        for chunk in self._chunks(partition, through):
            if isinstance(chunk, str):
                yield self._left_out(partition, chunk)
                continue
            if chunk.start != end:
                text = f"the log has no chunks from {end} to {chunk.start}"
                yield self._left_out(partition, text)
            end = chunk.end
            newest.update(zip(chunk.keys(), chunk.seqs.tolist(), strict=True))
        if record is None:
            damage = damage or f"the log ends at {end}, and has no record of its end"
            yield self._left_out(partition, damage)
        elif end != (expected_end := min(record.received_seq, through)):
            damage = f"the log ends at {end}, and should end at {expected_end}"
            yield self._left_out(partition, damage)
        for chunk in self._chunks(partition, through):
            if isinstance(chunk, Chunk):
                lines = [
                    _encode(self._line(partition, row)) + b"\n" for row in self._rows(chunk, newest)
                ]
                _write_all(self._output, b"".join(lines))
                yield Progress(1, chunk.nbytes, chunk.count)

    def _record(self, partition: int) -> tuple[PartitionRecord | None, str]:
        """A partition's record. None if there is none, or if it is damaged: then with how."""
        try:
            with self._log.read() as transaction:
                key = partition_key(PARTITION, partition)
                stored_value = transaction.get(key)
                if stored_value is None:
                    return None, ""
                return parse_record(key, stored_value, PartitionRecord), ""
        except StorageError as error:
            return None, str(error)

    def _chunks(self, partition: int, through: int) -> Iterator[Chunk | str]:
        """The chunks up to a number that can be read; for each of the others, what is wrong with
        it."""
        with self._log.read() as transaction:
            for key, value in transaction.scan(
                chunk_key(partition, 0), chunk_key(partition, through)
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

    def _left_out(self, partition: int, text: str) -> Problem:
        advice = "left out; the dump may show older versions of its keys as the newest"
        return Problem(self._name, partition, text, f"{advice}; {LOG_ADVICE}")


def _text_fields(name: str, data: bytes) -> dict[str, str]:
    # The same fields as in the output of `upr tail`.
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name: b64encode(data).decode(), f"{name}_encoding": "base64"}


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        raise OutputError(f"the output cannot be written: {error.strerror}") from error
