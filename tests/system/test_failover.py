"""Three nodes as processes: one after the other is killed, another takes its place, and it comes
back as a replica; publishers and consumers go on all the while.

Nothing that was acknowledged as replicated is lost. In the end all nodes and all consumers have the
same, and who undoes what was lost has undone no more than that. `UPR_FAILOVER_ROUNDS` says how many
rounds; a test of every day plays few.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import attrs
import pytest
import trio

from tests.kit.mirror import Mirror, apply_mutation, assert_same
from tests.kit.process import eventually
from tests.system.cluster import NAMES, PARTITIONS, Cluster, Node, caught_up, cluster
from upr_protocol.chunk import Mutation
from upr_protocol.client import (
    ChunkReceived,
    Consumer,
    Event,
    SnapshotEnd,
    StreamAccepted,
    connect,
    consume,
    publisher,
)
from upr_protocol.client.operator import (
    NotDoneError,
    TakeoverTimeouts,
    fail_over,
    take_over,
)
from upr_protocol.errors import UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import SEQ_MAX, Durability, HistoryId, PartitionId, PartitionState, SeqNo

ROUNDS: Final = int(os.environ.get("UPR_FAILOVER_ROUNDS", "2"))
LEVELS: Final = (
    (Durability.MEMORY, 0),
    (Durability.PERSISTED, 0),
    (Durability.REPLICATED, 1),
    (Durability.REPLICATED_AND_PERSISTED, 1),
)


@attrs.define
class AcknowledgedWrites:
    """What was sent, and what was acknowledged as replicated."""

    increments_sent: dict[bytes, int] = attrs.field(factory=dict)
    acknowledged: dict[bytes, int] = attrs.field(factory=dict)
    acknowledgements: int = 0

    def is_past(self, count: int) -> bool:
        """Whether more than `count` batches were acknowledged."""
        return self.acknowledgements > count


async def publish_all_the_while(
    url: str,
    writer: int,
    level: tuple[Durability, int],
    writes: AcknowledgedWrites,
    stopped: trio.Event,
) -> None:
    """Sets keys of its own to numbers that rise; what is acknowledged is noted."""
    draw = Random(writer)
    durability, copies = level
    while not stopped.is_set():
        try:
            async with publisher(
                url, durability=durability, copies=copies, retry_timeout_s=60
            ) as sender:
                while not stopped.is_set():
                    batch: dict[bytes, int] = {}
                    for _ in range(20):
                        key = b"%d of %d" % (draw.randrange(200), writer)
                        writes.increments_sent[key] = batch[key] = (
                            writes.increments_sent.get(key, 0) + 1
                        )
                        await sender.set(key, b"%d" % batch[key])
                    await sender.flush()
                    writes.acknowledgements += 1
                    if copies:
                        writes.acknowledged |= batch
                    await trio.sleep(0.005)
        except* UprError:
            # It gave up: what was under way is not noted.
            await trio.sleep(0.05)


@attrs.define(eq=False)
class Follower:
    """A consumer of the whole bucket, and what it has."""

    url: str
    state: PartitionState
    mirror: Mirror = attrs.field(factory=Mirror)
    consumer: Consumer | None = None

    async def run(self) -> None:
        """Follows, for ever."""
        async with consume(self.url, state=self.state, retry_timeout_s=120) as consumer:
            self.consumer = consumer
            async for event in consumer:
                self.mirror.apply(event)

    async def barrier(self) -> None:
        """Waits until it has all that there was."""
        assert self.consumer is not None
        with trio.fail_after(60):
            await self.consumer.barrier()


@attrs.define(eq=False)
class Undoer:
    """A consumer of the whole bucket that remembers all that it was sent, goes back when it is told
    to, and looks whether it had to go back so far."""

    url: str
    consumer: Consumer | None = None
    _sent: dict[PartitionId, list[Mutation]] = attrs.field(factory=dict)
    _ends: dict[PartitionId, list[tuple[SeqNo, HistoryId]]] = attrs.field(factory=dict)
    _logs: dict[PartitionId, FailoverLog] = attrs.field(factory=dict)
    _gone_back: dict[PartitionId, SeqNo] = attrs.field(factory=dict)

    async def run(self) -> None:
        """Follows, for ever."""
        async with consume(
            self.url, undo=self._undo, with_logs=True, retry_timeout_s=120
        ) as consumer:
            self.consumer = consumer
            async for event in consumer:
                self._apply(event)

    async def _undo(self, partition: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:
        below = (end for end, _ in self._ends.get(partition, ()) if end <= ceiling)
        to = min(max(below, default=SeqNo(0)), self._gone_back.get(partition, SEQ_MAX))
        self._gone_back[partition] = to
        return to

    def _apply(self, event: Event) -> None:
        if isinstance(event, ChunkReceived):
            self._sent.setdefault(event.partition, []).extend(event.chunk)
        elif isinstance(event, SnapshotEnd):
            branch = self._logs[event.partition].branch_of(event.end)
            self._ends.setdefault(event.partition, []).append((event.end, branch))
        elif isinstance(event, StreamAccepted):
            if event.partition in self._gone_back:
                self._check_depth(event, self._gone_back.pop(event.partition))
            self._logs[event.partition] = event.log

    def _check_depth(self, event: StreamAccepted, to: SeqNo) -> None:
        """The ends that the server has, too, by the names of the branches in which they were."""
        ends, mutations = self._ends.get(event.partition, []), self._sent.get(event.partition, [])
        common = [end for end, branch in ends if event.log.contains(branch, end)]
        assert to == max(common, default=0), (to, common[-3:], ends[-3:], event)
        ends[:] = [end for end in ends if end[0] <= to]
        mutations[:] = [mutation for mutation in mutations if mutation.seq <= to]

    @property
    def contents(self) -> dict[bytes, bytes]:
        """What it has."""
        items: dict[bytes, tuple[int, bytes]] = {}
        for mutations in self._sent.values():
            for mutation in mutations:
                apply_mutation(items, mutation)
        return {key: value for key, (_, value) in items.items()}

    async def barrier(self) -> None:
        """Waits until it has all that there was."""
        assert self.consumer is not None
        with trio.fail_after(60):
            await self.consumer.barrier()


async def contents(node: Node) -> dict[bytes, bytes]:
    """Everything that one node has, whatever it is for it."""
    mirror = Mirror()
    async with connect(node.address, follow_map=False) as client:
        states = {info.partition: info.state for info in client.partitions()}
    for state in (PartitionState.ACTIVE, PartitionState.REPLICA):
        numbers = [partition for partition, its_state in states.items() if its_state is state]
        if numbers:
            async with consume(
                node.address, partitions=numbers, state=state, end="now", follow_map=False
            ) as consumer:
                async for event in consumer:
                    mirror.apply(event)
    return mirror.contents


@pytest.mark.timeout(max(300, ROUNDS * 30))
async def test_nodes_are_killed_and_come_back(tmp_path: Path) -> None:
    draw, writes, stopped = Random(1), AcknowledgedWrites(), trio.Event()
    async with cluster(tmp_path) as running:
        followers = [Follower(running.url, PartitionState.ACTIVE) for _ in range(3)]
        followers.append(Follower(running.url, PartitionState.REPLICA))
        undoer = Undoer(running.url)
        async with trio.open_nursery() as consumers:
            consumers.start_soon(undoer.run)
            for follower in followers:
                consumers.start_soon(follower.run)
            async with trio.open_nursery() as publishers:
                for writer, level in enumerate(LEVELS):
                    publishers.start_soon(
                        publish_all_the_while, running.url, writer, level, writes, stopped
                    )
                for _ in range(ROUNDS):
                    await trio.sleep(draw.uniform(0, 0.3))
                    before = writes.acknowledgements
                    victim = running.nodes[draw.choice(NAMES)]
                    await victim.kill()
                    newest = await running.map()
                    if any(assignment.active == victim.name for assignment in newest.partitions):
                        await fail_over(running.operator(), all_of=victim.name)
                    await trio.sleep(draw.uniform(0, 0.2))
                    await victim.start(running.nursery)
                    await eventually(partial(writes.is_past, before + 8), "publishers go on")
                    # Otherwise a replica that is still being filled may be all that is left.
                    await caught_up(running)
                    await undoer.barrier()
                stopped.set()
            await running.quiet()
            items_of = {name: await contents(node) for name, node in running.nodes.items()}
            for name in NAMES[1:]:
                assert_same(items_of[name], items_of["a"], PARTITIONS)
            for follower in followers:
                await follower.barrier()
            await undoer.barrier()
            consumers.cancel_scope.cancel()
        for follower in followers:
            assert_same(follower.mirror.contents, items_of["a"], PARTITIONS)
        assert_same(undoer.contents, items_of["a"], PARTITIONS)
        for key, value in writes.acknowledged.items():
            assert int(items_of["a"].get(key, b"0")) >= value, (key, value, items_of["a"].get(key))
        for key, text in items_of["a"].items():
            assert int(text) <= writes.increments_sent[key], "nobody sent it"
        # Whether the one who died had anything that no other has is chance: what was sent arrives
        # although its sender is dead. tests/replication/test_replication.py sees to it.
        assert writes.acknowledged


async def test_a_takeover_of_all_partitions_under_load(tmp_path: Path) -> None:
    """No history is added, and nobody who publishes waits for long."""
    writes, stopped = AcknowledgedWrites(), trio.Event()
    async with cluster(tmp_path) as running, trio.open_nursery() as consumers:
        follower = Follower(running.url, PartitionState.ACTIVE)
        consumers.start_soon(follower.run)
        async with trio.open_nursery() as publishers:
            for writer, level in enumerate(LEVELS):
                publishers.start_soon(
                    publish_all_the_while, running.url, writer, level, writes, stopped
                )
            await eventually(lambda: writes.acknowledgements > 20, "there is load")
            logs = {}
            for node in running.up:
                async with connect(node.address, follow_map=False) as client:
                    for info in client.partitions():
                        if info.state is PartitionState.ACTIVE:
                            logs[info.partition] = info.log
            for name in ("b", "c", "a"):
                all_of_it = range(PARTITIONS)
                await take_over(running.operator(), to=name, partitions=all_of_it)
                before = writes.acknowledgements
                await eventually(partial(writes.is_past, before + 8), "they go on")
                newest = await running.map()
                assert all(assignment.active == name for assignment in newest.partitions)
            stopped.set()
        await running.quiet()
        async with connect(running.nodes["a"].address, follow_map=False) as client:
            for info in client.partitions():
                assert info.log == logs[info.partition], "no history was added"
        items = await contents(running.nodes["a"])
        await follower.barrier()
        consumers.cancel_scope.cancel()
    assert_same(follower.mirror.contents, items, PARTITIONS)
    for key, value in writes.acknowledged.items():
        assert int(items[key]) >= value


async def test_the_target_of_a_takeover_is_killed_in_the_middle(tmp_path: Path) -> None:
    """The source is active again, in its history, and publishers go on, without anybody's help."""
    writes, stopped = AcknowledgedWrites(), trio.Event()
    async with cluster(tmp_path) as running, trio.open_nursery() as consumers:
        follower = Follower(running.url, PartitionState.ACTIVE)
        consumers.start_soon(follower.run)
        target, operator = running.nodes["c"], running.operator()
        own_partitions = [
            partition for partition in range(PARTITIONS) if NAMES[partition % len(NAMES)] == "a"
        ]
        logs = await active_logs(running, own_partitions)
        async with trio.open_nursery() as publishers:
            for writer, level in enumerate(LEVELS):
                publishers.start_soon(
                    publish_all_the_while, running.url, writer, level, writes, stopped
                )
            await eventually(lambda: writes.acknowledgements > 20, "there is load")

            def record(line: str) -> None:
                if "hands over" in line:
                    target.pause()
                    publishers.start_soon(target.kill)

            operator = attrs.evolve(operator, on_progress=record)
            with pytest.raises(NotDoneError, match="a is active again"):
                await take_over(
                    operator,
                    to="c",
                    partitions=own_partitions,
                    timeouts=TakeoverTimeouts(handover_s=1.0),
                )
            assert await active_logs(running, own_partitions) == logs, "no history was added"
            await fail_over(running.operator(), all_of="c")
            before = writes.acknowledgements
            await eventually(partial(writes.is_past, before + 8), "publishers go on")
            await target.start(running.nursery)
            await caught_up(running)
            stopped.set()
        await running.quiet()
        items = await contents(running.nodes["c"])
        assert_same(items, await contents(running.nodes["a"]), PARTITIONS)
        await follower.barrier()
        consumers.cancel_scope.cancel()
    assert_same(follower.mirror.contents, items, PARTITIONS)
    for key, value in writes.acknowledged.items():
        assert int(items[key]) >= value


async def active_logs(running: Cluster, partitions: list[int]) -> dict[int, FailoverLog]:
    """The logs of those partitions for which "a" is active."""
    async with connect(running.nodes["a"].address, follow_map=False) as client:
        infos = [info for info in client.partitions() if info.partition in partitions]
    return {info.partition: info.log for info in infos if info.state is PartitionState.ACTIVE}
