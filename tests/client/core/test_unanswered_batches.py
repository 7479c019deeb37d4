"""Unanswered batches, against a server that answers in every way it may, as connections break."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from weakref import ref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.kit.effort import effort
from tests.kit.fake_partition import FakePartition
from tests.kit.reference_cycles import no_collections
from upr_protocol.chunk import Chunk, CounterDelta, Mutation, chunk_of_plain_sets
from upr_protocol.client.core.batcher import BUNDLE_MUTATIONS
from upr_protocol.client.core.node_batches import (
    BUSY_NODE_ROWS,
    JOINED_MUTATIONS_MAX,
    VERY_BUSY_NODE_ROWS,
)
from upr_protocol.client.core.partition_batches import Batch
from upr_protocol.client.core.publish_options import PublishOptions
from upr_protocol.client.core.unanswered_batches import UnansweredBatches
from upr_protocol.client.core.writer_identity import WriterIdentity
from upr_protocol.errors import Status
from upr_protocol.ids import Durability, Operation, PartitionId
from upr_protocol.session import ClientSession, ServerSession
from upr_protocol.wire import Credit, Hello, Mutate, MutateReply, Open, Opened, Refusal, RunResult

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
            PublishOptions(
                in_flight=IN_FLIGHT,
                buffer_bytes=4000,
                retry_timeout_s=RETRY_TIMEOUT_S,
                linger_s=0.02,
            ),
            draw=lambda: 0.5,
        )
        self.node = self.batches.new_node()
        for partition in range(PARTITIONS):
            self.batches.place(PartitionId(partition), self.node)
        self.partitions = [
            FakePartition(partition, 1 + partition) for partition in range(PARTITIONS)
        ]
        self.added: defaultdict[int, list[Batch]] = defaultdict(list)
        self.answered: list[Batch] = []
        self.periods: dict[int, list[Batch]] = {}
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
            for message in self.server.messages():
                if isinstance(message, Mutate):
                    self.check_bundle(message)
                    self.arrived.append(message)
                elif isinstance(message, Open):
                    self.server.send(Opened(PARTITIONS, 1, opaque=message.opaque))
                else:
                    assert isinstance(message, Hello)
            client.receive(b"".join(self.server.take_outgoing(0.0)), 0.0)
            for answer in client.messages():
                results = self.node.receive(answer, self.now)
                self.answered += results

    def check_bundle(self, message: Mutate) -> None:
        assert message.attempt == ATTEMPT
        bundle = message.bundle
        assert len(bundle.runs) == 1 or len(bundle) <= JOINED_MUTATIONS_MAX
        for index, run in enumerate(bundle.runs):
            chain = 0
            for batch in self.added[run.partition][: run.counter]:
                chain = batch.chunk.chained_crc(chain)
            assert run.chain == chain
            assert bundle.run_chunk(index) == self.added[run.partition][run.counter - 1].chunk

    def pump(self) -> None:
        if self.client is not None:
            self.node.send(self.client, self.now)
            self.carry()

    connected = precondition(lambda self: self.client is not None)
    something_arrived = precondition(lambda self: self.client is not None and self.arrived)

    @rule(
        sizes=st.lists(
            st.tuples(st.integers(0, PARTITIONS - 1), st.sampled_from([1, 1, 3, 400])), max_size=4
        )
    )
    def add(self, sizes: list[tuple[int, int]]) -> None:
        increment = Mutation(Operation.INCREMENT, b"n", CounterDelta(1, 1).encode())
        chunks = [(PartitionId(p), Chunk.build([increment] * rows)) for p, rows in sizes]
        count, nbytes = self.batches.totals.count, self.batches.totals.nbytes
        batches = self.batches.add_all(chunks)
        for (partition, chunk), batch in zip(chunks, batches, strict=True):
            assert (batch.partition, batch.chunk) == (partition, chunk)
            self.added[partition].append(batch)
        assert self.batches.totals.count == count + len(chunks)
        assert self.batches.totals.nbytes == nbytes + sum(batch.nbytes for batch in batches)
        if self.client is not None:
            is_worth_trying = self.node.is_send_worth_trying
            assert is_worth_trying >= self.node.send(self.client, self.now)
        self.pump()

    @connected
    @rule(count=st.integers(1, 2000))
    def grant(self, count: int) -> None:
        self.server.send(Credit(count))
        self.carry()
        self.pump()

    def apply(self, request: Mutate) -> MutateReply:
        """What the server says to a request. Each run is judged alone."""
        bundle = request.bundle
        results: list[RunResult] = []
        counters: list[tuple[int, int]] = []
        for low, run, chunk in zip(bundle.bounds, bundle.runs, bundle.run_chunks(), strict=False):
            if run.partition in self.inactive:
                results.append(RunResult(run.partition, Status.NOT_MY_PARTITION))
                continue
            result = self.partitions[run.partition].mutate(chunk, request.writer, run.counter)
            assert result.result.status == Status.OK, (
                "a batch in doubt is within the server's memory"
            )
            assert not result.failures
            results.append(result.result)
            counters += [(low + index, value) for index, value in result.counters]
        return MutateReply(0, tuple(results), (), tuple(counters), opaque=request.opaque)

    @something_arrived
    @rule()
    def answer(self) -> None:
        self.server.send(self.apply(self.arrived.popleft()))
        self.carry()
        self.pump()

    @something_arrived
    @rule()
    def refuse_the_whole_bundle(self) -> None:
        """It is refused, and so is what was sent behind it."""
        for request in self.arrived:
            refusal = Refusal("busy", opaque=request.opaque, status=Status.TEMPORARY_FAILURE)
            self.server.send(refusal)
        self.arrived.clear()
        self.carry()
        self.pump()

    @something_arrived
    @rule()
    def take_in_and_lose_the_answer(self) -> None:
        self.apply(self.arrived.popleft())
        self.break_connection()

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def deactivate(self, partition: int) -> None:
        """Whatever comes is refused, without effect."""
        self.inactive.add(partition)

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def activate(self, partition: int) -> None:
        # If some were refused and later ones taken, the refused ones could not go before them
        # again.
        if partition not in {run.partition for r in self.arrived for run in r.bundle.runs}:
            self.inactive.discard(partition)

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def lose_the_node_of(self, partition: int) -> None:
        """The runs that have arrived there are never carried out; the answer comes too late."""
        self.batches.place(PartitionId(partition), self.batches.unplaced_batches)
        self.inactive.add(partition)
        while self.client is not None and self.arrived:
            self.answer()
        self.inactive.discard(partition)
        self.pump()

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def find_the_node_of(self, partition: int) -> None:
        is_unplaced = self.batches.is_unplaced(PartitionId(partition))
        was_moved = self.batches.place(PartitionId(partition), self.node)
        assert was_moved or not is_unplaced
        self.pump()

    @rule(seconds=st.floats(0.01, 1.0))
    def let_time_pass(self, seconds: float) -> None:
        # No more time passes than leaves every batch alive: giving up is tried elsewhere.
        if self.now + seconds < RETRY_TIMEOUT_S:
            self.now += seconds
        self.pump()

    @connected
    @rule()
    def break_connection(self) -> None:
        self.client = None
        self.node.connection_lost()

    @precondition(lambda self: self.client is None)
    @rule()
    def connect_again(self) -> None:
        self.connect()
        self.pump()

    @rule()
    def end_period(self) -> None:
        period = self.batches.totals.end_period()
        self.periods[period] = [b for batches in self.added.values() for b in batches]

    @invariant()
    def periods_are_answered_when_all_of_them_is(self) -> None:
        for period, batches in self.periods.items():
            is_answered = all(batch.result is not None for batch in batches)
            assert self.batches.totals.is_answered(period) == is_answered

    @invariant()
    def counts_agree(self) -> None:
        added = [batch for batches in self.added.values() for batch in batches]
        answered = [batch for batch in added if batch.result is not None]
        unanswered = [batch for batch in added if batch.result is None]
        totals = self.batches.totals
        assert totals.answered_count == len(answered)
        assert totals.answered_mutations == sum(batch.chunk.count for batch in answered)
        assert totals.count == len(unanswered)
        placed = self.node.count + self.batches.unplaced_batches.count
        assert placed == len(unanswered)
        assert totals.nbytes == sum(batch.nbytes for batch in unanswered)
        assert self.batches.is_full == (totals.nbytes >= 4000)

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
            assert not self.client.credit.is_open

    def teardown(self) -> None:
        """With a good connection everything is answered, and had one effect each, in order."""
        if self.client is None:
            self.connect()
        for partition in range(PARTITIONS):
            self.find_the_node_of(partition)
        while self.arrived:
            self.answer()
        self.inactive.clear()
        for _ in range(200):
            self.now += 10.0
            if self.client is not None and not self.client.credit.is_open:
                self.server.send(Credit(1_000_000))
                self.carry()
            self.pump()
            while self.arrived:
                self.answer()
            if not self.batches.totals.count:
                break
        assert not self.batches.totals.count
        for partition, batches in self.added.items():
            history = self.partitions[partition].history
            counts = iter(range(1, len(history) + 1))
            assert [int(mutation.value) for mutation in history] == list(range(1, len(history) + 1))
            for batch in batches:
                assert batch.result is not None
                rows = range(batch.chunk.count)
                assert batch.result.counters == tuple((row, next(counts)) for row in rows)
            assert next(counts, None) is None
        assert len(self.answered) == sum(map(len, self.added.values()))


TestUnansweredBatches = Machine.TestCase
TestUnansweredBatches.settings = settings(
    max_examples=effort(50, 100), stateful_step_count=40, deadline=None
)


class Publishing:
    """Batches for 64 partitions of a server that answers nothing by itself.

    Attributes:
        bundles: What arrived since `sent_runs` was called last.
    """

    def __init__(self, options: PublishOptions, writer: WriterIdentity | None = None) -> None:
        self.bundles: list[Mutate] = []
        writer = WriterIdentity(bytes(15) + b"w") if writer is None else writer
        self._batches = UnansweredBatches(writer, options, draw=lambda: 0.5)
        self.node = self._batches.new_node()
        self.connect()

    def connect(self) -> None:
        """Makes a new connection; one that there was is lost."""
        self.node.connection_lost()
        self.client, self.server = ClientSession("test", now=0.0), ServerSession("test", now=0.0)
        self.carry()
        self.client.send(Open("b", opaque=self.client.new_opaque()))
        self.carry()

    def carry(self) -> None:
        """Carries everything over, both ways."""
        client, server = self.client, self.server
        while client.outgoing_bytes or server.outgoing_bytes:
            server.receive(b"".join(client.take_outgoing(0.0)), 0.0)
            for message in server.messages():
                if isinstance(message, Open):
                    server.send(Opened(64, 1, opaque=message.opaque))
                    server.send(Credit(1 << 30))
                elif isinstance(message, Mutate):
                    self.bundles.append(message)
            client.receive(b"".join(server.take_outgoing(0.0)), 0.0)
            for message in client.messages():
                self.node.receive(message, 0.0)

    def add(
        self,
        partition: int,
        rows: int,
        on_answer: Callable[[Batch], None] | None = None,
        *,
        value: bytes = b"v",
    ) -> Batch:
        self._batches.place(PartitionId(partition), self.node)
        chunk = chunk_of_plain_sets([b"k"] * rows, [value] * rows)
        return self._batches.add_all([(PartitionId(partition), chunk)], on_answer)[0]

    def close(self) -> None:
        self._batches.close()

    def refuse(self, bundle: Mutate, status: Status) -> None:
        self.server.send(Refusal("no", opaque=bundle.opaque, status=status))
        self.carry()

    def sent_runs(self, now: float) -> list[list[int]]:
        """Sends what may be sent; gives each bundle's partitions."""
        self.bundles.clear()
        self.node.send(self.client, now)
        self.carry()
        return [[run.partition for run in message.bundle.runs] for message in self.bundles]


