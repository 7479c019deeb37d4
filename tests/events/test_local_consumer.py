"""The node's own consumers, and the callbacks that share them, with a mock clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import count
from typing import Final

import pytest
import trio
from trio.testing import MockClock

from tests.engine.helpers import put
from tests.events.buses import ALL, EVERYTHING, buckets_of, new_bus
from upr_protocol.bucket_event import BucketEvent, BucketFate, EventFilter, EventKind
from upr_protocol.limits import EVENT_KEYS_MAX
from upr_server.engine import Buckets
from upr_server.events import EventBatch, EventBus

NAME: Final = ".test"


@pytest.fixture
async def bus(autojump_clock: MockClock) -> AsyncIterator[EventBus]:
    bus = new_bus()
    async with bus.running():
        yield bus


@pytest.fixture
def buckets(bus: EventBus) -> Buckets:
    return buckets_of(bus)


def events_of(batches: list[EventBatch]) -> list[BucketEvent]:
    return [event for batch in batches for event in batch.events]


async def test_callbacks_share_a_queue_and_each_has_its_filter(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    received: dict[str, list[EventBatch]] = {"all": [], "deleted": [], "named": [], "late": []}
    consumer = bus.local_consumer(NAME, 30.0)
    assert bus.local_consumer(NAME, 30.0) is consumer
    with (
        consumer.subscribed(received["all"].append, ALL),
        consumer.subscribed(received["deleted"].append, EventFilter(EventKind.DELETED)),
        consumer.subscribed(received["named"].append, EventFilter(pattern="a*")),
    ):
        await trio.sleep(1)
        buckets.create("abc", 1, incarnation=1)
        buckets.create("b", 1, incarnation=2)
        await trio.sleep(1)
        buckets.delete("b")
        await trio.sleep(1)
        with consumer.subscribed(received["late"].append, ALL):
            buckets.delete("abc")
            await trio.sleep(1)
    created = [
        BucketEvent(name, incarnation, BucketFate.CREATED)
        for incarnation, name in enumerate(("abc", "b"), 1)
    ]
    deleted = [
        BucketEvent(name, incarnation, BucketFate.DELETED)
        for incarnation, name in ((1, "abc"), (2, "b"))
    ]
    # Each callback begins with "look at everything", and the consumer's registration causes another
    # one.
    assert all(batches[0] == EVERYTHING for batches in received.values())
    assert {name: events_of(batches) for name, batches in received.items()} == {
        "all": [*created, deleted[1], deleted[0]],
        "deleted": [deleted[1], deleted[0]],
        "named": [created[0], deleted[0]],
        "late": [deleted[0]],
    }
    # The callbacks share one consumer, which does not count as a consumer of a connection.
    assert bus.statistics()["consumers"] == 0
    counters = bus.statistics()["counters"]
    assert isinstance(counters, int)
    assert counters <= 2


async def test_a_callback_that_wants_more_than_the_others_gets_it(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    narrow: list[EventBatch] = []
    wide: list[EventBatch] = []
    consumer = bus.local_consumer(NAME, 30.0)
    bucket = buckets.create("b", 1, incarnation=1)
    with consumer.subscribed(narrow.append, EventFilter(EventKind.DELETED)):
        await trio.sleep(2)
        with consumer.subscribed(wide.append, ALL):
            put(bucket.partitions[0], b"k")
            await trio.sleep(2)
    assert events_of(narrow) == []
    assert [event.updates for event in events_of(wide)] == [1]


async def test_a_consumer_without_events_does_not_time_out(
    autojump_clock: MockClock, bus: EventBus
) -> None:
    batches: list[EventBatch] = []
    with bus.local_consumer(NAME, 3.0).subscribed(batches.append, ALL):
        await trio.sleep(60)
    assert batches == [EVERYTHING, EVERYTHING]


async def test_a_load_that_never_ends_is_delivered_once_a_second(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    batches: list[EventBatch] = []
    bucket = buckets.create("b", 1, incarnation=1)
    with bus.local_consumer(NAME, 30.0).subscribed(batches.append, ALL):
        for _ in range(1000):
            put(bucket.partitions[0], b"k")
            await trio.sleep(0.01)
    assert 9 <= len(batches) <= 13


async def test_a_callback_that_died_is_not_called_and_the_others_are(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    dead: list[EventBatch] = []
    alive: list[EventBatch] = []
    consumer = bus.local_consumer(NAME, 30.0)
    with consumer.subscribed(alive.append, ALL):
        with suppress(KeyError), consumer.subscribed(dead.append, ALL):
            await trio.sleep(5)
            raise KeyError
        dead.clear()
        buckets.create("b", 1, incarnation=1)
        await trio.sleep(5)
    assert not dead
    assert events_of(alive) == [BucketEvent("b", 1, BucketFate.CREATED)]


async def test_without_callbacks_the_queue_is_cleared_and_a_later_one_looks_at_everything(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    consumer = bus.local_consumer(NAME, 3.0)
    with consumer.subscribed(list[EventBatch]().append, ALL):
        await trio.sleep(5)
    assert bus.statistics()["consumers_cleared"] == 0
    buckets.create("b", 1, incarnation=1)
    await trio.sleep(10)
    assert bus.statistics()["consumers_cleared"] == 1
    assert bus.statistics()["counters"] == 0
    batches: list[EventBatch] = []
    with consumer.subscribed(batches.append, ALL):
        await trio.sleep(5)
        buckets.delete("b")
        await trio.sleep(5)
    assert batches[:2] == [EVERYTHING, EVERYTHING]
    assert events_of(batches) == [BucketEvent("b", 1, BucketFate.DELETED)]


class StepCounter(trio.abc.Instrument):
    """Counts the steps of all tasks."""

    def __init__(self) -> None:
        self.steps = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1


async def test_a_long_queue_is_delivered_in_batches_and_other_tasks_run_between(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    batches: list[EventBatch] = []
    told_in_steps: list[int] = []
    counter = StepCounter()

    def take(batch: EventBatch) -> None:
        batches.append(batch)
        told_in_steps.append(counter.steps)

    trio.lowlevel.add_instrument(counter)
    with bus.local_consumer(NAME, 30.0).subscribed(take, ALL):
        await trio.sleep(1)
        incarnations = count(1)
        bucket_count = EVENT_KEYS_MAX + 1
        for index in range(bucket_count):
            buckets.create(f"b{index}", 1, incarnation=next(incarnations))
        await trio.sleep(5)
    assert [len(batch.events) for batch in batches] == [0, 0, EVENT_KEYS_MAX, 1]
    assert len(set(told_in_steps)) == len(batches)


async def test_a_shared_queue_counts_what_any_of_its_callbacks_accepts(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    received: list[EventBatch] = []
    consumer = bus.local_consumer(NAME, 30.0)
    with consumer.subscribed(received.append, EventFilter(pattern="a*")):
        with consumer.subscribed(received.append, EventFilter(pattern="b*")):
            await trio.sleep(2)
            for incarnation, name in enumerate(("a", "b", "c"), 1):
                buckets.create(name, 1, incarnation=incarnation)
            assert bus.statistics()["counters"] == 2
            await trio.sleep(2)
            assert [event.bucket for event in events_of(received)] == ["a", "b"]
        await trio.sleep(20)
        buckets.delete("b")
        assert bus.statistics()["counters"] == 0
