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

from tests.engine.helpers import NOW, free, new_partition, put, request, send
from tests.engine.model import check_result, contents
from tests.engine.naive_disk import DiskModel, DiskReader, NaiveDisk
from tests.engine.strategies import EXPIRIES, VALUES, requests
from upr_protocol.chunk import Chunk, CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, SeqNo
from upr_server.engine import (
    Bucket,
    FetchNeeded,
    Found,
    MutateResult,
    Partition,
    PartitionImage,
    Quota,
    Relief,
    Want,
    WriterToken,
)
from upr_server.engine.partition import EXPIRE_MAX
from upr_server.engine.writers import BATCHES_MAX

PROFILE: Final = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

KEYS: Final = [b"key %d" % number for number in range(12)]
SOME_KEYS: Final = st.sampled_from(KEYS)
ROOM: Final = 1 << 30
AT: Final = st.integers(0, 99)

T = TypeVar("T")


def chosen(things: Sequence[T], at: int) -> T:
    return things[at % len(things)]


class Asked:
    """A request that waits for the disk, with what was found so far."""

    def __init__(self, pin: int, wants: list[Want]) -> None:
        self.pin = pin
        self.wants = wants
        self.found: dict[bytes, Mutation | None] = {}


class AskedMutate(Asked):
    """A batch that waits."""

    def __init__(
        self, pin: int, wants: list[Want], rows: list[Mutation], writer: WriterToken | None
    ) -> None:
        super().__init__(pin, wants)
        self.rows = rows
        self.writer = writer


