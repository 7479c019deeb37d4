"""The engine with a disk behind it, against the naive model, which never evicts anything.

Items are evicted, fetched late, overwritten while they are fetched, expired by the disk's word, and
lost with what was not persisted; every answer must be the model's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import Any, Final, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.model import check_result, contents
from tests.engine.naive_disk import DiskModel, DiskReader, NaiveDisk
from tests.engine.strategies import EXPIRIES, VALUES, requests
from tests.kit.effort import effort
from upr_protocol.chunk import Chunk, CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Cas, HistoryId, Operation, SeqNo
from upr_server.engine import (
    Bucket,
    FetchedItems,
    FetchRequest,
    MemoryAction,
    MemoryPolicy,
    MutateResult,
    PartitionImage,
    WriterToken,
    batch_of,
)

PROFILE: Final = settings(
    max_examples=effort(60, 200),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
KEYS: Final = [b"key %d" % index for index in range(12)]
SOME_KEYS: Final = st.sampled_from(KEYS)
ROOM: Final = 1 << 30
CHOICES: Final = st.integers(0, 99)
T = TypeVar("T")


def chosen(things: Sequence[T], choice: int) -> T:
    return things[choice % len(things)]


class Asked:
    """A request that waits for the disk, with what was fetched so far."""

    def __init__(self, pin: int, fetch_requests: list[FetchRequest]) -> None:
        self.pin = pin
        self.missing = fetch_requests
        self.fetched: dict[bytes, Mutation | None] = {}


class AskedMutate(Asked):
    """A batch that waits."""

    def __init__(
        self,
        pin: int,
        fetch_requests: list[FetchRequest],
        rows: list[Mutation],
        token: WriterToken | None,
    ) -> None:
        super().__init__(pin, fetch_requests)
        self.rows = rows
        self.token = token


class AskedGet(Asked):
    """A read that waits."""

    def __init__(self, pin: int, fetch_requests: list[FetchRequest], keys: list[bytes]) -> None:
        super().__init__(pin, fetch_requests)
        self.keys = keys


class OnDisk(RuleBasedStateMachine):
    """One partition, its disk, its readers, and requests that wait for the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.histories = count(1)
        self.time = 100.0
        self.disk = NaiveDisk()
        self.model = DiskModel(self.knows)
        self.counters = [0, 0, 0]
        # All answers that were given and are not lost, and the high number then.
        self.answers: dict[WriterToken, MutateResult] = {}
        self.sent: dict[WriterToken, list[Mutation]] = {}
        self.start(None)

    def start(self, image: PartitionImage | None) -> None:
        self.bucket = Bucket(
            "b",
            new_history_id=lambda: HistoryId(next(self.histories)),
            partition_count=1,
            images=None if image is None else [image],
        )
        self.partition = self.bucket.partitions[0]
        self.partition.repeated_batches.answers.track_unsaved()
        self.manager = self.partition.manager
        self.readers: list[DiskReader] = []
        self.asked: list[AskedMutate | AskedGet] = []
        self.due: list[tuple[int, list[Mutation]]] = []
        self.known: dict[bytes, int] = {}

    def knows(self, row: Mutation) -> bool:
        return self.known.get(row.key) == row.seq

    def look(self) -> None:
        """Notes which items the memory knows before the next request."""
        self.known = {key: seq for key, seq, _ in self.partition.table}

    # What can be seen of the partition: a request that needs the disk first changes nothing of it.

    def picture(self) -> dict[str, Any]:
        partition = self.partition
        memory = self.bucket.memory.statistics()
        del memory["expiries"]  # stale entries may go whenever somebody looks
        figures = partition.statistics()
        del figures["expiring"]
        return {
            "table": list(partition.table),
            "cas": partition.last_cas,
            "memory": memory,
            "figures": figures,
        }

    # Requests.

    def mutate(
        self, rows: list[Mutation], token: WriterToken | None, fetched: FetchedItems
    ) -> list[FetchRequest]:
        """Has the batch taken in, unless something of it must be read from disk first."""
        partition, model = self.partition, self.model
        before, cas_before = model.high, partition.last_cas
        picture = self.picture()
        self.look()
        batch = batch_of(Chunk.build(rows), token)
        evaluation = partition.evaluate(batch, now=self.time)
        fetch_requests = [] if evaluation is None else evaluation.step(fetched)
        if fetch_requests:
            assert self.picture() == picture, "what must wait changes nothing"
            return fetch_requests
        result = partition.mutate(batch, now=self.time, evaluation=evaluation)
        self.check_answer(rows, token, result, (before, cas_before, picture))
        return []

    def check_answer(
        self,
        rows: list[Mutation],
        token: WriterToken | None,
        result: MutateResult,
        earlier: tuple[int, int, dict[str, Any]],
    ) -> None:
        """Whether the batch had the effect and the answer that the model gives it."""
        partition, model = self.partition, self.model
        before, cas_before, picture = earlier
        if token is not None and token in self.answers:
            assert result == msgspec.structs.replace(self.answers[token], is_repeated=True)
            assert self.picture() == picture
            return
        if result.status is Status.TOKEN_TOO_OLD:
            assert token is not None
            assert self.picture() == picture
            assert any(
                answered.writer == token.writer and answered.counter > token.counter
                for answered in self.answers
            )
            return
        cas_of = model.cas_of_all()
        failures, counters = model.mutate(rows, self.time, cas_of)
        assert (result.failures, result.counters) == (failures, counters)
        check_result(result, len(rows), before, model.high)
        assert result.first_cas > cas_before
        assert not result.is_repeated
        model.answered(result)
        if token is not None:
            self.answers[token] = result
        assert partition.high_seq == model.high

    def get(self, keys: list[bytes], fetched: FetchedItems) -> list[FetchRequest]:
        """Has the keys read, unless the first of them must be read from disk first."""
        picture = self.picture()
        fetch_requests = self.partition.missing_keys(keys, self.time, fetched)
        rows = [] if fetch_requests else self.partition.get(keys, self.time, fetched_items=fetched)
        assert self.picture() == picture, "a read changes nothing"
        if fetch_requests:
            return fetch_requests
        assert rows or not keys
        assert [row.key for row in rows] == keys[: len(rows)]
        for row in rows:
            item = self.model.live(row.key, self.time)
            self.check_item(item, row if row.seq else None)
        return []

    def check_item(self, item: Mutation | None, row: Mutation | None) -> None:
        if item is None or row is None:
            assert item is row
            return
        assert row.op == Operation.SET
        assert contents({row.key: row}) == contents({row.key: item})
        assert row.cas == self.model.cas[item.seq]

    def begin(self, rows: list[Mutation], token: WriterToken | None) -> None:
        fetch_requests = self.mutate(rows, token, {})
        if fetch_requests:
            pin = self.partition.eviction.pin()
            assert self.mutate(rows, token, {}) == fetch_requests, "nothing has changed"
            self.asked.append(AskedMutate(pin, fetch_requests, rows, token))

    def token(self, writer: int) -> WriterToken:
        self.counters[writer] += 1
        return WriterToken(bytes([writer]) * 16, self.counters[writer])

    # Rules: requests.

    @rule(
        rows=st.lists(requests(SOME_KEYS), min_size=1, max_size=8),
        writer=st.sampled_from([None, 0, 1]),
    )
    def ask_to_mutate(self, rows: list[Mutation], writer: int | None) -> None:
        token = None if writer is None else self.token(writer)
        if token is not None:
            self.sent[token] = rows
        self.begin(rows, token)

    @rule(key=SOME_KEYS, rows=st.lists(requests(st.just(b"")), min_size=1, max_size=4))
    def ask_of_one_key(self, key: bytes, rows: list[Mutation]) -> None:
        """Several operations on one key, some of which expect its CAS."""
        cas = Cas(self.model.cas_of_all().get(key, 12345))
        rows = [
            msgspec.structs.replace(row, key=key, cas=cas if row.cas else Cas(0)) for row in rows
        ]
        self.begin(rows, None)

    @rule(keys=st.lists(SOME_KEYS, min_size=1, max_size=12), expiry=EXPIRIES, value=VALUES)
    def store(self, keys: list[bytes], expiry: int, value: bytes) -> None:
        """Never needs the disk, and may overwrite what is being fetched."""
        rows = [Mutation(Operation.SET, key, value, expiry=expiry) for key in keys]
        assert not self.mutate(rows, None, {})

    @rule(keys=st.lists(SOME_KEYS, min_size=1, max_size=8))
    def ask_to_get(self, keys: list[bytes]) -> None:
        fetch_requests = self.get(keys, {})
        if fetch_requests:
            pin = self.partition.eviction.pin()
            assert self.get(keys, {}) == fetch_requests, "nothing has changed"
            self.asked.append(AskedGet(pin, fetch_requests, keys))

    @precondition(
        lambda self: self.asked and self.disk.indexed >= self.partition.eviction.restored_seq
    )
    @rule(choice=CHOICES, items=st.integers(1, 8))
    def fetch(self, choice: int, items: int) -> None:
        """Reads from the disk as it is now; what it knows may be more than the partition heard."""
        question = chosen(self.asked, choice)
        question.fetched |= self.disk.find(question.missing[:items])

    def ask_again(self, question: AskedMutate | AskedGet) -> list[FetchRequest]:
        if isinstance(question, AskedMutate):
            return self.mutate(question.rows, question.token, question.fetched)
        return self.get(question.keys, question.fetched)

    @precondition(lambda self: self.asked)
    @rule(choice=CHOICES)
    def answer(self, choice: int) -> None:
        question = chosen(self.asked, choice)
        question.missing = self.ask_again(question)
        if question.missing:
            return
        self.asked.remove(question)
        self.partition.eviction.unpin(question.pin)

    @precondition(lambda self: self.answers)
    @rule(choice=CHOICES)
    def send_again(self, choice: int) -> None:
        token = chosen(sorted(self.answers, key=lambda token: token.counter), choice)
        self.mutate(self.sent[token], token, {})

    # Rules: time.

    @rule(seconds=st.sampled_from([0.5, 3, 20]))
    def wait(self, seconds: float) -> None:
        self.time += seconds

    @rule()
    def expire(self) -> None:
        self.look()
        assert self.partition.expire(self.time) == self.model.expire(self.time)

    @rule()
    def ask_what_is_due(self) -> None:
        self.due.append((self.partition.eviction.pin(), self.disk.due(self.time)))

    @rule()
    def ask_what_is_due_later(self) -> None:
        """The partition is pinned, but the disk is slow to look."""
        self.due.append((self.partition.eviction.pin(), []))

    @precondition(lambda self: self.due)
    @rule(choice=CHOICES)
    def see_what_is_due(self, choice: int) -> None:
        choice %= len(self.due)
        self.due[choice] = self.due[choice][0], self.disk.due(self.time)

    @precondition(lambda self: self.due)
    @rule(choice=CHOICES)
    def expire_stored(self, choice: int) -> None:
        partition, model = self.partition, self.model
        pin, items = self.due.pop(choice % len(self.due))
        for row in items:
            newest = model.now.get(row.key)
            is_newest = newest is not None and newest.seq == row.seq
            expired = partition.expire_stored(row.key, row.seq, self.time)
            partition.snapshots.wake()
            if expired:
                assert is_newest
                model.store(Operation.EXPIRE, row.key)
            elif is_newest:
                assert partition.eviction.pinned_seq < partition.eviction.restored_seq
        assert partition.high_seq == model.high
        partition.eviction.unpin(pin)

    # Rules: the disk.

    @rule()
    def join_for_disk(self) -> None:
        self.partition.manager.join_unwritten()

    @rule(items=st.integers(1, 12))
    def read_for_disk(self, items: int) -> None:
        self.disk.read(self.partition, items)

    @rule(snapshots=st.integers(1, 3))
    def commit(self, snapshots: int) -> None:
        self.disk.commit(self.partition, snapshots)

    @rule(chunks=st.integers(1, 4))
    def index(self, chunks: int) -> None:
        self.disk.advance_index(chunks)

    @rule()
    def report(self) -> None:
        self.disk.report(self.partition)

    @rule(free=st.booleans(), evict=st.booleans())
    def settle(self, free: bool, evict: bool) -> None:
        """The disk catches up, and memory is freed of what it has."""
        self.disk.read(self.partition, 1000)
        self.disk.commit(self.partition, 1000)
        self.disk.advance_index(1000)
        self.disk.report(self.partition)
        while free and self.manager.free_oldest():
            pass
        while evict and self.partition.eviction.evict(5):
            pass

    @rule(times=st.integers(1, 3))
    def free_oldest(self, times: int) -> None:
        for _ in range(times):
            could = self.manager.snapshots.can_free
            assert self.manager.free_oldest() == could

    @rule(budget=st.integers(1, 12))
    def evict(self, budget: int) -> None:
        self.partition.eviction.evict(budget)

    @rule(budget=st.integers(1, 12))
    def evict_tombstones(self, budget: int) -> None:
        table, eviction = self.partition.table, self.partition.eviction
        items, known_on_disk = table.item_count, eviction.pinned_seq
        before = {key for key, seq, is_tombstone in table if is_tombstone and seq > known_on_disk}
        eviction.evict_tombstones(budget, self.partition.high_seq)
        assert table.item_count == items, "items stay"
        assert before <= {key for key, _, is_tombstone in table if is_tombstone}

    @rule(part=st.sampled_from([0.5, 0.9, 1.05, 1.5, 4]))
    def relieve(self, part: float) -> None:
        """Memory is short, or full; afterwards it is not, or nothing is left to be freed."""
        bucket, partition, manager = self.bucket, self.partition, self.manager
        bucket.memory_policy = MemoryPolicy(max(1, int(bucket.memory.total * part)))
        order = [
            MemoryAction.FREE,
            MemoryAction.COLLAPSE,
            MemoryAction.DROP,
            MemoryAction.REFUSE_CREDIT,
        ]
        for _ in range(1000):
            is_full, collapsible = (
                bucket.memory_policy.is_full(bucket.memory),
                bucket.needs_collapse,
            )
            can_free, droppable = manager.snapshots.can_free, manager.droppable_cursors()
            relief = bucket.free_memory(10)
            self.bucket.check_invariants()
            if relief is MemoryAction.NOTHING:
                break
            if collapsible and not is_full:
                assert relief is MemoryAction.COLLAPSE
            elif can_free:
                assert relief is MemoryAction.FREE
            elif relief is not MemoryAction.FREE:
                assert order.index(relief) >= order.index(
                    MemoryAction.COLLAPSE
                    if collapsible
                    else MemoryAction.DROP
                    if droppable
                    else MemoryAction.REFUSE_CREDIT
                )
                assert (relief is MemoryAction.DROP) == (bool(droppable) and not collapsible)
            if relief is MemoryAction.REFUSE_CREDIT:
                break
        else:
            raise AssertionError("relieving never ends")
        if relief is MemoryAction.NOTHING:
            assert bucket.memory.total <= bucket.memory_policy.high_bytes
            assert bucket.memory_action() is MemoryAction.NOTHING
        else:
            assert not manager.snapshots.can_free
            assert not manager.droppable_cursors()
            assert not bucket.needs_collapse
            known_on_disk = partition.eviction.pinned_seq
            assert all(seq > known_on_disk for _, seq, _ in partition.table)
            assert partition.statistics()["expiring"] <= len(partition.table) + 1024
            assert bucket.memory_action() is MemoryAction.REFUSE_CREDIT
        bucket.memory_policy = MemoryPolicy(ROOM)
        assert bucket.memory_action() is MemoryAction.NOTHING

    @rule()
    def restart(self) -> None:
        """The server is killed, and comes back with what is persisted."""
        self.disk.crash()
        failover_log = self.partition.failover_log.with_branch(
            HistoryId(next(self.histories)), self.disk.high
        )
        self.model.fall_back(self.disk.high)
        for token, answer in list(self.answers.items()):
            if token in self.disk.answers:
                assert answer == self.disk.answers[token]
                assert answer.last_seq <= self.disk.high
            else:
                has_effect = answer.last_seq >= answer.first_seq
                assert not has_effect or answer.last_seq > self.disk.high
                del self.answers[token]
        assert self.answers.keys() == self.disk.answers.keys()
        self.start(self.disk.image(failover_log))
        assert self.partition.high_seq == self.model.high
        assert self.partition.failover_log.current == failover_log.current

    # Rules: readers.

    @rule(choice=st.floats(0, 1), back=st.booleans())
    def register(self, choice: float, back: bool) -> None:
        start = 0 if back else round(choice * self.model.high)
        self.readers.append(DiskReader(self.partition, self.model, start, self.disk))

    @precondition(lambda self: self.readers)
    @rule(choice=CHOICES, steps=st.integers(1, 6))
    def read(self, choice: int, steps: int) -> None:
        reader = chosen(self.readers, choice)
        for _ in range(steps):
            reader.step()

    @precondition(lambda self: self.readers)
    @rule(choice=CHOICES)
    def cut(self, choice: int) -> None:
        chosen(self.readers, choice).cut()

    @precondition(lambda self: self.readers)
    @rule(choice=CHOICES)
    def leave(self, choice: int) -> None:
        reader = chosen(self.readers, choice)
        reader.cursor.close()
        self.readers.remove(reader)

    @rule(times=st.integers(8, 12), key=SOME_KEYS)
    def leave_snapshots(self, times: int, key: bytes) -> None:
        """So that there is something to collapse."""
        reader = DiskReader(self.partition, self.model, self.model.high, self.disk)
        for index in range(times):
            self.mutate([Mutation(Operation.SET, key, b"%d" % index)], None, {})
            reader.drain()
        reader.cursor.close()

    # Always.

    @invariant()
    def whole(self) -> None:
        self.bucket.check_invariants()
        assert (
            self.manager.snapshots.oldest_start
            <= self.manager.persistence.committed_seq
            == self.disk.high
        )
        for key, seq, is_tombstone in self.partition.table:
            assert self.model.log[seq - 1].key == key
            assert is_tombstone == (key not in self.model.now)

    @invariant()
    def only_those_behind_the_disk_are_droppable(self) -> None:
        disk = self.manager.persistence
        for cursor in self.manager.droppable_cursors():
            assert cursor is not disk
            assert cursor.oldest_entry.start < disk.oldest_entry.start == disk.committed_seq

    def teardown(self) -> None:
        for reader in self.readers:
            reader.drain()
        self.disk.advance_index(1000)
        self.disk.report(self.partition)
        for question in list(self.asked):
            for _ in range(3):
                question.fetched |= self.disk.find(question.missing)
                question.missing = self.ask_again(question)
                if not question.missing:
                    break
            else:
                raise AssertionError("it never comes to an answer")
        for key in KEYS:
            fetch_requests = self.get([key], {})
            if fetch_requests:
                assert not self.get([key], self.disk.find(fetch_requests))
        self.bucket.check_invariants()


