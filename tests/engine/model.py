"""The naive model: a list of every mutation ever made, and memcached's rules spelled out."""

from __future__ import annotations

from collections.abc import Iterable

from upr_protocol.chunk import Chunk, CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Cas, Operation, SeqNo
from upr_protocol.limits import VALUE_BYTES_MAX
from upr_server.engine import (
    BackfillNeeded,
    MutateResult,
    Partition,
    SnapshotEndItem,
    SnapshotStartItem,
)

State = dict[bytes, Mutation]


def applied(state: State, rows: Iterable[Mutation]) -> None:
    """Brings `state` forward by stored mutations."""
    for row in rows:
        if row.op == Operation.SET:
            state[row.key] = row
        else:
            state.pop(row.key, None)


class Model:
    """Every mutation that one partition ever made, in order; its number is its place plus one."""

    def __init__(self) -> None:
        self.log: list[Mutation] = []
        self.now: State = {}

    @property
    def high(self) -> int:
        return len(self.log)

    def state(self, seq: int) -> State:
        """The items at the number `seq`."""
        state: State = {}
        applied(state, self.log[:seq])
        return state

    def live(self, key: bytes, now: float) -> Mutation | None:
        item = self.now.get(key)
        return None if item is None or 0 < item.expiry <= now else item

    def store(
        self, op: Operation, key: bytes, value: bytes = b"", flags: int = 0, expiry: int = 0
    ) -> None:
        row = Mutation(op, key, value, SeqNo(len(self.log) + 1), Cas(0), flags, expiry)
        self.log.append(row)
        applied(self.now, [row])

    def expire(self, now: float) -> int:
        """Deletes what has expired, by time and then by number; returns how many."""
        expired = [row for row in self.now.values() if 0 < row.expiry <= now]
        for row in sorted(expired, key=lambda row: (row.expiry, row.seq)):
            self.store(Operation.EXPIRE, row.key)
        return len(expired)

    def mutate(
        self, rows: list[Mutation], now: float, cas_of: dict[bytes, int]
    ) -> tuple[list[tuple[int, Status]], list[tuple[int, int]]]:
        """What a batch does; returns its failures and its counters, by index.

        `cas_of` is what each key's CAS is as far as a test can know; -1 for one that no test knows.
        """
        self.expire(now)
        failures: list[tuple[int, Status]] = []
        counters: list[tuple[int, int]] = []
        for index, row in enumerate(rows):
            item = self.live(row.key, now)
            if row.op == Operation.ADD and item is not None:
                failures.append((index, Status.EXISTS))
            elif row.cas and item is None:
                failures.append((index, Status.NOT_FOUND))
            elif row.cas and cas_of.get(row.key) != row.cas:
                failures.append((index, Status.CAS_MISMATCH))
            else:
                failure = self._apply(index, row, item, counters)
                if failure is None:
                    cas_of[row.key] = -1
                else:
                    failures.append((index, failure))
        return failures, counters

    def _apply(
        self, index: int, row: Mutation, item: Mutation | None, counters: list[tuple[int, int]]
    ) -> Status | None:
        op = row.op
        if op in {Operation.SET, Operation.ADD}:
            self.store(Operation.SET, row.key, row.value, row.flags, row.expiry)
            return None
        if op in {Operation.INCREMENT, Operation.DECREMENT}:
            return self._count(index, row, item, counters)
        if item is None:
            return Status.NOT_FOUND
        if op == Operation.REPLACE:
            self.store(Operation.SET, row.key, row.value, row.flags, row.expiry)
        elif op == Operation.DELETE:
            self.store(Operation.DELETE, row.key)
        elif op == Operation.TOUCH:
            self.store(Operation.SET, row.key, item.value, item.flags, row.expiry)
        else:
            numbers = [item.value, row.value]
            value = b"".join(numbers if op == Operation.APPEND else reversed(numbers))
            if len(value) > VALUE_BYTES_MAX:
                return Status.TOO_LARGE
            self.store(Operation.SET, row.key, value, item.flags, item.expiry)
        return None

    def _count(
        self, index: int, row: Mutation, item: Mutation | None, counters: list[tuple[int, int]]
    ) -> Status | None:
        delta = CounterDelta.decode(row.value)
        if item is None:
            if not delta.create:
                return Status.NOT_FOUND
            count, flags, expiry = delta.initial, row.flags, row.expiry
        else:
            text = item.value
            if not text or text.strip(b"0123456789") or len(text) > 20 or int(text) >= 1 << 64:
                return Status.NOT_A_NUMBER
            count, flags, expiry = int(text), item.flags, item.expiry
            if row.op == Operation.INCREMENT:
                count = (count + delta.delta) % (1 << 64)
            else:
                count = 0 if delta.delta > count else count - delta.delta
        counters.append((index, count))
        self.store(Operation.SET, row.key, str(count).encode(), flags, expiry)
        return None


