"""Queues in a store: what is told, taken out, put back and cleared."""

from __future__ import annotations

import pytest

from tests.events.conformance import rows_of
from upr_protocol.bucket_event import BucketEvent, BucketFate
from upr_protocol.limits import CONSUMERS_MAX
from upr_server.events import MemoryStore, counter, keys, queues
from upr_server.events.errors import TooManyConsumersError, UnknownConsumerError
from upr_server.events.queues import Telling
from upr_server.events.store import EventStore, Transaction

TIMEOUT_S = 10.0


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


async def polled(store: EventStore, consumer: str = "c", now: float = 0.0) -> list[BucketEvent]:
    """What one look at the whole queue gives."""
    events: list[BucketEvent] = []
    after = b""
    while True:
        found = await queues.poll(store, consumer, TIMEOUT_S, now, after, limit=3)
        events += found.events
        after = found.after
        if not after:
            return events


async def registered(store: EventStore, *consumers: str) -> None:
    for consumer in consumers:
        await queues.register(store, consumer, TIMEOUT_S, 0.0)


async def test_what_is_told_before_anybody_registers_is_told_to_nobody(
    store: MemoryStore,
) -> None:
    assert await queues.tell(store, [Telling("b", 1, created=True)]) == 0
    assert len(store) == 0
    with pytest.raises(UnknownConsumerError):
        await polled(store)
    await registered(store, "c")
    assert await polled(store) == []


async def test_each_consumer_is_told_once(store: MemoryStore) -> None:
    await registered(store, "c", "d")
    telling = Telling("b", 1, created=True, updates=3, designs={b"_design/x": 2})
    assert await queues.tell(store, [telling, Telling("other", 2, updates=1)]) == 2
    told = [
        BucketEvent("b", 1, BucketFate.CREATED, 3, (b"_design/x",)),
        BucketEvent("other", 2, BucketFate.NONE, 1),
    ]
    for consumer in ("c", "d"):
        assert await polled(store, consumer) == told
        assert await polled(store, consumer) == []


async def test_what_reads_idle_is_cleared_away(store: MemoryStore) -> None:
    await registered(store, "c")
    empty = len(store)
    await queues.tell(store, [Telling("b", 1, updates=1, designs={b"_design/x": 1})])
    await polled(store)
    key = keys.counter_key("c", "b", 1)
    assert (await rows_of(store))[key] == counter.IDLE.to_bytes(8, "little")
    assert len(store) == empty + 1
    await polled(store)
    assert len(store) == empty


async def test_a_late_update_of_the_bucket_before_does_not_hide_a_creation(
    store: MemoryStore,
) -> None:
    await registered(store, "c")
    await queues.tell(store, [Telling("b", 1, deleted=True)])
    assert await polled(store) == [BucketEvent("b", 1, BucketFate.DELETED)]
    await queues.tell(store, [Telling("b", 1, updates=1)])
    await queues.tell(store, [Telling("b", 2, created=True)])
    # Were there one counter for both, it would be max(6, 3) now: updated, and not created.
    assert await polled(store) == [BucketEvent("b", 2, BucketFate.CREATED)]


async def test_of_a_bucket_made_again_and_again_there_is_one_counter(store: MemoryStore) -> None:
    await registered(store, "c")
    empty = len(store)
    for incarnation in (7, 3, 9, 1, 5):
        await queues.tell(
            store, [Telling("b", incarnation, created=True, designs={b"_design/x": 1})]
        )
        await queues.tell(store, [Telling("ba", incarnation, created=True)])
        await queues.tell(store, [Telling("b", incarnation, deleted=True)])
        assert len(store) == empty + 2
    assert await polled(store) == [
        BucketEvent("b", 5, BucketFate.DELETED),
        BucketEvent("ba", 5, BucketFate.CREATED),
    ]


async def test_a_queue_is_looked_at_piece_by_piece(store: MemoryStore) -> None:
    await registered(store, "c")
    designs = {b"_design/%d" % n: 1 for n in range(5)}
    await queues.tell(
        store, [Telling(f"b{n}", n, updates=1, designs=dict(designs)) for n in range(4)]
    )
    told: dict[str, set[bytes]] = {}
    updates = 0
    for event in await polled(store):
        told.setdefault(event.bucket, set()).update(event.designs)
        updates += event.updates
    assert told == {f"b{n}": set(designs) for n in range(4)}
    assert updates == 4
    assert await polled(store) == []