class AskedGet(Asked):
    """A read that waits."""

    def __init__(self, pin: int, wants: list[Want], keys: list[bytes]) -> None:
        super().__init__(pin, wants)
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
        self.partition.keep_news()
        self.manager = self.partition.manager
        self.readers: list[DiskReader] = []
        self.asked: list[AskedMutate | AskedGet] = []
        self.due: list[tuple[int, list[Mutation]]] = []
        self.known: dict[bytes, int] = {}

    def knows(self, row: Mutation) -> bool:
        return self.known.get(row.key) == row.seq

    def look(self) -> None:
        """Notes which items the memory knows before the next request."""
        self.known = dict(self.partition.table.numbers)

    # What can be seen of the partition: a request that needs the disk first changes nothing of it.

    def picture(self) -> dict[str, Any]:
        partition = self.partition
        memory = self.bucket.memory.statistics()
        del memory["expiries"]  # stale entries may go whenever somebody looks
        figures = partition.statistics()
        del figures["expiring"]
        return {
            "table": dict(partition.table.numbers),
            "cas": partition.last_cas,
            "memory": memory,
            "figures": figures,
        }

    # Requests.

    def mutate(self, rows: list[Mutation], writer: WriterToken | None, found: Found) -> None:
        partition, model = self.partition, self.model
        before, cas_before = model.high, partition.last_cas
        picture = self.picture()
        self.look()
        try:
            result = partition.mutate(Chunk.build(rows), now=self.time, writer=writer, found=found)
        except FetchNeeded:
            assert self.picture() == picture
            raise
        if writer is not None and writer in self.answers:
            assert result == msgspec.structs.replace(self.answers[writer], repeated=True)
            assert self.picture() == picture
            return
        if result.status is Status.TOKEN_TOO_OLD:
            assert writer is not None
            assert self.picture() == picture
            assert any(
                token.writer == writer.writer and token.counter > writer.counter
                for token in self.answers
            )
            return
        cas_of = model.cas_of_all()
        failures, counters = model.mutate(rows, self.time, cas_of)
        assert (result.failures, result.counters) == (failures, counters)
        check_result(result, len(rows), before, model.high)
        assert result.first_cas > cas_before
        assert not result.repeated
        model.answered(result)
        if writer is not None:
            self.answers[writer] = result
        assert partition.high_seq == model.high

    def get(self, keys: list[bytes], found: Found) -> None:
        picture = self.picture()
        try:
            rows = list(self.partition.get_many(keys, self.time, found=found))
        finally:
            assert self.picture() == picture
        assert rows or not keys
        assert [row.key for row in rows] == keys[: len(rows)]
        for row in rows:
            item = self.model.live(row.key, self.time)
            self.check_item(item, row if row.seq else None)
        if len(keys) == 1:
            single = self.partition.get(keys[0], self.time, found)
            item = self.model.live(keys[0], self.time)
            assert (single is None) == (item is None)
            if single is not None and item is not None:
                assert (single.value, single.seq) == (item.value, item.seq)
                assert single.cas == self.model.cas[item.seq]

    def check_item(self, item: Mutation | None, row: Mutation | None) -> None:
        if item is None or row is None:
            assert item is row
            return
        assert row.op == Operation.SET
        assert contents({row.key: row}) == contents({row.key: item})
        assert row.cas == self.model.cas[item.seq]

    def begin(self, rows: list[Mutation], writer: WriterToken | None) -> None:
        try:
            self.mutate(rows, writer, {})
        except FetchNeeded:
            pin = self.partition.pin()
            try:
                self.mutate(rows, writer, {})
            except FetchNeeded as needed:
                self.asked.append(AskedMutate(pin, needed.wants, rows, writer))
                return
            raise AssertionError("nothing has changed") from None

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
        self.mutate([Mutation(Operation.SET, key, value, expiry=expiry) for key in keys], None, {})

    @rule(keys=st.lists(SOME_KEYS, min_size=1, max_size=8))
    def ask_to_get(self, keys: list[bytes]) -> None:
        try:
            self.get(keys, {})
        except FetchNeeded:
            pin = self.partition.pin()
            with pytest.raises(FetchNeeded) as needed:
                self.get(keys, {})
            self.asked.append(AskedGet(pin, needed.value.wants, keys))

    @precondition(lambda self: self.asked and self.disk.indexed >= self.partition.restored)
    @rule(at=AT, items=st.integers(1, 8))
    def fetch(self, at: int, items: int) -> None:
        """Reads from the disk as it is now; what it knows may be more than the partition heard."""
        asked = chosen(self.asked, at)
        asked.found |= self.disk.find(asked.wants[:items])

    @precondition(lambda self: self.asked)
    @rule(at=AT)
    def answer(self, at: int) -> None:
        asked = chosen(self.asked, at)
        try:
            if isinstance(asked, AskedMutate):
                self.mutate(asked.rows, asked.writer, asked.found)
            else:
                self.get(asked.keys, asked.found)
        except FetchNeeded as needed:
            asked.wants = needed.wants
            return
        self.asked.remove(asked)
        self.partition.unpin(asked.pin)

    @precondition(lambda self: self.answers)
    @rule(at=AT)
    def send_again(self, at: int) -> None:
        token = chosen(sorted(self.answers, key=lambda token: token.counter), at)
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
        self.due.append((self.partition.pin(), self.disk.due(self.time)))

    @rule()
    def ask_what_is_due_later(self) -> None:
        """The partition is pinned, but the disk is slow to look."""
        self.due.append((self.partition.pin(), []))

    @precondition(lambda self: self.due)
    @rule(at=AT)
    def see_what_is_due(self, at: int) -> None:
        at %= len(self.due)
        self.due[at] = self.due[at][0], self.disk.due(self.time)

    @precondition(lambda self: self.due)
    @rule(at=AT)
    def expire_stored(self, at: int) -> None:
        partition, model = self.partition, self.model
        pin, items = self.due.pop(at % len(self.due))
        for row in items:
            newest = model.now.get(row.key)
            is_newest = newest is not None and newest.seq == row.seq
            made = partition.expire_stored(row.key, row.seq, self.time)
            if made:
                assert is_newest
                model.store(Operation.EXPIRE, row.key)
            elif is_newest:
                assert min(partition._pins.values()) < partition.restored
        assert partition.high_seq == model.high
        partition.unpin(pin)

    # Rules: the disk.

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
        while evict and self.partition.evict(5):
            pass

    @rule(times=st.integers(1, 3))
    def free_oldest(self, times: int) -> None:
        for _ in range(times):
            could = self.manager.can_free
            assert self.manager.free_oldest() == could

    @rule(budget=st.integers(1, 12))
    def evict(self, budget: int) -> None:
        self.partition.evict(budget)

    @rule(part=st.sampled_from([0.5, 0.9, 1.05, 1.5, 4]))
    def relieve(self, part: float) -> None:
        """Memory is short, or full; afterwards it is not, or nothing is left to be freed."""
        bucket, partition, manager = self.bucket, self.partition, self.manager
        bucket.quota = Quota(max(1, int(bucket.memory.total * part)))
        order = [Relief.FREE, Relief.COLLAPSE, Relief.DROP, Relief.REFUSE_CREDIT]
        for _ in range(1000):
            is_full, collapsible = bucket.quota.is_full(bucket.memory), bucket.collapse_wanted
            can_free, droppable = manager.can_free, manager.droppable()
            relief = bucket.relieve(10)
            self.bucket.check_invariants()
            if relief is Relief.NOTHING:
                break
            if collapsible and not is_full:
                assert relief is Relief.COLLAPSE
            elif can_free:
                assert relief is Relief.FREE
            elif relief is not Relief.FREE:
                assert order.index(relief) >= order.index(
                    Relief.COLLAPSE
                    if collapsible
                    else Relief.DROP
                    if droppable
                    else Relief.REFUSE_CREDIT
                )
                assert (relief is Relief.DROP) == (bool(droppable) and not collapsible)
            if relief is Relief.REFUSE_CREDIT:
                break
        else:
            raise AssertionError("relieving never ends")
        if relief is Relief.NOTHING:
            assert bucket.memory.total <= bucket.quota.high_bytes
            assert bucket.relief() is Relief.NOTHING
        else:
            assert not manager.can_free
            assert not manager.droppable()
            assert not bucket.collapse_wanted
            known_on_disk = min(partition._pins.values(), default=partition.indexed)
            numbers = partition.table.numbers.values()
            assert all(abs(number) > known_on_disk for number in numbers)
            assert len(partition._expiries) <= len(numbers) + 1024
            assert bucket.relief() is Relief.REFUSE_CREDIT
        bucket.quota = Quota(ROOM)
        assert bucket.relief() is Relief.NOTHING

    @rule()
    def restart(self) -> None:
        """The server is killed, and comes back with what is persisted."""
        self.disk.crash()
        failover_log = self.partition.failover_log.branch(
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

    @rule(at=st.floats(0, 1), back=st.booleans())
    def register(self, at: float, back: bool) -> None:
        start = 0 if back else round(at * self.model.high)
        self.readers.append(DiskReader(self.partition, self.model, start, self.disk))

    @precondition(lambda self: self.readers)
    @rule(at=AT, steps=st.integers(1, 6))
    def read(self, at: int, steps: int) -> None:
        reader = chosen(self.readers, at)
        for _ in range(steps):
            reader.step()

    @precondition(lambda self: self.readers)
    @rule(at=AT)
    def cut(self, at: int) -> None:
        chosen(self.readers, at).cut()

    @precondition(lambda self: self.readers)
    @rule(at=AT)
    def leave(self, at: int) -> None:
        reader = chosen(self.readers, at)
        reader.cursor.close()
        self.readers.remove(reader)

    @rule(times=st.integers(8, 12), key=SOME_KEYS)
    def leave_snapshots(self, times: int, key: bytes) -> None:
        """So that there is something to collapse."""
        reader = DiskReader(self.partition, self.model, self.model.high, self.disk)
        for number in range(times):
            self.mutate([Mutation(Operation.SET, key, b"%d" % number)], None, {})
            reader.drain()
        reader.cursor.close()

    # Always.

    @invariant()
    def whole(self) -> None:
        self.bucket.check_invariants()
        assert self.manager.oldest <= self.manager.persistence.committed == self.disk.high
        for key, number in self.partition.table.numbers.items():
            assert (self.model.log[abs(number) - 1].key, number > 0) == (key, key in self.model.now)

    @invariant()
    def only_those_behind_the_disk_are_droppable(self) -> None:
        disk = self.manager.persistence
        for cursor in self.manager.droppable():
            assert cursor is not disk
            assert cursor.oldest_place.start < disk.oldest_place.start == disk.committed

    def teardown(self) -> None:
        for reader in self.readers:
            reader.drain()
        self.disk.advance_index(1000)
        self.disk.report(self.partition)
        for asked in list(self.asked):
            for _ in range(3):
                asked.found |= self.disk.find(asked.wants)
                try:
                    if isinstance(asked, AskedMutate):
                        self.mutate(asked.rows, asked.writer, asked.found)
                    else:
                        self.get(asked.keys, asked.found)
                    break
                except FetchNeeded as needed:
                    asked.wants = needed.wants
            else:
                raise AssertionError("it never comes to an answer")
        for key in KEYS:
            found: dict[bytes, Mutation | None] = {}
            try:
                self.get([key], found)
            except FetchNeeded as needed:
                self.get([key], self.disk.find(needed.wants))
        self.bucket.check_invariants()


TestOnDisk = OnDisk.TestCase
TestOnDisk.settings = PROFILE


# Long seeded runs of the same: what needs many steps in a row happens in them.


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
        at = random.randrange(100)
        partition = machine.partition
        steps: list[tuple[int, Callable[[], None]]] = [
            (6, lambda: machine.ask_to_mutate(self.rows(4), random.choice([None, 0, 1]))),
            (6, lambda: machine.ask_of_one_key(random.choice(KEYS), self.rows(4))),
            (
                5,
                lambda: machine.store(
                    self.keys(), random.choice([0, int(machine.time) + at // 4]), b"7"
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
            (1, lambda: machine.relieve(random.choice([0.5, 0.9, 1.05, 1.1, 4]))),
            (1, lambda: machine.leave_snapshots(8, random.choice(KEYS))),
        ]
        if machine.readers:
            steps += [
                (5, lambda: machine.read(at, random.randint(1, 6))),
                (1, lambda: machine.cut(at)),
                (1, lambda: machine.leave(at)),
            ]
        if len(machine.readers) < 5:
            steps.append((2, lambda: machine.register(random.random(), random.random() < 0.4)))
        if machine.asked:
            steps.append((8, lambda: machine.answer(at)))
            if machine.disk.indexed >= partition.restored:
                steps.append((9, lambda: machine.fetch(at, random.randint(1, 8))))
        if machine.due:
            steps += [(2, lambda: machine.see_what_is_due(at))]
            steps += [(2, lambda: machine.expire_stored(at))]
        if machine.answers:
            steps.append((1, lambda: machine.send_again(at)))
        if random.random() < 0.01:
            steps = [(1, machine.restart)]
        before = (len(machine.asked), partition.manager.dropped, machine.model.high)
        (_, take), *_ = random.choices(steps, [weight for weight, _ in steps])
        take()
        self.reached["asked"] += len(machine.asked) > before[0]
        self.reached["dropped"] += partition.manager.dropped > before[1]
        self.reached["evicted"] += len(partition.table) < len(
            {row.key for row in machine.model.log}
        )
        machine.whole()
        machine.only_those_behind_the_disk_are_droppable()


@pytest.mark.parametrize("seed", range(60))
def test_every_answer_is_that_of_a_model_that_forgets_nothing(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(800):
        walk.step()
    walk.machine.teardown()
    # A run in which nothing of this happened would show nothing.
    assert walk.reached["asked"] > 10
    assert walk.reached["evicted"] > 50


# One rule at a time.


def stored(partition: Partition, disk: NaiveDisk, *, evict: bool = False) -> None:
    """The disk has all there is, its index knows it, and memory has none of it."""
    disk.read(partition, 1000)
    disk.commit(partition, 1000)
    disk.advance_index(1000)
    disk.report(partition)
    free(partition)
    while evict and partition.evict(100):
        partition.check_invariants()


def wants_of(partition: Partition, *rows: Mutation, now: float = NOW) -> list[Want]:
    with pytest.raises(FetchNeeded) as needed:
        send(partition, *rows, now=now)
    return needed.value.wants


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (Operation.ADD, [(1, Status.EXISTS)]),
        (Operation.REPLACE, []),
        (Operation.DELETE, []),
    ],
)
def test_an_item_that_a_batch_stores_expired_hides_no_other(
    op: Operation, expected: list[tuple[int, Status]]
) -> None:
    partition = new_partition()
    put(partition, b"on disk")
    stored(partition, NaiveDisk())
    result = send(
        partition,
        request(Operation.SET, b"gone at once", expiry=1),
        request(op, b"on disk"),
        request(Operation.ADD, b"gone at once"),
    )
    assert result.failures == expected
    partition.check_invariants()


def test_where_more_have_expired_than_one_call_deletes_existence_is_read_from_disk() -> None:
    partition, disk = new_partition(), NaiveDisk()
    keys = [b"%d" % number for number in range(EXPIRE_MAX + 2)]
    send(partition, *(request(Operation.SET, key, expiry=int(NOW) + 5) for key in keys))
    put(partition, b"stays")
    stored(partition, disk)
    rows = [request(Operation.ADD, keys[-1]), request(Operation.ADD, b"stays")]
    wants = wants_of(partition, *rows, now=NOW + 10)
    assert [(want.key, want.number) for want in wants] == [
        (keys[-1], len(keys)),
        (b"stays", len(keys) + 1),
    ]
    result = partition.mutate(Chunk.build(rows), now=NOW + 10, found=disk.find(wants))
    assert result.failures == [(1, Status.EXISTS)]
    partition.check_invariants()


def test_what_is_wanted_of_a_key_is_the_most_that_any_operation_needs() -> None:
    partition = new_partition()
    put(partition, b"k", value=b"5")
    stored(partition, NaiveDisk(), evict=True)
    add = request(Operation.ADD)
    increment = request(Operation.INCREMENT, value=CounterDelta(1).encode())
    assert wants_of(partition, add) == [Want(b"k", 0, False)]
    for rows in ([add, increment], [increment, add], [add, request(Operation.SET, cas=7)]):
        assert wants_of(partition, *rows) == [Want(b"k", 0, True)]


@pytest.mark.parametrize("evict", [False, True])
def test_existence_is_not_taken_for_a_value(evict: bool) -> None:
    partition, disk = new_partition(), NaiveDisk()
    put(partition, b"k", value=b"5")
    stored(partition, disk, evict=evict)
    exists = disk.find([Want(b"k", 0, False)])
    increment = Chunk.build([request(Operation.INCREMENT, value=CounterDelta(1).encode())])
    with pytest.raises(FetchNeeded) as needed:
        partition.mutate(increment, now=NOW, found=exists)
    with pytest.raises(FetchNeeded):
        partition.get(b"k", NOW, exists)
    assert needed.value.wants == [Want(b"k", 0 if evict else 1, True)]
    result = partition.mutate(increment, now=NOW, found=disk.find(needed.value.wants))
    assert result.counters == [(0, 6)]


def test_an_older_version_that_was_found_is_not_used() -> None:
    partition, disk = new_partition(), NaiveDisk()
    put(partition, b"k", value=b"5")
    stored(partition, disk)
    pin = partition.pin()
    found = disk.find([Want(b"k", 1, True)])
    put(partition, b"k", value=b"7")
    stored(partition, disk, evict=True)
    with pytest.raises(FetchNeeded) as needed:
        partition.get(b"k", NOW, found)
    assert needed.value.wants == [Want(b"k", 2, True)], "the pin holds it in the table"
    partition.unpin(pin)
    stored(partition, disk, evict=True)
    with pytest.raises(FetchNeeded) as needed:
        partition.get(b"k", NOW)
    assert needed.value.wants == [Want(b"k", 0, True)]
    item = partition.get(b"k", NOW, disk.find(needed.value.wants))
    assert item is not None
    assert item.value == b"7"


def test_what_the_disk_said_before_it_knew_all_keys_deletes_nothing() -> None:
    before, disk = new_partition(), NaiveDisk()
    before.keep_news()
    send(before, request(Operation.SET, expiry=int(NOW) + 5))
    disk.read(before, 1000)
    disk.commit(before, 1)
    disk.advance_index(1)
    put(before, b"k", value=b"newer")
    disk.read(before, 1000)
    disk.commit(before, 1)
    after = Partition(PartitionId(0), lambda: HistoryId(9), image=disk.image(before.failover_log))
    assert not after.can_be_asked
    early = after.pin()
    (due,) = disk.due(NOW + 10)
    disk.advance_index(1)
    disk.report(after)
    assert after.can_be_asked
    assert not after.expire_stored(due.key, due.seq, NOW + 10), "it was written to since"
    after.unpin(early)
    item = after.get(b"k", NOW + 10, disk.find([Want(b"k", 0, True)]))
    assert item is not None
    assert item.value == b"newer"


def test_an_expired_item_that_only_the_disk_knows_becomes_a_deletion_once() -> None:
    partition, disk = new_partition(), NaiveDisk()
    send(partition, request(Operation.SET, expiry=int(NOW) + 5))
    stored(partition, disk, evict=True)
    assert partition.next_expiry() is None
    pin = partition.pin()
    (due,) = disk.due(NOW + 10)
    assert partition.expire_stored(due.key, due.seq, NOW + 10)
    assert not partition.expire_stored(due.key, due.seq, NOW + 10)
    partition.unpin(pin)
    stored(partition, disk, evict=True)
    assert [row.op for row in disk.log] == [Operation.SET, Operation.EXPIRE]
    assert not disk.due(NOW + 10)
    partition.check_invariants()


def test_a_reply_ends_before_the_first_item_that_was_not_read() -> None:
    partition, disk = new_partition(), NaiveDisk()
    put(partition, b"a", b"b", b"c")
    stored(partition, disk, evict=True)
    put(partition, b"d")
    keys = [b"d", b"a", b"b", b"c", b"d", b"a"]
    with pytest.raises(FetchNeeded) as needed:
        partition.get_many(keys, NOW)
    assert [want.key for want in needed.value.wants] == [b"a", b"b", b"c"]
    found = disk.find(needed.value.wants[:2])
    chunk = partition.get_many(keys, NOW, found=found)
    assert chunk.keys() == [b"d", b"a", b"b"]
    with pytest.raises(FetchNeeded):
        partition.get_many(keys[3:], NOW, found=found)


def test_the_answers_that_a_restart_remembers_are_those_within_the_window() -> None:
    before, disk = new_partition(), NaiveDisk()
    before.keep_news()
    batch = Chunk.build([request(Operation.SET)])
    tokens = [WriterToken(bytes(16), number) for number in range(1, BATCHES_MAX + 7)]
    answers = []
    for token in tokens:
        answers.append(before.mutate(batch, now=NOW, writer=token))
        if token.counter % 20 == 0:
            disk.read(before, 1000)
            disk.commit(before, 1)
    disk.read(before, 1000)
    disk.commit(before, 1)
    after = Partition(PartitionId(0), lambda: HistoryId(9), image=disk.image(before.failover_log))
    for partition in (before, after):
        for token, answer in zip(tokens, answers, strict=True):
            again = partition.mutate(batch, now=NOW, writer=token)
            if token.counter <= 6:
                assert again.status is Status.TOKEN_TOO_OLD
            else:
                assert again == msgspec.structs.replace(answer, repeated=True)
        assert partition.high_seq == len(tokens)
        partition.check_invariants()
