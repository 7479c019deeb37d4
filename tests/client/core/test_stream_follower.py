"""A follower of streams, against a naive server, over connections that are cut at any byte."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import trio.testing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.kit.effort import effort
from tests.kit.fake_server import FakeConnection, FakeServer
from tests.kit.mirror import Mirror
from tests.kit.placed_keys import key_in
from upr_protocol.client import BarrierReached, RolledBack, SnapshotEnd
from upr_protocol.client.core.delivery_tracker import Delivery, RollbackRequest, SavePriority
from upr_protocol.client.core.events import ChunkReceived
from upr_protocol.client.core.handshake import Handshake
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.client.core.stream_follower import StreamFollower
from upr_protocol.client.core.subscription import Subscription, SubscriptionState
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import PartitionId
from upr_protocol.limits import OPEN_BARRIERS_MAX, WINDOW_BYTES_MIN
from upr_protocol.session import ClientSession
from upr_protocol.wire import Message, Stream, StreamEnd

PARTITIONS = 3
NOW = 0.0

partitions = st.integers(0, PARTITIONS - 1).map(PartitionId)


class Machine(RuleBasedStateMachine):
    """A server, a follower, the bytes between them, and the application.

    The model is what the server has: an application that applies every event must come to it. What
    the follower says of each position must follow from the events alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.server = FakeServer(PARTITIONS)
        self.state = SubscriptionState(Subscription(), ResumeState("b"))
        self.follower = StreamFollower(self.state)
        for partition in range(PARTITIONS):
            self.follower.add_partition(PartitionId(partition))
        self.session: ClientSession | None = None
        self.connection: FakeConnection | None = None
        self.deliveries: deque[Delivery] = deque()
        self.mirror = Mirror()
        self.complete = [0] * PARTITIONS
        """By partition the last complete snapshot's end, as the events tell it."""
        self.received = [0] * PARTITIONS
        """By partition the highest number, as the events tell it."""
        self.processed_logs: dict[PartitionId, FailoverLog] = {}
        self.saved_logs: dict[PartitionId, FailoverLog] = {}
        """The logs of the positions that a consumer has saved that saves only when it must."""
        self.processed_complete = [0] * PARTITIONS
        self.barriers: dict[bytes, list[int]] = {}
        """By cookie what each partition had when the barrier was opened, without what it has lost
        since."""
        self.changes = 0
        self.cookies = 0
        self.histories = 5000

    # The connection.

    @precondition(lambda self: self.connection is None)
    @rule()
    def connect(self) -> None:
        stream, _ = trio.testing.memory_stream_pair()
        self.connection = FakeConnection(self.server, stream, NOW)
        self.server.connections.add(self.connection)
        self.session = ClientSession("test:follower", window_bytes=WINDOW_BYTES_MIN, now=NOW)
        handshake = Handshake(self.session, "b")
        while not handshake.is_done:
            self.carry_to_server()
            for message in self.carry_to_client():
                handshake.receive(message)
        assert not self.state.learn_partitions(handshake)
        self.follower.connection_made(self.session, handshake)

    @precondition(lambda self: self.connection is not None)
    @rule()
    def cut(self) -> None:
        assert self.connection is not None
        self.server.connections.discard(self.connection)
        self.connection = self.session = None
        self.follower.connection_lost()

    def carry_to_server(self) -> None:
        assert self.session is not None
        assert self.connection is not None
        for data in self.session.take_outgoing(NOW):
            self.connection.receive(bytes(data), NOW)

    def carry_to_client(self, bytes_max: int = 1 << 30) -> Iterator[Message]:
        """Carries so many bytes of what the server has to send; gives the messages in them."""
        assert self.session is not None
        assert self.connection is not None
        self.connection.step()
        data = b"".join(self.connection.session.take_outgoing(NOW))[:bytes_max]
        self.session.receive(data, NOW)
        return self.session.messages()

    @precondition(lambda self: self.connection is not None)
    @rule(rounds=st.integers(1, 5))
    def exchange(self, rounds: int) -> None:
        for _ in range(rounds):
            self.carry_to_server()
            for message in self.carry_to_client():
                self.take_in(message)

    @precondition(lambda self: self.connection is not None)
    @rule(rounds=st.integers(0, 3), bytes_max=st.integers(0, 600))
    def exchange_and_cut(self, rounds: int, bytes_max: int) -> None:
        self.exchange(rounds)
        self.carry_to_server()
        for message in self.carry_to_client(bytes_max):
            self.take_in(message)
        self.cut()

    def take_in(self, message: Message) -> None:
        for delivery in self.follower.receive(message):
            self.deliveries.append(delivery)
            event = delivery.event
            if isinstance(event, ChunkReceived):
                end = int(event.chunk.end)
                self.received[event.partition] = max(self.received[event.partition], end)
            elif isinstance(event, SnapshotEnd):
                self.complete[event.partition] = int(event.end)
            elif isinstance(event, RolledBack):
                self.received[event.partition] = self.complete[event.partition] = int(event.to)
        assert self.follower.failure is None
        refused, self.follower.refused_streams = self.follower.refused_streams, []
        for stream in refused:
            assert stream.partition not in self.follower.partitions

    # The server.

    @rule(key=st.binary(min_size=1, max_size=1), count=st.integers(1, 8))
    def change(self, key: bytes, count: int) -> None:
        for index in range(count):
            self.changes += 1
            self.server.put(key + b"%d" % index, b"value %d" % self.changes)

    @rule(partition=partitions, kept_share=st.floats(0, 1))
    def fail_over(self, partition: PartitionId, kept_share: float) -> None:
        """The server's node is replaced by one that has less: every connection is lost."""
        if self.connection is not None:
            self.cut()
        self.histories += 1
        high = int(self.server.partitions[partition].high)
        self.server.partitions[partition].fail_over(self.histories, int(high * kept_share))
        kept = int(self.server.partitions[partition].high)
        for ends in self.barriers.values():
            ends[partition] = min(ends[partition], kept)

    @rule(partition=partitions, is_refused=st.booleans())
    def refuse_streams(self, partition: PartitionId, is_refused: bool) -> None:
        def refuse(message: Message) -> Status | None:
            is_meant = isinstance(message, Stream) and message.partition == partition
            return Status.TEMPORARY_FAILURE if is_meant and is_refused else None

        self.server.refuse = refuse

    # What the consumer does.

    @rule(partition=partitions)
    def remove_partition(self, partition: PartitionId) -> None:
        self.follower.remove_partition(partition)

    @rule(partition=partitions)
    def move_away_and_back(self, partition: PartitionId) -> None:
        self.follower.remove_partition(partition)
        self.follower.add_partition(partition)

    @rule(partition=partitions)
    def add_partition(self, partition: PartitionId) -> None:
        self.follower.add_partition(partition)

    @precondition(lambda self: len(self.barriers) < OPEN_BARRIERS_MAX)
    @rule()
    def open_barrier(self) -> None:
        self.cookies += 1
        cookie = b"%d" % self.cookies
        self.state.barriers.open_barrier(cookie)
        self.barriers[cookie] = [int(p.high) for p in self.server.partitions]
        self.follower.send_barriers()

    @precondition(lambda self: self.deliveries)
    @rule(count=st.integers(1, 10))
    def process(self, count: int) -> None:
        for _ in range(min(count, len(self.deliveries))):
            delivery = self.deliveries.popleft()
            event = delivery.event
            assert not isinstance(event, RollbackRequest), "there is no undo callback"
            if event is not None:
                self.mirror.apply(event)
            self.save(delivery)
            if isinstance(event, BarrierReached):
                self.barrier_reached(event)
            elif isinstance(event, SnapshotEnd):
                self.processed_complete[event.partition] = int(event.end)
            elif isinstance(event, RolledBack):
                self.processed_complete[event.partition] = int(event.to)
            self.follower.acknowledge(delivery)

    def save(self, delivery: Delivery) -> None:
        """Saves when a consumer must. A partition's log is saved before any data of it."""
        if delivery.position is not None:
            partition, position = delivery.position
            if isinstance(delivery.event, ChunkReceived):
                assert self.saved_logs.get(partition) == position.log
            self.processed_logs[partition] = position.log
        if delivery.priority is SavePriority.URGENT:
            self.saved_logs = dict(self.processed_logs)

    def barrier_reached(self, event: BarrierReached) -> None:
        ends = self.barriers.pop(event.cookie)
        assert set(event.ends) == set(range(PARTITIONS))
        for partition, end in enumerate(ends):
            assert self.processed_complete[partition] >= end

    # What holds.

    @invariant()
    def positions_follow_from_the_events(self) -> None:
        for partition in range(PARTITIONS):
            position = self.state.resume_state.position(PartitionId(partition))
            assert position.highest_received == self.received[partition]
            assert position.last_complete == self.complete[partition]
            assert (position.partial is None) == (
                self.received[partition] == self.complete[partition]
            )

    def teardown(self) -> None:
        """Left alone, the application comes to what the server has, and every barrier returns."""
        self.server.refuse = lambda _: None
        for partition_id in range(PARTITIONS):
            self.add_partition(PartitionId(partition_id))
        if self.connection is None:
            self.connect()
        for _ in range(1000):
            self.exchange(5)
            while self.deliveries:
                self.process(10)
            self.positions_follow_from_the_events()
            highs = [int(partition.high) for partition in self.server.partitions]
            if highs == self.complete and not self.barriers:
                break
        assert self.mirror.contents == self.server.contents()
        assert not self.barriers


