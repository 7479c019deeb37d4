"""What scans answer, and the JSON that says it."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from upr_server.indexer.explanation import Explanation
from upr_server.indexer.index_file import (
    ENTRY_OVERHEAD_BYTES,
    EntrySummary,
    ScanResult,
    Timestamps,
    entries_bytes,
)
from upr_server.indexer.pool import PIECE_BYTES
from upr_server.indexer.pure.keys import decode_parts
from upr_server.indexer.query import readable_key

_ENCODER: Final = msgspec.json.Encoder()


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
        explanation: How the scan was carried out, when that was asked.
        moment: Names the moment, if it is held; for further pages.
    """

    entries: list[Entry] = []
    continuation: str = ""
    count: int | None = None
    min: list[Any] | None = None
    max: list[Any] | None = None
    timestamps: dict[int, tuple[str, int]] = {}
    explanation: Explanation | None = None
    moment: str = ""


class ScanAnswer:
    """What a scan found, and the JSON that says it, an `Answer`.

    Args:
        result: What it found: entries, or a summary of them.
        part_count: How many parts of its keys the query is about.
        timestamps: How far each partition was; empty if that was not asked.
        explanation: How the scan was carried out; None if that was not asked.
        moment: Names the moment that it is of; empty if that is not held.

    Attributes:
        nbytes: The memory that its entries take.
        moment: Names the moment that it is of; empty if that is not held.
    """

    def __init__(
        self,
        result: ScanResult | EntrySummary,
        part_count: int,
        timestamps: Timestamps,
        explanation: Explanation | None = None,
        moment: str = "",
    ) -> None:
        self.moment = moment
        self._part_count = part_count
        self._entries: Sequence[bytes] = ()
        self._payloads: Sequence[bytes] = ()
        base_answer = Answer(
            timestamps=_timestamps(timestamps), explanation=explanation, moment=moment
        )
        if isinstance(result, EntrySummary):
            lowest, highest = (
                None if entry is None else decode_parts(entry, part_count)[0]
                for entry in (result.lowest, result.highest)
            )
            base_answer = msgspec.structs.replace(
                base_answer, count=result.count, min=lowest, max=highest
            )
        else:
            self._entries, self._payloads = result.entries, result.payloads
            if result.has_more:
                continuation = continuation_after(result.entries[-1])
                base_answer = msgspec.structs.replace(base_answer, continuation=continuation)
        self._base_answer = base_answer
        self.nbytes = entries_bytes(self._entries) + entries_bytes(self._payloads)

    @property
    def entry_count(self) -> int:
        """How many entries it has."""
        return len(self._entries)

    @property
    def rest(self) -> Answer:
        """All but the entries."""
        return self._base_answer

    def pieces(self) -> Iterator[bytes]:
        """The JSON, in pieces of some 64 KiB that are made one at a time: as Python's objects all
        the entries would take many times the memory."""
        other_fields = msgspec.json.encode(self._base_answer)
        if not self._entries:
            yield other_fields
            return
        # The rest is an object of its own: what stands behind its opening brace goes on here.
        tail = b"]}" if other_fields == b"{}" else b"]," + other_fields[1:]
        head = b'{"entries":['
        for entries, is_last in self._batches():
            yield head + msgspec.json.encode(entries)[1:-1] + (tail if is_last else b"")
            head = b","

    def lines(self) -> Iterator[bytes]:
        """The entries as JSON, a line each, in pieces as those of `pieces`."""
        for entries, _ in self._batches():
            yield _ENCODER.encode_lines(entries)

    def _batches(self) -> Iterator[tuple[list[Entry], bool]]:
        """The entries that make a piece, and whether they are the last."""
        start = nbytes = 0
        for end, data in enumerate(self._entries, 1):
            nbytes += len(data) + ENTRY_OVERHEAD_BYTES
            if self._payloads:
                nbytes += len(self._payloads[end - 1])
            is_last = end == len(self._entries)
            if nbytes >= PIECE_BYTES or is_last:
                yield [self._entry(position) for position in range(start, end)], is_last
                start, nbytes = end, 0

    def _entry(self, position: int) -> Entry:
        payload = self._payloads[position] if self._payloads else b""
        return _entry(self._entries[position], self._part_count, payload)


def continuation_after(entry: bytes) -> str:
    """Names what comes behind an entry, or behind the beginning of keys."""
    return base64.urlsafe_b64encode(entry).decode()


def _timestamps(timestamps: Timestamps) -> dict[int, tuple[str, int]]:
    return {
        partition: (f"{history_id:016x}", seq)
        for partition, (history_id, seq) in timestamps.items()
    }


def _entry(data: bytes, part_count: int, payload: bytes) -> Entry:
    parts, end = decode_parts(data, part_count)
    # It is JSON already, which msgspec copies.
    included: Any = msgspec.Raw(payload) if payload else None
    # Empty for the beginning of keys: no document's key is.
    return Entry(parts, *readable_key(data[end:]), included)
