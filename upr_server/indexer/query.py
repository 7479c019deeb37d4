"""Queries to an index, as they come over HTTP, and their answers."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Literal

import attrs
import msgspec

from upr_protocol.errors import UprError
from upr_protocol.ids import PARTITIONS_END, HistoryId, PartitionId, SeqNo
from upr_server.indexer.entry_reader import END_OF_KEYS, EntrySelection, KeyRange
from upr_server.indexer.explanation import RangeEnd, ReadRange
from upr_server.indexer.freshness import RequiredWrites
from upr_server.indexer.moments import HOLD_S_MAX
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

KEY_SIZE_MAX: Final = 1024
"""How many values and characters a bound has at most, the elements of its arrays included. Keys of
an index have 261 bytes at most, so a longer bound is a mistake."""

KEY_VALUES_MAX: Final = RANGES_MAX * 2 * 16
"""How many values the bounds of a query have at most: both ends of each range, all parts of a key.
Each costs 2 µs, each time that the query is turned into bytes."""

CONTINUATION_CHARACTERS_MAX: Final = 1024
"""An entry has 511 bytes at most, which are 684 characters."""

TIMEOUT_S_MAX: Final = 300.0

INVALID_CONTINUATION: Final = (
    "invalid continuation token; pass the `continuation` of the previous answer unchanged, and "
    "scan from the beginning if the index has got another definition since"
)


class QueryError(UprError):
    """A query that cannot be answered as it stands.

    Attributes:
        place: The field that is wrong.
    """

    def __init__(self, place: str, reason: str) -> None:
        self.place = place
        super().__init__(f"{place}: {reason}")


_UNKNOWN_FIELD: Final = "Object contains unknown field `"
"""How msgspec's sentence begins that names a field at its end, and only the object as its place."""


