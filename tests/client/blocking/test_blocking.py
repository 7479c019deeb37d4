"""The client for programs that block, against a fake server in a thread."""

from __future__ import annotations

import gc
import math
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
import trio

from tests.kit.forked import in_forked_process
from tests.kit.mirror import Mirror
from tests.kit.process import eventually, no_descriptors
from tests.kit.threaded import ThreadedFake, trio_thread
from upr_protocol.chunk import Buffer, Chunk, CounterDelta, Mutation, chunk_of_plain_sets
from upr_protocol.client import (
    Address,
    BarrierReached,
    BlockingClient,
    BlockingConsumer,
    ChunkReceived,
    CycleCompleted,
    Event,
    Failure,
    FileStore,
    IndexClient,
    RefusedKeysError,
    ResumeState,
    RolledBack,
    SaveLimits,
    SnapshotEnd,
    StreamEnded,
    WriteResult,
    WriterIdentity,
)
from upr_protocol.client.blocking import connection as blocking_connection
from upr_protocol.client.blocking.connection import BlockingConnection, SocketOptions
from upr_protocol.client.blocking.trio_thread import TrioThread
from upr_protocol.client.core.batcher import BUNDLE_MUTATIONS
from upr_protocol.client.core.partition_batches import Batch
from upr_protocol.errors import (
    BrokenError,
    ClosedError,
    LocalProtocolError,
    RemoteProtocolError,
    ServerError,
    Status,
    UprError,
)
from upr_protocol.ids import Durability, Operation, PartitionId, SeqNo
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_protocol.transport import write_available
from upr_protocol.wire import Await, Error, Message, Mutate, Noop, Stats, StatsReply

T = TypeVar("T")

URL = "upr://fake/b"
ARRIVAL_TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def thread() -> Iterator[object]:
    with trio_thread() as thread:
        yield thread


@pytest.fixture
def fake(thread: object) -> ThreadedFake:
    return ThreadedFake(thread)  # type: ignore[arg-type]


def client(fake: ThreadedFake, url: str = URL, **more: object) -> BlockingClient:
    return BlockingClient(
        url,
        dial=fake.dial,
        sleep=lambda _: None,
        **more,  # type: ignore[arg-type]
    )


def consumer(fake: ThreadedFake, **more: object) -> BlockingConsumer:
    return BlockingConsumer(URL, dial=fake.dial, **more)  # type: ignore[arg-type]


def test_items_are_written_and_read_back(fake: ThreadedFake) -> None:
    with client(fake) as kv:
        assert kv.get("k") is None
        write_result = kv.set("k", "v", flags=7)
        item = kv.get("k")
        assert item is not None
        assert (item.value, item.flags, item.cas) == (b"v", 7, write_result.cas)
        assert kv.increment("n", 5).count == 5
        assert kv.increment("n").count == 6
        kv.append("k", "w")
        kv.delete("n")
        with pytest.raises(ServerError) as caught:
            kv.add("k", "x")
        assert caught.value.status is Status.EXISTS
        assert [item and item.value for item in kv.get_many(["n", "k"])] == [None, b"vw"]
        assert kv.await_durable(write_result, Durability.MEMORY) == write_result.seq
        assert len(kv.partitions()) == len(kv.seqnos()) == 4
    assert fake.dialled == 1


def test_keys_that_the_server_cannot_read_are_told_beside_the_others(fake: ThreadedFake) -> None:
    fake.server.get_items_max = 2
    fake.server.damaged_keys = {b"x", b"y"}
    fake.server.put(b"k", b"v")
    with client(fake) as kv:
        with pytest.raises(RefusedKeysError, match="cannot read the key 'x' and 1 more") as caught:
            kv.get_many(["none", "x", "k", "y"])
        assert caught.value.statuses == {b"x": Status.DAMAGED, b"y": Status.DAMAGED}
        assert [item and item.value for item in caught.value.items] == [None, None, b"v", None]
        assert caught.value.status is Status.DAMAGED


def test_many_keys_in_several_answers(fake: ThreadedFake) -> None:
    fake.server.get_items_max = 3
    keys = [b"%d" % index for index in range(100)]
    for key in keys[1::2]:
        fake.server.put(key, key)
    with client(fake) as kv:
        assert [item and item.value for item in kv.get_many(keys)] == [
            key if index % 2 else None for index, key in enumerate(keys)
        ]


def test_buckets_are_created_listed_and_deleted(fake: ThreadedFake) -> None:
    with client(fake, "upr://fake") as admin:
        admin.create_bucket("c", 8)
        assert [bucket.name for bucket in admin.list_buckets()] == ["b", "c"]
        admin.delete_bucket("c")
        assert admin.stats() == {"fake": True}
        with pytest.raises(LocalProtocolError, match="names a bucket"):
            admin.get("k")


def test_a_blocking_client_reconnects(fake: ThreadedFake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_connection, "_UNREAD_S", math.inf)
    with client(fake) as kv:
        kv.set("k", "v")
        fake.cut()
        with pytest.raises(BrokenError):
            kv.get("k")
        item = kv.get("k")
        assert item is not None
    assert fake.dialled == 2
    with pytest.raises(ClosedError):
        kv.get("k")


class Value:
    """What a program has in a local name."""