TestStreamFollower = Machine.TestCase
TestStreamFollower.settings = settings(
    max_examples=effort(60, 1000), stateful_step_count=40, deadline=None
)


def test_logs_are_saved_before_data_though_the_last_answer_is_a_refusal() -> None:
    machine = Machine()
    machine.refuse_streams(PartitionId(PARTITIONS - 1), is_refused=True)
    machine.connect()
    machine.server.put(key_in(0, PARTITIONS), b"v")
    machine.exchange(5)
    machine.process(100)
    assert machine.complete[0] == 1
    machine.teardown()


def test_logs_are_saved_before_data_though_the_connection_that_brought_them_was_lost() -> None:
    machine = Machine()
    machine.connect()
    machine.exchange(5)
    machine.fail_over(PartitionId(0), kept_share=1.0)
    machine.connect()
    machine.carry_to_server()
    machine.take_in(next(machine.carry_to_client()))
    machine.cut()
    machine.connect()
    machine.server.put(key_in(0, PARTITIONS), b"v")
    machine.exchange(5)
    machine.process(100)
    assert machine.complete[0] == 1
    machine.teardown()


def test_an_end_that_was_read_in_another_history_is_read_anew() -> None:
    machine = Machine()
    machine.state = SubscriptionState(Subscription(partitions=(0,), end="now"), ResumeState("b"))
    machine.follower = StreamFollower(machine.state)
    machine.follower.add_partition(PartitionId(0))
    for count in range(3):
        machine.server.put(key_in(0, PARTITIONS, b"%d" % count), b"v")
    machine.connect()
    # The node is replaced by one that has less before it is asked for the stream.
    machine.server.partitions[0].fail_over(6000, 1)
    machine.carry_to_server()
    for message in machine.carry_to_client():
        assert not list(machine.follower.receive(message))
    assert machine.follower.failure is not None
    assert machine.follower.failure.status is Status.WRONG_STATE
    assert "another history" in str(machine.follower.failure)
    machine.cut()
    machine.connect()
    machine.exchange(5)
    assert machine.complete[0] == 1
    assert machine.state.is_finished