TestOnDisk = OnDisk.TestCase
TestOnDisk.settings = PROFILE


class Walk:
    """Takes random steps of the machine."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.machine = OnDisk()
        self.reached: Counter[str] = Counter()

    def rows(self, most: int, keys: Sequence[bytes] = KEYS) -> list[Mutation]:
        random = self.random
        rows = []
        for _ in range(random.randint(1, most)):
            op = random.choice([op for op in Operation if op is not Operation.EXPIRE])
            value = random.choice([b"", b"7", b"text", bytes(300)])
            if op in (Operation.INCREMENT, Operation.DECREMENT):
                value = CounterDelta(random.choice([0, 1, 5]), 10, random.random() < 0.5).encode()
            expiry = random.choice([0, 0, 0, 1, int(self.machine.time) + random.randint(-5, 40)])
            cas = Cas(random.choice([0, 0, 0, 12345]))
            rows.append(Mutation(op, random.choice(keys), value, SeqNo(0), cas, 1, expiry))
        return rows

    def keys(self) -> list[bytes]:
        return self.random.choices(KEYS, k=self.random.randint(1, 6))

    def step(self) -> None:
        random, machine = self.random, self.machine
        choice = random.randrange(100)
        partition = machine.partition
        steps: list[tuple[int, Callable[[], None]]] = [
            (6, lambda: machine.ask_to_mutate(self.rows(4), random.choice([None, 0, 1]))),
            (6, lambda: machine.ask_of_one_key(random.choice(KEYS), self.rows(4))),
            (
                5,
                lambda: machine.store(
                    self.keys(), random.choice([0, int(machine.time) + choice // 4]), b"7"
                ),
            ),
            (4, lambda: machine.ask_to_get(self.keys())),
            (2, lambda: machine.wait(random.choice([0.5, 3, 20]))),
            (1, machine.expire),
            (1, machine.ask_what_is_due),
            (1, machine.ask_what_is_due_later),
            (4, lambda: machine.read_for_disk(random.randint(1, 12))),
            (4, lambda: machine.commit(random.randint(1, 3))),
            (4, lambda: machine.index(random.randint(1, 3))),
            (4, machine.report),
            (2, lambda: machine.settle(random.random() < 0.7, random.random() < 0.7)),
            (4, lambda: machine.free_oldest(random.randint(1, 3))),
            (4, lambda: machine.evict(random.randint(1, 12))),
            (4, lambda: machine.evict_tombstones(random.randint(1, 12))),
            (1, lambda: machine.relieve(random.choice([0.5, 0.9, 1.05, 1.1, 4]))),
            (1, lambda: machine.leave_snapshots(8, random.choice(KEYS))),
        ]
        if machine.readers:
            steps += [
                (5, lambda: machine.read(choice, random.randint(1, 6))),
                (1, lambda: machine.cut(choice)),
                (1, lambda: machine.leave(choice)),
            ]
        if len(machine.readers) < 5:
            steps.append((2, lambda: machine.register(random.random(), random.random() < 0.4)))
        if machine.asked:
            steps.append((8, lambda: machine.answer(choice)))
            if machine.disk.indexed >= partition.eviction.restored_seq:
                steps.append((9, lambda: machine.fetch(choice, random.randint(1, 8))))
        if machine.due:
            steps += [(2, lambda: machine.see_what_is_due(choice))]
            steps += [(2, lambda: machine.expire_stored(choice))]
        if machine.answers:
            steps.append((1, lambda: machine.send_again(choice)))
        if random.random() < 0.01:
            steps = [(1, machine.restart)]
        before = (len(machine.asked), partition.manager.dropped_count, machine.model.high)
        (_, take), *_ = random.choices(steps, [weight for weight, _ in steps])
        take()
        self.reached["asked"] += len(machine.asked) > before[0]
        self.reached["dropped"] += partition.manager.dropped_count > before[1]
        self.reached["evicted"] += len(partition.table) < len(
            {row.key for row in machine.model.log}
        )
        machine.whole()
        machine.only_those_behind_the_disk_are_droppable()


@pytest.mark.parametrize("seed", range(effort(10, 60)))
def test_every_answer_is_that_of_a_model_that_forgets_nothing(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(800):
        walk.step()
    walk.machine.teardown()
    # A run in which nothing of this happened would show nothing.
    assert walk.reached["asked"] > 10
    assert walk.reached["evicted"] > 50
