"""Queries to an index, as they come over HTTP, and their answers."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import msgspec

from upr_protocol.errors import UprError
from upr_protocol.ids import PARTITIONS_END, HistoryId, PartitionId, SeqNo
from upr_server.indexer.freshness import RequiredWrites
from upr_server.indexer.index_file import (
    ENTRY_OVERHEAD_BYTES,
    KeyRange,
    ScanResult,
    Timestamps,
    entries_bytes,
)
from upr_server.indexer.pool import PIECE_BYTES
from upr_server.indexer.pure.keys import IndexKeyError, decode_parts, encode_parts, end_of_prefix

LIMIT_MAX: Final = 10_000
"""The most entries of one answer; a continuation gives more. Long keys make it fewer."""

LIMIT_DEFAULT: Final = 100

TIMEOUT_S_MAX: Final = 300.0

INVALID_CONTINUATION: Final = (
    "invalid continuation token; pass the `continuation` of the previous answer unchanged"
)


class QueryError(UprError):
    """A query that cannot be answered as it stands.

    Attributes:
        place: The field that is wrong.
    """

    def __init__(self, place: str, reason: str) -> None:
        self.place = place
        super().__init__(f"{place}: {reason}")


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An end of a range.

    Attributes:
        key: The first parts of a key, or all of them.
        inclusive: Whether keys that begin so are in the range.
    """

    key: list[Any]
    inclusive: bool = True


class RequiredWrite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change that a publisher was answered.

    Attributes:
        partition: Its partition.
        history_id: The history that its number is of, as 16 hexadecimal digits.
        seq: Its number.
    """

    partition: Annotated[int, msgspec.Meta(ge=0, lt=PARTITIONS_END)]
    history_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{1,16}$")]
    seq: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A scan. Without `prefix`, `low` and `high` it is over the whole index.

    Attributes:
        prefix: The first parts of the keys wanted, or all of them.
        low: Where to begin; not together with `prefix`.
        high: Where to end; not together with `prefix`.
        descending: Whether the highest key comes first.
        limit: How many entries at most; 100 by default. An answer with long keys has fewer, and a
            continuation. Not together with `count`.
        continuation: What an answer gave, for what comes behind it.
        count: Whether to count the entries and not to give them.
        consistency: `any`: as the index is. `at_least`: with the changes in `written`. `now`: with
            all that the server had acknowledged to anybody when the question came.
        written: Changes that must be in the index; `at_least` needs one at least.
        timeout_s: How long to wait for the index to be as fresh.
        timestamps: Whether to tell how far each partition was.
    """

    prefix: list[Any] | None = None
    low: Bound | None = None
    high: Bound | None = None
    descending: bool = False
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)] | None = None
    continuation: str = ""
    count: bool = False
    consistency: Literal["any", "at_least", "now"] = "any"
    written: tuple[RequiredWrite, ...] = ()
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=TIMEOUT_S_MAX)] = 10.0
    timestamps: bool = False

    def check(self) -> None:
        """Refuses fields that contradict each other.

        Raises:
            QueryError: A count has a limit, or `at_least` names no changes.
        """
        if self.count and self.limit is not None:
            raise QueryError(
                "limit", "`count` and `limit` exclude each other; leave out one of them"
            )
        if self.consistency == "at_least" and not self.written:
            raise QueryError(
                "written", "consistency `at_least` needs at least one change; name it, or ask `any`"
            )

    def range(self, part_count: int) -> KeyRange:
        """The range of entries that the query asks for.

        Args:
            part_count: How many parts the index's keys have.

        Raises:
            QueryError: A bound is not a key, has too many parts, or the continuation is invalid.
        """
        whole = KeyRange()
        low, high = whole.low, whole.high
        if self.prefix is not None:
            if self.low or self.high:
                raise QueryError("prefix", "name a prefix, or low and high, and not both")
            if self.prefix:
                low = _encoded("prefix", self.prefix, part_count)
                high = end_of_prefix(low)
        if self.low is not None and self.low.key:
            low = _encoded("low.key", self.low.key, part_count)
            low = low if self.low.inclusive else end_of_prefix(low)
        if self.high is not None and self.high.key:
            high = _encoded("high.key", self.high.key, part_count)
            high = end_of_prefix(high) if self.high.inclusive else high
        if self.continuation:
            try:
                last = base64.urlsafe_b64decode(self.continuation.encode("ascii"))
            except (UnicodeEncodeError, binascii.Error) as error:
                raise QueryError("continuation", INVALID_CONTINUATION) from error
            if self.descending:
                high = min(high, last)
            else:
                low = max(low, last + b"\0")
        return KeyRange(low, high, self.descending)

    def required_writes(self) -> RequiredWrites:
        """The changes that must be in the index, the newest of each partition."""
        newest: dict[PartitionId, tuple[HistoryId, SeqNo]] = {}
        for result in self.written:
            partition, seq = PartitionId(result.partition), SeqNo(result.seq)
            history_id = HistoryId(int(result.history_id, 16))
            if partition in newest and newest[partition][0] != history_id:
                raise QueryError("written", f"partition {partition} is named in two histories")
            if partition not in newest or newest[partition][1] < seq:
                newest[partition] = history_id, seq
        return newest


