"""The event bus: a consumer asks for events of buckets since it asked last."""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

import construct as cs

from upr_protocol.bucket_event import ALL_KINDS, BucketEvent, BucketFate, EventKind
from upr_protocol.chunk import Buffer
from upr_protocol.errors import Status
from upr_protocol.wire.columns import (
    LayoutError,
    member,
    member_of,
    octets,
    pack_text,
    row,
    text,
    tuple_of,
    unpack_text,
)
from upr_protocol.wire.message import CONTROL, Message, Role, check_end


def _decode_kinds(value: int, _: Any) -> EventKind:
    if not 0 < value <= ALL_KINDS:
        raise LayoutError(f"{value} is not a sum of kinds of events, 1 to {int(ALL_KINDS)}")
    return EventKind(value)


_KINDS = cs.ExprAdapter(cs.Int8ul, _decode_kinds, lambda kinds, _: int(kinds))

_EVENT = cs.ExprAdapter(
    row(
        bucket=text(),
        incarnation=cs.Int64ul,
        fate=member(BucketFate),
        updates=cs.Int64ul,
        designs=tuple_of(octets(cs.Int8ul)),
    ),
    lambda fields, _: BucketEvent(*fields),
    lambda event, _: (
        event.bucket,
        event.incarnation,
        event.fate,
        event.updates,
        event.designs,
    ),
)

_EVENTS: Final = Struct("<QBH")
_EVENT_NUMBERS: Final = Struct("<QBQH")
"""What an event has behind the bucket's name; the design documents follow."""


def _pack_event(event: BucketEvent) -> bytes:
    numbers = event.incarnation, event.fate, event.updates, len(event.designs)
    designs = [bytes((len(design),)) + design for design in event.designs]
    return b"".join((pack_text(event.bucket), _EVENT_NUMBERS.pack(*numbers), *designs))


def _unpack_event(data: bytes, offset: int) -> tuple[BucketEvent, int]:
    """The event at `offset`, and where it ends, which may be behind the end of `data`."""
    bucket, offset = unpack_text(data, offset)
    incarnation, fate, updates, design_count = _EVENT_NUMBERS.unpack_from(data, offset)
    offset += _EVENT_NUMBERS.size
    designs: list[bytes] = []
    for _ in range(design_count):
        end = offset + 1 + data[offset]
        designs.append(data[offset + 1 : end])
        offset = end
    event = BucketEvent(bucket, incarnation, member_of(BucketFate, fate), updates, tuple(designs))
    return event, offset


class EventsReply(Message, frozen=True):
    """Events of buckets since the consumer's last request; empty if no event came in time.

    Attributes:
        batch: The number with which the consumer acknowledges this batch; 0 if no event came in
            time.
        everything: Whether the consumer must look at all buckets once, because it is new, was away
            for too long, or the server was killed. Later changes come as events.
        events: One event for each bucket, in no order. `incarnation` is a number that each bucket
            gets when it is created, so a later bucket of the same name has another one. `fate` is a
            `BucketFate`. `updates` is above 0 if items of the bucket changed; one update may stand
            for many changes. `designs` has the keys of design documents.
    """

    opcode = 0xA3
    sender = Role.SERVER
    states = CONTROL
    body_bytes_max = 2 * 1024 * 1024
    layout = cs.Struct(
        "batch" / cs.Int64ul * "the number to acknowledge it by, or 0",
        "everything" / cs.Flag * "1 when the consumer must look at all buckets",
        "events"
        / tuple_of(_EVENT)
        * "per bucket: its incarnation, its fate (1 deleted, 2 neither, 3 created), the number of "
        "updates, and the keys of changed design documents",
    )

    batch: int
    everything: bool = False
    events: tuple[BucketEvent, ...] = ()

    # `construct` would hold the server's loop for 37 ms for events of 2,000 buckets.

    def body_buffers(self) -> tuple[Buffer, ...]:
        head = _EVENTS.pack(self.batch, self.everything, len(self.events))
        return (b"".join((head, *map(_pack_event, self.events))),)

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        data = bytes(body)
        batch, everything, count = _EVENTS.unpack_from(data)
        offset = _EVENTS.size
        events: list[BucketEvent] = []
        for _ in range(count):
            event, offset = _unpack_event(data, offset)
            events.append(event)
        check_end(data, offset)
        return batch, bool(everything), tuple(events)


class NextEvents(Message, frozen=True):
    """Asks for events of buckets, and waits for some. The server refuses with `UNSUPPORTED` if its
    operator has switched events off, and with `LIMIT_REACHED` if it has too many consumers, or if
    the connection has an open `NextEvents`.

    Attributes:
        consumer: The consumer's name; with it the consumer continues after a lost connection. It
            has 1 to 100 of letters, digits, `.`, `_` and `-`, and does not begin with `.`.
        acknowledged: The number of the batch that the consumer has handled; 0 for none. The server
            sends a batch again if it is not acknowledged.
        timeout_s: 1 to 3,600 seconds (`HEALTH_TIMEOUT_S_MIN` and `HEALTH_TIMEOUT_S_MAX`). If the
            consumer does not ask for this time, the server regards it as dead, and drops its queue.
        wait_ms: How long to wait for an event. The server waits for half of `timeout_s` if that is
            shorter.
        kinds: The kinds of events, as a sum: 1 created, 2 deleted, 4 updated, 8 design documents.
            At least one.
        pattern: The buckets whose events to send.
    """

    opcode = 0x23
    sender = Role.CLIENT
    states = CONTROL
    answers = (EventsReply,)
    refusals = (Status.BAD_ARGUMENT, Status.UNSUPPORTED, Status.LIMIT_REACHED, Status.SUPERSEDED)
    layout = cs.Struct(
        "acknowledged" / cs.Int64ul * "the batch that was handled, or 0",
        "timeout_s" / cs.Int32ul * "1 to 3,600: how long the queue is kept without a question",
        "wait_ms" / cs.Int32ul * "how long to wait for an event",
        "kinds" / _KINDS * "any of 1 created, 2 deleted, 4 updated, 8 design documents, added up",
        "pattern" / text() * "names of buckets, in which `*`, `?` and `[...]` stand for others",
        "consumer" / text() * "1 to 100 of letters, digits, `.`, `_`, `-`; no `.` first",
    )

    consumer: str
    acknowledged: int = 0
    timeout_s: int = 60
    wait_ms: int = 0
    kinds: EventKind = ALL_KINDS
    pattern: str = "*"
