"""Long work of a replica is done in steps, so that other tasks can run between them."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
import trio
from trio.testing import MockClock

from tests.kit.answer_rows import unpack_rows
from tests.kit.fake_server import BUCKET
from tests.kit.placed_keys import key_in
from tests.kit.process import eventually
from tests.kit.steps import LargestStep
from tests.replication.fake_source import LOST, PARTITION, Replica, replica
from upr_protocol.ids import (
    PartitionId,
    SeqNo,
)
from upr_protocol.partition_map import Assignment
from upr_server.engine.mutate_result import pack_result
from upr_server.engine.publisher_answers import BATCHES_MAX
from upr_server.replication.received_answers import STEP_ANSWER_BYTES
from upr_server.replication.received_snapshots import PublisherAnswer, ReceivedSnapshots
from upr_server.replication.replica_writer import (
    COLLECTED_PARTITIONS,
    NOTIFIED_BYTES,
    NOTIFIED_CHUNK_BYTES,
)
from upr_server.replication.roles import STEP_PARTITIONS
from upr_server.storage.calls import (
    LoadBuckets,
)
from upr_server.storage.errors import DiskFullError
from upr_server.storage.online.unsaved_answers import STEP_ANSWERS


class WritingSteps(trio.abc.Instrument):
    """Counts the steps of the task that writes what a replica received."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task.name.endswith("ReplicaWriter.run")


async def test_a_commit_of_many_partitions_is_collected_in_steps(
    autojump_clock: MockClock,
) -> None:
    """While a slow commit runs, the replica receives changes of all other partitions."""
    count = 32 * COLLECTED_PARTITIONS
    async with replica(count) as follower:
        await follower.assign(*[Assignment("a", {"b": ""})] * count)
        follower.store.commit_s = 5.0
        keys = [key_in(partition, count) for partition in range(count)]
        follower.source.put(keys[0], b"value")
        await trio.sleep(1)
        for key in keys[1:]:
            follower.source.put(key, b"value")
        await trio.sleep(1)
        steps = WritingSteps()
        trio.lowlevel.add_instrument(steps)
        await eventually(
            lambda: all(partition.high_seq for partition in follower.disk.bucket.partitions),
            "the disk has everything",
        )
        trio.lowlevel.remove_instrument(steps)
        assert steps.count > count // COLLECTED_PARTITIONS


async def test_what_a_full_disk_drops_is_dropped_in_steps(autojump_clock: MockClock) -> None:
    count = 32 * COLLECTED_PARTITIONS
    async with replica(count) as follower:
        await follower.assign(*[Assignment("a", {"b": ""})] * count)
        await trio.sleep(1)  # the logs are on disk
        follower.store.is_full = True
        follower.store.commit_s = 5.0
        for partition in range(count):
            follower.source.put(key_in(partition, count), b"value")
        await trio.sleep(1)
        steps = WritingSteps()
        trio.lowlevel.add_instrument(steps)
        with pytest.raises(DiskFullError):
            await follower.assign(*[Assignment("c")] * count)
        trio.lowlevel.remove_instrument(steps)
        assert steps.count > count // COLLECTED_PARTITIONS


class CountingSnapshots(dict[PartitionId, ReceivedSnapshots]):
    """Counts how often the received snapshots of a partition are looked up."""

    lookups = 0

    def __getitem__(self, partition_id: PartitionId) -> ReceivedSnapshots:
        self.lookups += 1
        return super().__getitem__(partition_id)