def test_what_a_task_has_behind_a_batch_that_was_refused_for_good_is_not_sent_again() -> None:
    """Its next attempt would take the refused one for one that was applied and forgotten."""
    publishing = Publishing(PublishOptions(in_flight=3), WriterIdentity.of_task(b"w" * 16, 1))
    batches = [publishing.add(0, 1) for _ in range(4)]
    assert publishing.sent_runs(0.0) == [[0], [0], [0]]
    bundles = list(publishing.bundles)
    for bundle, status in zip(
        bundles, (Status.NOT_ALLOWED, *[Status.TEMPORARY_FAILURE] * 2), strict=True
    ):
        publishing.refuse(bundle, status)
    assert publishing.node.take_refused() == batches[3:]
    assert [batch.refusal for batch in batches] == [Status.NOT_ALLOWED] * 4
    assert publishing.node.count == 0
    assert publishing.sent_runs(99.0) == []
    batches.append(publishing.add(0, 1))
    assert publishing.node.is_send_worth_trying
    assert publishing.sent_runs(99.0) == []
    assert publishing.node.take_refused() == batches[4:]
    assert not publishing.node.is_send_worth_trying


@pytest.mark.parametrize("refused", [0, 1])
def test_a_lost_connection_behind_a_refusal_for_good_has_a_task_send_nothing_again(
    refused: int,
) -> None:
    """The server has noted the refusal for the connection, and would apply what comes behind it."""
    publishing = Publishing(PublishOptions(in_flight=3), WriterIdentity.of_task(b"w" * 16, 1))
    batches = [publishing.add(0, 1) for _ in range(4)]
    other = publishing.add(1, 1)
    assert publishing.sent_runs(0.0) == [[0, 1], [0], [0]]
    bundles = list(publishing.bundles)
    for bundle in bundles[:refused]:
        publishing.refuse(bundle, Status.TEMPORARY_FAILURE)
    publishing.refuse(bundles[refused], Status.NOT_ALLOWED)
    publishing.connect()
    assert publishing.sent_runs(99.0) == ([[1]] if refused else [])
    answered = publishing.node.take_refused()
    assert answered == [batch for index, batch in enumerate(batches) if index != refused]
    assert [batch.refusal for batch in batches] == [Status.NOT_ALLOWED] * 4
    assert publishing.node.count == (0 if not refused else 1)
    assert other.refusal is (Status.NOT_ALLOWED if not refused else None)


