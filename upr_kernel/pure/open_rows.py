"""The rows that an open snapshot is being filled with."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Final

from upr_kernel.defects import ChunkDefectError
from upr_kernel.pure.answers import Answers
from upr_kernel.pure.chunks import OFFSET_MAX, gather
from upr_kernel.pure.columns import HEAD, U64_END, Buffer, Columns, padded
from upr_kernel.pure.key_table import SEQ_END, KeyTable
from upr_kernel.pure.partition import partition_of

ROW_BYTES: Final = 33
"""What a row takes beside its key and value."""

_ROWS_STEP: Final = 8
"""Room for rows grows by a multiple of this."""

Row = tuple[int, bytes, bytes, int, int, int, int]
"""Operation, key, value, sequence number, CAS, flags and expiry time."""


class RunLimits:
    """What `add_runs` asks of every run.

    Args:
        attempt: Which run of its task the writer is.
        cas: The lowest CAS that is given.
        partition_count: How many partitions the bucket has.
        rows_max: A run has fewer rows.
        bytes_max: A run has fewer bytes of values.
    """

    __slots__ = ("attempt", "bytes_max", "cas", "partition_count", "rows_max")

    def __init__(
        self, attempt: int, cas: int, partition_count: int, rows_max: int, bytes_max: int
    ) -> None:
        self.attempt = attempt
        self.cas = cas
        self.partition_count = partition_count
        self.rows_max = rows_max
        self.bytes_max = bytes_max


class OpenRows:
    """The rows of one partition's open snapshot that are being gathered, with the numbers and flags
    of the whole of it.

    Rows are copied here as they come, and taken from here as a chunk. The flags are for the newest
    numbers of the snapshot, also of rows that were taken from here before.

    Args:
        table: The partition's key table.
        answers: What the partition has answered to publishers.
        partition: The partition's number.
        rows_max: It is full with so many rows.
        bytes_max: It is full with so many bytes of rows.
        span_max: It is full once its rows span so many numbers.

    Attributes:
        table: The partition's key table.
        answers: What the partition has answered to publishers.
        partition: The partition's number.
        history_id: The history to which `add_runs` adds; 0 where the partition takes no runs.
        is_awaited: Whether somebody waits for the next change: `add_runs` then names the partition.
        first: The number of the first row that came since it was empty; 0 when it is.
        start: The snapshot's start: the mutations of the snapshot have higher numbers.
        high: The highest number that the snapshot has had.
        last_cas: No CAS up to here is given again.
        live: The snapshot's keys.
        base: The number of the first flag.
        flags: A flag for each number from `base` on, 1 for superseded.
        added: Bytes that came since the caller tidied.
        superseded: Mutations that were superseded since then.
        mean_bytes: What each of them is taken to have, as of then.
        tidy_at: With so many bytes more the caller should tidy.
        has_counters: Whether some of the snapshot's numbers have no flag: then `add_runs` flags
            nothing here, and returns all that is superseded.
    """

    __slots__ = (
        "_cas",
        "_expiries",
        "_flags",
        "_key_bytes",
        "_key_offsets",
        "_key_size",
        "_limits",
        "_operations",
        "_row_size",
        "_seqs",
        "_value_bytes",
        "_value_offsets",
        "_value_size",
        "added",
        "answers",
        "base",
        "first",
        "flags",
        "has_counters",
        "high",
        "history_id",
        "is_awaited",
        "last_cas",
        "live",
        "mean_bytes",
        "partition",
        "start",
        "superseded",
        "table",
        "tidy_at",
    )

    def __init__(
        self,
        table: KeyTable,
        answers: Answers,
        partition: int,
        rows_max: int,
        bytes_max: int,
        span_max: int,
        /,
    ) -> None:
        self.table = table
        self.answers = answers
        self.partition = partition
        self.history_id = 0
        self.is_awaited = False
        self._limits = rows_max, bytes_max, span_max
        self.flags = bytearray()
        self.last_cas = 0
        self.begin(0, 0)

    def begin(self, start: int, tidy_at: int, /) -> None:
        """The snapshot was closed, and a new one begins behind the number `start`.

        Raises:
            BufferError: Somebody reads the flags. Nothing has changed.
            OverflowError: A number is negative, or has more than 64 bits.
        """
        if min(start, tidy_at) < 0 or max(start, tidy_at) >= U64_END:
            raise OverflowError("a number is out of range")
        self.flags.clear()
        self.clear()
        self.start = self.high = start
        self.tidy_at = tidy_at
        self.live = self.base = self.added = self.superseded = self.mean_bytes = 0
        self.has_counters = False

    def clear(self) -> None:
        """Forgets the rows, and gives their room back."""
        self._seqs = array("Q")
        self._cas = array("Q")
        self._expiries = array("I")
        self._flags = array("I")
        self._operations = bytearray()
        self._key_offsets = array("i", (0,))
        self._value_offsets = array("i", (0,))
        self._key_bytes = bytearray()
        self._value_bytes = bytearray()
        self.first = self._row_size = self._key_size = self._value_size = 0

    def __len__(self) -> int:
        """Rows, with those that are superseded."""
        return len(self._seqs)

    # Adding rows.

    def append(
        self,
        operation: int,
        key: bytes,
        value: bytes,
        seq: int,
        cas: int,
        flags: int,
        expiry: int,
        /,
    ) -> None:
        """Adds one row. O(1).

        Raises:
            OverflowError: A number is out of range, or there is no room in a chunk.
        """
        if operation > 0xFF or max(flags, expiry) >= 1 << 32 or max(seq, cas) >= 1 << 64:
            raise OverflowError("operation, flags, expiry or numbers out of range")
        if min(operation, seq, cas, flags, expiry) < 0:
            raise OverflowError("numbers are not negative")
        self._reserve(1, len(key), len(value))
        self._seqs.append(seq)
        self._cas.append(cas)
        self._expiries.append(expiry)
        self._flags.append(flags)
        self._operations.append(operation)
        self._key_bytes += key
        self._value_bytes += value
        self._key_offsets.append(len(self._key_bytes))
        self._value_offsets.append(len(self._value_bytes))
        self.first = self.first or seq
        self.added += ROW_BYTES + len(key) + len(value)

    def extend(self, chunk: Buffer, low: int, high: int, first_seq: int, first_cas: int, /) -> None:
        """Adds rows of a chunk, numbered on end. O(rows).

        Raises:
            ChunkDefectError: The chunk is damaged.
            IndexError: The chunk does not have the rows.
        """
        columns = Columns(chunk)
        columns.check_rows(low, high)
        self._extend(columns, low, high, first_seq, first_cas)

    def _extend(
        self, columns: Columns, low: int, high: int, first_seq: int, first_cas: int
    ) -> None:
        count, before = high - low, self.row_bytes
        keys = columns.rows(columns.key_offsets_at, columns.key_length, low, high)
        values = columns.rows(columns.value_offsets_at, columns.value_length, low, high)
        self._reserve(count, keys[-1] - keys[0], values[-1] - values[0])
        self._seqs.extend(range(first_seq, first_seq + count))
        self._cas.extend(range(first_cas, first_cas + count))
        self._expiries.frombytes(columns.column(columns.expiries_at, 4, low, high))
        self._flags.frombytes(columns.column(columns.flags_at, 4, low, high))
        self._operations += columns.column(columns.operations_at, 1, low, high)
        for target, target_offsets, start, offsets in (
            (self._key_bytes, self._key_offsets, columns.keys_at, keys),
            (self._value_bytes, self._value_offsets, columns.values_at, values),
        ):
            shift = len(target) - offsets[0]
            target_offsets.extend([offset + shift for offset in offsets[1:]])
            target += columns.view[start + offsets[0] : start + offsets[-1]]
        if count:
            self.first = self.first or first_seq
        self.added += self.row_bytes - before

    def _reserve(self, count: int, key_bytes: int, value_bytes: int) -> None:
        rows = len(self) + count
        keys, values = len(self._key_bytes) + key_bytes, len(self._value_bytes) + value_bytes
        if max(rows, keys, values) > OFFSET_MAX:
            raise OverflowError("a chunk holds 2 GiB of keys, and of values, at most")
        if rows > self._row_size:
            size = max(rows, self._row_size * 3 // 2)
            self._row_size = -(-size // _ROWS_STEP) * _ROWS_STEP
        if keys > self._key_size:
            self._key_size = max(keys, self._key_size * 3 // 2)
        if values > self._value_size:
            self._value_size = max(values, self._value_size * 3 // 2)

    def pop(self) -> None:
        """Takes the last row away.

        Raises:
            IndexError: There is none.
        """
        if not len(self):
            raise IndexError("there are no rows")
        for column in (
            self._seqs,
            self._cas,
            self._expiries,
            self._flags,
            self._operations,
            self._key_offsets,
            self._value_offsets,
        ):
            column.pop()
        del self._key_bytes[self._key_offsets[-1] :]
        del self._value_bytes[self._value_offsets[-1] :]

    # Reading rows.

    def find(self, seq: int, /) -> Row | None:
        """The row with this number; None where it is not here. O(log rows)."""
        index = bisect_left(self._seqs, seq)
        if index == len(self) or self._seqs[index] != seq:
            return None
        return (
            self._operations[index],
            bytes(self._key_bytes[self._key_offsets[index] : self._key_offsets[index + 1]]),
            bytes(self._value_bytes[self._value_offsets[index] : self._value_offsets[index + 1]]),
            seq,
            self._cas[index],
            self._flags[index],
            self._expiries[index],
        )

    def seqs(self) -> list[int]:
        """The number of each row. O(rows)."""
        return self._seqs.tolist()

    def encoded(self, start: int, end: int, only_live: bool, /) -> bytes:
        """An encoded chunk of the rows. O(rows).

        Args:
            start: The range that the chunk covers, exclusive.
            end: The same, inclusive.
            only_live: Whether to leave out those that are superseded.
        """
        columns = (
            HEAD.pack(len(self), len(self._key_bytes), len(self._value_bytes), 0, start, end),
            self._seqs.tobytes(),
            self._cas.tobytes(),
            self._expiries.tobytes(),
            self._flags.tobytes(),
            self._key_offsets.tobytes(),
            self._value_offsets.tobytes(),
            bytes(self._operations),
            bytes(self._key_bytes),
            bytes(self._value_bytes),
        )
        chunk = b"".join(column.ljust(padded(len(column)), b"\0") for column in columns)
        if not only_live or 1 not in self.flags:
            return chunk
        flags, base = self.flags, self.base
        skip = bytes(
            base <= seq < base + len(flags) and flags[seq - base] > 0 for seq in self._seqs
        )
        return gather([(chunk, 0, len(self), skip, None, 0)], start, end)

    # For `add_runs`.

    def fits(self, columns: Columns, low: int, high: int, limits: RunLimits) -> bool:
        """Whether a run may be added here as it is."""
        count = high - low
        if self.is_full or not 0 < count < limits.rows_max:
            return False
        try:
            keys = columns.keys(low, high)
            values = columns.rows(columns.value_offsets_at, columns.value_length, low, high)
        except (ChunkDefectError, IndexError):
            return False
        return (
            values[-1] - values[0] < limits.bytes_max
            and self.high + count + 1 < SEQ_END
            and max(self.last_cas + 1, limits.cas) + count < U64_END
            and all(partition_of(key, limits.partition_count) == self.partition for key in keys)
        )

    def add_run(self, chunk: Buffer, columns: Columns, low: int, high: int, cas: int) -> list[int]:
        """Adds a run that fits; returns what it superseded and has no flag."""
        count, first_seq = high - low, self.high + 1
        first_cas = max(self.last_cas + 1, cas)
        if not self.flags:
            self.base = first_seq
        self.flags += bytes(count)
        flags = bytearray() if self.has_counters else self.flags
        superseded, fresh = self.table.put_run(
            chunk, low, high, first_seq, self.start, self.base, flags
        )
        self._extend(columns, low, high, first_seq, first_cas)
        self.high += count
        self.last_cas = first_cas + count - 1
        self.live += fresh
        self.superseded += count - fresh
        return superseded

    # Figures.

    @property
    def last(self) -> int:
        """The number of the last row; 0 where there is none."""
        return self._seqs[-1] if self._seqs else 0

    @property
    def row_bytes(self) -> int:
        """What the rows would take without any room to grow."""
        return ROW_BYTES * len(self) + len(self._key_bytes) + len(self._value_bytes)

    @property
    def nbytes(self) -> int:
        """What was reserved for rows."""
        columns = ROW_BYTES * self._row_size + _ROWS_STEP if self._row_size else 0
        return columns + self._key_size + self._value_size

    @property
    def is_full(self) -> bool:
        """Whether the rows are to be taken as a chunk."""
        rows_max, bytes_max, span_max = self._limits
        return (
            len(self) >= rows_max
            or self.row_bytes >= bytes_max
            or (len(self) > 0 and self.last - self.first >= span_max)
        )

    @property
    def wants_tidying(self) -> bool:
        """Whether the caller should look at what is superseded."""
        superseded_bytes = self.superseded * self.mean_bytes
        return self.added > self.tidy_at or 2 * superseded_bytes > self.tidy_at + self.added
