"""A consumer's events, as lines of JSON and as a summary.

Every line is a JSON object with a field `event`. Keys and values are text where they are UTF-8;
otherwise they are base64, and a second field (`key_encoding`, `value_encoding`) says so. CAS values
and history IDs are text: they have 64 bits, and most JSON parsers keep only 53.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any, Final

import msgspec

from upr_protocol.cli.escaping import printable_json
from upr_protocol.cli.output import rate_text, size_text, text_fields
from upr_protocol.client import (
    BarrierReached,
    ChunkReceived,
    CycleCompleted,
    Event,
    Item,
    RolledBack,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    Undone,
)
from upr_protocol.ids import SEQ_MAX, Operation

_encode: Final = msgspec.json.Encoder().encode

_NAMES: Final = {operation.value: operation.name.lower() for operation in Operation}


def event_lines(event: Event | Undone) -> bytes:
    """The lines for `event`, each with its newline. O(mutations)."""
    if isinstance(event, ChunkReceived):
        return _mutation_lines(event)
    return printable_json(_encode(_FIELDS[type(event)](event))) + b"\n"


def _mutation_lines(event: ChunkReceived) -> bytes:
    chunk = event.chunk
    lines: list[bytes] = []
    for partition, seq, op, key, value, cas, flags, expiry in zip(
        repeat(event.partition, chunk.count),
        chunk.seqs.tolist(),
        chunk.operations.tobytes(),
        chunk.keys(),
        chunk.values(),
        chunk.cas.tolist(),
        chunk.flags.tolist(),
        chunk.expiries.tolist(),
        strict=True,
    ):
        has_value = op == Operation.SET
        lines.append(
            _encode(
                {
                    "event": "mutation",
                    "partition": partition,
                    "seq": seq,
                    "op": _NAMES.get(op, op),
                    **text_fields("key", key),
                    **(text_fields("value", value) if has_value else {"value": None}),
                    "cas": str(cas),
                    "flags": flags,
                    "expiry": expiry,
                }
            )
        )
    lines.append(b"")
    return printable_json(b"\n".join(lines))


def _snapshot_start(event: SnapshotStart) -> dict[str, Any]:
    return {
        "event": "snapshot_start",
        "partition": event.partition,
        "history": f"{event.history_id:016x}",
        "start": event.start,
        "end": event.end,
        "kind": event.kind.name.lower(),
        "may_repeat": event.may_repeat,
    }


def _snapshot_end(event: SnapshotEnd) -> dict[str, Any]:
    return {"event": "snapshot_end", "partition": event.partition, "end": event.end}


def _cycle_completed(event: CycleCompleted) -> dict[str, Any]:
    return {"event": "completed", "cycle": event.cycle}


def _barrier(event: BarrierReached) -> dict[str, Any]:
    ends = {str(partition): end for partition, end in sorted(event.ends.items())}
    return {"event": "barrier", **text_fields("cookie", event.cookie), "ends": ends}


def _rolled_back(event: RolledBack) -> dict[str, Any]:
    return {
        "event": "rollback",
        "partition": event.partition,
        "restarts_from": event.to,
        "ceiling": event.ceiling,
        "reason": event.reason,
    }


def _undone(event: Undone) -> dict[str, Any]:
    return {
        "event": "undone",
        "partition": event.partition,
        "restarts_from": event.to,
        "ceiling": event.ceiling,
        "settled": None if event.consistent_from == SEQ_MAX else event.consistent_from,
        "reason": event.reason,
        "documents": [_document(key, item) for key, item in event.documents.items()],
    }


def _document(key: bytes, item: Item | None) -> dict[str, Any]:
    if item is None:
        return {**text_fields("key", key), "value": None}
    return {
        **text_fields("key", key),
        **text_fields("value", item.value),
        "seq": item.seq,
        "cas": str(item.cas),
        "flags": item.flags,
        "expiry": item.expiry,
    }


def _stream_ended(event: StreamEnded) -> dict[str, Any]:
    return {
        "event": "stream_end",
        "partition": event.partition,
        "reason": event.reason.name.lower(),
    }


_FIELDS: Final[Mapping[type, Callable[[Any], dict[str, Any]]]] = {
    SnapshotStart: _snapshot_start,
    SnapshotEnd: _snapshot_end,
    CycleCompleted: _cycle_completed,
    BarrierReached: _barrier,
    RolledBack: _rolled_back,
    StreamEnded: _stream_ended,
    Undone: _undone,
}


_SET: Final = bytes((Operation.SET,))


class EventCounts:
    """Counts a consumer's events.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_at = self._last_line_at = clock()
        self._last_line_mutations = 0
        self.mutations = 0
        self.removals = 0
        self.nbytes = 0
        self.snapshots = 0
        self.rollbacks = 0
        self._partitions: set[int] = set()

    def add(self, event: Event | Undone) -> None:
        """Counts `event`. Scans a chunk's operations once, at memory speed."""
        if isinstance(event, ChunkReceived):
            chunk = event.chunk
            self.mutations += chunk.count
            self.removals += chunk.count - chunk.operations.tobytes().count(_SET)
            self.nbytes += chunk.nbytes
            self._partitions.add(event.partition)
        elif isinstance(event, SnapshotEnd):
            self.snapshots += 1
        elif isinstance(event, RolledBack | Undone):
            self.rollbacks += 1

    def line(self) -> str:
        """The totals, and the rate since the previous line."""
        now = self._clock()
        rate = rate_text(self.mutations - self._last_line_mutations, now - self._last_line_at)
        self._last_line_at, self._last_line_mutations = now, self.mutations
        return f"{self._counts()}, now {rate}"

    def total(self) -> str:
        """The totals, and the overall rate."""
        seconds = self._clock() - self._started_at
        return f"{self._counts()}, in {seconds:.1f} s ({rate_text(self.mutations, seconds)})"

    def _counts(self) -> str:
        removals_text = f" ({self.removals:,} of them removals)" if self.removals else ""
        restarts_text = f", {self.rollbacks:,} restarts" if self.rollbacks else ""
        return (
            f"{self.mutations:,} changes{removals_text} in {self.snapshots:,} snapshots of "
            f"{len(self._partitions):,} partitions, {size_text(self.nbytes)}{restarts_text}"
        )
