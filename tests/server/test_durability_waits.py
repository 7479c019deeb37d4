"""What a connection waits for: each wait is answered once, when it is time, and some in a step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.engine.helpers import new_bucket, put
from upr_protocol.concurrency import Notifier
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import Durability, HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.wire import Await, AwaitReply, Message
from upr_server.engine import Bucket
from upr_server.net import durability_waits
from upr_server.net.durability_waits import (
    ANSWER_COST,
    STEP_COST,
    WAIT_BYTES,
    DurabilityWaits,
)
from upr_server.net.replies import DurabilityTarget
from upr_server.net.turns import Turns

HIGH: Final = 9
PARTITIONS: Final = 2
COPIES: Final = (1, 2)


@attrs.define
class Owed:
    """What a connection has waiting.

    Attributes:
        nbytes: How many bytes that are.
    """

    nbytes: int = 0

    def reply_owed(self, nbytes: int) -> None:
        self.nbytes += nbytes

    def reply_sent(self, nbytes: int) -> None:
        self.nbytes -= nbytes


@attrs.define
class Client:
    """A connection that notes its answers.

    Attributes:
        nursery: Where its tasks run.
        bucket: The bucket that it opened; None once that was deleted.
        answers: By the number of the request, the number that was reached, or why it was refused.
        faults: Requests that failed.
        backlog: What it has waiting.
    """

    nursery: trio.Nursery
    bucket: Bucket | None
    answers: dict[int, int | Status] = attrs.field(factory=dict)
    faults: int = 0
    backlog: Owed = attrs.field(factory=Owed)

    def start_task(self, task: Callable[[], Awaitable[None]]) -> None:
        self.nursery.start_soon(task)

    def send(self, message: Message) -> None:
        assert isinstance(message, AwaitReply)
        assert message.opaque not in self.answers
        self.answers[message.opaque] = message.seq

    def refuse_for(self, request: Message, error: ServerError) -> None:
        assert request.opaque not in self.answers
        self.answers[request.opaque] = error.status

    def fail_in(self, kind: type[Message]) -> None:
        assert kind is Await
        self.faults += 1

    def wake(self) -> None:
        pass


@attrs.define
class Disk:
    progress: Notifier = attrs.field(factory=Notifier)


class Waiting:
    """The waits of a client, beside a model of them: a list."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.bucket = new_bucket(PARTITIONS)
        for partition in self.bucket.partitions:
            put(partition, *(b"%d" % number for number in range(HIGH)))
        self.disk, self.client = Disk(), Client(nursery, self.bucket)
        self.waits = DurabilityWaits(self.client, self.disk, Turns())
        self.model: list[tuple[int, int, int, int, HistoryId, float]] = []
        """Opaque, partition, number, copies, history, and deadline of each that waits."""
        self.expected: dict[int, int | Status] = {}
        self.asked = 0

    def target(self, copies: int) -> DurabilityTarget:
        return DurabilityTarget(Durability.REPLICATED, copies)

    def wait(self, place: int, seq: int, copies: int, time_s: float) -> None:
        partition = self.bucket.partitions[place]
        if self.target(copies).reached_seq(partition) >= seq:
            return
        self.asked += 1
        history, deadline = partition.failover_log.current, trio.current_time() + time_s
        request = Await(
            history, SeqNo(seq), int(time_s * 1000), Durability.REPLICATED, copies,
            partition=PartitionId(place), opaque=self.asked,
        )  # fmt: skip
        self.waits.add(request, partition, self.target(copies), deadline)
        self.model.append((self.asked, place, seq, copies, history, deadline))

    def report(self, place: int, replica: str, seq: int) -> None:
        self.bucket.partitions[place].replicas.report(replica, SeqNo(seq), SeqNo(0))
        self.disk.progress.notify()

    def begin_history(self, place: int) -> None:
        """As in a failover: nobody tells the waits of it."""
        partition = self.bucket.partitions[place]
        history = HistoryId(1000 + self.asked + len(partition.failover_log.entries))
        log = partition.failover_log.with_branch(history, partition.high_seq)
        partition.change_state(PartitionState.ACTIVE, log)

    def stop_serving(self, place: int) -> None:
        partition = self.bucket.partitions[place]
        partition.change_state(PartitionState.DEAD, partition.failover_log)

    async def check(self) -> None:
        await wait_all_tasks_blocked()
        self.waits.check_invariants()
        assert self.client.backlog.nbytes == len(self.waits) * WAIT_BYTES
        remaining = []
        for wait in self.model:
            opaque, place, seq, copies, history, deadline = wait
            partition = self.bucket.partitions[place]
            reached = self.target(copies).reached_seq(partition)
            if opaque in self.client.answers:
                answer = self.client.answers[opaque]
                if partition.failover_log.current != history:
                    assert answer is Status.HISTORY_CHANGED
                elif reached >= seq:
                    assert answer == reached
                elif partition.state is PartitionState.DEAD:
                    assert answer is Status.NOT_MY_PARTITION
                else:
                    assert deadline <= trio.current_time()
                    assert answer is Status.TIMED_OUT
            else:
                assert deadline > trio.current_time()
                assert reached < seq
                remaining.append(wait)
        self.model = remaining
        assert len(self.waits) == len(remaining)
        assert not self.client.faults


