"""Streams read in the calling thread, to their ends, against a fake server in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.fake_server import FakeConnection, FakeServer, put_keys
from tests.kit.threaded import ThreadedCluster, ThreadedFake, TrioThread, trio_thread
from upr_protocol.client import (
    Address,
    BoundedStreams,
    ChunkReceived,
    Event,
    ResumeState,
    RolledBack,
    SnapshotEnd,
    SnapshotStart,
    StreamAccepted,
    StreamEnded,
)
from upr_protocol.errors import BrokenError, ServerError, Status
from upr_protocol.failover import FailoverEntry, FailoverLog, Position
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.wire import Message, Open, Stream

ADDRESS = Address.parse("upr://fake/b")


@pytest.fixture(scope="module")
def thread() -> Iterator[TrioThread]:
    with trio_thread() as thread:
        yield thread


@pytest.fixture
def fake(thread: TrioThread) -> ThreadedFake:
    return filled(thread)


def filled(thread: TrioThread) -> ThreadedFake:
    fake = ThreadedFake(thread)
    thread.call(lambda: put_keys(fake.server, 60))
    return fake


def numbers(server: FakeServer) -> dict[PartitionId, list[int]]:
    """The numbers that each partition has."""
    return {partition.id: [row.seq for row in partition.history] for partition in server.partitions}


def streams(
    fake: ThreadedFake | ThreadedCluster, server: FakeServer, **changed: object
) -> BoundedStreams:
    """Everything that the server has; retries end at once."""
    positions = {
        partition.id: Position(partition.log, SeqNo(0), SeqNo(0), None)
        for partition in server.partitions
    }
    arguments: dict[str, object] = {
        "address": ADDRESS,
        "partitions": list(positions),
        "resume": ResumeState("b", positions),
        "end": {partition.id: partition.high for partition in server.partitions},
        "retry_timeout_s": 0.0,
        "dial": fake.dial,
        **changed,
    }
    return BoundedStreams(**arguments)  # type: ignore[arg-type]


def rows(events: Iterator[Event], ends: Mapping[int, int]) -> dict[PartitionId, list[int]]:
    """The numbers of all rows up to the ends. Each chunk must come within a snapshot, and each
    partition must end."""
    received: dict[PartitionId, list[int]] = {PartitionId(partition): [] for partition in ends}
    inside: set[PartitionId] = set()
    unfinished = set(received)
    for event in events:
        match event:
            case SnapshotStart():
                inside.add(event.partition)
            case SnapshotEnd():
                inside.remove(event.partition)
            case ChunkReceived():
                assert event.partition in inside
                received[event.partition] += event.chunk.slice(
                    SeqNo(0), SeqNo(ends[event.partition])
                ).seqs.tolist()
            case StreamEnded():
                unfinished.remove(event.partition)
    assert not unfinished
    return received


def has_client_thread() -> bool:
    return any(thread.name == "upr-client" for thread in threading.enumerate())


def test_the_calling_thread_reads(fake: ThreadedFake) -> None:
    """Over one connection, which is closed in the end."""
    bounded = streams(fake, fake.server)
    with closing(bounded.events()) as events:
        first = next(events)
        assert not has_client_thread()
        assert rows(iter([first, *events]), bounded.end) == numbers(fake.server)
    assert fake.dialled == 1
    assert bounded.resume.positions[PartitionId(0)].highest_received == 0


@given(
    st.lists(st.integers(1, 3000), max_size=4),
    st.lists(st.integers(0, 20), min_size=4, max_size=4),
    st.lists(st.integers(0, 20), min_size=4, max_size=4),
    st.booleans(),
)
def test_each_row_comes_once_however_often_the_connection_breaks(
    thread: TrioThread, budgets: list[int], starts: list[int], lengths: list[int], is_leased: bool
) -> None:
    fake = filled(thread)
    fake.budgets = iter(budgets)
    partitions = fake.server.partitions
    highs = [partition.high for partition in partitions]
    bounds = [
        (min(start, high), min(start + length, high))
        for start, length, high in zip(starts, lengths, highs, strict=True)
    ]
    ends = {index: end for index, (_, end) in enumerate(bounds)}
    ranges = tuple((index, start, end) for index, (start, end) in enumerate(bounds))
    fake.server.leases = {7: ranges}
    bounded = streams(
        fake,
        fake.server,
        resume=ResumeState(
            "b",
            {
                partition.id: Position(partition.log, SeqNo(start), SeqNo(start), None)
                for partition, (start, _) in zip(partitions, bounds, strict=True)
            },
        ),
        end=ends,
        lease_id=7 if is_leased else 0,
        retry_timeout_s=60.0,
    )
    assert rows(bounded.events(), ends) == {
        partition: [seq for seq in seqs if bounds[partition][0] < seq <= ends[partition]]
        for partition, seqs in numbers(fake.server).items()
    }
    assert not has_client_thread()


def test_a_consumer_goes_on_where_the_connection_broke(fake: ThreadedFake) -> None:
    fake.budgets = iter([2000])
    bounded = streams(fake, fake.server, retry_timeout_s=60.0)
    assert rows(bounded.events(), bounded.end) == numbers(fake.server)
    assert fake.dialled == 2


def test_the_logs_of_the_streams_come_on_request(fake: ThreadedFake) -> None:
    for dialled in (1, 2):
        fake.budgets = iter([2000][: dialled - 1])
        bounded = streams(fake, fake.server, with_logs=True, retry_timeout_s=60.0)
        fake.dialled = 0
        logs = {
            event.partition: event.log
            for event in bounded.events()
            if isinstance(event, StreamAccepted)
        }
        assert logs == {partition.id: partition.log for partition in fake.server.partitions}
        assert fake.dialled == dialled


def test_a_server_that_is_away_is_an_error_after_the_time(fake: ThreadedFake) -> None:
    fake.down = True
    with pytest.raises(BrokenError):
        next(streams(fake, fake.server).events())


def test_a_final_refusal_is_an_error_at_once(fake: ThreadedFake) -> None:
    fake.server.refuse = lambda message: Status.NO_BUCKET if isinstance(message, Open) else None
    with pytest.raises(ServerError) as refused:
        next(streams(fake, fake.server, retry_timeout_s=60.0).events())
    assert refused.value.status is Status.NO_BUCKET
    assert fake.dialled == 1


@pytest.mark.parametrize(
    ("url", "status"),
    [("upr://fake,other/b", Status.NO_BUCKET), ("upr://fake/b", Status.LOG_IN_FAILED)],
)
def test_a_consumer_goes_on_where_another_host_or_attempt_may_succeed(
    fake: ThreadedFake, url: str, status: Status
) -> None:
    refused: list[Message] = []

    def refuse(message: Message) -> Status | None:
        if isinstance(message, Open) and not refused:
            refused.append(message)
            return status
        return None

    fake.server.refuse = refuse
    bounded = streams(fake, fake.server, address=Address.parse(url), retry_timeout_s=60.0)
    assert rows(bounded.events(), bounded.end) == numbers(fake.server)
    assert fake.dialled == 2


def test_a_partition_that_is_refused_at_first_is_asked_for_again(fake: ThreadedFake) -> None:
    refused: list[Message] = []

    def refuse(message: Message) -> Status | None:
        if isinstance(message, Stream) and not refused:
            refused.append(message)
            return Status.WRONG_STATE
        return None

    fake.server.refuse = refuse
    bounded = streams(fake, fake.server, retry_timeout_s=60.0)
    assert rows(bounded.events(), bounded.end) == numbers(fake.server)
    assert refused


def test_a_server_that_stops_as_it_answers_for_the_streams_is_waited_for(
    fake: ThreadedFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers and the end of the connection come together."""
    answer, last = FakeConnection._on_stream, fake.server.partitions[-1].id

    def answer_and_stop(connection: FakeConnection, message: Stream) -> None:
        answer(connection, message)
        if message.partition == last:
            monkeypatch.undo()
            connection.session.fail(Status.SHUTTING_DOWN, "it stops")

    monkeypatch.setattr(FakeConnection, "_on_stream", answer_and_stop)
    bounded = streams(fake, fake.server, retry_timeout_s=60.0)
    assert rows(bounded.events(), bounded.end) == numbers(fake.server)


