"""Consumers and their queues, in the store: each function here is one transaction.

Keys of a queue are bounded by buckets × consumers, whatever happens: of one bucket there is one
counter, as a creation takes those of earlier incarnations away, and at most `DESIGNS_MAX` design
documents, which who calls `tell` sees to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from upr_protocol.bucket_event import BucketEvent, BucketFate
from upr_protocol.limits import CONSUMERS_MAX, EVENT_KEYS_MAX
from upr_server.events import counter, keys
from upr_server.events.errors import TooManyConsumersError, UnknownConsumerError
from upr_server.events.store import EventStore, Transaction
from upr_server.storage.ledger import NUMBER


@attrs.define
class Telling:
    """What became of one incarnation of a bucket since it was told last.

    Attributes:
        bucket: The bucket's name.
        incarnation: Which one of that name.
        created: Whether it was made.
        deleted: Whether it was deleted, behind all else.
        updates: Batches that were taken in.
        designs: Design documents that changed, and how often.
    """

    bucket: str
    incarnation: int
    created: bool = False
    deleted: bool = False
    updates: int = 0
    designs: dict[bytes, int] = attrs.field(factory=dict)


@attrs.frozen
class Polled:
    """What a poll took out of a queue.

    Attributes:
        events: What became of buckets.
        after: From where the next poll goes on; empty when this one came to the end.
    """

    events: tuple[BucketEvent, ...]
    after: bytes


# Registering, and being alive.


async def register(store: EventStore, consumer: str, timeout_s: float, now: float) -> None:
    """Makes a consumer known, with an empty queue.

    Raises:
        TooManyConsumersError: There are `CONSUMERS_MAX` already, beside the nodes' own.
        StorageError: The store failed, or was full.
    """

    async def body(transaction: Transaction) -> None:
        known = await transaction.read(*keys.REGISTRATIONS)
        mine = keys.registration_key(consumer)
        others = [key for key, _ in known if key != mine and not keys.is_own(keys.consumer_of(key))]
        if len(others) >= CONSUMERS_MAX and not keys.is_own(consumer):
            raise TooManyConsumersError(f"there are {len(others)} consumers of events already")
        transaction.clear(*keys.queue_range(consumer))
        transaction.put(mine, b"")
        transaction.put(keys.health_key(consumer), keys.pack_health(timeout_s, now))

    await store.transact(body)


async def report_health(store: EventStore, consumer: str, timeout_s: float, now: float) -> None:
    """Says that a consumer is alive.

    Raises:
        UnknownConsumerError: It is not registered, or not any more.
        StorageError: The store failed, or was full.
    """

    async def body(transaction: Transaction) -> None:
        if not await transaction.read(*keys.one(keys.registration_key(consumer))):
            raise UnknownConsumerError(consumer)
        transaction.put(keys.health_key(consumer), keys.pack_health(timeout_s, now))

    await store.transact(body)


async def revive(store: EventStore, now: float) -> None:
    """Has all consumers reported now: nobody could for as long as this node was not there."""

    async def body(transaction: Transaction) -> None:
        for key, health in await transaction.read(*keys.HEALTHS):
            transaction.put(key, keys.pack_health(keys.timeout_of(health), now))

    await store.transact(body)


async def forget(store: EventStore, consumer: str) -> None:
    """Clears a consumer and its queue, if it is registered."""

    async def body(transaction: Transaction) -> None:
        if await transaction.read(*keys.one(keys.registration_key(consumer))):
            _clear(transaction, consumer)

    await store.transact(body)


async def forget_dead(store: EventStore, now: float) -> tuple[list[str], float]:
    """Clears the consumers that have not reported within their timeout, and their queues.

    Returns:
        Who they were, and when the next one will be dead, unless it reports; infinity when there is
        none.
    """

    async def body(transaction: Transaction) -> tuple[list[str], float]:
        rows = await transaction.read(*keys.HEALTHS, snapshot=True)
        deadlines = {keys.consumer_of(key): keys.deadline_of(health) for key, health in rows}
        dead: list[str] = []
        for consumer, deadline in deadlines.items():
            if deadline > now:
                continue
            # Looked at again: it may report just now.
            health = await transaction.read(*keys.one(keys.health_key(consumer)))
            if health and keys.deadline_of(health[0][1]) <= now:
                dead.append(consumer)
        for consumer in dead:
            _clear(transaction, consumer)
        alive = [deadline for consumer, deadline in deadlines.items() if consumer not in dead]
        return dead, min(alive, default=float("inf"))

    return await store.transact(body)


def _clear(transaction: Transaction, consumer: str) -> None:
    transaction.clear(*keys.one(keys.registration_key(consumer)))
    transaction.clear(*keys.one(keys.health_key(consumer)))
    transaction.clear(*keys.queue_range(consumer))


# Telling.


async def tell(store: EventStore, tellings: Sequence[Telling]) -> int:
    """Puts into every consumer's queue what became of buckets.

    Returns:
        How many consumers there are.
    """

    async def body(transaction: Transaction) -> int:
        known = await transaction.read(*keys.REGISTRATIONS)
        for key, _ in known:
            for telling in tellings:
                _tell(transaction, keys.consumer_of(key), telling)
        return len(known)

    return await store.transact(body)


def _tell(transaction: Transaction, consumer: str, telling: Telling) -> None:
    key = keys.counter_key(consumer, telling.bucket, telling.incarnation)
    designs = keys.designs_range(key)
    if telling.created:
        first, end = keys.bucket_range(consumer, telling.bucket)
        transaction.clear(first, key)
        transaction.clear(designs[1], end)
        transaction.maximum(key, counter.CREATED)
    if telling.updates:
        transaction.add(key, counter.UPDATED * telling.updates)
    if telling.deleted:
        transaction.minimum(key, counter.DELETED)
        transaction.clear(*designs)
        return
    for document, times in telling.designs.items():
        document_key = keys.design_key(consumer, telling.bucket, telling.incarnation, document)
        transaction.add(document_key, times)


# Polling.


async def poll(
    store: EventStore,
    consumer: str,
    timeout_s: float,
    now: float,
    after: bytes = b"",
    limit: int = EVENT_KEYS_MAX,
) -> Polled:
    """Takes out of a queue what is there: reads it, and resets it, in one transaction, which also
    reports the consumer's health. What was idle is cleared away.

    Args:
        store: The store.
        consumer: Whose queue.
        timeout_s: When it has not polled for so long it is dead.
        now: The time, in seconds since 1970.
        after: From where to go on, as the poll before said.
        limit: How many keys to look at.

    Raises:
        UnknownConsumerError: It is not registered, or not any more: it may have missed anything.
        StorageError: The store failed, or was full.
    """

    async def body(transaction: Transaction) -> Polled:
        if not await transaction.read(*keys.one(keys.registration_key(consumer))):
            raise UnknownConsumerError(consumer)
        first, end = keys.queue_range(consumer)
        rows = await transaction.read(after or first, end, limit=limit)
        transaction.put(keys.health_key(consumer), keys.pack_health(timeout_s, now))
        events = _take(transaction, consumer, rows)
        return Polled(events, rows[-1][0] + b"\0" if len(rows) == limit else b"")

    return await store.transact(body)


def _take(
    transaction: Transaction, consumer: str, rows: Iterable[tuple[bytes, bytes]]
) -> tuple[BucketEvent, ...]:
    values: dict[tuple[str, int], int] = {}
    designs: dict[tuple[str, int], list[bytes]] = {}
    for key, number in rows:
        place = keys.place_of(consumer, key)
        name = (place.bucket, place.incarnation)
        documents = designs.setdefault(name, [])
        if place.document:
            documents.append(place.document)
            transaction.clear(*keys.one(key))
            continue
        (values[name],) = NUMBER.unpack(number)
        if counter.is_idle(values[name]):
            transaction.clear(*keys.one(key))
        else:
            transaction.put(key, NUMBER.pack(counter.IDLE))
    events = []
    for (bucket, incarnation), documents in designs.items():
        fate, updates = counter.unpack(values.get((bucket, incarnation), counter.IDLE))
        if fate is not BucketFate.NONE or updates or documents:
            events.append(BucketEvent(bucket, incarnation, fate, updates, tuple(documents)))
    return tuple(events)


async def put_back(store: EventStore, consumer: str, events: Sequence[BucketEvent]) -> None:
    """Puts into a queue again what was taken out, before whatever has come since.

    Raises:
        UnknownConsumerError: It is not registered any more.
        StorageError: The store failed, or was full.
    """

    async def body(transaction: Transaction) -> None:
        if not await transaction.read(*keys.one(keys.registration_key(consumer))):
            raise UnknownConsumerError(consumer)
        since: Mapping[bytes, bytes] = dict(await transaction.read(*keys.queue_range(consumer)))
        places = [keys.place_of(consumer, key) for key in since]
        incarnations = {place.bucket: place.incarnation for place in places}
        for event in events:
            if incarnations.get(event.bucket, event.incarnation) != event.incarnation:
                # Another bucket of that name was made since, which tells of the end of this one.
                continue
            key = keys.counter_key(consumer, event.bucket, event.incarnation)
            (later,) = NUMBER.unpack(since.get(key, NUMBER.pack(0)))
            earlier = counter.pack(event.fate, event.updates)
            transaction.put(key, NUMBER.pack(counter.merged(earlier, later)))
            for document in event.designs:
                transaction.add(
                    keys.design_key(consumer, event.bucket, event.incarnation, document), 1
                )

    await store.transact(body)