STEPS: Final = st.one_of(
    st.tuples(
        st.just("wait"),
        st.integers(0, PARTITIONS - 1),
        st.integers(1, HIGH),
        st.sampled_from(COPIES),
        st.sampled_from((0.0, 0.25, 0.5, 5.0)),
    ),
    st.tuples(
        st.just("report"),
        st.integers(0, PARTITIONS - 1),
        st.sampled_from("ab"),
        st.integers(0, HIGH),
    ),
    st.tuples(st.just("begin_history"), st.integers(0, PARTITIONS - 1)),
    st.tuples(st.just("stop_serving"), st.integers(0, PARTITIONS - 1)),
    st.tuples(st.just("time"), st.sampled_from((0.25, 0.75, 2.0))),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_each_wait_is_answered_when_it_is_time(steps: list[tuple[object, ...]]) -> None:
    async def run() -> None:
        async with trio.open_nursery() as nursery:
            waiting = Waiting(nursery)
            for name, *arguments in steps:
                if name == "time":
                    (seconds,) = arguments
                    assert isinstance(seconds, float)
                    await trio.sleep(seconds)
                else:
                    getattr(waiting, str(name))(*arguments)
                await waiting.check()
            # What is hopeless ends within a second, though nobody tells of it.
            await trio.sleep(durability_waits.LOOK_AGAIN_S + 0.1)
            await waiting.check()
            for _, place, _, _, history, _ in waiting.model:
                partition = waiting.bucket.partitions[place]
                assert partition.failover_log.current == history
                assert partition.state is PartitionState.ACTIVE
            await trio.sleep(6.0)
            await waiting.check()
            # Its task ends by itself.
            assert not waiting.model

    trio.run(run, clock=MockClock(autojump_threshold=0))


class LongestStep(trio.abc.Instrument):
    """The most answers that one step has made."""

    def __init__(self, client: Client) -> None:
        self.longest = 0
        self._client = client
        self._count = 0

    def after_task_step(self, _task: trio.lowlevel.Task) -> None:
        self.longest = max(self.longest, len(self._client.answers) - self._count)
        self._count = len(self._client.answers)


@pytest.mark.parametrize("end", ["reached", "late", "history", "deleted"])
async def test_thousands_of_waits_are_answered_some_in_each_step(
    autojump_clock: MockClock, end: str
) -> None:
    async with trio.open_nursery() as nursery:
        waiting = Waiting(nursery)
        for _ in range(1000):
            waiting.wait(0, 3, 1, 5.0 if end == "late" else 100.0)
        await wait_all_tasks_blocked()
        step = LongestStep(waiting.client)
        trio.lowlevel.add_instrument(step)
        if end == "reached":
            waiting.report(0, "a", 3)
        elif end == "history":
            waiting.begin_history(0)
        elif end == "deleted":
            waiting.client.bucket = None
        await trio.sleep(6.0)
        trio.lowlevel.remove_instrument(step)
        expected = {
            "reached": 3, "late": Status.TIMED_OUT, "history": Status.HISTORY_CHANGED,
            "deleted": Status.NO_BUCKET,
        }[end]  # fmt: skip
        assert set(waiting.client.answers.values()) == {expected}
        assert len(waiting.client.answers) == 1000
        assert step.longest <= STEP_COST // ANSWER_COST


async def test_waits_of_many_connections_have_their_turns(autojump_clock: MockClock) -> None:
    """One connection's waits are answered in a turn of the loop."""
    turns, disk = Turns(), Disk()
    answered_in: list[int] = []
    turn = 0

    class Turn(trio.abc.Instrument):
        def before_io_wait(self, timeout: float) -> None:
            nonlocal turn
            turn += 1

    class NotingClient(Client):
        def send(self, message: Message) -> None:
            super().send(message)
            answered_in.append(turn)

    bucket = new_bucket(1)
    (partition,) = bucket.partitions
    put(partition, b"a")
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            waits = DurabilityWaits(NotingClient(nursery, bucket), disk, turns)
            request = Await(
                partition.failover_log.current, SeqNo(1), 5000, Durability.REPLICATED, 1,
                partition=PartitionId(0), opaque=1,
            )  # fmt: skip
            target = DurabilityTarget(Durability.REPLICATED, 1)
            waits.add(request, partition, target, trio.current_time() + 5.0)
        await wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(Turn())
        partition.replicas.report("a", SeqNo(1), SeqNo(0))
        disk.progress.notify()
    assert len(answered_in) == 20
    assert len(set(answered_in)) == 20
