"""Publishing: every operation takes effect once, whatever happens to connections."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.kit.effort import effort
from tests.kit.fake_net import ENDLESS, FakeNet
from tests.kit.fake_server import FakeServer
from tests.kit.steps import counted_steps
from upr_protocol.chunk import chunk_of_plain_sets
from upr_protocol.client import (
    Failure,
    Publisher,
    PublishError,
    WriterIdentity,
    connect,
    publisher,
)
from upr_protocol.client.core.partition_batches import Batch
from upr_protocol.errors import BrokenError, ClosedError, ServerError, Status, UprError
from upr_protocol.ids import Operation, PartitionId
from upr_protocol.limits import BUNDLE_MUTATIONS_MAX
from upr_protocol.wire import Message, Mutate

URL = "upr://fake/b"


async def test_published_operations_arrive(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with publisher(URL, dial=net.dial) as sink:
        for index in range(500):
            await sink.set(b"key-%d" % index, b"value-%d" % index)
        for _ in range(50):
            await sink.increment("counter", 2)
        await sink.delete("key-0")
    expected = {b"key-%d" % index: b"value-%d" % index for index in range(1, 500)}
    assert server.contents() == expected | {b"counter": b"100"}
    statistics = sink.statistics()
    assert (statistics.mutations, statistics.failed_mutations, statistics.unanswered_batches) == (
        551,
        0,
        0,
    )
    assert statistics.batches < 20
    assert net.open == 0


async def test_batches_are_sent_when_full_or_when_their_time_has_come(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with publisher(URL, dial=net.dial, batch_mutations=3, linger_s=1.0) as sink:
        key = b"k"
        await sink.set(key, "1")
        await sink.set(key, "2")
        await trio.testing.wait_all_tasks_blocked()
        assert server.contents() == {}
        await sink.set(key, "3")
        await trio.testing.wait_all_tasks_blocked()
        assert server.contents() == {key: b"3"}
        await sink.set(key, "4")
        await trio.sleep(0.9)
        assert server.contents() == {key: b"3"}
        await trio.sleep(0.2)
        assert server.contents() == {key: b"4"}
        assert sink.statistics().batches == 2


async def test_a_batch_is_sent_at_its_bytes(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with publisher(URL, dial=net.dial, batch_bytes=1000, linger_s=1e6) as sink:
        await sink.set("k", bytes(2000))
        await trio.testing.wait_all_tasks_blocked()
        assert server.contents() == {b"k": bytes(2000)}


async def test_failures_are_reported_for_each_operation(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with publisher(URL, dial=net.dial) as sink:
        await sink.set("there", "1")
        await sink.apply(Operation.ADD, "there", "2")
        await sink.delete("not there")
        await sink.set("after", "3")
        await sink.flush()
        failures = {(f.key, f.operation, f.status) for f in sink.failures}
        assert failures == {
            (b"there", Operation.ADD, Status.EXISTS),
            (b"not there", Operation.DELETE, Status.NOT_FOUND),
        }
        sink.failures.clear()
    assert server.contents() == {b"there": b"1", b"after": b"3"}
    assert sink.statistics().failed_mutations == 2


async def test_failures_left_over_are_raised_when_the_context_ends(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    with pytest.raises(PublishError, match="1 operations failed; the first: delete of 'k'"):
        async with publisher(URL, dial=net.dial) as sink:
            await sink.delete("k")


async def test_failures_that_were_cleared_are_not_told_of_again(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    with pytest.raises(PublishError, match=r"1 operations failed; .*'l'"):  # noqa: PT012
        async with publisher(URL, dial=net.dial) as sink:
            await sink.delete("k")
            await sink.flush()
            sink.failures.clear()
            await sink.delete("l")


async def test_failures_go_to_the_callback_if_there_is_one(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    failures: list[Failure] = []
    async with publisher(URL, dial=net.dial, on_failure=failures.append) as sink:
        await sink.delete("k")
    assert [failure.key for failure in failures] == [b"k"]


async def test_every_operation_of_a_refused_batch_fails(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.refuse = lambda m: Status.UNSUPPORTED if isinstance(m, Mutate) else None
    failures: list[Failure] = []
    async with publisher(URL, dial=net.dial, on_failure=failures.append) as sink:
        for index in range(10):
            await sink.set(b"%d" % index, "v")
    assert {failure.key for failure in failures} == {b"%d" % index for index in range(10)}
    assert {failure.status for failure in failures} == {Status.UNSUPPORTED}


async def test_keys_and_values_that_no_server_takes_are_refused_locally(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    async with publisher(URL, dial=net.dial) as sink:
        with pytest.raises(ServerError) as caught:
            await sink.set(b"", "v")
        assert caught.value.status is Status.BAD_KEY
        with pytest.raises(ServerError) as caught:
            await sink.set(b"k", bytes(20 * 1024 * 1024 + 1))
        assert caught.value.status is Status.TOO_LARGE


async def test_a_number_that_does_not_fit_takes_nothing_from_other_operations(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with publisher(URL, dial=net.dial) as sink:
        for index in range(10):
            await sink.set(b"%d" % index, "v")
            with pytest.raises(ServerError, match=r"below 2\*\*32") as caught:
                await sink.set(b"%d" % index, "w", expiry=1_700_000_000_000)
            assert caught.value.status is Status.BAD_ARGUMENT
        await trio.sleep(1)
        await sink.set("after", "v")
    assert server.contents() == {b"after": b"v"} | {b"%d" % index: b"v" for index in range(10)}


async def test_a_chunk_can_be_published_as_it_is(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    answered: list[int] = []
    async with publisher(URL, dial=net.dial) as sink:
        chunk = chunk_of_plain_sets([b"a", b"b"], [b"1", b"2"])
        partition = PartitionId(2)
        reply = await sink.publish_and_wait(partition, chunk)
        assert (reply.first_seq, reply.last_seq) == (1, 2)
        for _ in range(40):
            await sink.publish(partition, chunk, lambda batch: answered.append(batch.counter))
        await sink.flush()
        assert answered == list(range(2, 42))


async def test_publish_and_wait_raises_the_refusal_of_a_chunk(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.refuse = lambda m: Status.BAD_ARGUMENT if isinstance(m, Mutate) else None
    async with publisher(URL, dial=net.dial, on_failure=lambda _: None) as sink:
        with pytest.raises(ServerError) as caught:
            await sink.publish_and_wait(PartitionId(0), chunk_of_plain_sets([b"a"], [b"1"]))
        assert caught.value.status is Status.BAD_ARGUMENT


async def test_the_batches_in_flight_of_a_partition_are_bounded(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.held = {Mutate}
    async with publisher(URL, dial=net.dial, in_flight=5) as sink:
        chunk = chunk_of_plain_sets([b"a"], [b"1"])
        for _ in range(20):
            await sink.publish(PartitionId(1), chunk)
        for _ in range(3):
            await sink.publish(PartitionId(3), chunk)
        await trio.sleep(1)
        (connection,) = server.connections
        # The first was sent at once; then three bundles had a batch of both, and one of the first.
        assert connection.counts[Mutate] == 5
        # Answers come in with a new connection only: these were swallowed.
        server.held = set()
        net.cut()
        await sink.flush()
    assert sink.statistics().resent_batches == 8
    assert len(server.partitions[1].history) == 20
    assert len(server.partitions[3].history) == 3


async def test_a_publisher_waits_for_room_in_its_buffer(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.held = {Mutate}
    async with publisher(URL, dial=net.dial, buffer_bytes=10_000) as sink:
        chunk = chunk_of_plain_sets([b"a"], [bytes(2000)])
        handed_over = 0
        with trio.move_on_after(1):
            while True:
                await sink.publish(PartitionId(1), chunk)
                handed_over += 1
        assert handed_over == 3
        server.held = set()
        net.cut()
        for _ in range(10):
            await sink.publish(PartitionId(1), chunk)
    assert len(server.partitions[1].history) == 14


async def test_a_publisher_waits_for_credit_and_fails_after_the_timeout(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.credit_bytes = 100
    server.pays = False
    async with publisher(URL, dial=net.dial, credit_timeout_s=30) as sink:
        await sink.set("first", bytes(100))
        await sink.flush()
        await sink.set("second", "v")
        began_at = trio.current_time()
        with pytest.raises(ServerError, match="over its memory quota") as caught:
            await sink.flush()
        assert caught.value.status is Status.TEMPORARY_FAILURE
        assert trio.current_time() - began_at == pytest.approx(30)
        assert server.contents() == {b"first": bytes(100)}
        # What was handed over is sent as soon as there is credit.
        server.grant(1 << 20)
        await sink.flush()
        assert server.contents() == {b"first": bytes(100), b"second": b"v"}


async def test_late_credit_within_the_timeout_raises_no_error(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.credit_bytes = 1
    server.pays = False

    async def pay_little_by_little() -> None:
        while True:
            await trio.sleep(20)
            server.grant(200)

    net.nursery.start_soon(pay_little_by_little)
    chunk = chunk_of_plain_sets([b"k"], [b"v"])
    async with publisher(URL, dial=net.dial, credit_timeout_s=25) as sink:
        for _ in range(5):
            await sink.publish_and_wait(PartitionId(0), chunk)
    assert len(server.partitions[0].history) == 5
    assert trio.current_time() == pytest.approx(4 * 20)


def small_budgets(rng: random.Random, connections: int) -> Iterator[tuple[int, int]]:
    """Enough for the handshake, mostly, and then not for long."""
    for _ in range(connections):
        yield rng.randrange(0, 3000), rng.randrange(0, 3000)


@given(st.integers(0, 2**32), st.integers(1, 30), st.sampled_from([1, 3, 16]))
@settings(max_examples=effort(30, 60), deadline=None)
def test_increments_have_exactly_one_effect_though_connections_are_cut_anywhere(
    seed: int, connections: int, batch_mutations: int
) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        server = FakeServer()
        async with trio.open_nursery() as nursery:
            net = FakeNet(nursery, server)
            net.budgets = iter([(ENDLESS, 4000), *small_budgets(rng, connections)])
            async with publisher(
                URL,
                dial=net.dial,
                batch_mutations=batch_mutations,
                linger_s=0.01,
                draw=rng.random,
                writer=WriterIdentity(rng.randbytes(16)),
            ) as sink:
                for index in range(300):
                    await sink.increment(b"counter-%d" % (index % 7))
                    if not rng.randrange(20):
                        await trio.sleep(rng.random())
            nursery.cancel_scope.cancel()
        assert sum(map(int, server.contents().values())) == 300
        assert sum(partition.applied for partition in server.partitions) == 300
        assert net.open == 0

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_order_holds_across_connections(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    rng = random.Random(5)
    net.budgets = iter([(ENDLESS, 4000), *small_budgets(rng, 20)])
    async with publisher(URL, dial=net.dial, batch_mutations=2) as sink:
        for index in range(1000):
            await sink.set("k", b"%d" % index)
    history = server.partition_of(b"k").history
    assert [int(mutation.value) for mutation in history] == list(range(1000))


async def test_a_batch_refused_for_a_passing_reason_is_sent_again_in_order(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    def refuse(message: Message) -> Status | None:
        busy = isinstance(message, Mutate) and trio.current_time() < 7
        return Status.TEMPORARY_FAILURE if busy else None

    server.refuse = refuse
    async with publisher(URL, dial=net.dial, batch_mutations=1, retry_timeout_s=60) as sink:
        for index in range(40):
            await sink.set("k", b"%d" % index)
    history = server.partition_of(b"k").history
    assert [int(mutation.value) for mutation in history] == list(range(40))
    assert 7 <= trio.current_time() < 13
    assert net.dialled == 1


async def test_a_batch_refused_for_too_long_fails(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.refuse = lambda m: Status.NOT_MY_PARTITION if isinstance(m, Mutate) else None
    failures: list[Failure] = []
    async with publisher(
        URL, dial=net.dial, retry_timeout_s=20, on_failure=failures.append
    ) as sink:
        await sink.set("k", "v")
    assert [failure.status for failure in failures] == [Status.NOT_MY_PARTITION]
    assert 20 <= trio.current_time() < 30


async def test_a_publisher_gives_up_on_a_server_that_stays_away(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    with pytest.raises(BrokenError, match="cannot connect") as caught:  # noqa: PT012
        async with publisher(URL, dial=net.dial, retry_timeout_s=100) as sink:
            net.down = True
            net.cut()
            await sink.set("k", "v")
            await sink.flush()
    assert "gave up after" in caught.value.__notes__[0]
    assert 100 <= trio.current_time() < 110
    with pytest.raises(BrokenError):
        await sink.set("k", "v")


async def test_an_address_that_never_answered_is_tried_once(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    net.down = True
    with pytest.raises(BrokenError):
        async with publisher(URL, dial=net.dial):
            pass
    assert net.dialled == 1


async def test_a_publisher_does_not_retry_after_the_bucket_was_deleted(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    with pytest.raises(ServerError) as caught:  # noqa: PT012
        async with publisher(URL, dial=net.dial) as sink:
            del server.buckets["b"]
            net.cut()
            await sink.set("k", "v")
            await sink.flush()
    assert caught.value.status is Status.NO_BUCKET


async def test_a_publisher_takes_address_and_options_from_a_client(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with connect(URL, dial=net.dial, identity="test:me") as client, publisher(client) as sink:
        await sink.set("k", "v")
    assert server.identities == ["test:me", "test:me"]


async def test_leaving_a_publisher_by_an_exception_does_not_wait(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.held = {Mutate}
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with publisher(URL, dial=net.dial) as sink:
            await sink.set("k", "v")
            raise ZeroDivisionError
    assert net.open == 0


async def test_what_another_task_adds_while_a_publisher_is_left_is_sent(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.held = {Mutate}

    async def add_another(sink: Publisher) -> None:
        await trio.testing.wait_all_tasks_blocked()
        await sink.set("late", "v")
        server.release()

    async with trio.open_nursery() as nursery, publisher(URL, dial=net.dial, linger_s=1e6) as sink:
        nursery.start_soon(add_another, sink)
        await sink.set("k", "v")
    assert server.contents() == {b"k": b"v", b"late": b"v"}


async def test_many_tasks_may_share_a_publisher(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with publisher(URL, dial=net.dial, batch_mutations=5, buffer_bytes=5000) as sink:

        async def work(name: int) -> None:
            for index in range(100):
                await sink.set(b"task-%d" % name, b"%d" % index)
                await sink.increment("all")

        async with trio.open_nursery() as nursery:
            for name in range(10):
                nursery.start_soon(work, name)
    assert server.contents() == {b"all": b"1000"} | {b"task-%d" % name: b"99" for name in range(10)}


async def test_a_flush_does_not_wait_for_what_is_added_after_it(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    def refuse(message: Message) -> Status | None:
        is_later = isinstance(message, Mutate) and message.bundle.runs[0].partition == 1
        return Status.TEMPORARY_FAILURE if is_later else None

    server.held, server.refuse = {Mutate}, refuse
    chunk = chunk_of_plain_sets([b"a"], [b"1"])
    flushed = trio.Event()
    async with publisher(URL, dial=net.dial) as sink, trio.open_nursery() as nursery:

        async def flush() -> None:
            await sink.flush()
            flushed.set()

        await sink.publish(PartitionId(0), chunk)
        nursery.start_soon(flush)
        await trio.testing.wait_all_tasks_blocked()
        await sink.publish(PartitionId(1), chunk)
        server.release()
        with trio.fail_after(10):
            await flushed.wait()
        assert sink.statistics().unanswered_batches == 1
        server.refuse = lambda _: None
    assert sink.statistics().unanswered_batches == 0


async def test_an_answer_wakes_the_task_that_waits_for_it_and_no_other(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    count = 300
    chunk = chunk_of_plain_sets([b"a"], [b"1"])
    async with publisher(URL, dial=net.dial, in_flight=1) as sink:
        with counted_steps() as steps:
            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(sink.publish_and_wait, PartitionId(0), chunk)
    assert len(server.partitions[0].history) == count
    assert steps.count < 40 * count


async def test_room_in_the_buffer_wakes_no_more_tasks_than_it_is_enough_for(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    tasks, times = 150, 3
    chunk = chunk_of_plain_sets([b"a"], [b"1"])
    async with publisher(URL, dial=net.dial, in_flight=1, buffer_bytes=4000) as sink:

        async def publish() -> None:
            for _ in range(times):
                await sink.publish(PartitionId(0), chunk)

        with counted_steps() as steps:
            async with trio.open_nursery() as nursery:
                for _ in range(tasks):
                    nursery.start_soon(publish)
            await sink.flush()
    assert len(server.partitions[0].history) == tasks * times
    assert steps.count < 40 * tasks * times


@pytest.mark.parametrize(
    ("is_lost", "body_error", "error"),
    [(True, BrokenError, BrokenError), (False, ZeroDivisionError, ClosedError)],
)
async def test_tasks_that_wait_when_a_publisher_ends_learn_why(
    net: FakeNet,
    server: FakeServer,
    autojump_clock: MockClock,
    is_lost: bool,
    body_error: type[Exception],
    error: type[UprError],
) -> None:
    server.held = {Mutate}
    chunk = chunk_of_plain_sets([b"a"], [bytes(2000)])
    ended = 0

    async def wait(action: Callable[[], Awaitable[object]]) -> None:
        nonlocal ended
        with pytest.raises(error):
            await action()
        ended += 1

    async def publish() -> None:
        async with publisher(URL, dial=net.dial, buffer_bytes=5000, retry_timeout_s=20) as sink:
            actions: list[Callable[[], Awaitable[object]]] = [
                partial(sink.publish_and_wait, PartitionId(0), chunk),
                partial(sink.publish, PartitionId(1), chunk),
                partial(sink.publish, PartitionId(2), chunk),
                sink.wait_for_room,
                sink.flush,
            ]
            for action in actions:
                net.nursery.start_soon(wait, action)
                await trio.testing.wait_all_tasks_blocked()
            if is_lost:
                net.down = True
                net.cut()
                await sink.flush()
            raise ZeroDivisionError

    with pytest.raises(body_error):
        await publish()
    await trio.testing.wait_all_tasks_blocked()
    assert ended == 5


async def test_a_refusal_and_a_lost_connection_together(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    rng = random.Random(3)
    net.budgets = iter([(ENDLESS, 4000), *small_budgets(rng, 10)])
    server.refuse = lambda m: (
        Status.TEMPORARY_FAILURE if isinstance(m, Mutate) and trio.current_time() < 2 else None
    )
    async with publisher(URL, dial=net.dial, batch_mutations=3, draw=rng.random) as sink:
        for index in range(200):
            await sink.increment("n")
            await sink.set("k", b"%d" % index)
    assert server.contents() == {b"n": b"200", b"k": b"199"}


async def test_a_chunk_of_an_unknown_partition_or_longer_than_allowed_is_not_added(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with publisher(URL, dial=net.dial) as sink:
        with pytest.raises(ServerError, match="partitions 0 to 3") as caught:
            await sink.publish(PartitionId(4), chunk_of_plain_sets([b"a"], [b"1"]))
        assert caught.value.status is Status.BAD_ARGUMENT
        half = bytes(17 * 1024 * 1024)
        with pytest.raises(ServerError) as caught:
            await sink.publish(PartitionId(0), chunk_of_plain_sets([b"a", b"b"], [half, half]))
        assert caught.value.status is Status.TOO_LARGE
        keys = [b"a"] * (BUNDLE_MUTATIONS_MAX + 1)
        with pytest.raises(ServerError, match="4097 operations, the limit is 4096") as caught:
            await sink.publish(PartitionId(0), chunk_of_plain_sets(keys, keys))
        assert caught.value.status is Status.TOO_LARGE
        await sink.publish(PartitionId(0), chunk_of_plain_sets([b"a"], [b"1"]))
    assert sink.statistics().batches == 1


async def test_of_chunks_published_together_none_is_added_if_one_is_refused(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    good = chunk_of_plain_sets([b"a"], [b"1"])
    too_long = chunk_of_plain_sets([b"a", b"b"], [bytes(17 * 1024 * 1024)] * 2)
    answered: list[Batch] = []
    async with publisher(URL, dial=net.dial) as sink:
        for wrong in ((PartitionId(4), good), (PartitionId(1), too_long)):
            with pytest.raises(ServerError):
                sink.publish_nowait([(PartitionId(0), good), wrong])
            assert sink.statistics().unanswered_batches == 0
        assert sink.publish_nowait([]) == []
        batches = sink.publish_nowait([(PartitionId(p), good) for p in (2, 0, 2)], answered.append)
        await sink.wait_for_room()
        await sink.flush()
        assert sorted(answered, key=batches.index) == batches
        assert [(batch.partition, batch.counter) for batch in batches] == [(2, 1), (0, 1), (2, 2)]


@pytest.mark.parametrize(
    "wrong", [{"in_flight": 65}, {"in_flight": 0}, {"batch_bytes": 1 << 24}, {"batch_mutations": 0}]
)
async def test_invalid_limits_are_refused(net: FakeNet, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        async with publisher(URL, dial=net.dial, **wrong):  # type: ignore[arg-type]
            pass


async def test_statistics_keep_the_reason_of_the_last_failure(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with publisher(URL, dial=net.dial) as sink:
        assert sink.statistics().last_failure == ""
        assert sink.statistics().is_connected
        net.cut()
        await trio.testing.wait_all_tasks_blocked()
        assert not sink.statistics().is_connected
        await sink.set("k", "v")
        await sink.flush()
        assert "the connection was lost" in sink.statistics().last_failure
        assert sink.statistics().connections == 2
        assert sink.statistics().is_connected


async def test_a_bucket_made_anew_with_other_partitions_ends_the_publisher(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async def publish() -> None:
        async with publisher(URL, dial=net.dial) as sink:
            server.partitions.pop()
            net.cut()
            await sink.set("k", "v")
            await sink.flush()

    with pytest.raises(BrokenError, match="created again, with 3 partitions instead of 4"):
        await publish()
    assert net.open == 0
