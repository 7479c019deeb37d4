"""The bus as a whole, in the time of a mock clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count

import pytest
import trio
from trio.testing import MockClock

from tests.engine.helpers import put, request, send
from upr_protocol.bucket_event import ANY_DESIGN, BucketEvent, BucketFate, EventFilter, EventKind
from upr_protocol.ids import HistoryId, Operation, SeqNo
from upr_server.engine import Buckets
from upr_server.events import EventBus, MemoryStore, queues
from upr_server.events.bell import Bell
from upr_server.events.consumer import Consumer, News
from upr_server.events.producer import FLUSH_S
from upr_server.events.queues import Telling
from upr_server.events.store import Transaction
from upr_server.events.worker import RETRY_S, Worker
from upr_server.storage.errors import DiskFullError

ALL = EventFilter()
EVERYTHING = News(everything=True, events=())


class CountingStore(MemoryStore):
    """Counts commits, and is full now and then."""

    is_full = False
    commits = 0

    async def commit(self, transaction: Transaction) -> bool:
        if self.is_full:
            raise DiskFullError("full")
        self.commits += 1
        return await super().commit(transaction)


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
async def bus(store: CountingStore, autojump_clock: MockClock) -> AsyncIterator[EventBus]:
    ids = count(1)
    bus = EventBus(store, time=trio.current_time, new_id=lambda: next(ids))
    async with bus.running():
        yield bus


async def test_it_runs_though_its_store_is_full(autojump_clock: MockClock) -> None:
    ids, store = count(1), CountingStore()
    bus = EventBus(store, time=trio.current_time, new_id=lambda: next(ids))
    async with bus.running():
        await Consumer(store, "c", 30.0, trio.current_time).poll()
    store.is_full = True
    async with bus.running():
        await trio.sleep(10)
        store.is_full = False
        assert not (await Consumer(store, "c", 30.0, trio.current_time).poll()).everything


@pytest.fixture
def buckets(bus: EventBus) -> Buckets:
    ids = count(1)
    return Buckets(lambda: HistoryId(next(ids)), listener=bus.producer)


async def ask(
    bus: EventBus, name: str = "c", acknowledged: int = 0, timeout_s: float = 9.0
) -> tuple[int, bool, tuple[BucketEvent, ...]]:
    return await bus.next_events(
        name, ALL, timeout_s=timeout_s, acknowledged=acknowledged, wait_s=timeout_s / 3
    )


async def test_callbacks_share_a_worker_and_each_has_its_filter(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets, store: CountingStore
) -> None:
    told: dict[str, list[News]] = {"all": [], "deleted": [], "named": [], "late": []}
    worker = bus.worker(".test", 30.0)
    assert bus.worker(".test", 30.0) is worker
    with (
        worker.calling(told["all"].append, ALL),
        worker.calling(told["deleted"].append, EventFilter(EventKind.DELETED)),
        worker.calling(told["named"].append, EventFilter(pattern="a*")),
    ):
        await trio.sleep(1)
        buckets.create("abc", 1, incarnation=1)
        buckets.create("b", 1, incarnation=2)
        await trio.sleep(1)
        buckets.delete("b")
        await trio.sleep(1)
        with worker.calling(told["late"].append, ALL):
            buckets.delete("abc")
            await trio.sleep(1)
    created = tuple(
        BucketEvent(name, n, BucketFate.CREATED) for n, name in enumerate(("abc", "b"), 1)
    )
    deleted = [BucketEvent(name, n, BucketFate.DELETED) for n, name in ((1, "abc"), (2, "b"))]
    # Each begins by looking at everything, and the worker's registration says so once more.
    assert {name: news[0] for name, news in told.items()} == dict.fromkeys(told, EVERYTHING)
    flat = {
        name: [event for news in all_news for event in news.events]
        for name, all_news in told.items()
    }
    assert flat["all"] == [*created, deleted[1], deleted[0]]
    assert flat["deleted"] == [deleted[1], deleted[0]]
    assert flat["named"] == [created[0], deleted[0]]
    assert flat["late"] == [deleted[0]]
    # One queue: registration, health, and what is idle.
    assert len(store) <= 4


async def test_a_worker_lives_though_nothing_is_told(
    autojump_clock: MockClock, bus: EventBus
) -> None:
    told: list[News] = []
    with bus.worker(".test", 3.0).calling(told.append, ALL):
        await trio.sleep(60)
    assert told == [EVERYTHING, EVERYTHING]


async def test_a_worker_that_cannot_read_tries_again_soon(
    autojump_clock: MockClock, store: CountingStore
) -> None:
    bell = Bell()
    worker = Worker(Consumer(store, ".test", 3000.0, trio.current_time), bell)
    told: list[News] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        with worker.calling(told.append, ALL):
            await trio.sleep(1)
            await queues.tell(store, [Telling("b", 7, created=True)])
            store.is_full = True
            bell.ring()
            await trio.sleep(1)
            store.is_full = False
            await trio.sleep(RETRY_S)
        nursery.cancel_scope.cancel()
    assert told[2:] == [News(everything=False, events=(BucketEvent("b", 7, BucketFate.CREATED),))]


async def test_ingest_pays_no_transaction_a_batch(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets, store: CountingStore
) -> None:
    await ask(bus)
    some = [buckets.create(name, 1, incarnation=n) for n, name in enumerate("abcd", 1)]
    before, begun = store.commits, trio.current_time()
    for _ in range(1000):
        for bucket in some:
            put(bucket.partitions[0], b"k")
        await trio.sleep(0.001)
    await bus.producer.flush()
    flushes = (trio.current_time() - begun) / FLUSH_S
    assert store.commits - before <= flushes + 2


async def test_the_dead_are_cleared_in_time_and_others_are_not(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets, store: CountingStore
) -> None:
    _, everything, _ = await ask(bus, "dead", timeout_s=5.0)
    assert everything
    number, _, _ = await ask(bus, "alive", timeout_s=5.0)
    died_at = trio.current_time()
    while bus.statistics()["consumers_cleared"] == 0:
        buckets.create("b", 1, incarnation=1)
        await trio.sleep(0.5)
        buckets.delete("b")
        number, everything, _ = await ask(bus, "alive", number, timeout_s=5.0)
        assert not everything
    assert trio.current_time() - died_at <= 5.0 + 3.0
    assert bus.statistics()["feeds"] == 1
    _, everything, events = await ask(bus, "dead", timeout_s=5.0)
    assert everything
    assert events == ()


async def test_a_full_store_loses_nothing(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets, store: CountingStore
) -> None:
    number, _, _ = await ask(bus)
    store.is_full = True
    bucket = buckets.create("b", 1, incarnation=7)
    for _ in range(5):
        put(bucket.partitions[0], b"k", b"_design/x")
        await trio.sleep(1)
    assert bus.statistics()["failures"] != 0
    store.is_full = False
    await trio.sleep(2)
    _, everything, events = await ask(bus, "c", number)
    assert not everything
    assert events == (BucketEvent("b", 7, BucketFate.CREATED, 5, (b"_design/x",)),)


async def test_a_stop_that_cannot_write_leaves_a_store_that_is_not_whole(
    autojump_clock: MockClock,
) -> None:
    store = CountingStore()
    ids = count(1)
    bus = EventBus(store, time=trio.current_time, new_id=lambda: next(ids))
    async with bus.running():
        buckets = Buckets(lambda: HistoryId(next(ids)), listener=bus.producer)
        await Consumer(store, "c", 10.0, trio.current_time).poll()
        buckets.create("b", 1)
        store.is_full = True
    assert not store.is_whole


async def test_what_has_expired_is_told(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    number, _, _ = await ask(bus)
    partition = buckets.create("b", 1, incarnation=1).partitions[0]
    send(partition, request(Operation.SET, b"_design/x", expiry=5), now=1.0)
    await trio.sleep(0.2)
    number, _, events = await ask(bus, "c", number)
    assert [event.designs for event in events] == [(b"_design/x",)]
    assert partition.expire(10.0) == 1
    await trio.sleep(0.2)
    number, _, events = await ask(bus, "c", number)
    assert [(event.updates, event.designs) for event in events] == [(1, (b"_design/x",))]


async def test_what_was_cut_may_be_any_design_document(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    partition = buckets.create("b", 1, incarnation=1).partitions[0]
    await trio.sleep(0.2)
    number, _, _ = await ask(bus)
    partition.cut(SeqNo(0))
    await trio.sleep(0.2)
    _, _, events = await ask(bus, "c", number)
    assert events == (BucketEvent("b", 1, BucketFate.NONE, 1, (ANY_DESIGN,)),)


async def test_a_batch_that_changed_nothing_tells_nothing(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    number, _, _ = await ask(bus)
    partition = buckets.create("b", 1, incarnation=1).partitions[0]
    send(partition, request(Operation.REPLACE, b"_design/x", b"v"))
    send(
        partition,
        request(Operation.REPLACE, b"_design/y", b"v"),
        request(Operation.SET, b"_design/z", b"v"),
    )
    await trio.sleep(0.2)
    _, _, events = await ask(bus, "c", number)
    assert events == (BucketEvent("b", 1, BucketFate.CREATED, 1, (b"_design/z",)),)
