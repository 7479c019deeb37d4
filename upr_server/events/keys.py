"""What stands in the event store. Pure.

==============================================  ===============================================
key                                             value
==============================================  ===============================================
``h`` consumer                                  its health: timeout and time of its last word
``q`` consumer 0 bucket 0 incarnation           the packed counter (`counter`)
``q`` consumer 0 bucket 0 incarnation document  how often the design document was told of
``r`` consumer                                  there while it is registered
==============================================  ===============================================

Registration and health are two keys: producers read the one with conflict detection, so that nobody
who registers meanwhile misses an event, and the other changes all the time. Names hold no zero
bytes.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import attrs

_HEALTH: Final = Struct("<dd")
_INCARNATION: Final = Struct(">Q")

REGISTRATIONS: Final = (b"r", b"s")
"""The range of all registrations."""
HEALTHS: Final = (b"h", b"i")
"""The range of what consumers have reported."""

Range = tuple[bytes, bytes]
"""First key, and the key below which it ends."""


def registration_key(consumer: str) -> bytes:
    """There while the consumer is registered."""
    return b"r" + consumer.encode()


def health_key(consumer: str) -> bytes:
    """What it reported last."""
    return b"h" + consumer.encode()


def consumer_of(key: bytes) -> str:
    """The consumer of a registration's or a health's key."""
    return key[1:].decode()


def is_own(consumer: str) -> bool:
    """Whether a node has it for itself; a name that comes over a connection begins otherwise."""
    return consumer.startswith(".")


def one(key: bytes) -> Range:
    """The range of a key alone."""
    return key, key + b"\0"


def pack_health(timeout_s: float, now: float) -> bytes:
    """A report."""
    return _HEALTH.pack(timeout_s, now)


def deadline_of(health: bytes) -> float:
    """Until when a consumer that has reported so is alive."""
    timeout_s, reported_at = _HEALTH.unpack(health)
    return float(timeout_s + reported_at)


def timeout_of(health: bytes) -> float:
    """The timeout that was reported."""
    return float(_HEALTH.unpack(health)[0])


def queue_range(consumer: str) -> Range:
    """All of a consumer's queue."""
    prefix = b"q" + consumer.encode()
    return prefix + b"\0", prefix + b"\1"


def bucket_range(consumer: str, bucket: str) -> Range:
    """All of a bucket, in a queue."""
    prefix = queue_range(consumer)[0] + bucket.encode()
    return prefix + b"\0", prefix + b"\1"


def counter_key(consumer: str, bucket: str, incarnation: int) -> bytes:
    """The packed counter."""
    return bucket_range(consumer, bucket)[0] + _INCARNATION.pack(incarnation)


def design_key(consumer: str, bucket: str, incarnation: int, document: bytes) -> bytes:
    """How often a design document was told of."""
    return counter_key(consumer, bucket, incarnation) + document


def designs_range(counter: bytes) -> Range:
    """All design documents beside a counter."""
    return counter + b"\0", counter + b"\xff"


@attrs.frozen
class Place:
    """What a key of a queue is about.

    Attributes:
        bucket: The bucket.
        incarnation: Which one of that name.
        document: The design document; empty for the counter.
    """

    bucket: str
    incarnation: int
    document: bytes


def place_of(consumer: str, key: bytes) -> Place:
    """What a key of the consumer's queue is about."""
    rest = key[len(queue_range(consumer)[0]) :]
    bucket, _, rest = rest.partition(b"\0")
    (incarnation,) = _INCARNATION.unpack_from(rest)
    return Place(bucket.decode(), incarnation, rest[_INCARNATION.size :])
