"""The constructs that several layouts share."""

from __future__ import annotations

from enum import IntEnum
from itertools import chain
from struct import Struct
from typing import Any, Final, TypeVar

import construct as cs

from upr_protocol.chunk import Bundle, BundleRun, Chunk
from upr_protocol.failover import FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import HistoryId, SeqNo
from upr_protocol.limits import FAILOVER_ENTRIES_MAX


class LayoutError(ValueError):
    """A body does not fit its message's layout. The text is a sentence for the peer."""


E = TypeVar("E", bound=IntEnum)


def member_of(kind: type[E], value: int) -> E:
    """The member of an enumeration with this value.

    Raises:
        LayoutError: The enumeration does not have it.
    """
    try:
        return kind(value)
    except ValueError:
        raise LayoutError(f"{value} is not a value of {kind.__name__}") from None


CHUNK: Final = cs.ExprAdapter(
    cs.GreedyBytes, lambda data, _: Chunk(data), lambda chunk, _: bytes(chunk)
)
"""A chunk that fills the rest of a body."""


def text(length: Any = cs.Int16ul) -> Any:
    """UTF-8 after its length in bytes."""
    return cs.PascalString(length, "utf8")


def octets(length: Any = cs.Int16ul) -> Any:
    """Bytes after their length."""
    return cs.Prefixed(length, cs.GreedyBytes)


def tuple_of(item: Any, count: Any = cs.Int16ul) -> Any:
    """A tuple of `item`s after their count."""
    code = _struct_code(item)
    if code:
        return _NumberRows(item, count, Struct("<" + code))
    return _Tuple(item, count)


class _Tuple(cs.ExprAdapter):  # type: ignore[misc]  # construct has no types
    """A tuple of items after their count."""

    def __init__(self, item: Any, count: Any) -> None:
        array = cs.PrefixedArray(count, item)
        super().__init__(array, lambda items, _: tuple(items), lambda items, _: list(items))


def _struct_code(kind: Any) -> str:
    """The `struct` code of a number, of padding, or of a row of these; empty for anything else."""
    if isinstance(kind, cs.FormatField):
        return str(kind.fmtstr.removeprefix("<"))
    if isinstance(kind, cs.Padded) and kind.subcon is cs.Pass:
        return f"{kind.length}x"
    if isinstance(kind, cs.ExprAdapter) and isinstance(kind.subcon, cs.Struct):
        codes = [_struct_code(field.subcon) for field in kind.subcon.subcons]
        return "".join(codes) if all(codes) else ""
    return ""


class _NumberRows(_Tuple):
    """The same for numbers, or rows of numbers, in `struct` code: `construct` would hold the loop
    for 10 ms for a row of each of 1,024 partitions."""

    def __init__(self, item: Any, count: Any, row_struct: Struct) -> None:
        super().__init__(item, count)
        self._count_struct = Struct("<" + _struct_code(count))
        self._row_struct = row_struct
        self._is_row = isinstance(item, cs.Adapter)

    def _parse(self, stream: Any, _context: Any, path: Any) -> tuple[Any, ...]:
        size = self._count_struct.size
        (count,) = self._count_struct.unpack(cs.stream_read(stream, size, path))
        data = cs.stream_read(stream, count * self._row_struct.size, path)
        # A tuple at once: CPython 3.11 crashes when its garbage collector finds such an iterator.
        rows = tuple(self._row_struct.iter_unpack(data))
        return rows if self._is_row else tuple(chain.from_iterable(rows))

    def _build(self, rows: Any, stream: Any, _context: Any, path: Any) -> Any:
        pack = self._row_struct.pack
        packed = [pack(*values) for values in rows] if self._is_row else map(pack, rows)
        data = b"".join([self._count_struct.pack(len(rows)), *packed])
        cs.stream_write(stream, data, len(data), path)
        return rows


def row(**fields: Any) -> Any:
    """A tuple of the named fields, one after the other, without the padding."""
    names = tuple(name for name in fields if name != "padding")
    return cs.ExprAdapter(
        cs.Struct(*(name / kind for name, kind in fields.items())),
        lambda parsed, _: tuple(parsed[name] for name in names),
        lambda values, _: dict(zip(names, values, strict=True)),
    )


def member(kind: type[IntEnum]) -> Any:
    """A member of the enumeration `kind`, as a byte."""
    return cs.ExprAdapter(
        cs.Int8ul, lambda value, _: member_of(kind, value), lambda value, _: int(value)
    )


BUNDLE: Final = cs.ExprAdapter(
    cs.Struct(
        "runs"
        / tuple_of(
            row(
                partition=cs.Int32ul,
                row_count=cs.Int32ul,
                counter=cs.Int64ul,
                chain=cs.Int32ul,
                padding=cs.Padding(4),
            ),
            cs.Int32ul,
        )
        * "which rows of the chunk are for which partition",
        "chunk" / CHUNK * "a published chunk, ordered by partition",
    ),
    lambda parsed, _: Bundle(parsed.chunk, map(BundleRun._make, parsed.runs)),
    lambda bundle, _: {"runs": bundle.runs, "chunk": bundle.chunk},
)
"""A bundle that fills the rest of a body."""


