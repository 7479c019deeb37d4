"""The event bus as a whole, with a mock clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import pytest
import structlog.testing
import trio
from trio.testing import MockClock

from tests.engine.helpers import put, request, send
from tests.events.buses import ALL, buckets_of, new_bus
from upr_protocol.bucket_event import ANY_DESIGN, BucketEvent, BucketFate
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import Operation, SeqNo
from upr_server.engine import Buckets
from upr_server.events import EventBus
from upr_server.storage.calls import StoreCall
from upr_server.storage.errors import CorruptionError, DiskFullError
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore

Answer = tuple[int, bool, tuple[BucketEvent, ...]]


@pytest.fixture
async def bus(autojump_clock: MockClock) -> AsyncIterator[EventBus]:
    bus = new_bus()
    async with bus.running():
        yield bus


@pytest.fixture
def buckets(bus: EventBus) -> Buckets:
    return buckets_of(bus)


async def ask(
    bus: EventBus, name: str = "c", acknowledged: int = 0, timeout_s: float = 9.0
) -> Answer:
    return await bus.next_events(
        name, ALL, timeout_s=timeout_s, acknowledged=acknowledged, wait_s=timeout_s / 3
    )


async def test_registering_while_buckets_change_misses_nothing(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    """After its registration, each consumer receives every update exactly once."""
    bucket = buckets.create("b", 1, incarnation=7)
    bucket_count = 0
    registered_at: dict[str, int] = {}
    update_counts: dict[str, int] = {}

    async def write() -> None:
        nonlocal bucket_count
        for _ in range(200):
            put(bucket.partitions[0], b"k")
            bucket_count += 1
            await trio.sleep(0.01)

    async def follow(name: str, delay_s: float) -> None:
        await trio.sleep(delay_s)
        registered_at[name], update_counts[name] = bucket_count, 0
        batch_id, must_look, _ = await ask(bus, name)
        assert must_look
        while True:
            batch_id, must_look, events = await ask(bus, name, batch_id)
            assert not must_look
            update_counts[name] += sum(event.updates for event in events)

    async with trio.open_nursery() as nursery:
        for index in range(20):
            nursery.start_soon(follow, f"c{index}", index * 0.0713)
        await write()
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    assert update_counts == {name: bucket_count - before for name, before in registered_at.items()}


CHANGES: Final[dict[str, Callable[[Buckets], object]]] = {
    "create": lambda buckets: buckets.create("new", 1, incarnation=8),
    "update": lambda buckets: put(buckets.get("b").partitions[0], b"k"),  # type: ignore[union-attr]
    "delete": lambda buckets: buckets.delete("b"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_consumer_that_waits_is_woken_at_once(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets, change: str
) -> None:
    buckets.create("b", 1, incarnation=7)
    batch_id, _, _ = await ask(bus)
    asked_at = trio.current_time()
    async with trio.open_nursery() as nursery:

        async def change_later() -> None:
            await trio.sleep(1.0)
            CHANGES[change](buckets)

        nursery.start_soon(change_later)
        _, _, events = await ask(bus, acknowledged=batch_id, timeout_s=60.0)
    assert len(events) == 1
    assert trio.current_time() == pytest.approx(asked_at + 1.0)


async def test_a_follower_whose_name_was_taken_over_hears_of_it_at_once(
    autojump_clock: MockClock, bus: EventBus
) -> None:
    batch_id, _, _ = await ask(bus)
    began_at = trio.current_time()

    async def be_overtaken() -> None:
        with pytest.raises(ServerError) as refusal:
            await ask(bus, acknowledged=batch_id, timeout_s=60.0)
        assert refusal.value.status is Status.SUPERSEDED
        assert trio.current_time() == pytest.approx(began_at + 1.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(be_overtaken)
        await trio.sleep(1.0)
        await ask(bus, timeout_s=60.0)


async def test_a_load_that_never_ends_is_delivered_ten_times_a_second(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    batch_id, _, _ = await ask(bus)
    bucket = buckets.create("b", 1, incarnation=7)
    began_at, answers, updates = trio.current_time(), 0, 0

    async def write() -> None:
        while True:
            put(bucket.partitions[0], b"k")
            await trio.sleep(0.001)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        while updates < 1000:
            batch_id, _, events = await ask(bus, acknowledged=batch_id)
            answers += 1
            updates += sum(event.updates for event in events)
        nursery.cancel_scope.cancel()
    assert answers <= 10 * (trio.current_time() - began_at) + 2


async def test_a_clean_restart_revives_its_consumers(autojump_clock: MockClock) -> None:
    """A consumer cannot ask while its node is down, so that time must not count towards its
    timeout."""
    directory = SimulatedDirectory()
    before = new_bus(SimulatedStore(directory))
    async with before.running():
        batch_id, _, _ = await ask(before, timeout_s=9.0)
        buckets_of(before).create("b", 1, incarnation=7)
    await before.save()
    await trio.sleep(3600)
    after = new_bus(SimulatedStore(directory), first_id=1000)
    await after.restore()
    async with after.running():
        await trio.sleep(8.0)
        _, must_look, events = await ask(after, acknowledged=batch_id)
        assert not must_look
        assert events == (BucketEvent("b", 7, BucketFate.CREATED),)


async def test_queues_are_restored_once(autojump_clock: MockClock) -> None:
    """Queues are deleted once they are restored. After a crash there are none, so consumers look at
    everything."""
    directory = SimulatedDirectory()
    before = new_bus(SimulatedStore(directory))
    async with before.running():
        await ask(before)
    await before.save()
    for is_known in (True, False):
        after = new_bus(SimulatedStore(directory), first_id=1000)
        await after.restore()
        assert bool(after.statistics()["consumers"]) is is_known


async def test_damaged_queues_have_consumers_start_over(autojump_clock: MockClock) -> None:
    class Damaged(SimulatedStore):
        async def execute(self, call: StoreCall[Any]) -> Any:
            await trio.lowlevel.checkpoint()
            raise CorruptionError("checksum mismatch")

    directory = SimulatedDirectory()
    directory.event_queues.data = b"of another version"
    for store in (Damaged(), SimulatedStore(directory)):
        bus = new_bus(store)
        with structlog.testing.capture_logs() as logs:
            await bus.restore()
        assert [log["event"] for log in logs] == [
            "event queues cannot be read; consumers start over"
        ]
        async with bus.running():
            _, must_look, _ = await ask(bus)
            assert must_look


async def test_a_disk_that_is_full_at_the_stop_has_consumers_start_over(
    autojump_clock: MockClock,
) -> None:
    class Full(SimulatedStore):
        async def execute(self, call: StoreCall[Any]) -> Any:
            await trio.lowlevel.checkpoint()
            raise DiskFullError("the disk is full")

    bus = new_bus(Full())
    with structlog.testing.capture_logs() as logs:
        await bus.save()
    assert [log["event"] for log in logs] == ["event queues not saved; consumers start over"]


async def test_dead_consumers_are_cleared_in_time_and_others_are_not(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    _, must_look, _ = await ask(bus, "dead", timeout_s=5.0)
    assert must_look
    batch_id, _, _ = await ask(bus, "alive", timeout_s=5.0)
    died_at = trio.current_time()
    while bus.statistics()["consumers_cleared"] == 0:
        buckets.create("b", 1, incarnation=1)
        await trio.sleep(0.5)
        buckets.delete("b")
        batch_id, must_look, _ = await ask(bus, "alive", batch_id, timeout_s=5.0)
        assert not must_look
    assert trio.current_time() - died_at <= 5.0 + 3.0
    assert bus.statistics()["consumers"] == 1
    _, must_look, events = await ask(bus, "dead", timeout_s=5.0)
    assert must_look
    assert events == ()


async def test_a_consumer_that_waits_is_not_dead(autojump_clock: MockClock, bus: EventBus) -> None:
    """A consumer that waits for events stays registered, however long it waits."""
    batch_id, _, _ = await ask(bus)
    await bus.next_events("c", ALL, timeout_s=5.0, acknowledged=batch_id, wait_s=60.0)
    assert bus.statistics()["consumers_cleared"] == 0


async def test_an_expired_item_is_an_update(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    batch_id, _, _ = await ask(bus)
    partition = buckets.create("b", 1, incarnation=1).partitions[0]
    send(partition, request(Operation.SET, b"_design/x", expiry=5), now=1.0)
    await trio.sleep(0.2)
    batch_id, _, events = await ask(bus, "c", batch_id)
    assert [event.designs for event in events] == [(b"_design/x",)]
    assert partition.expire(10.0) == 1
    await trio.sleep(0.2)
    batch_id, _, events = await ask(bus, "c", batch_id)
    assert [(event.updates, event.designs) for event in events] == [(1, (b"_design/x",))]


async def test_after_a_truncation_any_design_document_may_have_changed(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    partition = buckets.create("b", 1, incarnation=1).partitions[0]
    await trio.sleep(0.2)
    batch_id, _, _ = await ask(bus)
    partition.truncate(SeqNo(0))
    await trio.sleep(0.2)
    _, _, events = await ask(bus, "c", batch_id)
    assert events == (BucketEvent("b", 1, BucketFate.NONE, 1, (ANY_DESIGN,)),)


async def test_a_batch_without_effect_is_not_an_update(
    autojump_clock: MockClock, bus: EventBus, buckets: Buckets
) -> None:
    batch_id, _, _ = await ask(bus)
    partition = buckets.create("b", 1, incarnation=1).partitions[0]
    send(partition, request(Operation.REPLACE, b"_design/x", b"v"))
    send(
        partition,
        request(Operation.REPLACE, b"_design/y", b"v"),
        request(Operation.SET, b"_design/z", b"v"),
    )
    await trio.sleep(0.2)
    _, _, events = await ask(bus, "c", batch_id)
    assert events == (BucketEvent("b", 1, BucketFate.CREATED, 1, (b"_design/z",)),)