def test_a_rollback_is_told(fake: ThreadedFake) -> None:
    other_log = FailoverLog((FailoverEntry(HistoryId(77), SeqNo(0)),))
    position = Position(other_log, SeqNo(2), SeqNo(2), None)
    bounded = streams(
        fake, fake.server, partitions=[0], resume=ResumeState("b", {PartitionId(0): position})
    )
    with closing(bounded.events()) as events:
        assert any(isinstance(event, RolledBack) for event in events)


def test_partitions_of_several_nodes_come_by_the_map(thread: TrioThread) -> None:
    """The consumer connects to each node once, and nobody to the first one before."""
    nodes = thread.call(lambda: ThreadedCluster(thread, "abc", 6))
    server = nodes.cluster.any
    thread.call(lambda: put_keys(server, 60))
    hosts: list[str] = []

    def dial(address: Address, timeout_s: float) -> socket.socket:
        hosts.append(address.host)
        return nodes.dial(address, timeout_s)

    bounded = streams(
        nodes, server, address=Address.parse("upr://a,b,c/b"), retry_timeout_s=60.0, dial=dial
    )
    assert rows(bounded.events(), bounded.end) == numbers(server)
    assert sorted(hosts) == ["a", "b", "c"]


def test_a_caller_that_stops_closes_the_connection(fake: ThreadedFake) -> None:
    with closing(streams(fake, fake.server).events()) as events:
        next(events)
        assert fake.thread.call(lambda: len(fake.server.connections)) == 1
    assert not has_client_thread()