def _decode_log(pairs: tuple[tuple[int, int], ...], _: Any) -> FailoverLog:
    if len(pairs) > FAILOVER_ENTRIES_MAX:
        raise LayoutError(f"a failover log of {len(pairs)} entries; at most {FAILOVER_ENTRIES_MAX}")
    try:
        return FailoverLog.of_pairs(pairs)
    except ValueError as error:
        raise LayoutError(str(error)) from None


LOG: Final = cs.ExprAdapter(
    tuple_of(row(history_id=cs.Int64ul, seq=cs.Int64ul)), _decode_log, lambda log, _: log.pairs()
)
"""A failover log, newest entry first."""

_POSITION: Final = cs.Struct(
    "last_complete" / cs.Int64ul * "the end of the last snapshot received whole",
    "highest_received" / cs.Int64ul * "the highest sequence number received",
    "partial_history" / cs.Int64ul * "the history of the snapshot that was interrupted, or 0",
    "partial_start" / cs.Int64ul * "that snapshot's start, exclusive",
    "partial_end" / cs.Int64ul * "that snapshot's end, inclusive",
    "log" / LOG * "the client's failover log, newest entry first",
)


def _position_of(
    last_complete: int,
    highest_received: int,
    partial_history: int,
    partial_start: int,
    partial_end: int,
    log: FailoverLog,
) -> Position:
    if highest_received < last_complete:
        raise LayoutError(
            f"highest_received is {highest_received}, below last_complete, which is {last_complete}"
        )
    partial = None
    if partial_history:
        partial = PartialSnapshot(
            HistoryId(partial_history), SeqNo(partial_start), SeqNo(partial_end)
        )
        if not partial_start <= highest_received <= partial_end:
            raise LayoutError(
                f"highest_received is {highest_received}, outside the partial snapshot "
                f"({partial_start}, {partial_end}]"
            )
    elif highest_received != last_complete:
        raise LayoutError(
            "highest_received is above last_complete, but no partial snapshot is named"
        )
    return Position(log, SeqNo(last_complete), SeqNo(highest_received), partial)


def _decode_position(parsed: Any, _: Any) -> Position:
    return _position_of(
        parsed.last_complete,
        parsed.highest_received,
        parsed.partial_history,
        parsed.partial_start,
        parsed.partial_end,
        parsed.log,
    )


def _encode_position(position: Position, _: Any) -> dict[str, Any]:
    partial = position.partial
    return {
        "last_complete": position.last_complete,
        "highest_received": position.highest_received,
        "partial_history": partial.history_id if partial else 0,
        "partial_start": partial.start if partial else 0,
        "partial_end": partial.end if partial else 0,
        "log": position.log,
    }


POSITION: Final = cs.ExprAdapter(_POSITION, _decode_position, _encode_position)
"""What a client has of a partition."""


# The same in `struct` code, for messages of which there is one for each partition.

_COUNT: Final = Struct("<H")
_POSITION_HEAD: Final = Struct("<QQQQQ")


def pack_text(data: str) -> bytes:
    """As `text` writes it."""
    encoded = data.encode()
    return _COUNT.pack(len(encoded)) + encoded


def unpack_text(body: bytes, offset: int) -> tuple[str, int]:
    """The text at `offset`, and where it ends; raises `struct.error` or `ValueError`."""
    (length,) = _COUNT.unpack_from(body, offset)
    end = offset + 2 + length
    if len(body) < end:
        raise LayoutError("the body ends inside a text")
    return body[offset + 2 : end].decode(), end


def pack_log(log: FailoverLog) -> bytes:
    """As `LOG` writes it."""
    pairs = log.pairs()
    return Struct("<H" + "QQ" * len(pairs)).pack(len(pairs), *chain.from_iterable(pairs))


def unpack_log(body: bytes, offset: int) -> tuple[FailoverLog, int]:
    """The failover log at `offset`, and where it ends; raises `struct.error` or `ValueError`."""
    (count,) = _COUNT.unpack_from(body, offset)
    values = Struct("<" + "QQ" * min(count, FAILOVER_ENTRIES_MAX + 1)).unpack_from(body, offset + 2)
    pairs = tuple(zip(values[::2], values[1::2], strict=True))
    return _decode_log(pairs, None), offset + 2 + 16 * count


def pack_position(position: Position) -> bytes:
    """As `POSITION` writes it."""
    return _POSITION_HEAD.pack(*list(_encode_position(position, None).values())[:5]) + pack_log(
        position.log
    )


def unpack_position(body: bytes, offset: int) -> tuple[Position, int]:
    """The position at `offset`, and where it ends; raises `struct.error` or `ValueError`."""
    complete, highest_received, history_id, start, finish = _POSITION_HEAD.unpack_from(body, offset)
    log, end = unpack_log(body, offset + _POSITION_HEAD.size)
    return _position_of(complete, highest_received, history_id, start, finish, log), end