def test_a_partition_that_moves_while_it_waits_to_send_again_is_left_to_its_new_node() -> None:
    """If both nodes sent its batches, one could arrive before those that come before it."""
    publishing = Publishing(PublishOptions())
    publishing.add(0, 1)
    assert publishing.sent_runs(0.0) == [[0]]
    publishing.refuse(publishing.bundles[0], Status.TEMPORARY_FAILURE)
    assert publishing.node.send_at is not None
    publishing._batches.place(PartitionId(0), publishing._batches.new_node())
    assert publishing.node.send_at is None
    assert publishing.sent_runs(99.0) == []


def test_a_bundle_takes_batches_up_to_twice_what_fills_it() -> None:
    publishing = Publishing(PublishOptions(in_flight=1, linger_s=0.005))
    for partition in range(5):
        publishing.add(partition, 1_000)
    assert publishing.sent_runs(0.0) == [[0, 1], [2, 3], [4]], "2,048 operations at most"

    publishing = Publishing(PublishOptions(in_flight=1, linger_s=0.005))
    for partition in range(4):
        publishing.add(partition, 10, value=bytes(20_000))
    assert publishing.sent_runs(0.0) == [[0, 1], [2, 3]], "512 KiB at most"

    publishing = Publishing(PublishOptions(in_flight=1, linger_s=0.005))
    publishing.add(0, 3_000)
    assert publishing.sent_runs(0.0) == [[0]], "a batch is not divided"


