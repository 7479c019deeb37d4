"""Unanswered batches, against a server that answers in every way it may, as connections break."""

from __future__ import annotations

from collections import defaultdict, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.kit.fake_partition import FakePartition
from upr_protocol.chunk import CounterDelta, plain_chunk
from upr_protocol.client.core.unanswered_batches import Batch, PublishOptions, UnansweredBatches
from upr_protocol.client.core.writer_identity import WriterIdentity
from upr_protocol.errors import Status
from upr_protocol.ids import Operation, PartitionId
from upr_protocol.session import ClientSession, ServerSession
from upr_protocol.wire import Credit, Hello, Mutate, MutateReply, Open, Opened, RunResult

PARTITIONS = 3
IN_FLIGHT = 3
RETRY_TIMEOUT_S = 30.0
ATTEMPT = 7


class Machine(RuleBasedStateMachine):
    """The batches, the two ends of a connection, and what the server did."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.batches = UnansweredBatches(
            WriterIdentity.of_task(b"w" * 16, ATTEMPT),
            PublishOptions(in_flight=IN_FLIGHT, buffer_bytes=4000, retry_timeout_s=RETRY_TIMEOUT_S),
            draw=lambda: 0.5,
        )
        self.node = self.batches.new_node()
        for partition in range(PARTITIONS):
            self.batches.place(PartitionId(partition), self.node)
        self.partitions = [FakePartition(number, 1 + number) for number in range(PARTITIONS)]
        self.added: defaultdict[int, list[Batch]] = defaultdict(list)
        self.answered: list[Batch] = []
        self.inactive: set[int] = set()
        self.client: ClientSession | None = None
        self.connect()

    def connect(self) -> None:
        self.client = ClientSession("test:batches", now=0.0)
        self.server = ServerSession("test", now=0.0)
        self.arrived: deque[Mutate] = deque()
        self.carry()
        self.client.send(Open("b", opaque=self.client.new_opaque()))
        self.carry()

    def carry(self) -> None:
        """Carries everything over, both ways."""
        client = self.client
        assert client is not None
        while client.outgoing_bytes or self.server.outgoing_bytes:
            self.server.receive(b"".join(client.take_outgoing(0.0)), 0.0)
            for message in self.server.events():
                if isinstance(message, Mutate):
                    self.check_chain(message)
                    self.arrived.append(message)
                elif isinstance(message, Open):
                    self.server.send(Opened(PARTITIONS, 1, opaque=message.opaque))
                else:
                    assert isinstance(message, Hello)
            client.receive(b"".join(self.server.take_outgoing(0.0)), 0.0)
            for answer in client.events():
                done = self.node.receive(answer, self.now)
                if done is not None:
                    self.answered.append(done)

    def check_chain(self, message: Mutate) -> None:
        chain = 0
        (run,) = message.bundle.runs
        for batch in self.added[run.partition][: run.counter]:
            chain = batch.chunk.chained(chain)
        assert (run.chain, message.attempt) == (chain, ATTEMPT)

    def pump(self) -> None:
        if self.client is not None:
            self.node.send(self.client, self.now)
            self.carry()

    connected = precondition(lambda self: self.client is not None)
    something_arrived = precondition(lambda self: self.client is not None and self.arrived)

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def add(self, partition: int) -> None:
        chunk = plain_chunk([b"n"], [CounterDelta(1, 1).encode()], bytes([Operation.INCREMENT]))
        self.added[partition].append(self.batches.add(PartitionId(partition), chunk))
        self.pump()

    @connected
    @rule(count=st.integers(1, 2000))
    def grant(self, count: int) -> None:
        self.server.send(Credit(count))
        self.carry()
        self.pump()

    @something_arrived
    @rule()
    def answer(self) -> None:
        request = self.arrived.popleft()
        (run,) = request.bundle.runs
        if run.partition in self.inactive:
            refused = RunResult(run.partition, Status.NOT_MY_PARTITION)
            self.server.send(MutateReply(0, (refused,), opaque=request.opaque))
            self.carry()
            self.pump()
            return
        partition = self.partitions[run.partition]
        done = partition.mutate(request.bundle.chunk, request.writer, run.counter)
        assert done.result.status == Status.OK, "a batch in doubt is within the server's memory"
        self.server.send(
            MutateReply(
                0,
                (done.result,),
                tuple(done.failures),
                tuple(done.counters),
                opaque=request.opaque,
            )
        )
        self.carry()
        self.pump()

    @something_arrived
    @rule()
    def take_in_and_lose_the_answer(self) -> None:
        request = self.arrived.popleft()
        (run,) = request.bundle.runs
        if run.partition not in self.inactive:
            partition = self.partitions[run.partition]
            partition.mutate(request.bundle.chunk, request.writer, run.counter)
        self.break_connection()

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def deactivate(self, partition: int) -> None:
        """Whatever comes is refused, without effect."""
        self.inactive.add(partition)

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def activate(self, partition: int) -> None:
        # Were some refused and later ones taken, the refused ones could not go before them again.
        if all(request.partition != partition for request in self.arrived):
            self.inactive.discard(partition)

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def lose_the_node_of(self, partition: int) -> None:
        """Requests that have arrived there are never carried out."""
        self.batches.place(PartitionId(partition), self.batches.unplaced)
        self.arrived = deque(r for r in self.arrived if r.partition != partition)
        self.pump()

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def find_the_node_of(self, partition: int) -> None:
        is_unplaced = self.batches.is_unplaced(PartitionId(partition))
        was_moved = self.batches.place(PartitionId(partition), self.node)
        assert was_moved or not is_unplaced
        self.pump()

    @rule(seconds=st.floats(0.01, 1.0))
    def let_time_pass(self, seconds: float) -> None:
        # Not so much that a batch would be given up: that is tried elsewhere.
        if self.now + seconds < RETRY_TIMEOUT_S:
            self.now += seconds
        self.pump()

    @connected
    @rule()
    def break_connection(self) -> None:
        self.client = None
        self.node.disconnected()

    @precondition(lambda self: self.client is None)
    @rule()
    def connect_again(self) -> None:
        self.connect()
        self.pump()

    @invariant()
    def counts_agree(self) -> None:
        unanswered = [b for batches in self.added.values() for b in batches if b.reply is None]
        assert self.batches.count == len(unanswered)
        placed = self.node.count + self.batches.unplaced.count
        assert placed == len(unanswered)
        assert self.batches.nbytes == sum(batch.nbytes for batch in unanswered)
        assert self.batches.is_full == (self.batches.nbytes >= 4000)

    @invariant()
    def few_are_in_flight(self) -> None:
        if self.client is not None:
            for partition in range(PARTITIONS):
                runs = [run for request in self.arrived for run in request.bundle.runs]
                counters = [run.counter for run in runs if run.partition == partition]
                assert len(counters) <= IN_FLIGHT
                assert counters == sorted(set(counters))

    @invariant()
    def starving_is_noticed(self) -> None:
        if self.node.out_of_credit_since is not None:
            assert self.client is not None
            assert not self.client.credit.open

    def teardown(self) -> None:
        """With a good connection everything is answered, and had one effect each, in order."""
        if self.client is None:
            self.connect()
        for number in range(PARTITIONS):
            self.find_the_node_of(number)
        while self.arrived:
            self.answer()
        self.inactive.clear()
        for _ in range(200):
            self.now += 10.0
            if self.client is not None and not self.client.credit.open:
                self.server.send(Credit(100_000))
                self.carry()
            self.pump()
            while self.arrived:
                self.answer()
            if not self.batches.count:
                break
        assert not self.batches.count
        for number, batches in self.added.items():
            history = self.partitions[number].history
            assert [int(mutation.value) for mutation in history] == [
                count + 1 for count in range(len(batches))
            ]
            for count, batch in enumerate(batches):
                assert batch.reply is not None
                assert batch.reply.counters == ((0, count + 1),)
        assert len(self.answered) == sum(map(len, self.added.values()))


TestUnansweredBatches = Machine.TestCase
TestUnansweredBatches.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