async def test_a_chunk_costs_the_same_however_many_partitions_wait_for_the_disk(
    autojump_clock: MockClock,
) -> None:
    """Before each chunk the replica compares the waiting bytes with its limit."""
    count = 32
    async with replica(count) as follower:
        await follower.assign(*[Assignment("a", {"b": ""})] * count)
        await trio.sleep(1)  # the logs are on disk
        follower.store.commit_s = 600.0
        keys = [key_in(partition, count) for partition in range(count)]
        follower.source.put(keys[0], b"value")
        await trio.sleep(1)
        replicators = follower.server.partition_maps._buckets[BUCKET].replicators
        (replicator,) = replicators._replicators.values()
        snapshots = CountingSnapshots(replicator._received_snapshots)
        for part in (replicator, replicator._writer, replicator._streams):
            part._received_snapshots = snapshots
        lookups: list[int] = []
        for key in keys[1:]:
            follower.source.put(key, b"value")
            await trio.sleep(1)
            lookups.append(snapshots.lookups)
        assert lookups[-1] - lookups[-2] == lookups[0]
        waiting_bytes = sum(part.nbytes for part in snapshots.values())
        assert replicator.statistics()["waiting_bytes"] == waiting_bytes > 0
        follower.store.commit_s = 0.0
        await trio.sleep(600)
        assert replicator.statistics()["waiting_bytes"] == 0


def answers_of(follower: Replica) -> int:
    """How many answers to publishers the replica remembers."""
    return len(follower.partition.repeated_batches.answers.answers_between(0, 1))


