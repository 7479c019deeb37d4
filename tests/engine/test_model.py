"""The engine against the naive model, for any interleaving of writers, readers and collapsing."""

from __future__ import annotations

from itertools import count
from typing import Final

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.helpers import get_item
from tests.engine.model import Model, Reader, check_result, contents
from tests.engine.strategies import EXPIRIES, KEYS, SIZES, SOME_KEYS, VALUES, requests
from tests.kit.effort import effort
from upr_protocol.chunk import Chunk, Mutation, chunk_of_plain_sets
from upr_protocol.ids import Cas, HistoryId, Operation, SeqNo
from upr_server.engine import Bucket, batch_of

PROFILE: Final = settings(
    max_examples=effort(50, 100),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Engine(RuleBasedStateMachine):
    """What both machines have: a partition, a model, readers."""

    def __init__(self) -> None:
        super().__init__()
        histories = count(1)
        self.bucket = Bucket(
            "b", new_history_id=lambda: HistoryId(next(histories)), partition_count=1
        )
        self.partition = self.bucket.partitions[0]
        self.manager = self.partition.manager
        self.model = Model()
        self.readers: list[Reader] = []
        self.time = 100.0

    def write(self, rows: list[Mutation], chunk: Chunk) -> None:
        before = self.model.high
        cas_before = self.partition.last_cas
        result = self.partition.mutate(batch_of(chunk), now=self.time)
        failures, counters = self.model.mutate(rows, self.time, {})
        assert (result.failures, result.counters) == (failures, counters)
        check_result(result, len(rows), before, self.model.high)
        assert result.first_cas > cas_before
        assert self.partition.high_seq == self.model.high

    def sets(self, data: st.DataObject, size: int) -> None:
        first = data.draw(st.integers(0, len(KEYS) - 1))
        step = data.draw(st.sampled_from([0, 1, 3, 7]))
        keys = [KEYS[(first + step * index) % len(KEYS)] for index in range(size)]
        value = data.draw(VALUES)
        rows = [Mutation(Operation.SET, key, value) for key in keys]
        self.write(rows, chunk_of_plain_sets(keys, [value] * size))

    def reader(self, data: st.DataObject) -> Reader:
        return data.draw(st.sampled_from(self.readers))

    # Rules of both.

    @rule(data=st.data(), size=SIZES)
    def write_sets(self, data: st.DataObject, size: int) -> None:
        self.sets(data, size)

    @rule(rows=st.lists(st.tuples(SOME_KEYS, VALUES, st.booleans()), min_size=1, max_size=80))
    def write_and_delete(self, rows: list[tuple[bytes, bytes, bool]]) -> None:
        requests = [
            Mutation(
                Operation.DELETE if is_deleted else Operation.SET, key, b"" if is_deleted else value
            )
            for key, value, is_deleted in rows
        ]
        self.write(requests, Chunk.build(requests))

    @rule(share=st.floats(0, 1))
    def register(self, share: float) -> None:
        oldest = self.manager.snapshots.oldest_start
        start = oldest + round(share * (self.model.high - oldest))
        self.readers.append(Reader(self.partition, self.model, start))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), steps=st.integers(1, 6))
    def read(self, data: st.DataObject, steps: int) -> None:
        reader = self.reader(data)
        for _ in range(steps):
            reader.step()

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def read_all(self, data: st.DataObject) -> None:
        self.reader(data).drain()

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.reader(data).cut()

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        reader = self.reader(data)
        self.readers.remove(reader)
        reader.cursor.close()

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), times=st.integers(8, 20))
    def write_and_read(self, data: st.DataObject, times: int) -> None:
        """Leaves a snapshot behind each time, so that there is something to collapse."""
        reader = self.reader(data)
        first = data.draw(st.integers(0, len(KEYS) - 1))
        for index in range(times):
            key = KEYS[(first + index) % len(KEYS)]
            self.write(
                [Mutation(Operation.SET, key, b"%d" % index)],
                chunk_of_plain_sets([key], [b"%d" % index]),
            )
            reader.drain()

    @rule()
    def consider_short_runs(self) -> None:
        for partition in self.bucket.partitions:
            partition.manager.consider_short_runs()

    @rule()
    def join_unwritten(self) -> None:
        for partition in self.bucket.partitions:
            partition.manager.join_unwritten()

    @precondition(lambda self: self.bucket.needs_collapse)
    @rule(budget=st.sampled_from([1, 50, 100_000]))
    def collapse(self, budget: int) -> None:
        self.bucket.collapse_step(budget)

    @invariant()
    def whole(self) -> None:
        self.bucket.check_invariants()

    def teardown(self) -> None:
        for reader in self.readers:
            reader.drain()
        self.bucket.check_invariants()