def _encoded(place: str, parts: list[Any], part_count: int) -> bytes:
    if len(parts) > part_count:
        raise QueryError(place, f"{len(parts)} parts; keys of this index have {part_count}")
    try:
        return encode_parts(parts)
    except IndexKeyError as error:
        raise QueryError(place, str(error)) from error


class Entry(msgspec.Struct, frozen=True):
    """A document in an index.

    Attributes:
        key: Its key in the index, part by part.
        id: The document's key; where that is no UTF-8, in base64.
        id_encoding: `base64` then; otherwise empty.
    """

    key: list[Any]
    id: str
    id_encoding: str = ""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a scan found, all in one moment.

    Attributes:
        entries: The entries, in order.
        continuation: Names what comes behind them; empty when there is no more.
        count: How many entries there are, when that was asked.
        timestamps: By partition, the history (16 hexadecimal digits) and the number that it was at,
            when that was asked.
    """

    entries: list[Entry] = []
    continuation: str = ""
    count: int | None = None
    timestamps: dict[int, tuple[str, int]] = {}


class ScanAnswer:
    """What a scan found, and the JSON that says it, an `Answer`.

    Args:
        result: What it found.
        part_count: How many parts the index's keys have.
        count: How many entries there are, when only that was asked.

    Attributes:
        nbytes: The memory that its entries take.
    """

    def __init__(self, result: ScanResult, part_count: int, count: int | None = None) -> None:
        self._entries = result.entries
        self._part_count = part_count
        self.nbytes = entries_bytes(result.entries)
        self._rest = Answer(
            [],
            base64.urlsafe_b64encode(result.entries[-1]).decode() if result.more else "",
            count,
            _timestamps(result.timestamps),
        )

    def pieces(self) -> Iterator[bytes]:
        """The JSON, in pieces of some 64 KiB that are made one at a time: as Python's objects all
        the entries would take many times the memory."""
        other_fields = msgspec.json.encode(self._rest)
        if not self._entries:
            yield other_fields
            return
        # The rest is an object of its own: what stands behind its opening brace goes on here.
        tail = b"]}" if other_fields == b"{}" else b"]," + other_fields[1:]
        head = b'{"entries":['
        start = nbytes = 0
        for end, data in enumerate(self._entries, 1):
            nbytes += len(data) + ENTRY_OVERHEAD_BYTES
            is_last = end == len(self._entries)
            if nbytes >= PIECE_BYTES or is_last:
                entries = [_entry(entry, self._part_count) for entry in self._entries[start:end]]
                yield head + msgspec.json.encode(entries)[1:-1] + (tail if is_last else b"")
                head, start, nbytes = b",", end, 0


def _timestamps(timestamps: Timestamps) -> dict[int, tuple[str, int]]:
    return {
        partition: (f"{history_id:016x}", seq)
        for partition, (history_id, seq) in timestamps.items()
    }


def _entry(data: bytes, part_count: int) -> Entry:
    parts, end = decode_parts(data, part_count)
    key = data[end:]
    try:
        return Entry(parts, key.decode())
    except UnicodeDecodeError:
        return Entry(parts, base64.b64encode(key).decode(), "base64")