def read_query(body: bytes) -> Query:
    """The query that is the body of a request.

    Raises:
        QueryError: It is none. The place is the field that is wrong, or `body`.
    """
    try:
        return msgspec.json.decode(body, type=Query)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # For example "Expected `int` >= 1 - at `$.limit`".
        reason, _, path = str(error).partition(" - at `$")
        places = [path.lstrip(".").rstrip("`")]
        if reason.startswith(_UNKNOWN_FIELD):
            places.append(reason.removeprefix(_UNKNOWN_FIELD).rstrip("`"))
        elif reason.startswith("Invalid enum value"):
            reason += "; use `any`, `at_least` or `now`"
        place = ".".join(filter(None, places))
        raise QueryError(place or "body", reason) from error


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
        explain: Whether to tell how the scan was carried out.
        hold_s: Hold the moment that the answer is of for so many seconds after it, for further
            pages; 0 to let it go.
        moment: The `moment` of an earlier answer, which this one is to be of, too. Not together
            with `consistency` and `written`, by which that moment was chosen.
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
    explain: bool = False
    hold_s: Annotated[float, msgspec.Meta(ge=0, le=HOLD_S_MAX)] = 0.0
    moment: str = ""

    def check(self) -> None:
        """Refuses fields that contradict each other.

        Raises:
            QueryError: A summary has a limit or a continuation, `at_least` names no changes, a
                moment is to be fresher than it is, or the bounds are too long.
        """
        if self.is_summary and (self.limit is not None or self.continuation):
            place = "continuation" if self.limit is None else "limit"
            raise QueryError(
                place, f"`count`, `min` and `max` exclude `{place}`; leave out one of them"
            )
        if self.moment and (self.consistency != "any" or self.written):
            place = "written" if self.written else "consistency"
            raise QueryError(
                place, f"a moment is as fresh as it is; leave out `{place}`, or `moment`"
            )
        if self.consistency == "at_least" and not self.written:
            raise QueryError(
                "written", "consistency `at_least` needs at least one change; name it, or ask `any`"
            )

        self._check_keys()

    def _check_keys(self) -> None:
        total = 0
        for place, key in self._keys():
            values, characters = _size_of(key, KEY_SIZE_MAX)
            if values + characters > KEY_SIZE_MAX:
                raise QueryError(
                    place,
                    f"a bound has at most {KEY_SIZE_MAX} values and characters; keys of an index "
                    "are shorter",
                )
            total += values
            if total > KEY_VALUES_MAX:
                # Those that follow are not counted: a body has room for a hundred thousand.
                raise QueryError(
                    "ranges",
                    f"the bounds have more than {KEY_VALUES_MAX} values together; ask for fewer "
                    "ranges at a time",
                )

    def _keys(self) -> Iterator[tuple[str, list[Any]]]:
        """The keys of all bounds, and their places."""
        ranges: list[tuple[str, Query | Range]] = [("", self)]
        ranges += ((f"ranges[{place}].", bounds) for place, bounds in enumerate(self.ranges or ()))
        for place, bounds in ranges:
            if bounds.prefix is not None:
                yield f"{place}prefix", bounds.prefix
            for end, bound in (("low", bounds.low), ("high", bounds.high)):
                if bound is not None:
                    yield f"{place}{end}.key", bound.key

    def has_more_values_than(self, count: int) -> bool:
        """Whether its bounds have more values, the elements of their arrays included. O(count +
        keys without values)."""
        total = 0
        for _, key in self._keys():
            total += _size_of(key, KEY_SIZE_MAX)[0]
            if total > count:
                return True
        return False

    @property
    def is_summary(self) -> bool:
        """Whether the query asks about entries, and not for them."""
        return self.count or self.min or self.max

    def selection(self, part_count: int) -> EntrySelection:
        """The entries that the query asks for. O(n log n) for n ranges.

        Args:
            part_count: How many parts the index's keys have.

        Raises:
            QueryError: A bound is not a key, or has too many parts; one range and several are
                given; or the continuation is invalid.
        """
        ranges = tuple(
            KeyRange(range_.low.data, range_.high.data) for range_ in self._ranges(part_count)
        )
        return EntrySelection(ranges, self.descending, self.distinct)

    def read_ranges(self, part_count: int) -> tuple[ReadRange, ...]:
        """The ranges of `selection`, to be read by people."""
        return tuple(
            ReadRange(range_.low.meaning, range_.high.meaning)
            for range_ in self._ranges(part_count)
        )

    def _ranges(self, part_count: int) -> list[_EncodedRange]:
        if self.distinct > part_count:
            raise QueryError("distinct", _too_many_parts(self.distinct, part_count))
        if self.ranges is None:
            ranges = [_encoded_range("", self, part_count)]
        elif self.prefix is None and self.low is None and self.high is None:
            ranges = [
                _encoded_range(f"ranges[{position}].", bounds, part_count)
                for position, bounds in enumerate(self.ranges)
            ]
        else:
            raise QueryError("ranges", "name ranges, or prefix, low and high, and not both")
        if self.continuation:
            remainder = self._remainder(part_count)
            ranges = [
                _EncodedRange(max(range_.low, remainder.low), min(range_.high, remainder.high))
                for range_ in ranges
            ]
        return _merge_ranges(ranges)

    def _remainder(self, part_count: int) -> _EncodedRange:
        """What comes behind the continuation."""
        if len(self.continuation) > CONTINUATION_CHARACTERS_MAX:
            raise QueryError("continuation", INVALID_CONTINUATION)
        count = self.distinct or part_count
        try:
            last_entry = base64.urlsafe_b64decode(self.continuation.encode("ascii"))
            end = end_of_parts(last_entry, count)
            parts, _ = decode_parts(last_entry, count)
        except (UnicodeEncodeError, binascii.Error, IndexKeyError) as error:
            raise QueryError("continuation", INVALID_CONTINUATION) from error
        # The document's key follows a whole index key.
        if (end == len(last_entry)) is not bool(self.distinct):
            raise QueryError("continuation", INVALID_CONTINUATION)
        meaning = RangeEnd(parts, False, *readable_key(last_entry[end:]))
        if self.descending:
            return _EncodedRange(high=_End(last_entry, meaning))
        low = end_of_prefix(last_entry) if self.distinct else last_entry + b"\0"
        return _EncodedRange(low=_End(low, meaning))

    def required_writes(self) -> RequiredWrites:
        """The changes that must be in the index, the newest of each partition and history. O(n)."""
        newest: dict[PartitionId, dict[HistoryId, SeqNo]] = {}
        for write in self.written:
            history_id, seq = HistoryId(int(write.history_id, 16)), SeqNo(write.seq)
            seqs = newest.setdefault(PartitionId(write.partition), {})
            seqs[history_id] = max(seq, seqs.get(history_id, seq))
        return newest


