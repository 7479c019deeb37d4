"""The queues of the event bus: for each consumer, one packed counter a bucket. Pure.

Nothing is appended to a queue, so an absent consumer costs the server buckets, not events. A queue
counts only what its consumer's filter lets through. One
loop owns the queues and no method here waits. So each call is atomic, and no count can come
between a poll's read and its reset. Their size is bounded by consumers × buckets × `DESIGNS_MAX`,
and by consumers × `COUNTERS_MAX` for buckets that were deleted.

The queues live in memory. A clean stop saves them (`to_bytes`); a crash loses them, and every
consumer then registers again and looks at everything.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from re import Pattern
from typing import Final

import attrs
import msgspec

from upr_protocol.bucket_event import ANY_DESIGN, BucketEvent, EventFilter, EventKind
from upr_protocol.errors import UprError
from upr_protocol.limits import (
    CONSUMERS_MAX,
    CONSUMERS_OF_USER_MAX,
    DESIGNS_MAX,
    EVENT_KEYS_MAX,
)
from upr_server.events import packed_counter
from upr_server.events.packed_counter import IDLE, UPDATE

_DESIGN: Final = int(EventKind.DESIGN)
_UPDATED: Final = int(EventKind.UPDATED) | _DESIGN
# Plain numbers: an enum's operators are slow.

COUNTERS_MAX: Final = 16 * 1024
"""How many buckets a queue counts events of while its consumer does not ask: some 6 MB. A node has
a few hundred buckets, but there is no bound for those that are created and deleted again. A
consumer that has missed more has to look at everything."""

_KINDS_REMEMBERED_MAX: Final = 1024
"""For how many buckets a queue remembers what its filters say about them."""


class TooManyConsumersError(UprError):
    """No more consumers can be registered."""


class EventBatch(msgspec.Struct, frozen=True):
    """What a consumer receives at once.

    Attributes:
        events: What became of buckets since the batch before.
        everything: Whether the consumer may have missed events and must look at every bucket.
        id: The number that acknowledges the batch; 0 where nothing is to be acknowledged.
    """

    events: tuple[BucketEvent, ...] = ()
    everything: bool = False
    id: int = 0


class BucketCounter(msgspec.Struct):
    """What became of one bucket since a consumer polled last.

    Attributes:
        incarnation: Which bucket of that name; each creation has another.
        value: The packed counter.
        designs: The design documents that changed, in the order in which they first did. A
            dictionary without values: a set has no order that a simulation could repeat.
    """

    incarnation: int
    value: int = IDLE
    designs: dict[bytes, None] = {}

    def add_designs(self, designs: Sequence[bytes]) -> None:
        """Notes changed design documents. Beyond `DESIGNS_MAX`, `ANY_DESIGN` stands for all."""
        if ANY_DESIGN in self.designs:
            return
        self.designs.update(dict.fromkeys(designs))
        if len(self.designs) > DESIGNS_MAX or ANY_DESIGN in self.designs:
            self.designs = {ANY_DESIGN: None}


class _SavedQueue(msgspec.Struct):
    consumer: str
    timeout_s: float
    counters: dict[str, BucketCounter]
    unacknowledged: EventBatch | None
    filters: tuple[EventFilter, ...] = (EventFilter(),)


@attrs.define(eq=False)
class EventQueue:
    """One consumer's queue.

    Attributes:
        timeout_s: How long the queue is kept after the consumer's last report.
        reported_at: When the consumer last said that it is alive, by the clock of the bus.
        filters: What is counted: whatever one of them lets through. Change it with `set_filters`.
        counters: By bucket name. Polled counters move to the end, so that a poll that stops early
            continues with the others.
        unacknowledged: The batch that the consumer has received and not acknowledged.
        asker: Identifies the question that waits for an answer; None when the consumer does not
            ask. Not saved.
        polled_at: When the queue was polled last, by the loop's clock. Not saved.
        rights: What decided which events the consumer may know of when it asked last; None if it
            may know of all, or has not asked since a restart. Not saved.
    """

    timeout_s: float
    reported_at: float
    filters: tuple[EventFilter, ...] = (EventFilter(),)
    counters: dict[str, BucketCounter] = attrs.field(factory=dict)
    unacknowledged: EventBatch | None = None
    asker: object | None = None
    polled_at: float = float("-inf")
    rights: Hashable = None
    _kinds: dict[str, int] = attrs.field(factory=dict)
    _expressions: Sequence[tuple[Pattern[str], int]] = attrs.field(init=False)
    """Of each filter, what matches its buckets, and its kinds. Made when the filters are set: when
    an event is counted, it is for all queues in one step."""

    def __attrs_post_init__(self) -> None:
        self._compile_filters()

    def _compile_filters(self) -> None:
        self._expressions = [
            (event_filter.expression, int(event_filter.kinds)) for event_filter in self.filters
        ]

    def set_filters(self, filters: tuple[EventFilter, ...]) -> None:
        """Counts what one of these lets through from now on. What earlier filters left out is
        lost: a consumer whose filter changes must look at everything.

        Counters of buckets that no filter wants any more go: what becomes of such a bucket is not
        counted, and a later filter that wants it again would find a state of the past.
        """
        self.filters = filters
        self._compile_filters()
        self._kinds.clear()
        for bucket in [bucket for bucket in self.counters if not self._kinds_of(bucket)]:
            del self.counters[bucket]

    def _kinds_of(self, bucket: str) -> int:
        """The kinds of event that are counted of a bucket."""
        kinds = self._kinds.get(bucket)
        if kinds is None:
            if len(self._kinds) >= _KINDS_REMEMBERED_MAX:
                self._kinds.clear()
            kinds = 0
            for expression, filter_kinds in self._expressions:
                if expression.match(bucket):
                    kinds |= filter_kinds
            self._kinds[bucket] = kinds
        return kinds

    def is_dead(self, now: float) -> bool:
        """Whether the consumer missed its timeout. One that waits for an answer is alive."""
        return self.asker is None and self.deadline <= now

    @property
    def deadline(self) -> float:
        """When the consumer is dead unless it reports before, by the clock of the bus."""
        return self.reported_at + self.timeout_s

    # For the producer. A late report of an earlier incarnation is ignored: the creation of the
    # newer one says that the earlier one is gone. So creations and deletions are counted even if
    # the filter lets only updates of the bucket through.

    def count_creation(self, bucket: str, incarnation: int) -> None:
        """A bucket was created."""
        if self._kinds_of(bucket):
            counter = BucketCounter(incarnation)
            counter.value = packed_counter.with_creation(counter.value)
            self.counters[bucket] = counter

    def count_updates(
        self, bucket: str, incarnation: int, designs: Sequence[bytes], batch_count: int = 1
    ) -> None:
        """Batches changed something in a bucket, and these of its design documents."""
        # Runs for each batch or bundle and consumer. Calls would take most of its time.
        kinds = self._kinds.get(bucket)
        if kinds is None:
            kinds = self._kinds_of(bucket)
        if not kinds & _UPDATED or (kinds & _UPDATED == _DESIGN and not designs):
            return
        counter = self.counters.get(bucket)
        if counter is None:
            counter = self.counters[bucket] = BucketCounter(incarnation)
        if counter.incarnation == incarnation:
            counter.value += UPDATE * batch_count
            if designs and kinds & _DESIGN:
                counter.add_designs(designs)

    def count_deletion(self, bucket: str, incarnation: int) -> None:
        """A bucket was deleted."""
        if not self._kinds_of(bucket):
            return
        counter = self.counters.get(bucket)
        if counter is None:
            counter = self.counters[bucket] = BucketCounter(incarnation)
        if counter.incarnation == incarnation:
            counter.value = packed_counter.with_deletion(counter.value)
            counter.designs = {}

    # For the consumer.

    def poll(self, keys_max: int = EVENT_KEYS_MAX) -> tuple[tuple[BucketEvent, ...], bool]:
        """Takes out what was counted since the last poll: reads each counter and resets it. A
        counter that is still idle since the last poll is removed.

        Complexity: O(buckets in the queue).

        Args:
            keys_max: How many buckets and design documents to return at most. The first bucket
                comes whole, even if it has more.

        Returns:
            What became of buckets, and whether that is all; if not, poll again.
        """
        events: list[BucketEvent] = []
        keys = 0
        for bucket, counter in list(self.counters.items()):
            if counter.value == IDLE:
                del self.counters[bucket]
                continue
            keys += 1 + len(counter.designs)
            if events and keys > keys_max:
                return tuple(events), False
            fate, updates = packed_counter.unpack(counter.value)
            designs = tuple(counter.designs)
            events.append(BucketEvent(bucket, counter.incarnation, fate, updates, designs))
            counter.value = IDLE
            counter.designs = {}
            self.counters[bucket] = self.counters.pop(bucket)
        return tuple(events), True


_OWN_PREFIX: Final = "."


def is_own_consumer(consumer: str) -> bool:
    """Whether the name is one of the node's own consumers. Names of consumers that come over a
    connection never begin with a dot."""
    return consumer.startswith(_OWN_PREFIX)


def user_of_consumer(name: str) -> str:
    """The user whose consumer has this name in the queues, which is `CONSUMER@USER`; empty where
    nobody logs in."""
    return name.partition("@")[2]


class EventQueues:
    """The queues of one node, by consumer."""

    def __init__(self) -> None:
        self._queues: dict[str, EventQueue] = {}

    def __iter__(self) -> Iterator[EventQueue]:
        return iter(self._queues.values())

    def get(self, consumer: str) -> EventQueue | None:
        """A registered consumer's queue."""
        return self._queues.get(consumer)

    def report_health(self, consumer: str, timeout_s: float, now: float) -> EventQueue | None:
        """Notes that a consumer is alive.

        Args:
            consumer: Its name.
            timeout_s: When it has not reported for so long, it is dead.
            now: The time, by the clock of the bus.

        Returns:
            The consumer's queue; None when the consumer is unknown, or was cleared: it may have
            missed any event, and has to register.
        """
        queue = self._queues.get(consumer)
        if queue is not None:
            queue.timeout_s, queue.reported_at = timeout_s, now
        return queue

    def register(
        self,
        consumer: str,
        timeout_s: float,
        now: float,
        filters: tuple[EventFilter, ...] = (EventFilter(),),
    ) -> EventQueue:
        """Begins an empty queue for a consumer. Whatever is reported from now on is counted in it,
        if one of the filters lets it through.

        Raises:
            TooManyConsumersError: `CONSUMERS_MAX` are registered, beside the node's own; or
                `CONSUMERS_OF_USER_MAX` of the same user.
        """
        count = self.consumer_count
        if count >= CONSUMERS_MAX and not is_own_consumer(consumer):
            raise TooManyConsumersError(
                f"this node already has {count} event consumers, which is the maximum; wait until "
                "one of them times out"
            )
        user = user_of_consumer(consumer)
        if (
            user
            and sum(user_of_consumer(name) == user for name in self._queues)
            >= CONSUMERS_OF_USER_MAX
        ):
            raise TooManyConsumersError(
                f"user {user} already has {CONSUMERS_OF_USER_MAX} event consumers on this node, "
                "which is the maximum; wait until one of them times out"
            )
        queue = self._queues[consumer] = EventQueue(timeout_s, now, filters)
        return queue

    def remove_dead(self, now: float) -> tuple[list[str], float]:
        """Removes the queues of dead consumers.

        Returns:
            The names of those consumers, and when the next one may be dead; infinity when no
            consumer is left.
        """
        dead = [name for name, queue in self._queues.items() if queue.is_dead(now)]
        for name in dead:
            del self._queues[name]
        return dead, min((queue.deadline for queue in self), default=float("inf"))

    def remove_oversized(self) -> None:
        """Removes a queue whose consumer has missed too much, and does not ask. (The node's own are
        polled each second.) To be called whenever a bucket was deleted. It removes one at a time:
        to free its memory takes a millisecond or two."""
        for name, queue in self._queues.items():
            is_oversized = len(queue.counters) > COUNTERS_MAX and queue.asker is None
            if is_oversized and not is_own_consumer(name):
                del self._queues[name]
                return

    @property
    def consumer_count(self) -> int:
        """How many consumers are registered, without the node's own."""
        return sum(not is_own_consumer(name) for name in self._queues)

    # A clean restart.

    def to_bytes(self) -> bytes:
        """The queues, for `restore`."""
        return msgspec.msgpack.encode(
            [
                _SavedQueue(
                    name, queue.timeout_s, queue.counters, queue.unacknowledged, queue.filters
                )
                for name, queue in self._queues.items()
            ]
        )

    def restore(self, data: bytes, now: float) -> None:
        """Adds the queues that a clean stop saved. Their consumers count as having reported now:
        they could not report while the node was down.

        Raises:
            msgspec.DecodeError: The data is not of this version.
        """
        for saved in msgspec.msgpack.decode(data, type=list[_SavedQueue]):
            self._queues[saved.consumer] = EventQueue(
                saved.timeout_s, now, saved.filters, saved.counters, saved.unacknowledged
            )