def answers_of_steps(count: int) -> tuple[PublisherAnswer, ...]:
    """So many answers that they are processed in `count` steps."""
    packed = pack_result(LOST)
    return tuple(
        (writer.to_bytes(16), counter, SeqNo(1), packed)
        for writer in range(1, count * STEP_ANSWERS // BATCHES_MAX + 1)
        for counter in range(BATCHES_MAX)
    )


async def test_many_answers_to_publishers_are_taken_in_steps(autojump_clock: MockClock) -> None:
    """A new replica receives the answers of a thousand publishers at once."""
    step_count = 4
    async with replica() as follower:
        follower.source.answers = answers_of_steps(step_count)
        largest_step = LargestStep(partial(answers_of, follower))
        trio.lowlevel.add_instrument(largest_step)
        await follower.receive(b"1")
        await follower.persist()
        trio.lowlevel.remove_instrument(largest_step)
        answers = follower.partition.repeated_batches.answers
        assert len(answers.answers_between(0, 1)) == step_count * STEP_ANSWERS
        assert largest_step.added_count == STEP_ANSWERS


async def test_many_answers_to_publishers_are_undone_in_steps(autojump_clock: MockClock) -> None:
    """The source has lost everything, and a partition may have 65,536 answers."""
    step_count = 2
    async with replica() as follower:
        follower.source.answers = answers_of_steps(step_count)
        await follower.receive(b"1")
        await follower.persist()
        assert answers_of(follower) == step_count * STEP_ANSWERS
        largest_step = LargestStep(lambda: -answers_of(follower))
        trio.lowlevel.add_instrument(largest_step)
        await follower.lose(0)
        await eventually(lambda: not answers_of(follower), "they are undone")
        trio.lowlevel.remove_instrument(largest_step)
        assert largest_step.added_count == STEP_ANSWERS
        (truncation,) = follower.store.truncations
        row_counts = [len(unpack_rows(rows)) for rows in truncation.answers]
        assert row_counts == [STEP_ANSWERS] * step_count
        (stored,) = (await follower.store.ask(LoadBuckets())).buckets
        assert not stored.partitions[PARTITION].tokens


async def test_answers_to_publishers_of_many_partitions_are_taken_in_steps(
    autojump_clock: MockClock,
) -> None:
    """The answers of one partition fit into a step; those of several together are too many for
    one."""
    count, writer_count = COLLECTED_PARTITIONS, STEP_ANSWERS // 8
    async with replica(count) as follower:
        await follower.assign(*[Assignment("a", {"b": ""})] * count)
        follower.store.commit_s = 5.0
        keys = [key_in(partition, count) for partition in range(count)]
        follower.source.put(keys[0], b"value")
        await trio.sleep(1)
        packed = pack_result(LOST)
        follower.source.answers = tuple(
            (writer.to_bytes(16), 1, 1, packed) for writer in range(1, writer_count + 1)
        )
        for key in keys[1:]:
            follower.source.put(key, b"value")
        partitions = follower.disk.bucket.partitions
        largest_step = LargestStep(lambda: sum(len(p.repeated_batches.answers) for p in partitions))
        trio.lowlevel.add_instrument(largest_step)
        await eventually(
            lambda: all(partition.high_seq for partition in partitions), "the disk has everything"
        )
        trio.lowlevel.remove_instrument(largest_step)
        assert largest_step.added_count == writer_count


async def test_large_answers_to_publishers_are_taken_in_more_steps(
    autojump_clock: MockClock,
) -> None:
    """Processing the answer to a thousand increments takes a hundred times as long as that to a few
    changes."""
    counters = [(index, index) for index in range(1000)]
    packed = pack_result(msgspec.structs.replace(LOST, counters=counters))
    count = 2 * STEP_ANSWER_BYTES // len(packed)
    async with replica() as follower:
        follower.source.answers = tuple(
            (writer.to_bytes(16), 1, 1, packed) for writer in range(1, count + 1)
        )
        largest_step = LargestStep(partial(answers_of, follower))
        trio.lowlevel.add_instrument(largest_step)
        await follower.receive(b"1")
        await follower.persist()
        trio.lowlevel.remove_instrument(largest_step)
        answers = follower.partition.repeated_batches.answers
        assert len(answers.answers_between(0, 1)) == count
        assert largest_step.added_count == count // 2 + 1


async def test_readers_of_many_committed_partitions_are_updated_in_steps(
    autojump_clock: MockClock,
) -> None:
    """After the commit each reader must continue from disk."""
    count = 8 * COLLECTED_PARTITIONS
    async with replica(count) as follower:
        await follower.assign(*[Assignment("a", {"b": ""})] * count)
        await trio.sleep(1)  # the logs are on disk
        partitions = follower.disk.bucket.partitions
        for partition in partitions:
            for _ in range(STEP_PARTITIONS):
                partition.manager.register("a reader", partition.high_seq)
        follower.source.paused = True
        for number in range(count):
            follower.source.put(key_in(number, count), b"value")
        steps = WritingSteps()
        trio.lowlevel.add_instrument(steps)
        follower.source.resume()
        await eventually(
            lambda: all(partition.high_seq for partition in partitions), "the disk has everything"
        )
        trio.lowlevel.remove_instrument(steps)
        assert steps.count > count


async def test_the_keys_of_a_large_commit_are_searched_in_steps(autojump_clock: MockClock) -> None:
    """A replica may receive 32 MiB of one partition before a slow commit ends."""
    count = 36
    async with replica() as follower:
        update_counts: list[int] = []
        follower.partition.updates._on_update = lambda _designs, updates: update_counts.append(
            updates
        )
        follower.source.chunk_mutations = 1
        follower.store.commit_s = 0.5
        for index in range(count):
            follower.source.put(b"%d" % index, bytes(4 * NOTIFIED_BYTES))
        largest_step = LargestStep(lambda: len(update_counts))
        trio.lowlevel.add_instrument(largest_step)
        await follower.persist()
        await trio.sleep(1)
        trio.lowlevel.remove_instrument(largest_step)
        assert len(update_counts) == count
        assert largest_step.added_count <= STEP_PARTITIONS // 4


async def test_many_small_chunks_of_a_snapshot_are_searched_in_steps(
    autojump_clock: MockClock,
) -> None:
    """If a source accepted changes one by one, its snapshot from disk has a chunk for each."""
    count = 800
    async with replica() as follower:
        update_counts: list[int] = []
        follower.partition.updates._on_update = lambda _designs, updates: update_counts.append(
            updates
        )
        source = follower.source
        source.chunk_mutations = 1
        source.paused = True
        for index in range(count):
            source.put(b"%d" % index, b"value")
        largest_step = LargestStep(lambda: len(update_counts))
        trio.lowlevel.add_instrument(largest_step)
        follower.store.commit_s = 5.0
        source.resume()
        await follower.persist()
        await trio.sleep(1)
        trio.lowlevel.remove_instrument(largest_step)
        assert len(update_counts) == count
        chunks_max = STEP_PARTITIONS * NOTIFIED_BYTES // NOTIFIED_CHUNK_BYTES
        assert largest_step.added_count <= chunks_max