class EveryOperation(Engine):
    """All operations and expiry, everything in memory."""

    @rule(rows=st.lists(requests(), max_size=40))
    def write_anything(self, rows: list[Mutation]) -> None:
        self.write(rows, Chunk.build(rows))

    @rule(keys=st.lists(SOME_KEYS, min_size=1, max_size=90), expiry=EXPIRIES)
    def write_expiring(self, keys: list[bytes], expiry: int) -> None:
        rows = [Mutation(Operation.SET, key, b"for a while", expiry=expiry) for key in keys]
        self.write(rows, Chunk.build(rows))

    @rule(data=st.data(), keys=st.lists(SOME_KEYS, min_size=1, max_size=30))
    def write_with_cas(self, data: st.DataObject, keys: list[bytes]) -> None:
        rows = []
        cas_of = {}
        for key in dict.fromkeys(keys):
            item = get_item(self.partition, key, self.time)
            if item is not None:
                cas = Cas(item.cas + data.draw(st.sampled_from([0, 0, 1])))
                cas_of[key] = int(item.cas)
                rows.append(Mutation(Operation.SET, key, b"seen", cas=cas))
        result = self.partition.mutate(batch_of(Chunk.build(rows)), now=self.time)
        assert (result.failures, result.counters) == self.model.mutate(rows, self.time, cas_of)

    @rule(seconds=st.sampled_from([0.5, 3, 20]))
    def wait(self, seconds: float) -> None:
        self.time += seconds
        for key in KEYS:
            item = self.model.live(key, self.time)
            row = get_item(self.partition, key, self.time)
            assert (row is None) == (item is None)

    @rule()
    def expire(self) -> None:
        assert self.partition.expire(self.time) == self.model.expire(self.time)
        due = self.partition.next_expiry()
        times = [row.expiry for row in self.model.now.values() if row.expiry]
        assert due == min(times, default=None)

    @rule(keys=st.lists(SOME_KEYS, max_size=8))
    def get(self, keys: list[bytes]) -> None:
        rows = self.partition.get(keys, self.time)
        assert [row.key for row in rows] == keys
        for row in rows:
            item = self.model.live(row.key, self.time)
            if item is None:
                assert (row.op, row.seq) == (Operation.DELETE, 0)
            else:
                assert row.op == Operation.SET
                assert contents({row.key: row}) == contents({row.key: item})


class Persisted(Engine):
    """Sets and deletes, with a disk that commits, and cursors that are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Reader(self.partition, self.model, 0, "disk")
        self.disk.cursor.close()
        self.disk.cursor = self.manager.persistence
        self.manager.persistence.subscribe(self.disk.wake)
        self.ends: list[int] = []

    @rule(steps=st.integers(1, 12))
    def persist(self, steps: int) -> None:
        for _ in range(steps):
            snapshots = self.disk.snapshots
            self.disk.step()
            if self.disk.snapshots > snapshots:
                self.ends.append(self.disk.seq)

    @precondition(lambda self: self.ends)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.ends) - 1))
        through = SeqNo(self.ends[index])
        del self.ends[: index + 1]
        self.manager.persistence.commit(through)
        assert self.manager.persistence.committed_seq == through

    @rule()
    def begin_at_the_beginning(self) -> None:
        self.readers.append(Reader(self.partition, self.model, 0))

    @rule(times=st.integers(1, 5))
    def free(self, times: int) -> None:
        for _ in range(times):
            oldest, could = self.manager.snapshots.oldest_start, self.manager.snapshots.can_free
            assert (
                self.manager.free_oldest()
                == could
                == (self.manager.snapshots.oldest_start > oldest)
            )

    @precondition(lambda self: self.manager.droppable_cursors())
    @rule()
    def drop_furthest_back(self) -> None:
        droppable_cursors = self.manager.droppable_cursors()
        entries = {cursor.oldest_entry for cursor in droppable_cursors}
        assert len(entries) == 1
        for cursor in droppable_cursors:
            assert cursor is not self.manager.persistence
            assert cursor.oldest_entry.start < self.manager.persistence.committed_seq
        assert self.manager.drop_furthest_back()
        assert not set(droppable_cursors) & set(self.manager.snapshots.cursors)

    @invariant()
    def nothing_uncommitted_is_freed(self) -> None:
        assert self.manager.snapshots.oldest_start <= self.manager.persistence.committed_seq


TestEveryOperation = EveryOperation.TestCase
TestEveryOperation.settings = PROFILE
TestPersisted = Persisted.TestCase
TestPersisted.settings = PROFILE