@attrs.frozen(order=True)
class _End:
    """An end of a range.

    Attributes:
        data: The lowest bytes in the range, or the lowest above it.
        meaning: What they stand for; None for an end of the index.
    """

    data: bytes
    meaning: RangeEnd | None = attrs.field(default=None, eq=False, order=False)


@attrs.frozen
class _EncodedRange:
    low: _End = _End(b"")
    high: _End = _End(END_OF_KEYS)


def _encoded_range(place: str, bounds: Query | Range, part_count: int) -> _EncodedRange:
    """A range of encoded keys. `place` stands before the names of its fields in errors."""
    low, high = bounds.low, bounds.high
    low_place, high_place = f"{place}low.key", f"{place}high.key"
    if bounds.prefix is not None:
        low_place = high_place = f"{place}prefix"
        if low or high:
            raise QueryError(low_place, "name a prefix, or low and high, and not both")
        low = high = Bound(bounds.prefix)
    range_ = _EncodedRange()
    if low is not None and low.key:
        data = _encode_key(low_place, low.key, part_count)
        meaning = RangeEnd(low.key, low.inclusive)
        range_ = attrs.evolve(
            range_, low=_End(data if low.inclusive else end_of_prefix(data), meaning)
        )
    if high is not None and high.key:
        data = _encode_key(high_place, high.key, part_count)
        meaning = RangeEnd(high.key, high.inclusive)
        range_ = attrs.evolve(
            range_, high=_End(end_of_prefix(data) if high.inclusive else data, meaning)
        )
    return range_


def _merge_ranges(ranges: Iterable[_EncodedRange]) -> list[_EncodedRange]:
    """Joins ranges that overlap or touch. Returns them from the lowest to the highest."""
    merged_ranges: list[_EncodedRange] = []
    for range_ in sorted(ranges, key=lambda range_: range_.low):
        if range_.low >= range_.high:
            continue
        if merged_ranges and range_.low <= merged_ranges[-1].high:
            high = max(merged_ranges[-1].high, range_.high)
            merged_ranges[-1] = _EncodedRange(merged_ranges[-1].low, high)
        else:
            merged_ranges.append(range_)
    return merged_ranges


def _size_of(key: list[Any], size_max: int) -> tuple[int, int]:
    """How many values and characters a key has; no longer exact when they are more than `size_max`.
    O(size_max)."""
    values, characters = len(key), 0
    arrays: list[list[Any]] = [key]
    while arrays and values <= size_max:
        for value in arrays.pop():
            if isinstance(value, str):
                characters += len(value)
            elif isinstance(value, list):
                values += len(value)
                arrays.append(value)
    return values, characters


def _too_many_parts(count: int, part_count: int) -> str:
    return f"{count} parts are too many: keys of this index have {part_count}"


def readable_key(key: bytes) -> tuple[str, str]:
    """A document's key as text, and `base64` if it is not UTF-8 and that was needed."""
    try:
        return key.decode(), ""
    except UnicodeDecodeError:
        return base64.b64encode(key).decode(), "base64"


def _encode_key(place: str, parts: list[Any], part_count: int) -> bytes:
    if len(parts) > part_count:
        raise QueryError(place, _too_many_parts(len(parts), part_count))
    try:
        return encode_parts(parts)
    except IndexKeyError as error:
        raise QueryError(place, str(error)) from error
