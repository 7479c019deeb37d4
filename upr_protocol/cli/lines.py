"""What a consumer is told, as lines of JSON.

Every line is an object with a field `event`. Keys and values are text where they are UTF-8;
otherwise they are base64, and a field beside them (`key_encoding`, `value_encoding`) says so. CAS
values and history IDs are text: they need 64 bits, and most readers of JSON have 53.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any, Final

import msgspec

from upr_protocol.client import (
    BarrierReached,
    ChunkReceived,
    Completed,
    Event,
    Item,
    RolledBack,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    Undone,
)
from upr_protocol.ids import Operation

_encode: Final = msgspec.json.Encoder().encode

_NAMES: Final = {operation.value: operation.name.lower() for operation in Operation}


def text_fields(name: str, data: bytes) -> dict[str, str]:
    """The field `name` for `data`, and the one that says how it is written, if need be."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name: b64encode(data).decode(), f"{name}_encoding": "base64"}


def event_lines(event: Event | Undone) -> bytes:
    """The lines that tell of `event`, each with its newline. O(mutations)."""
    if isinstance(event, ChunkReceived):
        return _mutations(event)
    return _encode(_FIELDS[type(event)](event)) + b"\n"


def _mutations(event: ChunkReceived) -> bytes:
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
        stored = op == Operation.SET
        lines.append(
            _encode(
                {
                    "event": "mutation",
                    "partition": partition,
                    "seq": seq,
                    "op": _NAMES.get(op, op),
                    **text_fields("key", key),
                    **(text_fields("value", value) if stored else {"value": None}),
                    "cas": str(cas),
                    "flags": flags,
                    "expiry": expiry,
                }
            )
        )
    lines.append(b"")
    return b"\n".join(lines)


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


def _completed(event: Completed) -> dict[str, Any]:
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
        "settled": event.settled,
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
    Completed: _completed,
    BarrierReached: _barrier,
    RolledBack: _rolled_back,
    StreamEnded: _stream_ended,
    Undone: _undone,
}
