"""Queries to an index, as they come over HTTP, and their answers."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from upr_protocol.errors import UprError
from upr_protocol.ids import PARTITIONS_END, HistoryId, PartitionId, SeqNo
from upr_server.indexer.freshness import RequiredWrites
from upr_server.indexer.index_file import (
    ENTRY_OVERHEAD_BYTES,
    KeyRange,
    ScanResult,
    Selection,
    Summary,
    Timestamps,
    entries_bytes,
)
from upr_server.indexer.pool import PIECE_BYTES
from upr_server.indexer.pure.keys import (
    IndexKeyError,
    decode_parts,
    encode_parts,
    end_of_parts,
    end_of_prefix,
)

LIMIT_MAX: Final = 10_000
"""The most entries of one answer; a continuation gives more. Long keys make it fewer."""

LIMIT_DEFAULT: Final = 100

RANGES_MAX: Final = 1000
"""The most ranges of one scan: each costs a search."""

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


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A range of keys.

    Attributes:
        prefix: The first parts of the keys in the range, or all of them.
        low: Where it begins; not together with `prefix`.
        high: Where it ends; not together with `prefix`.
    """

    prefix: list[Any] | None = None
    low: Bound | None = None
    high: Bound | None = None


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
    """A scan. Without `prefix`, `low`, `high` and `ranges` it is over the whole index.

    Attributes:
        prefix: The first parts of the keys wanted, or all of them.
        low: Where to begin; not together with `prefix`.
        high: Where to end; not together with `prefix`.
        ranges: Several ranges, in place of one; an entry that is in two of them stands once.
        descending: Whether the highest key comes first.
        distinct: Look only at so many first parts of the keys, and at each different beginning
            once; 0 for whole entries.
        limit: How many entries at most; 100 by default. An answer with long keys has fewer, and a
            continuation. Not together with `count`, `min` or `max`.
        continuation: What an answer gave, for what comes behind it.
        count: Whether to count the entries and not to give them.
        min: Whether to give the lowest key, and no entries.
        max: Whether to give the highest key, and no entries.
        consistency: `any`: as the index is. `at_least`: with the changes in `written`. `now`: with
            all that the server had acknowledged to anybody when the question came.
        written: Changes that must be in the index; `at_least` needs one at least.
        timeout_s: How long to wait for the index to be as fresh.
        timestamps: Whether to tell how far each partition was.
    """

    prefix: list[Any] | None = None
    low: Bound | None = None
    high: Bound | None = None
    ranges: Annotated[tuple[Range, ...], msgspec.Meta(max_length=RANGES_MAX)] | None = None
    descending: bool = False
    distinct: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)] | None = None
    continuation: str = ""
    count: bool = False
    min: bool = False
    max: bool = False
    consistency: Literal["any", "at_least", "now"] = "any"
    written: tuple[RequiredWrite, ...] = ()
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=TIMEOUT_S_MAX)] = 10.0
    timestamps: bool = False

    def check(self) -> None:
        """Refuses fields that contradict each other.

        Raises:
            QueryError: A summary has a limit or a continuation, or `at_least` names no changes.
        """
        if self.is_summary and (self.limit is not None or self.continuation):
            place = "continuation" if self.limit is None else "limit"
            raise QueryError(
                place, f"`count`, `min` and `max` exclude `{place}`; leave out one of them"
            )
        if self.consistency == "at_least" and not self.written:
            raise QueryError(
                "written", "consistency `at_least` needs at least one change; name it, or ask `any`"
            )

    @property
    def is_summary(self) -> bool:
        """Whether the query asks about entries, and not for them."""
        return self.count or self.min or self.max

    def selection(self, part_count: int) -> Selection:
        """The entries that the query asks for. O(n log n) for n ranges.

        Args:
            part_count: How many parts the index's keys have.

        Raises:
            QueryError: A bound is not a key, or has too many parts; one range and several are
                given; or the continuation is invalid.
        """
        if self.distinct > part_count:
            raise QueryError("distinct", _too_many_parts(self.distinct, part_count))
        if self.ranges is None:
            ranges = [_key_range("", self, part_count)]
        elif self.prefix is None and self.low is None and self.high is None:
            ranges = [
                _key_range(f"ranges[{number}].", bounds, part_count)
                for number, bounds in enumerate(self.ranges)
            ]
        else:
            raise QueryError("ranges", "name ranges, or prefix, low and high, and not both")
        if self.continuation:
            remainder = self._remainder(part_count)
            ranges = [
                KeyRange(max(key_range.low, remainder.low), min(key_range.high, remainder.high))
                for key_range in ranges
            ]
        return Selection(_disjoint(ranges), self.descending, self.distinct)

    def _remainder(self, part_count: int) -> KeyRange:
        """What comes behind the continuation."""
        try:
            last = base64.urlsafe_b64decode(self.continuation.encode("ascii"))
            end = end_of_parts(last, self.distinct or part_count)
        except (UnicodeEncodeError, binascii.Error, IndexKeyError) as error:
            raise QueryError("continuation", INVALID_CONTINUATION) from error
        # Behind a whole key stands the document's.
        if (end == len(last)) is not bool(self.distinct):
            raise QueryError("continuation", INVALID_CONTINUATION)
        if self.descending:
            return KeyRange(high=last)
        return KeyRange(low=end_of_prefix(last) if self.distinct else last + b"\0")

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


