"""Long seeded runs against the naive model, with batches as large as they come in service.

What Hypothesis' short runs seldom reach happens here in every run, and each run shows that it did.
"""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from tests.engine.helpers import get_item
from tests.engine.model import Model, Reader, check_result, contents
from tests.kit.effort import effort
from upr_protocol.chunk import Chunk, CounterDelta, Mutation, chunk_of_plain_sets
from upr_protocol.ids import HistoryId, Operation, SeqNo
from upr_server.engine import Bucket, batch_of


class Run:
    """One partition under load, with readers at different speeds."""

    def __init__(self, seed: int, keys: int, counters: bool = True) -> None:
        self.random = Random(seed)
        histories = count(1)
        self.bucket = Bucket(
            "b", new_history_id=lambda: HistoryId(next(histories)), partition_count=1
        )
        self.partition = self.bucket.partitions[0]
        self.manager = self.partition.manager
        self.model = Model()
        self.readers: list[Reader] = []
        self.keys = [b"key %d" % index for index in range(keys)]
        self.counters = counters
        self.sizes = [1, 3, 16, 64, 300, 1000, 3000]
        self.rewritten = 0
        self.collapsed = 0

    def write(self) -> None:
        random = self.random
        kind = random.random()
        before = self.model.high
        if kind < 0.7 or not self.counters:
            size = random.choice(self.sizes)
            keys = random.choices(self.keys, k=size)
            values = [random.randbytes(random.choice([0, 4, 60])) for _ in keys]
            rows = [
                Mutation(Operation.SET, key, value) for key, value in zip(keys, values, strict=True)
            ]
            chunk = chunk_of_plain_sets(keys, values)
        else:
            ops = [Operation.SET, Operation.DELETE, Operation.INCREMENT]
            rows = []
            for key in random.choices(self.keys, k=random.choice([1, 20, 400])):
                op = random.choice(ops)
                value = CounterDelta(3).encode() if op == Operation.INCREMENT else b"1"
                rows.append(Mutation(op, key, value))
            chunk = Chunk.build(rows)
        result = self.partition.mutate(batch_of(chunk), now=100)
        assert (result.failures, result.counters) == self.model.mutate(rows, 100, {})
        check_result(result, len(rows), before, self.model.high)

    def step(self) -> None:
        random = self.random
        action = random.random()
        rewritten = self.manager.snapshots.open.statistics()["rewritten"]
        if action < 0.45:
            self.write()
            self.rewritten += self.manager.snapshots.open.statistics()["rewritten"] - rewritten
        elif action < 0.5:
            start = random.randint(self.manager.snapshots.oldest_start, self.model.high)
            self.readers.append(Reader(self.partition, self.model, start))
        elif action < 0.53 and self.readers:
            random.choice(self.readers).cut()
        elif action < 0.56 and len(self.readers) > 6:
            self.readers.pop(random.randrange(len(self.readers))).cursor.close()
        elif action < 0.8 and self.readers:
            reader = random.choice(self.readers)
            for _ in range(random.choice([1, 3, 100])):
                reader.step()
        else:
            self.bucket.collapse_step(random.choice([100, 5000]))


@pytest.mark.parametrize(
    ("seed", "keys", "steps"),
    effort(
        [(1, 5, 200), (2, 60, 200), (3, 800, 150), (4, 5000, 60)],
        [(1, 5, 400), (2, 60, 400), (3, 800, 300), (4, 5000, 250)],
    ),
)
def test_readers_see_what_the_model_says(seed: int, keys: int, steps: int) -> None:
    run = Run(seed, keys)
    for index in range(steps):
        run.step()
        if index % 10 == 0:
            run.bucket.check_invariants()
    for reader in run.readers:
        reader.drain()
        assert reader.snapshots
    while run.bucket.needs_collapse:
        run.bucket.collapse_step()
    run.bucket.check_invariants()
    last = Reader(run.partition, run.model, 0)
    last.drain()
    items = {key: get_item(run.partition, key, 100) for key in run.model.now}
    assert {key: item and item.value for key, item in items.items()} == {
        key: row.value for key, row in run.model.now.items()
    }
    # A run in which nothing of this happened would show nothing.
    assert run.rewritten or keys > 1000
    assert run.manager.statistics()["collapses"]


@pytest.mark.parametrize(
    ("keys", "sizes"), [(1, [1, 5]), (50, [20]), (50, [1000]), (2000, [7, 60]), (2000, [1, 3000])]
)
def test_unread_mutations_take_the_memory_of_the_live_keys(keys: int, sizes: list[int]) -> None:
    run = Run(7, keys, counters=False)
    run.sizes = sizes
    while run.model.high < 40_000:
        run.write()
    assert len(run.manager.snapshots) == 1, "nobody read, so there is one snapshot"
    live = sum(33 + len(key) + len(row.value) for key, row in run.model.now.items())
    # Three times what is live, the slack, and the last batch.
    assert run.bucket.memory.arrays < 3 * live + 2 * 64 * 1024 + 80 * max(sizes)
    assert run.manager.snapshots.open.statistics()["window"] < 8192 + 4 * keys + 4000
    run.bucket.check_invariants()


def test_collapsing_keeps_read_snapshots_near_the_size_of_the_live_keys() -> None:
    run = Run(8, 1500, counters=False)
    reader = Reader(run.partition, run.model, 0)
    most = 0
    for _ in range(200):
        run.write()
        reader.drain()
        while run.bucket.needs_collapse:
            run.bucket.collapse_step(500)
        most = max(most, len(run.manager.snapshots))
    run.bucket.check_invariants()
    live = sum(33 + len(key) + len(row.value) for key, row in run.model.now.items())
    assert run.bucket.memory.encoded < 3 * live + 1_000_000
    assert most < 40
    newcomer = Reader(run.partition, run.model, 0)
    newcomer.drain()
    assert contents(newcomer.state) == contents(reader.state)


def test_a_disk_that_keeps_up_lets_a_small_bucket_stay_within_its_quota() -> None:
    run = Run(9, 300, counters=False)
    disk = Reader(run.partition, run.model, 0, "disk")
    disk.cursor.close()
    disk.cursor = run.manager.persistence
    run.manager.persistence.subscribe(disk.wake)
    for _ in range(50):
        run.write()
        disk.drain()
        run.manager.persistence.commit(SeqNo(disk.seq))
        while run.bucket.needs_collapse:
            run.bucket.collapse_step()
    memory = run.bucket.memory
    assert memory.encoded, "there was room"
    while run.manager.free_oldest():
        run.bucket.check_invariants()
    assert (memory.arrays, memory.encoded, memory.counters) == (0, 0, 0)
    assert len(run.manager.snapshots) == 1
    run.bucket.check_invariants()
