"""The event bus: a consumer asks what became of buckets since it asked last."""

from __future__ import annotations

from typing import Any

import construct as cs

from upr_protocol.bucket_event import ALL_KINDS, BucketEvent, BucketFate, EventKind
from upr_protocol.wire.columns import member, octets, row, text, tuple_of
from upr_protocol.wire.message import CONTROL, Message, Role


def _decode_kinds(value: int, _: Any) -> EventKind:
    if not 0 < value <= ALL_KINDS:
        raise ValueError(f"{value} is no set of kinds of events")
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


class EventsReply(Message, frozen=True):
    """What became of buckets since the consumer asked last; empty when it has waited in vain.

    Attributes:
        batch: What to acknowledge it by; 0 when there is nothing to tell.
        everything: Whether the consumer is new, or was away for too long, or the server was
            killed: it must look at everything, once. What comes after this is told as events.
        events: What became of buckets, by name.
    """

    opcode = 0xA3
    sender = Role.SERVER
    states = CONTROL
    body_bytes_max = 2 * 1024 * 1024
    layout = cs.Struct(
        "batch" / cs.Int64ul * "what to acknowledge it by, or 0",
        "everything" / cs.Flag * "1 when the consumer must look at everything",
        "events"
        / tuple_of(_EVENT)
        * "per bucket: which one of that name, its fate (1 deleted, 2 neither, 3 created), how "
        "often it was told of updates, the keys of design documents that changed",
    )

    batch: int
    everything: bool = False
    events: tuple[BucketEvent, ...] = ()


class NextEvents(Message, frozen=True):
    """Asks what became of buckets, and waits for something to tell.

    Attributes:
        consumer: The consumer's name, under which it comes back after a lost connection.
        acknowledged: The batch that it has dealt with; 0 for none. One that is not acknowledged is
            told again.
        timeout_s: When it has not asked for so long, 1 to 3,600 seconds, it is taken for dead, and
            what is kept for it goes.
        wait_ms: How long to wait for something to tell.
        kinds: What it wants to be told of: 1 created, 2 deleted, 4 updated, 8 design documents,
            added up.
        pattern: Of which buckets.
    """

    opcode = 0x23
    sender = Role.CLIENT
    states = CONTROL
    answers = (EventsReply,)
    layout = cs.Struct(
        "acknowledged" / cs.Int64ul * "the batch that was dealt with, or 0",
        "timeout_s" / cs.Int32ul * "1 to 3,600: for how long to be kept without asking",
        "wait_ms" / cs.Int32ul * "how long to wait for something to tell",
        "kinds" / _KINDS * "any of 1 created, 2 deleted, 4 updated, 8 design documents, added up",
        "pattern" / text() * "names of buckets, in which `*`, `?` and `[...]` stand for others",
        "consumer" / text() * "1 to 100 of letters, digits, `.`, `_`, `-`",
    )

    consumer: str
    acknowledged: int = 0
    timeout_s: int = 60
    wait_ms: int = 0
    kinds: EventKind = ALL_KINDS
    pattern: str = "*"