def _key_range(place: str, bounds: Query | Range, part_count: int) -> KeyRange:
    """A range of encoded keys. `place` stands before the names of its fields in errors."""
    whole = KeyRange()
    low, high = whole.low, whole.high
    if bounds.prefix is not None:
        if bounds.low or bounds.high:
            raise QueryError(f"{place}prefix", "name a prefix, or low and high, and not both")
        if bounds.prefix:
            low = _encoded(f"{place}prefix", bounds.prefix, part_count)
            high = end_of_prefix(low)
    if bounds.low is not None and bounds.low.key:
        low = _encoded(f"{place}low.key", bounds.low.key, part_count)
        low = low if bounds.low.inclusive else end_of_prefix(low)
    if bounds.high is not None and bounds.high.key:
        high = _encoded(f"{place}high.key", bounds.high.key, part_count)
        high = end_of_prefix(high) if bounds.high.inclusive else high
    return KeyRange(low, high)


def _disjoint(ranges: Iterable[KeyRange]) -> tuple[KeyRange, ...]:
    """The same keys in ranges that do not meet, the lowest first."""
    disjoint: list[KeyRange] = []
    for key_range in sorted(ranges, key=lambda key_range: key_range.low):
        if key_range.low >= key_range.high:
            continue
        if disjoint and key_range.low <= disjoint[-1].high:
            high = max(disjoint[-1].high, key_range.high)
            disjoint[-1] = KeyRange(disjoint[-1].low, high)
        else:
            disjoint.append(key_range)
    return tuple(disjoint)


def _too_many_parts(count: int, part_count: int) -> str:
    return f"{count} parts; keys of this index have {part_count}"


def _encoded(place: str, parts: list[Any], part_count: int) -> bytes:
    if len(parts) > part_count:
        raise QueryError(place, _too_many_parts(len(parts), part_count))
    try:
        return encode_parts(parts)
    except IndexKeyError as error:
        raise QueryError(place, str(error)) from error


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document in an index, or with `distinct` the beginning of keys.

    Attributes:
        key: Its key in the index, part by part.
        id: The document's key; where that is no UTF-8, in base64. Empty with `distinct`.
        id_encoding: `base64` then; otherwise empty.
        included: The values that the index includes, in the order of its `include`. Missing if it
            includes none, or if they take more than 4,096 bytes: read the document then.
    """

    key: list[Any]
    id: str = ""
    id_encoding: str = ""
    included: list[Any] | None = None


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a scan found, all in one moment.

    Attributes:
        entries: The entries, in order.
        continuation: Names what comes behind them; empty when there is no more.
        count: How many entries there are, when that was asked.
        min: The lowest key, part by part, when that was asked; null if there are no entries.
        max: The highest key, likewise.
        timestamps: By partition, the history (16 hexadecimal digits) and the number that it was at,
            when that was asked.
    """

    entries: list[Entry] = []
    continuation: str = ""
    count: int | None = None
    min: list[Any] | None = None
    max: list[Any] | None = None
    timestamps: dict[int, tuple[str, int]] = {}


class ScanAnswer:
    """What a scan found, and the JSON that says it, an `Answer`.

    Args:
        result: What it found: entries, or a summary of them.
        part_count: How many parts of its keys the query is about.

    Attributes:
        nbytes: The memory that its entries take.
    """

    def __init__(self, result: ScanResult | Summary, part_count: int) -> None:
        self._part_count = part_count
        self._entries: Sequence[bytes] = ()
        self._payloads: Sequence[bytes] = ()
        timestamps = _timestamps(result.timestamps)
        if isinstance(result, Summary):
            lowest, highest = (
                None if entry is None else decode_parts(entry, part_count)[0]
                for entry in (result.lowest, result.highest)
            )
            self._rest = Answer(count=result.count, min=lowest, max=highest, timestamps=timestamps)
        else:
            self._entries, self._payloads = result.entries, result.payloads
            continuation = ""
            if result.more:
                continuation = base64.urlsafe_b64encode(result.entries[-1]).decode()
            self._rest = Answer(continuation=continuation, timestamps=timestamps)
        self.nbytes = entries_bytes(self._entries) + entries_bytes(self._payloads)

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
            if self._payloads:
                nbytes += len(self._payloads[end - 1])
            is_last = end == len(self._entries)
            if nbytes >= PIECE_BYTES or is_last:
                entries = [self._entry(position) for position in range(start, end)]
                yield head + msgspec.json.encode(entries)[1:-1] + (tail if is_last else b"")
                head, start, nbytes = b",", end, 0

    def _entry(self, position: int) -> Entry:
        payload = self._payloads[position] if self._payloads else b""
        return _entry(self._entries[position], self._part_count, payload)


def _timestamps(timestamps: Timestamps) -> dict[int, tuple[str, int]]:
    return {
        partition: (f"{history_id:016x}", seq)
        for partition, (history_id, seq) in timestamps.items()
    }


def _entry(data: bytes, part_count: int, payload: bytes) -> Entry:
    parts, end = decode_parts(data, part_count)
    # Empty for the beginning of keys: no document's key is.
    key = data[end:]
    # It is JSON already, which msgspec copies.
    included: Any = msgspec.Raw(payload) if payload else None
    try:
        return Entry(parts, key.decode(), included=included)
    except UnicodeDecodeError:
        return Entry(parts, base64.b64encode(key).decode(), "base64", included)