def test_a_bundle_fills_while_the_server_has_enough_to_do() -> None:
    publishing = Publishing(PublishOptions(in_flight=1, linger_s=0.005))
    add, sent_runs = publishing.add, publishing.sent_runs
    full_count = BUSY_NODE_ROWS // BUNDLE_MUTATIONS
    for partition in range(full_count):
        add(partition, BUNDLE_MUTATIONS)
        assert sent_runs(0.0) == [[partition]], "it fills a bundle"
    full_bundle = publishing.bundles[0]
    add(60, 1)
    assert sent_runs(0.0) == sent_runs(9.0) == []
    assert publishing.node.send_at is None, "an answer comes first"
    # What cannot be sent does not make what can be sent worth it.
    add(60, BUNDLE_MUTATIONS)
    assert sent_runs(9.0) == []
    add(61, BUNDLE_MUTATIONS * 3 // 4 - 1)
    assert sent_runs(9.0) == [[60, 61]], "most of a bundle"
    add(62, 1)
    assert sent_runs(9.0) == []
    results = (RunResult(PartitionId(full_count - 1), 0),)
    publishing.server.send(MutateReply(0, results, opaque=full_bundle.opaque))
    publishing.carry()
    assert sent_runs(9.004) == []
    assert publishing.node.send_at == 9.005, "the server will soon have nothing to do"
    assert sent_runs(9.006) == [[62]]


def test_only_full_bundles_are_sent_while_plenty_is_unanswered() -> None:
    publishing = Publishing(PublishOptions(in_flight=1, linger_s=0.005))
    add, sent_runs, node = publishing.add, publishing.sent_runs, publishing.node
    full_bundles: list[Mutate] = []
    for partition in range(VERY_BUSY_NODE_ROWS // BUNDLE_MUTATIONS):
        add(partition, BUNDLE_MUTATIONS)
        assert sent_runs(0.0) == [[partition]], "it is full"
        full_bundles += publishing.bundles
    add(60, BUNDLE_MUTATIONS * 15 // 16 - 1)
    assert sent_runs(9.0) == [], "an answer comes first"
    assert not node.is_send_worth_trying
    add(61, 1)
    assert node.is_send_worth_trying
    assert sent_runs(9.0) == [[60, 61]]
    add(62, BUNDLE_MUTATIONS * 3 // 4)
    assert sent_runs(9.0) == []
    for bundle in full_bundles[:2]:
        results = (RunResult(bundle.bundle.runs[0].partition, 0),)
        publishing.server.send(MutateReply(0, results, opaque=bundle.opaque))
    publishing.carry()
    assert sent_runs(9.0) == [[62]], "most of a bundle, as fewer are unanswered"


def test_batches_of_one_partition_go_as_long_as_they_fill_most_of_a_bundle_together() -> None:
    publishing = Publishing(PublishOptions(in_flight=12, linger_s=0.005))
    for _ in range(40):
        publishing.add(3, 100)
    # Eight of the twelve make 800 rows, and seven are not worth it.
    assert publishing.sent_runs(0.0) == [[3]] * 5
    assert publishing.sent_runs(0.006) == [[3]] * 7


def test_batches_that_are_added_call_for_a_send_only_when_they_fill_most_of_a_bundle() -> None:
    publishing = Publishing(PublishOptions(in_flight=1, linger_s=0.005))
    node = publishing.node
    publishing.add(0, 1)
    assert node.is_send_worth_trying, "the server has nothing to do"
    assert publishing.sent_runs(0.0) == [[0]]
    publishing.add(0, 1000)
    assert not node.is_send_worth_trying, "the partition has as many in flight as it may"
    publishing.add(1, 1)
    assert node.is_send_worth_trying, "something begins to wait"
    assert publishing.sent_runs(0.0) == []
    publishing.add(2, BUNDLE_MUTATIONS * 3 // 4 - 2)
    assert not node.is_send_worth_trying
    publishing.add(3, 1)
    assert node.is_send_worth_trying
    assert publishing.sent_runs(0.0) == [[1, 2, 3]]
    publishing.client.credit.remaining_bytes = 0
    publishing.add(4, 1)
    assert node.is_send_worth_trying, "since when credit is missing must be noted"
    assert publishing.sent_runs(0.0) == []
    publishing.add(5, BUNDLE_MUTATIONS)
    assert not node.is_send_worth_trying, "new credit calls for a send"


class Application:
    """One whose callback is in a reference cycle with its batch, which no collector looks at."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.is_told = False

    def note_answered(self, batch: Batch) -> None:
        assert batch is self.batch
        self.is_told = True


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_batch_that_is_done_with_is_in_no_reference_cycle(is_answered: bool) -> None:
    publishing = Publishing(PublishOptions())
    application = Application()
    application.batch = publishing.add(3, 1, application.note_answered)
    assert publishing.sent_runs(0.0) == [[3]]
    publishing.add(3, 1, application.note_answered)
    if is_answered:
        opaque = publishing.bundles[0].opaque
        publishing.server.send(MutateReply(0, (RunResult(PartitionId(3), 0),), opaque=opaque))
        publishing.carry()
    assert application.is_told == is_answered
    publishing.close()
    reference = ref(application)
    with no_collections():
        del application
        assert reference() is None


def test_what_waits_for_a_disk_does_not_keep_others_waiting() -> None:
    publishing = Publishing(PublishOptions(durability=Durability.PERSISTED, linger_s=0.005))
    for partition in range(BUSY_NODE_ROWS // BUNDLE_MUTATIONS):
        publishing.add(partition, BUNDLE_MUTATIONS)
    assert publishing.sent_runs(0.0) == [[0, 1], [2, 3]]
    publishing.add(60, 1)
    assert publishing.sent_runs(0.0) == []
    assert publishing.node.send_at == 0.005
    assert publishing.sent_runs(0.005) == [[60]]