def test_a_partition_that_came_back_is_asked_for_again_after_its_old_request_was_refused() -> None:
    machine = Machine()
    machine.refuse_streams(PartitionId(0), is_refused=True)
    machine.connect()
    machine.carry_to_server()
    machine.move_away_and_back(PartitionId(0))
    # The refusal of the first request is under way when the partition comes back.
    answers = list(machine.carry_to_client())
    machine.refuse_streams(PartitionId(0), is_refused=False)
    machine.server.put(key_in(0, PARTITIONS), b"v")
    for message in answers:
        machine.take_in(message)
    machine.exchange(5)
    assert machine.complete[0] == 1


def test_a_partition_that_came_back_is_asked_for_again_after_its_old_stream_has_ended() -> None:
    machine = Machine()
    machine.connect()
    machine.exchange(5)
    machine.move_away_and_back(PartitionId(0))
    machine.server.put(key_in(0, PARTITIONS), b"v")
    machine.exchange(5)
    assert machine.complete[0] == 1


def test_a_barrier_returns_when_the_last_stream_ends_that_it_has_not_passed() -> None:
    machine = Machine()
    machine.connect()
    machine.exchange(5)
    barriers = machine.state.barriers
    barriers.open_barrier(b"a barrier")
    barriers.add_passed(b"a barrier", [PartitionId(1), PartitionId(2)], {})
    end = StreamEnd(partition=PartitionId(0), opaque=1, status=Status.END_REACHED)
    deliveries = machine.follower.receive(end)
    assert BarrierReached(b"a barrier", {}) in [delivery.event for delivery in deliveries]