def check_result(result: MutateResult, rows: int, before: int, high: int) -> None:
    """Numbers follow on: of `rows` requests, those that did not fail, up to the high number."""
    successes = rows - len(result.failures)
    assert result.last_seq == high
    assert result.first_seq == high - successes + 1 > before


class Reader:
    """A consumer of one partition: applies what its cursor hands on, and checks every rule."""

    def __init__(self, partition: Partition, model: Model, start: int, name: str = "r") -> None:
        self.partition = partition
        self.model = model
        self.state = model.state(start)
        self.seq = start
        self.announced: SnapshotStartItem | None = None
        self.keys: set[bytes] = set()
        self.name = name
        self.waiting = False
        self.snapshots = 0
        self.steps = 0
        self.register(start, 0)

    def register(self, start: int, end_at_least: int) -> None:
        manager = self.partition.manager
        self.waiting = False
        registration = manager.register(
            self.name, SeqNo(start), end_at_least=SeqNo(end_at_least), on_ready=self.wake
        )
        self.end_at_least = end_at_least
        self.cursor = registration.cursor
        if registration.backfill is not None:
            self.backfill(registration.backfill)

    def wake(self) -> None:
        assert self.waiting, "only who asked in vain is woken, and once"
        self.waiting = False

    def backfill(self, backfill: BackfillNeeded) -> None:
        """Plays the disk: its snapshot ends where the disk does."""
        assert backfill.start == self.seq, (backfill, self.seq)
        assert backfill.end >= self.seq
        assert backfill.end == max(self.seq, self.partition.manager.persistence.committed_seq)
        applied(self.state, self.stored(backfill.start, backfill.end))
        self.seq = backfill.end
        if self.seq >= self.end_at_least:
            self.end_at_least = 0
            assert contents(self.state) == contents(self.model.state(self.seq))

    def stored(self, start: int, end: int) -> Iterable[Mutation]:
        """What the disk has in (start, end]."""
        return self.model.log[start:end]

    def step(self) -> bool:
        """Reads one item, or every other time a whole snapshot; returns whether there was one."""
        ready = self.cursor.has_next
        self.steps += 1
        if self.steps % 2 and self.whole():
            assert ready
            assert not self.waiting
            return True
        item = self.cursor.next()
        assert ready == (item is not None)
        if item is None:
            self.waiting = True
            return False
        assert not self.waiting, "who waits is woken before there is something to read"
        if isinstance(item, SnapshotStartItem):
            self.start(item)
        elif isinstance(item, SnapshotEndItem):
            self.end(item)
        elif isinstance(item, Chunk):
            self.chunk(item)
        else:
            end = self.announced.end if self.announced is not None else self.end_at_least
            self.announced = None
            self.end_at_least = end
            self.backfill(item)
            self.register(self.seq, self.end_at_least)
        return True

    def whole(self) -> bool:
        """Reads the next snapshot at once, if the cursor gives it so."""
        start = self.seq
        chunk = self.cursor.next_whole_snapshot()
        if chunk is None:
            return False
        self.start(SnapshotStartItem(SeqNo(start), chunk.end))
        self.chunk(chunk)
        self.end(SnapshotEndItem(chunk.end))
        return True

    def start(self, item: SnapshotStartItem) -> None:
        assert self.announced is None, "one end for each start"
        assert item.start == self.seq < item.end, (item, self.seq)
        assert item.end >= self.end_at_least
        assert not item.may_repeat or self.end_at_least
        self.end_at_least = 0
        self.announced = item
        self.keys = set()

    def chunk(self, chunk: Chunk) -> None:
        assert self.announced is not None
        assert chunk.start == self.seq, "chunks touch"
        assert chunk.end <= self.announced.end
        chunk.check()
        rows = list(chunk)
        for row in rows:
            mutation = self.model.log[row.seq - 1]
            assert (row.op, row.key, row.value) == (mutation.op, mutation.key, mutation.value)
            assert (row.flags, row.expiry) == (mutation.flags, mutation.expiry)
            assert row.cas
        keys = [row.key for row in rows]
        if not self.announced.may_repeat:
            assert len(set(keys)) == len(keys)
            assert self.keys.isdisjoint(keys)
        self.keys.update(keys)
        applied(self.state, rows)
        self.seq = chunk.end

    def end(self, item: SnapshotEndItem) -> None:
        assert self.announced is not None
        assert item.end == self.announced.end == self.seq
        assert contents(self.state) == contents(self.model.state(item.end))
        self.announced = None
        self.snapshots += 1

    def drain(self) -> None:
        """Reads all there is."""
        while self.step():
            pass
        assert self.seq == self.model.high
        assert contents(self.state) == contents(self.model.now)

    def cut(self) -> None:
        """Loses its connection, and resumes from where it is."""
        self.cursor.close()
        end = self.announced.end if self.announced is not None else self.end_at_least
        self.announced = None
        self.register(self.seq, end)


def contents(state: State) -> dict[bytes, tuple[bytes, int, int, int]]:
    """What is comparable: the model knows no CAS."""
    return {key: (row.value, row.flags, row.expiry, row.seq) for key, row in state.items()}