def test_a_failure_keeps_nothing_of_the_program_that_caught_it(
    fake: ThreadedFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking_connection, "_UNREAD_S", math.inf)

    def ask() -> weakref.ref[Value]:
        value = Value()
        with suppress(BrokenError):
            kv.get("k")
        return weakref.ref(value)

    with client(fake) as kv:
        kv.set("k", "v")
        fake.cut()
        reference = ask()
        gc.collect()
        assert reference() is None
        assert fake.dialled == 1


def test_a_connection_that_ended_between_two_requests_is_made_again(
    fake: ThreadedFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that is sent over it would be in doubt."""
    monkeypatch.setattr(blocking_connection, "_UNREAD_S", 0.0)

    async def wait_for_the_end() -> None:
        await eventually(lambda: not fake.server.connections, "the server has ended it")

    with client(fake) as kv:
        assert kv.increment("n").count == 1
        fake.cut()
        fake.thread.run(wait_for_the_end)
        assert kv.increment("n").count == 2
    assert fake.dialled == 2


def test_connecting_to_a_closed_port_fails(fake: ThreadedFake) -> None:
    fake.down = True
    with pytest.raises(BrokenError, match="cannot connect"), client(fake):
        pass
    with pytest.raises(BrokenError, match="cannot connect"):
        client(fake).publish_all([])
    assert fake.dialled == 2


def test_a_publisher_waits_for_a_server_that_its_client_has_reached(fake: ThreadedFake) -> None:
    """It has connections of its own, and the server may be away when they are made."""
    dialled = 0

    def dial(address: Address, timeout_s: float) -> socket.socket:
        nonlocal dialled
        dialled += 1
        if dialled == 2:
            raise ConnectionRefusedError
        return fake.dial(address, timeout_s)

    with BlockingClient(URL, dial=dial, draw=lambda: 0.0) as kv:
        assert not kv.publish(PartitionId(0), chunk_of_plain_sets([b"k"], [b"v"])).failures
    assert dialled == 3


def test_apply_waits_for_a_server_that_its_client_has_reached(
    fake: ThreadedFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking_connection, "_UNREAD_S", 0.0)

    async def wait_for_the_end() -> None:
        await eventually(lambda: not fake.server.connections, "the server has ended them")

    def start_again(_: float) -> None:
        fake.down = False

    with BlockingClient(URL, dial=fake.dial, sleep=start_again) as kv:
        kv.set("k", "v")
        fake.down = True
        fake.cut()
        fake.thread.run(wait_for_the_end)
        (result,) = kv.apply([Mutation(Operation.SET, b"k", b"w")])
        assert isinstance(result, WriteResult)
    assert fake.server.contents() == {b"k": b"w"}


def test_a_server_that_was_away_while_nobody_published_is_published_to(fake: ThreadedFake) -> None:
    chunk = chunk_of_plain_sets([b"k"], [b"v"])
    with client(fake, retry_timeout_s=0.05) as kv:
        kv.publish(PartitionId(0), chunk)
        fake.down = True
        fake.cut()
        publisher = kv._last_publisher._publisher
        assert publisher is not None
        in_thread = publisher._in_thread._require_publisher()
        fake.thread.run(
            lambda: eventually(lambda: in_thread._nodes.error is not None, "it gave up")
        )
        fake.down = False
        assert not kv.publish(PartitionId(0), chunk).failures
    assert fake.server.partitions[0].applied == 2


def test_a_bucket_that_is_not_there(fake: ThreadedFake) -> None:
    with pytest.raises(ServerError) as caught, client(fake, "upr://fake/other"):
        pass
    assert caught.value.status is Status.NO_BUCKET


def test_an_impossible_host_cannot_be_connected_to() -> None:
    label = "a" * 64
    with pytest.raises(BrokenError, match="not a valid host name"):
        BlockingClient(f"upr://{label}.example/b").get("k")


def test_a_peer_that_speaks_another_protocol_is_rejected() -> None:
    own_end, peer_end = socket.socketpair()
    with peer_end:
        peer_end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        kv = BlockingClient(URL, dial=lambda *_: own_end)
        with pytest.raises(RemoteProtocolError, match="not a UPR frame"):
            kv.get("k")
    assert own_end.fileno() == -1


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"upr://127.0.0.1:{port}/b"
    with pytest.raises(BrokenError, match=f"^cannot connect to {url}: Connection refused$"):
        BlockingClient(url).get("k")
    with pytest.raises(BrokenError, match=r"does not answer: Connection refused$"):
        IndexClient(f"http://127.0.0.1:{port}").indexes()


def test_a_peer_that_says_nothing() -> None:
    own_end, peer_end = socket.socketpair()
    with peer_end, pytest.raises(BrokenError, match="did not answer in time"):
        BlockingClient(URL, dial=lambda *_: own_end, connect_timeout_s=0.01).get("k")
    assert own_end.fileno() == -1


def test_a_request_without_an_answer_times_out(fake: ThreadedFake) -> None:
    fake.server.held = {Stats}
    # Long enough for the change, which is answered, also where the machine pauses.
    with client(fake, timeout_s=0.5) as kv:
        with pytest.raises(TimeoutError, match=r"did not answer in [\d.]+ s"):
            kv.stats()
        # The connection is as good as before.
        kv.set("k", "v")
    assert fake.dialled == 1


def test_a_server_that_is_to_wait_has_longer_for_its_answer(fake: ThreadedFake) -> None:
    with client(fake) as kv:
        write_result = kv.set("k", "v")
    fake.server.held = {Await}
    with client(fake, timeout_s=0.01) as kv:
        with pytest.raises(TimeoutError, match="did not answer") as timed_out:
            kv.await_durable(write_result, Durability.PERSISTED, timeout_s=0.2)
        assert float(str(timed_out.value).split()[-2]) >= 0.2


def test_a_change_fails_when_no_credit_arrives_in_time(fake: ThreadedFake) -> None:
    fake.server.credit_bytes = 0
    with client(fake, credit_timeout_s=0.01) as kv:
        with pytest.raises(ServerError, match="over its memory quota"):
            kv.set("k", "v")
        with pytest.raises(ServerError, match="over its memory quota"):
            kv.publish(PartitionId(0), chunk_of_plain_sets([b"k"], [b"v"]))
    assert fake.server.contents() == {}


def test_a_change_that_waits_for_credit_fails_for_the_servers_reason(fake: ThreadedFake) -> None:
    fake.server.credit_bytes = 0

    def stop() -> None:
        fake.server.grant(1000)
        for connection in fake.server.connections:
            connection.session.fail(Status.SHUTTING_DOWN, "it stops")
            connection.wake()

    with client(fake) as kv:
        kv.seqnos()
        fake.thread.call(stop)
        with pytest.raises(ServerError, match="it stops"):
            kv.set("k", "v")
    assert fake.server.contents() == {}


def test_publish_sends_a_chunk_and_returns_its_answer(fake: ThreadedFake) -> None:
    with client(fake) as kv:
        reply = kv.publish(PartitionId(1), chunk_of_plain_sets([b"a", b"b"], [b"1", b"2"]))
        assert (reply.first_seq, reply.last_seq) == (1, 2)
        fake.server.refuse = lambda m: Status.UNSUPPORTED if isinstance(m, Mutate) else None
        with pytest.raises(ServerError) as caught:
            kv.publish(PartitionId(1), chunk_of_plain_sets([b"a"], [b"1"]))
        assert caught.value.status is Status.UNSUPPORTED


def test_small_batches_that_wait_take_no_more_memory_than_large_ones(fake: ThreadedFake) -> None:
    """What each takes beside its rows counts, too."""
    fake.server.held = {Mutate}
    taken = taken_at_release = 0

    def source() -> Iterator[tuple[PartitionId, Chunk]]:
        nonlocal taken
        while not taken_at_release and taken < 6000:
            taken += 1
            yield PartitionId(0), chunk_of_plain_sets([b"k"], [b"v"])

    def release() -> None:
        nonlocal taken_at_release
        taken_at_release = taken
        fake.thread.call(fake.server.release)

    with client(fake) as kv:
        timer = threading.Timer(0.2, release)
        timer.start()
        kv.publish_each(source(), lambda _: None, buffer_bytes=1024 * 1024)
        timer.join()
    assert taken_at_release <= 3 * BUNDLE_MUTATIONS


def test_the_same_batches_of_the_same_writer_have_no_second_effect(fake: ThreadedFake) -> None:
    def task() -> list[Failure]:
        writer = WriterIdentity(b"task 7 of 9".ljust(16))
        delta = CounterDelta(1, 1).encode()
        chunk = Chunk.build([Mutation(Operation.INCREMENT, b"n", delta)])
        with client(fake) as kv:
            return kv.publish_all([(PartitionId(0), chunk)] * 10, writer=writer)

    assert task() == task() == []
    assert fake.server.contents() == {b"n": b"10"}


def test_only_the_writer_of_a_task_chains_its_batches(fake: ThreadedFake) -> None:
    batches: list[Mutate] = []

    def hear(message: Message) -> None:
        if isinstance(message, Mutate):
            batches.append(message)

    fake.server.refuse = hear
    batch = (PartitionId(0), chunk_of_plain_sets([b"k"], [b"v"]))
    with client(fake) as kv:
        kv.publish_all([batch])
        kv.publish_all([batch], writer=WriterIdentity.of_task(bytes(15) + b"1", 5))
    assert [(message.attempt, message.bundle.runs[0].chain) for message in batches] == [
        (0, 0),
        (5, batch[1].chained_crc(0)),
    ]


def test_a_writer_id_has_16_bytes() -> None:
    with pytest.raises(ValueError, match="16 bytes, not 3"):
        WriterIdentity.of_task(b"abc")


def test_an_exception_of_on_answer_ends_the_call(fake: ThreadedFake) -> None:
    def refuse(batch: Batch) -> None:
        raise LocalProtocolError(f"no more after {batch.counter}")

    batches = [(PartitionId(0), chunk_of_plain_sets([b"k%d" % n], [b"v"])) for n in range(100)]
    with client(fake) as kv, pytest.raises(LocalProtocolError, match="after 1"):
        kv.publish_each(batches, refuse)


def test_who_publishes_while_it_publishes_is_told_of_its_own_batches(fake: ThreadedFake) -> None:
    """A callback may send again what failed, and a source may store where it stands."""
    batches = [(PartitionId(0), chunk_of_plain_sets([b"k%d" % n], [b"v"])) for n in range(20)]
    answered_keys: list[bytes] = []

    def source() -> Iterator[tuple[PartitionId, Chunk]]:
        for batch in batches:
            yield batch
            (result,) = kv.apply([Mutation(Operation.SET, b"place", b"v")])
            assert isinstance(result, WriteResult)

    def hear(batch: Batch) -> None:
        answered_keys.extend(batch.chunk.keys())
        kv.publish(PartitionId(1), chunk_of_plain_sets([b"heard"], [b"v"]))

    with client(fake) as kv:
        kv.publish_each(source(), hear)
    assert answered_keys == [b"k%d" % n for n in range(20)]


def test_batches_go_out_while_the_next_is_made(fake: ThreadedFake) -> None:
    answered: list[int] = []

    def source() -> Iterator[tuple[PartitionId, Chunk]]:
        for index in range(3000):
            yield PartitionId(0), chunk_of_plain_sets([b"k%d" % index], [bytes(10_000)])
        # The first are under way in another thread: they arrive while this one still makes batches.
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        while not fake.server.contents():
            assert time.monotonic() < deadline, "all waited for the last"
            os.sched_yield()

    with client(fake) as kv:
        kv.publish_each(source(), lambda batch: answered.append(batch.counter))
    assert answered == list(range(1, 3001))


def test_a_large_batch_while_answers_come_back(fake: ThreadedFake) -> None:
    batches = [
        (PartitionId(index % 4), chunk_of_plain_sets([b"%d" % index], [bytes(100_000)]))
        for index in range(200)
    ]
    with client(fake) as kv:
        assert kv.publish_all(batches) == []
    assert len(fake.server.contents()) == 200


def test_results_are_in_order_though_connections_are_cut(fake: ThreadedFake) -> None:
    rng = random.Random(7)
    mutations = []
    for index in range(3000):
        key = b"counter-%d" % (index % 50)
        if index % 10 == 9:
            mutations.append(Mutation(Operation.ADD, key, b"x"))
        else:
            mutations.append(Mutation(Operation.INCREMENT, key, CounterDelta(1, 1).encode()))
    fake.budgets = iter([4000, *(rng.randrange(1500, 5000) for _ in range(4))])
    with client(fake, draw=rng.random) as kv:
        results = kv.apply(mutations)
    assert len(results) == len(mutations)
    expected: dict[bytes, int] = {}
    for mutation, result in zip(mutations, results, strict=True):
        if mutation.op is Operation.ADD and mutation.key in expected:
            assert isinstance(result, Failure)
            assert (result.key, result.status) == (mutation.key, Status.EXISTS)
        elif mutation.op is Operation.INCREMENT:
            assert isinstance(result, WriteResult)
            expected[mutation.key] = expected.get(mutation.key, 0) + 1
            assert result.count == expected[mutation.key]
    assert fake.dialled > 2


def test_apply_fails_every_operation_of_a_refused_batch(fake: ThreadedFake) -> None:
    fake.server.refuse = lambda m: Status.BAD_ARGUMENT if isinstance(m, Mutate) else None
    with client(fake) as kv:
        results = kv.apply(Mutation(Operation.SET, b"%d" % index, b"v") for index in range(9))
    assert [result.status for result in results if isinstance(result, Failure)] == [
        Status.BAD_ARGUMENT
    ] * 9


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_program_that_was_busy_does_not_take_the_server_for_dead(fake: ThreadedFake) -> None:
    clock = Clock()
    options = SocketOptions(idle_interval_s=20, dial=fake.dial, clock=clock)
    connection = BlockingConnection(Address("fake", 12000, "b"), options)
    while connection.receive(clock.now) is not None:
        pass
    clock.now += 10_000
    assert connection.receive(clock.now) is None
    # What counts is how long it listened in vain.
    connection._silent_s = 39.9
    assert connection.receive(clock.now) is None
    connection._silent_s = 40.0
    with pytest.raises(BrokenError, match="idle timeout"):
        connection.receive(clock.now)
    with pytest.raises(BrokenError, match="idle timeout"):
        connection.receive(clock.now)
    connection.close()


def _frame(message: Message) -> bytes:
    return b"".join(message.frame_buffers())


@pytest.mark.parametrize(
    ("last_frame", "error", "sentence"),
    [
        (_frame(StatsReply("x" * 1000))[:-1], BrokenError, "closed the connection|was lost"),
        (_frame(Error("it stops", "", status=Status.SHUTTING_DOWN)), ServerError, "it stops"),
    ],
    ids=["cut", "error"],
)
@pytest.mark.parametrize("is_write_refused", [False, True])
def test_a_whole_frame_is_handed_out_though_the_connection_ends_behind_it(
    fake: ThreadedFake,
    monkeypatch: pytest.MonkeyPatch,
    is_write_refused: bool,
    last_frame: bytes,
    error: type[Exception],
    sentence: str,
) -> None:
    """It may be the answer to a request, which is not asked again."""
    server_ends: list[socket.socket] = []
    accept = fake._accept

    def accept_and_keep(server_end: socket.socket, budget: int) -> None:
        server_ends.append(server_end.dup())
        accept(server_end, budget)

    monkeypatch.setattr(fake, "_accept", accept_and_keep)
    connection = BlockingConnection(Address("fake", 12000, "b"), SocketOptions(dial=fake.dial))
    while connection.receive(0.0) is not None:
        pass
    server_ends[0].sendall(_frame(Noop()) + last_frame)
    server_ends[0].shutdown(socket.SHUT_RDWR if is_write_refused else socket.SHUT_WR)
    if is_write_refused:
        connection.session.send(Stats("b", opaque=connection.session.new_opaque()))
    assert connection.receive(float("inf")) == Noop()
    with pytest.raises(error, match=sentence):
        connection.receive(float("inf"))
    server_ends[0].close()


# Consuming.


def fill(fake: ThreadedFake, count: int, size: int = 10) -> None:
    def put() -> None:
        for index in range(count):
            fake.server.put(b"key-%d" % index, b"%d" % index + bytes(size))

    fake.thread.call(put)


def test_events_until_now(fake: ThreadedFake) -> None:
    fill(fake, 100)
    mirror = Mirror()
    with client(fake) as kv, kv.read_stream(end="now") as stream:
        end_count = 0
        for event in stream:
            mirror.apply(event)
            end_count += isinstance(event, StreamEnded)
        assert stream.is_finished
        assert end_count == 4
    assert mirror.contents == fake.server.contents()


def test_a_window_smaller_than_what_comes(fake: ThreadedFake) -> None:
    fill(fake, 300, 2000)
    mirror = Mirror()
    with consumer(fake, window_bytes=WINDOW_BYTES_MIN, end="now") as stream:
        for event in stream:
            mirror.apply(event)
    assert mirror.contents == fake.server.contents()


def test_some_partitions_from_now_with_a_barrier(fake: ThreadedFake) -> None:
    fill(fake, 100)
    with consumer(fake, partitions=[0, 1], start="now") as stream:
        assert stream.next_event() == CycleCompleted(1)
        assert stream.next_event(0.01) is None
        assert not stream.is_finished
        fill(fake, 10)
        stream.barrier(b"mine")
        events: list[Event | None] = []
        while not any(isinstance(event, BarrierReached) for event in events):
            events.append(stream.next_event())
        keys = [event.chunk.keys() for event in events if isinstance(event, ChunkReceived)]
        expected = {b"key-%d" % n for n in range(10)}
        of_two = {key for key in expected if fake.server.partition_of(key).id < 2}
        assert {key for chunk_keys in keys for key in chunk_keys} == of_two


def test_a_blocking_consumer_resumes_from_a_file(fake: ThreadedFake, tmp_path: Path) -> None:
    rng = random.Random(3)
    path = tmp_path / "resume.json"
    items: dict[int, dict[bytes, tuple[int, bytes]]] = {}
    for _ in range(20):
        fill(fake, rng.randrange(60))
        fake.budgets = iter([3000, *(rng.randrange(4000) for _ in range(3))])
        mirror = Mirror(items)
        with suppress(BrokenError), consumer(fake, resume=path) as stream:
            for _ in range(rng.randrange(50)):
                event = stream.next_event(0.001)
                if event is not None:
                    mirror.apply(event)
        items = mirror.items
    mirror = Mirror(items)
    fake.budgets = iter(())
    with consumer(fake, resume=path, end="now") as stream:
        for event in stream:
            mirror.apply(event)
            assert not isinstance(event, RolledBack)
    assert mirror.contents == fake.server.contents()


def test_a_blocking_consumer_follows_a_failover(fake: ThreadedFake) -> None:
    fill(fake, 50)
    mirror = Mirror()
    with consumer(fake, end="now") as stream:
        for event in stream:
            mirror.apply(event)
        state = stream.resume_state
    fake.server.partitions[1].fail_over(99, 3)
    mirror = Mirror(mirror.items)
    with consumer(fake, resume=state, end="now") as stream:
        rolled_back = []
        for event in stream:
            mirror.apply(event)
            if isinstance(event, RolledBack):
                rolled_back.append((event.partition, event.ceiling, event.to))
    assert rolled_back == [(1, 3, 0)]
    assert mirror.contents == fake.server.contents()


def test_a_blocking_consumer_killed_during_a_rollback_rolls_back_again(
    fake: ThreadedFake, tmp_path: Path
) -> None:
    """Though it asks a server then that has all it had."""
    fill(fake, 50)
    path, not_parted = tmp_path / "state", deepcopy(fake.server.partitions[1])
    with consumer(fake, resume=path, end="now") as stream:
        assert [event for event in stream if isinstance(event, SnapshotEnd)]
    fake.server.partitions[1].fail_over(99, 3)
    with consumer(fake, resume=path, end="now") as stream:
        assert any(isinstance(event, RolledBack) for event in stream)  # it is the current event
    fake.server.partitions[1] = not_parted
    with consumer(fake, resume=path, end="now") as stream:
        rollbacks = [event for event in stream if isinstance(event, RolledBack)]
    assert [(event.partition, event.ceiling) for event in rollbacks] == [(1, 3)]


def test_a_blocking_consumer_gives_up_on_a_lasting_refusal(fake: ThreadedFake) -> None:
    fake.server.refuse = lambda m: (
        Status.SEQ_TOO_HIGH if type(m).__name__ == "Stream" and m.partition == 2 else None
    )
    with consumer(fake, retry_timeout_s=0.05) as stream:
        with pytest.raises(ServerError) as caught:
            list(stream)
        assert caught.value.status is Status.SEQ_TOO_HIGH


def test_a_resume_state_of_another_bucket_is_refused(fake: ThreadedFake) -> None:
    from upr_protocol.client import ResumeStateError

    with pytest.raises(ResumeStateError):
        consumer(fake, resume=ResumeState("other"))


def test_a_closed_consumer(fake: ThreadedFake) -> None:
    with consumer(fake) as stream:
        next(stream)
    with pytest.raises(ClosedError):
        next(stream)


def test_connect_waits_for_a_server_that_is_down(fake: ThreadedFake) -> None:
    refusals = [OSError("refused"), OSError("refused")]

    def dial(address: Address, timeout_s: float) -> socket.socket:
        if refusals:
            raise refusals.pop()
        return fake.dial(address, timeout_s)

    fill(fake, 10)
    mirror = Mirror()
    with BlockingConsumer(URL, end="now", dial=dial) as following:
        following.connect()
        assert not refusals
        for event in following:
            mirror.apply(event)
    assert mirror.contents == fake.server.contents()
    refusals.append(OSError("refused"))
    with (
        pytest.raises(BrokenError, match="refused"),
        BlockingConsumer(URL, dial=dial) as following,
    ):
        next(following)
    with pytest.raises(ClosedError):
        following.connect()


def test_an_event_asked_for_again_connects_after_a_failure(fake: ThreadedFake) -> None:
    fill(fake, 1)
    fake.down = True
    with consumer(fake, end="now") as following:
        with pytest.raises(BrokenError):
            next(following)
        fake.down = False
        assert any(isinstance(event, ChunkReceived) for event in following)


def test_a_consumer_continues_after_its_connection_was_cut(fake: ThreadedFake) -> None:
    fill(fake, 10)
    mirror = Mirror()
    with consumer(fake) as following:
        mirror.apply(next(following))
        fake.cut()
        fill(fake, 20)
        following.barrier(b"end")
        for event in following:
            mirror.apply(event)
            if isinstance(event, BarrierReached):
                break
    assert mirror.contents == fake.server.contents()
    assert fake.dialled == 2


def test_a_busy_program_keeps_its_connection_alive(fake: ThreadedFake) -> None:
    async def wait_for_a_noop() -> None:
        (connection,) = fake.server.connections
        await eventually(lambda: connection.counts[Noop] > 0, "the client says that it is alive")

    with consumer(fake, idle_interval_s=1) as following:
        following.connect()
        fake.thread.run(wait_for_a_noop)
    assert fake.dialled == 1


def test_an_application_that_undoes_is_asked_to(fake: ThreadedFake) -> None:
    fill(fake, 50)
    with consumer(fake, end="now") as stream:
        assert [event for event in stream if isinstance(event, SnapshotEnd)]
        state = stream.resume_state
    fake.server.partitions[1].fail_over(99, 3)
    requests: list[tuple[int, int]] = []

    def undo(partition: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:
        requests.append((partition, ceiling))
        if len(requests) == 1:
            raise KeyboardInterrupt
        return SeqNo(0)

    with consumer(fake, resume=state, end="now", undo=undo) as stream:
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        rollbacks = [event for event in stream if isinstance(event, RolledBack)]
    assert requests == [(1, 3), (1, 3)]
    assert [(event.partition, event.ceiling, event.to) for event in rollbacks] == [(1, 3, 0)]


def test_ctrl_c_after_a_rollback_is_undone_does_not_undo_it_again(
    fake: ThreadedFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(fake, 50)
    with consumer(fake, end="now") as stream:
        assert [event for event in stream if isinstance(event, SnapshotEnd)]
        state = stream.resume_state
    fake.server.partitions[1].fail_over(99, 3)
    run = TrioThread.run
    undone: list[SeqNo] = []

    def undo(partition: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:
        undone.append(ceiling)
        monkeypatch.setattr(TrioThread, "run", run_and_interrupt)
        return SeqNo(0)

    def run_and_interrupt(self: TrioThread, *args: Any) -> None:
        monkeypatch.setattr(TrioThread, "run", run)
        run(self, *args)
        raise KeyboardInterrupt

    with consumer(fake, resume=state, end="now", undo=undo) as stream:
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        assert [type(event) for event in stream].count(RolledBack) == 1
    assert undone == [3]


class InterruptedByAlarmError(Exception):
    """What a signal's handler raises, as that of Ctrl-C raises KeyboardInterrupt."""


def test_ctrl_c_while_it_waits_loses_no_event(fake: ThreadedFake) -> None:
    interrupted = 0

    def interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if frame is not None and frame.f_code.co_name == "wait":
            interrupted += 1
            raise InterruptedByAlarmError

    mirror = Mirror()
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    try:
        with consumer(fake) as following:
            while interrupted < 20:
                fill(fake, interrupted)
                with suppress(InterruptedByAlarmError):
                    while True:
                        event = following.next_event()
                        assert event is not None
                        mirror.apply(event)
            signal.setitimer(signal.ITIMER_REAL, 0)
            following.barrier(b"end")
            for event in following:
                mirror.apply(event)
                if isinstance(event, BarrierReached):
                    break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert mirror.contents == fake.server.contents()


def interrupted_at(place: int, function: Callable[[], T]) -> T:
    """Calls a function. Ctrl-C comes at one of the places where Python looks for it: where a
    function begins, and where one that is written in C has ended."""

    def profile(_frame: object, happened: str, _argument: object) -> None:
        nonlocal place
        if happened in ("call", "c_return"):
            place -= 1
            if place < 0:
                raise KeyboardInterrupt

    gc.disable()  # nobody would hear of what is raised while it collects
    sys.setprofile(profile)
    try:
        return function()
    finally:
        sys.setprofile(None)
        gc.enable()


def events_in_spite_of_ctrl_c(following: BlockingConsumer) -> Iterator[Event]:
    """The events, each once Ctrl-C has come at each place on the way to it."""
    place = 0
    while not following.is_finished:
        try:
            event = interrupted_at(place, following.next_event)
        except KeyboardInterrupt:
            place += 1
            continue
        if event is not None:
            assert place > 3
            yield event
        place = 0


def test_ctrl_c_anywhere_loses_and_repeats_no_event(fake: ThreadedFake) -> None:
    fill(fake, 40)
    mirror = Mirror()
    with consumer(fake, end="now") as following:
        following.connect()
        for event in events_in_spite_of_ctrl_c(following):
            mirror.apply(event)
        state = following.resume_state
    assert mirror.contents == fake.server.contents()
    fake.server.partitions[1].fail_over(99, 3)
    mirror, rollback_count = Mirror(mirror.items), 0
    with consumer(fake, resume=state, end="now", undo=lambda *_: SeqNo(0)) as following:
        following.connect()
        for event in events_in_spite_of_ctrl_c(following):
            mirror.apply(event)
            rollback_count += isinstance(event, RolledBack)
    assert rollback_count == 1
    assert mirror.contents == fake.server.contents()


def test_ctrl_c_while_connections_are_closed_leaves_the_position_saved(
    fake: ThreadedFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(fake, 10)
    path, close = tmp_path / "state", TrioThread.close

    def close_and_interrupt(thread: TrioThread) -> None:
        close(thread)
        raise KeyboardInterrupt

    following = consumer(fake, resume=path)
    for _ in range(4):
        next(following)
    monkeypatch.setattr(TrioThread, "close", close_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        following.close()
    assert FileStore(path).load_now() == following.processed_state


def test_ctrl_c_while_it_writes_makes_no_change_twice(
    fake: ThreadedFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_interrupt(descriptor: int, buffers: Sequence[Buffer]) -> None:
        assert not write_available(descriptor, buffers)
        raise KeyboardInterrupt

    async def wait_for_three() -> None:
        await eventually(lambda: fake.server.contents() == {b"n": b"3"}, "all changes arrive")

    with client(fake) as kv:
        kv.increment("n")
        with monkeypatch.context() as patch:
            patch.setattr(
                "upr_protocol.client.blocking.connection.write_available", write_and_interrupt
            )
            with pytest.raises(KeyboardInterrupt):
                kv.increment("n")
        kv.increment("n")
        fake.thread.run(wait_for_three)
    assert fake.dialled == 2


# The threads.


@contextmanager
def request_of_another_thread(fake: ThreadedFake, kv: BlockingClient) -> Iterator[list[object]]:
    """Another thread waits for an answer meanwhile, which is held; the list has what came of it in
    the end."""
    outcomes: list[object] = []

    def ask() -> None:
        try:
            outcomes.append(kv.stats())
        except UprError as error:
            outcomes.append(error)

    async def wait_for_request() -> None:
        await eventually(
            lambda: any(connection.counts[Stats] for connection in fake.server.connections),
            "the request arrives",
        )

    fake.server.held = {Stats}
    thread = threading.Thread(target=ask)
    thread.start()
    fake.thread.run(wait_for_request)
    try:
        yield outcomes
    finally:
        thread.join(ARRIVAL_TIMEOUT_S)


def test_a_request_while_another_thread_waits_is_refused(
    fake: ThreadedFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking_connection, "_UNREAD_S", -math.inf)
    with client(fake) as kv:
        with request_of_another_thread(fake, kv) as outcomes:
            with pytest.raises(LocalProtocolError, match="make a client for each thread"):
                kv.set("k", "v")
            fake.thread.call(fake.server.release)
        assert isinstance(outcomes[0], dict)
        assert kv.get("k") is None
    assert fake.dialled == 1


def test_a_request_that_waits_ends_when_another_thread_closes_the_client(
    fake: ThreadedFake,
) -> None:
    kv = client(fake)
    with request_of_another_thread(fake, kv) as outcomes:
        kv.close()
    assert [type(outcome) for outcome in outcomes] == [ClosedError]


def test_a_consumer_goes_on_when_there_are_descriptors_again(fake: ThreadedFake) -> None:
    fill(fake, 10)
    with consumer(fake) as following:
        with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
            next(following)
        assert next(following) is not None


def client_threads() -> int:
    return sum(thread.name == "upr-client" for thread in threading.enumerate())


@pytest.mark.parametrize("copied", [copy, deepcopy, pickle.dumps])
def test_a_client_is_not_copied(copied: Callable[[BlockingClient], object]) -> None:
    """Batches of a copy would count as those of the other, sent again, and be lost."""
    with pytest.raises(TypeError, match="make one in each process and thread"):
        copied(BlockingClient(URL))


def test_a_delta_that_does_not_fit_is_refused(fake: ThreadedFake) -> None:
    wrong_numbers: list[Any] = [-1, 2**64, 1.5, None]
    with client(fake) as kv:
        for delta in wrong_numbers:
            with pytest.raises(ServerError, match="whole numbers from 0") as caught:
                kv.increment("n", delta)
            assert caught.value.status is Status.BAD_ARGUMENT
        with pytest.raises(ServerError, match="whole numbers from 0"):
            kv.decrement("n", 1, initial=-1)


def test_requests_start_no_thread(fake: ThreadedFake) -> None:
    with client(fake) as kv:
        kv.set("k", "v")
        assert client_threads() == 0


def test_a_consumer_and_a_publisher_that_nobody_closes_end_their_threads(
    fake: ThreadedFake,
) -> None:
    fill(fake, 10)
    following = consumer(fake)
    assert next(following) is not None
    kv = client(fake)
    kv.publish(PartitionId(0), chunk_of_plain_sets([b"k"], [b"v"]))
    assert client_threads() == 2
    requests = kv._dispatcher
    del following, kv
    gc.collect()
    assert client_threads() == 0
    requests.close()


def test_a_publisher_is_kept_for_its_writer(fake: ThreadedFake) -> None:
    chunk = chunk_of_plain_sets([b"k"], [b"v"])
    with client(fake) as kv:
        kv.publish(PartitionId(0), chunk)
        kv.publish_all([(PartitionId(0), chunk)] * 3)
        assert fake.dialled == 2
        kv.publish(PartitionId(0), chunk, writer=WriterIdentity(b"another".ljust(16)))
        assert fake.dialled == 3
        assert client_threads() == 1
    assert client_threads() == 0


def test_ctrl_c_ends_publishing_and_the_client_stays_usable(fake: ThreadedFake) -> None:
    fake.server.credit_bytes = 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with client(fake) as kv:
            with pytest.raises(KeyboardInterrupt):
                kv.publish(PartitionId(0), chunk_of_plain_sets([b"k"], [b"v"]))
            fake.server.credit_bytes = 1 << 20
            kv.publish(PartitionId(0), chunk_of_plain_sets([b"k"], [b"w"]))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert fake.server.contents() == {b"k": b"w"}


def url_of(fake: ThreadedFake) -> str:
    """Where the fake can be reached from other processes."""

    async def listen() -> list[trio.SocketListener]:
        serve = partial(trio.serve_tcp, fake.server.serve, 0, host="127.0.0.1")
        listeners: list[trio.SocketListener] = await fake.thread.nursery.start(serve)
        return listeners

    (listener,) = fake.thread.run(listen)
    return f"upr://127.0.0.1:{listener.socket.getsockname()[1]}/b"


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("has_published", [False, True])
def test_forked_processes_publish_as_writers_of_their_own(
    fake: ThreadedFake, has_published: bool
) -> None:
    def publish(key: bytes) -> None:
        assert not kv.publish(PartitionId(0), chunk_of_plain_sets([key], [b"v"])).failures

    kv = BlockingClient(url_of(fake))
    if has_published:
        publish(b"parent")
    for key in (b"a", b"b"):
        in_forked_process(partial(publish, key))
    publish(b"last")
    kv.close()
    keys = {b"a", b"b", b"last"} | ({b"parent"} if has_published else set())
    assert fake.server.contents().keys() == keys


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_makes_requests_over_its_own_connection(fake: ThreadedFake) -> None:
    def ask() -> None:
        assert kv.increment("n").count == 2
        kv.close()

    with BlockingClient(url_of(fake)) as kv:
        kv.increment("n")
        in_forked_process(ask)
        assert fake.server.bucket_opens == 2
        assert kv.increment("n").count == 3
    assert fake.server.bucket_opens == 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_makes_its_own_consumer(fake: ThreadedFake) -> None:
    fill(fake, 10)
    with consumer(fake) as following:
        assert next(following) is not None
        child = os.fork()
        if not child:  # it must not come back to pytest
            code = 1
            try:
                # Events that had crossed before are there; new ones are not.
                with suppress(ClosedError):
                    while True:
                        following.next_event(0.0)
                following.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        following.barrier(b"end")
        for event in following:
            if isinstance(event, BarrierReached):
                break


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_leaves_the_resume_file_to_its_parent(
    fake: ThreadedFake, tmp_path: Path
) -> None:
    """Leaving the context there, as `sys.exit` does, must not put back an older position."""
    path = tmp_path / "resume.json"
    saved_bytes = b""

    def leave() -> None:
        following.close()
        for use in (following.next_event, following.save):
            with pytest.raises(ClosedError):
                use()
        assert path.read_bytes() == saved_bytes

    fill(fake, 10)
    with consumer(fake, resume=path, save_limits=SaveLimits(1e9, 1e9)) as following:
        for event in following:
            if isinstance(event, SnapshotEnd):
                break
        following.save()
        saved_bytes = path.read_bytes()
        following.barrier(b"end")
        for event in following:
            if isinstance(event, BarrierReached):
                break
        in_forked_process(leave)
    assert path.read_bytes() != saved_bytes
