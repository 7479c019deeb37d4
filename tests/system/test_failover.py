"""Three nodes as processes: one after the other is killed, another takes its place, and it comes
back as a replica; publishers and consumers go on all the while.

Nothing that was acknowledged as replicated is lost. In the end all nodes and all consumers have the
same, and who undoes what was lost has undone no more than that. `UPR_FAILOVER_ROUNDS` says how many
rounds; a test of every day plays few.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import attrs
import pytest
import trio

from tests.kit.mirror import Mirror, apply_mutation, assert_same
from tests.kit.ports import free_port
from tests.kit.process import ServerProcess, eventually, server_process
from upr_protocol.chunk import Mutation
from upr_protocol.client import (
    Address,
    ChunkReceived,
    Consumer,
    Event,
    NodeClient,
    SnapshotEnd,
    StreamAccepted,
    connect,
    consume,
    publisher,
)
from upr_protocol.client.operator import (
    NotDoneError,
    Operator,
    TakeoverTimeouts,
    fail_over,
    take_over,
)
from upr_protocol.errors import UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import SEQ_MAX, Durability, HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.partition_map import Assignment, PartitionMap

ROUNDS: Final = int(os.environ.get("UPR_FAILOVER_ROUNDS", "2"))
BUCKET: Final = "b"
PARTITIONS: Final = 8
NAMES: Final = ("a", "b", "c")
LEVELS: Final = (
    (Durability.MEMORY, 0),
    (Durability.PERSISTED, 0),
    (Durability.REPLICATED, 1),
    (Durability.REPLICATED_AND_PERSISTED, 1),
)


@attrs.define(eq=False)
class Node:
    """One node, through all its lives."""

    name: str
    folder: Path
    port: int = attrs.field(factory=free_port)
    server: ServerProcess | None = None
    _leave: trio.Event = attrs.field(factory=trio.Event)
    _left: trio.Event = attrs.field(factory=trio.Event)

    @property
    def address(self) -> Address:
        """Where its bucket is."""
        return Address.parse(f"upr://127.0.0.1:{self.port}/{BUCKET}")

    async def start(self, nursery: trio.Nursery) -> None:
        """Starts it, with what is in its folder."""
        self._leave, self._left = trio.Event(), trio.Event()
        started = trio.Event()
        nursery.start_soon(self._run, started)
        await started.wait()

    async def _run(self, started: trio.Event) -> None:
        async with server_process(
            "--node", self.name, listen=f"127.0.0.1:{self.port}", data_dir=self.folder
        ) as server:
            self.server = server
            started.set()
            await self._leave.wait()
        self._left.set()

    def pause(self) -> None:
        """Has it do nothing any more, without an end to its connections."""
        assert self.server is not None
        self.server.process.send_signal(signal.SIGSTOP)

    async def kill(self) -> None:
        """Ends it as a crash would."""
        assert self.server is not None
        self.server.kill()
        await self.server.wait()
        await self.stop()

    async def stop(self) -> None:
        """Ends it, cleanly if it is still there."""
        self.server = None
        self._leave.set()
        await self._left.wait()


@attrs.define(eq=False)
class Cluster:
    """The nodes, and who starts them."""

    nodes: dict[str, Node]
    nursery: trio.Nursery

    @property
    def url(self) -> str:
        """All nodes; any of them will do."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes.values())
        return f"upr://{hosts}/{BUCKET}"

    @property
    def up(self) -> list[Node]:
        """Those that are there."""
        return [node for node in self.nodes.values() if node.server is not None]

    def operator(self) -> Operator:
        """Somebody who gives commands at a node that is up."""
        return Operator(self.up[0].address)

    async def map(self) -> PartitionMap:
        """The newest map."""
        maps = [(await NodeClient(node.address).status()).map for node in self.up]
        return max(
            (partition_map for partition_map in maps if partition_map is not None),
            key=lambda partition_map: partition_map.revision,
        )

    async def quiet(self) -> None:
        """Waits until every node has what the actives have."""
        deadline = trio.current_time() + 60
        while not await self._is_quiet():
            assert trio.current_time() < deadline, "the nodes have not come to rest"
            await trio.sleep(0.05)

    async def _is_quiet(self) -> bool:
        newest = await self.map()
        rows: dict[int, set[tuple[object, ...]]] = {}
        for node in self.up:
            async with connect(node.address, follow_map=False) as client:
                for info in client.partitions():
                    state = newest.partitions[info.partition].state_of(node.name)
                    if info.state is not state:
                        return False
                    rows.setdefault(info.partition, set()).add((info.high_seq, info.log))
        return all(len(row) == 1 for row in rows.values())


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    """Three nodes, each active for a third of the partitions, each a replica of the others."""
    async with trio.open_nursery() as nursery:
        new_cluster = Cluster({name: Node(name, folder / name) for name in NAMES}, nursery)
        for node in new_cluster.nodes.values():
            await node.start(nursery)
        first = new_cluster.nodes["a"]
        async with connect(attrs.evolve(first.address, bucket="")) as client:
            await client.create_bucket(BUCKET, partition_count=PARTITIONS)
        assignments = []
        for partition in range(PARTITIONS):
            active = NAMES[partition % len(NAMES)]
            assignments.append(Assignment(active, {name: "" for name in NAMES if name != active}))
        first_map = PartitionMap(
            bucket=BUCKET,
            revision=1,
            nodes={name: f"127.0.0.1:{node.port}" for name, node in new_cluster.nodes.items()},
            partitions=tuple(assignments),
        )
        for node in new_cluster.nodes.values():
            await NodeClient(node.address).set_map(0, first_map)
        # "a" was active for all partitions: without their copies it counts for no failover.
        await new_cluster.quiet()
        yield new_cluster
        for node in new_cluster.up:
            await node.stop()


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


async def caught_up(running: Cluster) -> None:
    """Waits until every replica follows again: what is acknowledged from here on has two copies
    among any two nodes."""
    newest = await running.map()
    deadline = trio.current_time() + 60
    while True:
        behind = 0
        for node in running.up:
            async with connect(node.address, follow_map=False) as client:
                for info in client.partitions():
                    assignment = newest.partitions[info.partition]
                    if assignment.active == node.name:
                        rows = await client.seqnos([info.partition])
                        behind += rows[0].high_seq - rows[0].replicated_seq > 2000
                        behind += info.state is not PartitionState.ACTIVE
                    else:
                        behind += info.state is not PartitionState.REPLICA
        if not behind:
            return
        assert trio.current_time() < deadline, "the replicas do not catch up"
        await trio.sleep(0.05)


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