async def test_the_dead_are_cleared_with_their_queues_and_others_are_not(
    store: MemoryStore,
) -> None:
    await registered(store, "c", "d")
    await queues.tell(store, [Telling("b", 1, updates=1, designs={b"_design/x": 1})])
    await queues.poll(store, "d", 30.0, 5.0)
    assert await queues.forget_dead(store, TIMEOUT_S - 0.1) == ([], TIMEOUT_S)
    assert await queues.forget_dead(store, TIMEOUT_S) == (["c"], 35.0)
    with pytest.raises(UnknownConsumerError):
        await polled(store)
    assert not [key for key in await rows_of(store) if key[1:2] == b"c"]
    assert await polled(store, "d") == []


async def test_who_reports_while_it_is_buried_lives(store: MemoryStore) -> None:
    await registered(store, "c")
    raced = False

    class Racing(MemoryStore):
        async def transact(self, body):  # type: ignore[no-untyped-def]
            async def racing(transaction: Transaction):  # type: ignore[no-untyped-def]
                nonlocal raced
                result = await body(transaction)
                if not raced:
                    raced = True
                    await queues.report_health(store, "c", TIMEOUT_S, 50.0)
                return result

            return await store.transact(racing)

    assert await queues.forget_dead(Racing(), 20.0) == ([], 50.0 + TIMEOUT_S)
    assert await polled(store) == []


async def test_after_an_absence_of_the_node_nobody_is_dead(store: MemoryStore) -> None:
    await registered(store, "c")
    await queues.revive(store, 1000.0)
    assert await queues.forget_dead(store, 1005.0) == ([], 1000.0 + TIMEOUT_S)


async def test_what_is_put_back_is_told_before_what_has_come_since(store: MemoryStore) -> None:
    await registered(store, "c")
    await queues.tell(store, [Telling("a", 1, created=True, updates=2), Telling("b", 1, updates=1)])
    await queues.tell(store, [Telling("c", 1, updates=1, designs={b"_design/x": 1})])
    events = await polled(store)
    await queues.tell(
        store,
        [
            Telling("a", 1, updates=1, designs={b"_design/y": 1}),
            Telling("b", 1, deleted=True),
        ],
    )
    await queues.tell(store, [Telling("c", 2, created=True)])
    await queues.put_back(store, "c", events)
    assert await polled(store) == [
        BucketEvent("a", 1, BucketFate.CREATED, 3, (b"_design/y",)),
        BucketEvent("b", 1, BucketFate.DELETED, 1),
        BucketEvent("c", 2, BucketFate.CREATED),
    ]


async def test_there_are_so_many_consumers_and_no_more(store: MemoryStore) -> None:
    await registered(store, *(f"c{n}" for n in range(CONSUMERS_MAX)))
    with pytest.raises(TooManyConsumersError):
        await registered(store, "one more")
    await registered(store, "c0")
    # Those that nodes have for themselves are neither counted nor refused.
    await registered(store, ".own")
    await queues.forget(store, "c1")
    await registered(store, "one more")
    with pytest.raises(TooManyConsumersError):
        await registered(store, "and one more")


def test_keys_come_apart_again() -> None:
    for document in (b"", b"_design/", b"_design/\0\xff"):
        key = keys.design_key("c", "b", (1 << 64) - 1, document)
        assert keys.place_of("c", key) == keys.Place("b", (1 << 64) - 1, document)
        first, end = keys.queue_range("c")
        assert first <= key < end
        if document:
            first, end = keys.designs_range(keys.counter_key("c", "b", (1 << 64) - 1))
            assert first <= key < end
    # A name that another begins with is another.
    assert not keys.queue_range("c")[0] <= keys.counter_key("ca", "b", 0) < keys.queue_range("c")[1]
    first, end = keys.bucket_range("c", "b")
    assert not first <= keys.counter_key("c", "ba", 0) < end
