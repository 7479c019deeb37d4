"""One partition: its numbers, its hash table, its mutation queue, and what writes do to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from upr_protocol.chunk import Chunk, ChunkBuilder, CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, PartitionState, SeqNo
from upr_protocol.limits import FRAME_BODY_BYTES_MAX
from upr_server.engine.expiry import ExpiryIndex
from upr_server.engine.hash_table import HashTable
from upr_server.engine.manager import MutationManager
from upr_server.engine.memory import Memory
from upr_server.engine.operations import COUNTS, READS, outcome
from upr_server.engine.writers import Writers, WriterToken

EXPIRE_MAX: Final = 512
"""Items that one call of `expire` deletes; at 4 µs each it holds the loop for 2 ms."""

GET_BYTES_MAX: Final = FRAME_BODY_BYTES_MAX - 64 * 1024
"""What one reply to a `GET` holds; the rest of the frame is for its head."""

RESULT_BYTES: Final = 200
RESULT_ITEM_BYTES: Final = 120
"""What a remembered result takes, about, and each failure and counter in it."""

_NANOSECONDS: Final = 1_000_000_000


class MutateResult(msgspec.Struct, frozen=True):
    """What became of one batch.

    A batch is no transaction: what failed failed alone, and the others have consecutive numbers and
    CAS values, in the batch's order.

    Attributes:
        history_id: The history in which the numbers count.
        first_seq: The first success's number; with no success, one more than `last_seq`.
        last_seq: The last success's number.
        first_cas: The first success's CAS.
        failures: Index in the batch and reason, for each that failed.
        counters: Index in the batch and new value, for each increment or decrement that succeeded.
        repeated: Whether this answer was given before: the batch had its effect then.
        status: `OK`, or why the batch as a whole was refused, without any effect: `WRONG_STATE`,
            `TOKEN_TOO_OLD`.
    """

    history_id: HistoryId
    first_seq: SeqNo
    last_seq: SeqNo
    first_cas: Cas
    failures: list[tuple[int, Status]] = []
    counters: list[tuple[int, int]] = []
    repeated: bool = False
    status: Status = Status.OK


class Item(msgspec.Struct, frozen=True):
    """What a key holds."""

    value: bytes
    cas: Cas
    flags: int
    expiry: int
    seq: SeqNo


class Partition:
    """A partition of a bucket. All its methods are synchronous, and none keeps the time itself.

    Args:
        partition_id: Its number.
        new_history_id: Draws a fresh non-zero random ID.
        state: What this node is for it.
        memory: What the bucket holds.
        on_collapsible: Called when `manager.collapse_wanted` becomes true.

    Attributes:
        id: Its number.
        state: Only an active partition takes writes, and expires items.
        failover_log: The branches that led here.
        table: Key to number.
        manager: The snapshots, and the cursors that read them.
    """

    __slots__ = (
        "_expiries",
        "_last_cas",
        "_memory",
        "_writers",
        "failover_log",
        "id",
        "manager",
        "state",
        "table",
    )

    def __init__(
        self,
        partition_id: PartitionId,
        new_history_id: Callable[[], HistoryId],
        *,
        state: PartitionState = PartitionState.ACTIVE,
        memory: Memory | None = None,
        on_collapsible: Callable[[], None] | None = None,
    ) -> None:
        memory = Memory() if memory is None else memory
        self._memory = memory
        self._last_cas = 0
        self._writers: Writers[MutateResult] = Writers(memory)
        self.id = partition_id
        self.state = state
        self.failover_log = FailoverLog().branch(new_history_id(), SeqNo(0))
        self.table = HashTable(memory)
        self.manager = MutationManager(SeqNo(0), memory, on_collapsible)
        self._expiries = ExpiryIndex(self.table, memory)

    def __repr__(self) -> str:
        return f"<Partition {self.id}, {self.state.name.lower()}, at {self.high_seq}>"

    @property
    def high_seq(self) -> SeqNo:
        """The number of the newest mutation."""
        return self.manager.high

    @property
    def snapshot_end(self) -> SeqNo:
        """The end of the newest closed snapshot: up to here a consumer can be consistent now."""
        return self.manager.open.start

    @property
    def last_cas(self) -> Cas:
        """The highest CAS ever given here."""
        return Cas(self._last_cas)

    # Writing.

    def mutate(
        self, chunk: Chunk, *, now: float, writer: WriterToken | None = None
    ) -> MutateResult:
        """Takes in a batch of a publisher. O(mutations), O(log mutations) for those that read.

        Args:
            chunk: A published chunk; the engine keeps it, or parts of it.
            now: Seconds since 1970.
            writer: The batch's name. The answer to a batch that was here before is given again.

        Raises:
            ChunkError: The chunk breaks a rule of chunks; it had no effect.
        """
        keys = chunk.check_published()
        unconditional = chunk.is_unconditional
        rows = None if unconditional else _checked_rows(chunk)
        if self.state is not PartitionState.ACTIVE:
            return self._refusal(Status.WRONG_STATE)
        if writer is not None:
            answer, too_old = self._writers.recall(writer)
            if answer is not None:
                return msgspec.structs.replace(answer, repeated=True)
            if too_old:
                return self._refusal(Status.TOKEN_TOO_OLD)
        before = self.manager.high
        # What has expired becomes a deletion before anything is written to it. (There may be more
        # than one call's worth: the rest reads as missing, and has its deletion later.)
        if self._expiries.is_due(now):
            self._expire_due(now)
        result = self._set_all(chunk, keys, now) if rows is None else self._apply(rows, now)
        if writer is not None:
            items = len(result.failures) + len(result.counters)
            self._writers.remember(writer, result, RESULT_BYTES + RESULT_ITEM_BYTES * items)
        if self.manager.high > before:
            self.manager.wake()
        return result

    def _refusal(self, status: Status) -> MutateResult:
        high = self.high_seq
        return MutateResult(self.failover_log.current, SeqNo(high + 1), high, Cas(0), status=status)

    def _next_cas(self, now: float) -> int:
        # The clock may stand still or run backwards; the CAS never does.
        return max(self._last_cas + 1, int(now * _NANOSECONDS))

    def _set_all(self, chunk: Chunk, keys: list[bytes], now: float) -> MutateResult:
        first_seq, first_cas = SeqNo(self.manager.high + 1), Cas(self._next_cas(now))
        count = len(keys)
        if count:
            self.manager.open.add_chunk(chunk, keys, first_seq, first_cas, self.table)
            self._last_cas = first_cas + count - 1
            expiries = chunk.expiries
            if expiries.tobytes() != bytes(4 * count):
                self._expiries.add_all(expiries.tolist(), first_seq, keys)
        return MutateResult(
            self.failover_log.current, first_seq, SeqNo(first_seq + count - 1), first_cas
        )

    def _apply(self, rows: list[Mutation], now: float) -> MutateResult:
        first_seq, first_cas = SeqNo(self.manager.high + 1), Cas(self._next_cas(now))
        seq, cas = first_seq, first_cas
        failures: list[tuple[int, Status]] = []
        counters: list[tuple[int, int]] = []
        for index, request in enumerate(rows):
            stored = outcome(request, self._item_for(request, now))
            if isinstance(stored, Status):
                failures.append((index, stored))
                continue
            row = Mutation(
                stored.op, request.key, stored.value, seq, cas, stored.flags, stored.expiry
            )
            self._store(row, is_counter=stored.counter is not None)
            if stored.counter is not None:
                counters.append((index, stored.counter))
            seq, cas = SeqNo(seq + 1), Cas(cas + 1)
        if seq > first_seq:
            self._last_cas = cas - 1
        history_id = self.failover_log.current
        return MutateResult(history_id, first_seq, SeqNo(seq - 1), first_cas, failures, counters)

    def _item_for(self, request: Mutation, now: float) -> Mutation | None:
        """What the key holds, as far as the operation needs to know."""
        number = self.table.newest(request.key)
        if number <= 0:
            return None
        if request.cas or request.op in READS or self._expiries.is_due(now):
            item = self.manager.find(number)
            return None if 0 < item.expiry <= now else item
        return _SOME_ITEM

    def _store(self, row: Mutation, *, is_counter: bool = False) -> None:
        table = self.table
        previous = table.newest(row.key)
        table.put(row.key, row.seq if row.op == Operation.SET else -row.seq)
        if is_counter:
            self.manager.open.add_counter(row, previous)
        else:
            self.manager.open.add(row, previous)
        if row.expiry:
            self._expiries.add(row.expiry, row.seq, row.key)

    # Expiring.

    def next_expiry(self) -> int | None:
        """When `expire` should next be called, in seconds since 1970; None for never."""
        return self._expiries.next_expiry()

    def expire(self, now: float) -> int:
        """Makes deletions of items that have expired: at most `EXPIRE_MAX`, if this is the active.

        Returns:
            How many; when it is `EXPIRE_MAX` there may be more.
        """
        if self.state is not PartitionState.ACTIVE:
            return 0
        expired = self._expire_due(now)
        if expired:
            self.manager.wake()
        return expired

    def _expire_due(self, now: float) -> int:
        for expired in range(EXPIRE_MAX):
            key = self._expiries.take(now)
            if key is None:
                return expired
            seq, cas = SeqNo(self.manager.high + 1), Cas(self._next_cas(now))
            self._store(Mutation(Operation.EXPIRE, key, b"", seq, cas))
            self._last_cas = cas
        return EXPIRE_MAX

    # Reading.

    def get(self, key: bytes, now: float) -> Item | None:
        """What the key holds; None when it is missing, or has expired. O(log mutations)."""
        row = self._find(key, now)
        return None if row is None else Item(row.value, row.cas, row.flags, row.expiry, row.seq)

    def get_many(self, keys: Sequence[bytes], now: float, bytes_max: int = GET_BYTES_MAX) -> Chunk:
        """What the keys hold, one row a key in the order asked, as a reply to a `GET`.

        Args:
            keys: The keys.
            now: Seconds since 1970.
            bytes_max: The reply ends before it exceeds this, but not before its first row: ask
                again for `keys[chunk.count:]`.

        Returns:
            A `SET` with its number for what was found, a `DELETE` with number 0 for what is
            missing. Its range is (0, high number]; its numbers are in no order.
        """
        builder = ChunkBuilder()
        room = bytes_max
        for key in keys:
            row = self._find(key, now)
            room -= ROW_BYTES_MAX + len(key) + (len(row.value) if row is not None else 0)
            if room < 0 and len(builder):
                break
            if row is None:
                builder.append(Operation.DELETE, key)
            else:
                builder.append(row.op, key, row.value, row.seq, row.cas, row.flags, row.expiry)
        return builder.build(SeqNo(0), self.high_seq)

    def _find(self, key: bytes, now: float) -> Mutation | None:
        number = self.table.newest(key)
        if number <= 0:
            return None
        row = self.manager.find(number)
        return None if 0 < row.expiry <= now else row

    # Figures and checks.

    def recount(self, memory: Memory) -> None:
        """Adds what it holds to `memory`, by counting."""
        self.manager.recount(memory)
        memory.table += self.table.nbytes
        memory.expiries += self._expiries.nbytes
        memory.writers += self._writers.nbytes

    def statistics(self) -> dict[str, int]:
        """Figures of this partition. O(snapshots)."""
        return {
            **self.manager.statistics(),
            "state": self.state,
            "items": self.table.items,
            "keys": len(self.table),
            "expiring": len(self._expiries),
            "writers": len(self._writers),
        }

    def check_invariants(self) -> None:
        """Every structure, and that every key's newest mutation is where the table says. Slow."""
        self.table.check_invariants()
        self.manager.check_invariants()
        self._expiries.check_invariants()
        self._writers.check_invariants()
        for key, number in self.table.numbers.items():
            if abs(number) <= self.manager.oldest:
                continue  # the disk has it
            row = self.manager.find(abs(number))
            assert row.key == key, (row, key)
            assert (row.op == Operation.SET) == (number > 0), row
            assert row.seq == abs(number), row
            assert row.cas <= self._last_cas, row


def _checked_rows(chunk: Chunk) -> list[Mutation]:
    """The rows, after checking what only counters have: raises `ChunkError`."""
    rows = list(chunk)
    for row in rows:
        if row.op in COUNTS:
            CounterDelta.decode(row.value)
    return rows


ROW_BYTES_MAX: Final = 48
"""What a row takes in a chunk beside its key and value, with all padding."""

_SOME_ITEM: Final = Mutation(Operation.SET, b"")
"""Stands for an item of which an operation only needs to know that it exists."""
