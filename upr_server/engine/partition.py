"""One partition: its numbers, its hash table, its snapshots, and what writes do to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from upr_kernel import OpenRows
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import (
    Cas,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_protocol.limits import FRAME_BODY_BYTES_MAX
from upr_server.engine.batch import CheckedChunk, MutationBatch
from upr_server.engine.evaluation import Evaluation
from upr_server.engine.evaluation_result import ContentVersion
from upr_server.engine.evaluation_steps import BULK_ROWS_MIN
from upr_server.engine.eviction import KeyEviction
from upr_server.engine.expiry import ExpiryIndex
from upr_server.engine.hash_table import HashTable
from upr_server.engine.lookup import NOTHING_FETCHED, FetchedItems, FetchRequest, ItemLookup
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.mutate_result import MutateResult
from upr_server.engine.partition_image import PartitionImage
from upr_server.engine.publisher_answers import UNBOUNDED
from upr_server.engine.repeated_batches import RepeatedBatches
from upr_server.engine.replica_progress import ReplicaProgress
from upr_server.engine.snapshots import (
    ARRAY_BYTES_MAX,
    ARRAY_MUTATIONS_MAX,
    ARRAY_SPAN_MAX,
    EvaluatedArray,
    MutationManager,
)
from upr_server.engine.update_notifier import UpdateNotifier

EXPIRE_MAX: Final = 256
"""Items that one call of `expire` deletes, or entries of superseded items that it passes; at 3 µs
each it holds the loop for a millisecond."""

EXPIRE_BEFORE_RUN_MAX: Final = 64
"""The same before a plain run, which is taken in in the same step."""

GET_BYTES_MAX: Final = FRAME_BODY_BYTES_MAX - 64 * 1024
"""What one reply to a `GET` holds; the rest of the frame is for its head."""

NANOSECONDS: Final = 1_000_000_000
"""CAS values are nanoseconds since 1970, or higher."""

_ACTIVE: Final = PartitionState.ACTIVE  # an enum's attributes are slow to look up


class Partition:
    """A partition of a bucket. All its methods are synchronous, and none reads a clock.

    Args:
        partition_id: Its number.
        new_history_id: Draws a fresh non-zero random ID.
        state: What this node is for it.
        memory: What the bucket holds.
        on_collapsible: Called when `manager.needs_collapse` becomes true.
        image: What the disk has of it; None for a new one.
        on_update: Called whenever something in it has changed, with the keys of the design
            documents that did, and how many batches have changed something.
        answers_bytes_max: What the remembered answers to publishers may take. Of those in the image
            the ones that are over it are forgotten, and the disk is not told.

    Attributes:
        id: Its number.
        state: Only an active partition takes writes, and expires items.
        damage: Which of its records on disk is damaged; empty for none. Such a partition is dead,
            and stays so. What it has in memory goes to those of its replicas that follow it.
        is_incomplete: Whether this node may lack changes that it once acknowledged: it has lost its
            copy, and copies the partition again.
        failover_log: The branches that led here.
        table: Key to number.
        rows: The kernel's part of the open snapshot, with the highest number and CAS.
        manager: Registers the cursors that read the snapshots.
        snapshots: The snapshots in memory.
        eviction: Which keys the table may forget, and what the disk's index knows.
        repeated_batches: Recognises batches that publishers send again.
        replicas: What its replicas have reported.
        updates: Tells the observer what has changed.
        purge_seq: Tombstones at or below it may be gone.
        indexed_item_count: Keys that exist, as of `eviction.indexed_seq`.
        begins_no_stream: Whether its state or its failover log is about to change, and its streams
            are being ended for that: none begins meanwhile.
    """

    __slots__ = (
        "_expiries",
        "_holds_expiry",
        "_lookup",
        "begins_no_stream",
        "damage",
        "eviction",
        "failover_log",
        "id",
        "indexed_item_count",
        "is_incomplete",
        "manager",
        "purge_seq",
        "repeated_batches",
        "replicas",
        "rows",
        "snapshots",
        "state",
        "table",
        "updates",
    )

    def __init__(
        self,
        partition_id: PartitionId,
        new_history_id: Callable[[], HistoryId],
        *,
        state: PartitionState = PartitionState.ACTIVE,
        memory: MemoryAccount | None = None,
        on_collapsible: Callable[[], None] | None = None,
        image: PartitionImage | None = None,
        on_update: Callable[[Sequence[bytes], int], None] | None = None,
        answers_bytes_max: int = UNBOUNDED,
    ) -> None:
        memory = MemoryAccount() if memory is None else memory
        if image is None:
            image = PartitionImage(state, FailoverLog().with_branch(new_history_id(), SeqNo(0)))
        self.updates = UpdateNotifier(on_update)
        self.id = partition_id
        self.state = image.state
        self.damage = image.damage
        self.is_incomplete = image.is_incomplete
        self.failover_log = image.failover_log
        self.table = HashTable(memory)
        self.repeated_batches = RepeatedBatches(
            memory, image.answers, image.high_seq, answers_bytes_max
        )
        self.rows = OpenRows(
            self.table.kernel_table,
            self.repeated_batches.answers.kernel_answers,
            partition_id,
            ARRAY_MUTATIONS_MAX,
            ARRAY_BYTES_MAX,
            ARRAY_SPAN_MAX,
        )
        self.rows.last_cas = image.last_cas
        self._note_history()
        self.manager = MutationManager(
            image.high_seq, self.rows, self.table, memory, on_collapsible
        )
        self.snapshots = self.manager.snapshots
        self._expiries = ExpiryIndex(self.table, memory)
        self.eviction = KeyEviction(self.table, self._expiries, image.high_seq, image.indexed_seq)
        self._lookup = ItemLookup(self.table, self.snapshots, self._expiries, self.eviction)
        self.replicas = ReplicaProgress()
        self.purge_seq = image.purge_seq
        self.indexed_item_count = image.item_count
        self.begins_no_stream = False
        self._holds_expiry = False

    def __repr__(self) -> str:
        return f"<Partition {self.id}, {self.state.name.lower()}, at {self.high_seq}>"

    @property
    def told_state(self) -> PartitionState:
        """The state that others are told. Who is about to choose an active node must not take a
        replica for complete that copies again what it had."""
        if self.is_incomplete and self.state is PartitionState.REPLICA:
            return PartitionState.PENDING
        return self.state

    @property
    def high_seq(self) -> SeqNo:
        """The number of the newest mutation."""
        return SeqNo(self.rows.high)

    @property
    def snapshot_end(self) -> SeqNo:
        """The end of the newest closed snapshot: up to here a consumer can be consistent now."""
        return self.snapshots.open.start

    @property
    def item_count(self) -> int:
        """Keys that exist. Once the table has forgotten some, as of `eviction.indexed_seq`."""
        return self.indexed_item_count if self.eviction.has_evicted else self.table.item_count

    @property
    def last_cas(self) -> Cas:
        """The highest CAS ever given here."""
        return Cas(self.rows.last_cas)

    # Writing.

    @property
    def content_version(self) -> ContentVersion:
        """What its content depends on: while it is the same, so are all items."""
        return ContentVersion(self.failover_log.current, self.high_seq, Cas(self.rows.last_cas))

    def evaluate(self, batch: MutationBatch, *, now: float) -> Evaluation | None:
        """The evaluation of a batch, which can be worked out in slices before `mutate`.

        Returns:
            The evaluation; None for a batch that needs none, as it is plain or not to be applied.
        """
        if batch.is_plain or self.state is not _ACTIVE or not self.repeated_batches.is_new(batch):
            return None
        return Evaluation(batch, self, self._lookup, now)

    def mutate(
        self,
        batch: MutationBatch,
        *,
        now: float,
        evaluation: Evaluation | None = None,
        fetched_items: FetchedItems = NOTHING_FETCHED,
    ) -> MutateResult:
        """Takes in a batch of a publisher, in one step. O(mutations), O(log mutations) for those
        that read.

        A batch that was here before has no second effect, and gets its first answer again.

        Args:
            batch: The batch.
            now: Seconds since 1970.
            evaluation: The batch's evaluation, done, with the partition where it stood then. It is
                worked out here where none is given.
            fetched_items: What was read from disk, if it is worked out here. Nothing may be
                missing.
        """
        token = batch.token
        if self.state is not _ACTIVE:
            # It may become active again, and the publisher will then send the batch again.
            self.repeated_batches.note_refused(token)
            return self._refusal(Status.WRONG_STATE)
        high_before = SeqNo(self.rows.high)
        if token is not None:
            answer = self.repeated_batches.answer_unless_new(batch, high_before)
            if answer is not None:
                return self._refusal(answer) if isinstance(answer, Status) else answer
        if batch.is_plain:
            return self._set_all(batch, now, high_before)
        if evaluation is None:
            evaluation = Evaluation(batch, self, self._lookup, now)
            fetch_requests = evaluation.step(fetched_items)
            assert not fetch_requests, "the caller must first ask which keys are missing"
        return self._finish(batch, self._store_all(evaluation), high_before)

    def note_expiries(self, columns: CheckedChunk, low: int, high: int, first_seq: SeqNo) -> None:
        """Notes when the rows [`low`, `high`) of a chunk, which were taken in, expire. O(rows)."""
        expiries = columns.chunk.expiries[low:high].tolist()
        seqs = range(first_seq, first_seq + high - low)
        self._expiries.add_all(zip(expiries, seqs, columns.keys[low:high], strict=True))

    def _finish(
        self, batch: MutationBatch, result: MutateResult, high_before: SeqNo
    ) -> MutateResult:
        """Keeps the answer to a batch that was applied, and tells of what it changed."""
        token, high = batch.token, SeqNo(self.rows.high)
        if token is not None:
            if batch.chain or batch.attempt:
                result = msgspec.structs.replace(result, chain=batch.chain, attempt=batch.attempt)
            # Also when every mutation failed: sent again, the batch must fail again.
            self.repeated_batches.remember(token, result, high)
        # Last: a reader or observer that runs now sees the batch whole, with its answer.
        if high > high_before:
            self.snapshots.wake()
            self.updates.notify_batch(batch, result)
        return result

    def _refusal(self, status: Status) -> MutateResult:
        high = self.high_seq
        return MutateResult(self.failover_log.current, SeqNo(high + 1), high, Cas(0), status=status)

    def next_cas(self, now: float) -> Cas:
        """The CAS that the next mutation gets."""
        # The clock may stand still or run backwards; the CAS never does.
        return Cas(max(self.rows.last_cas + 1, int(now * NANOSECONDS)))

    def _set_all(self, batch: MutationBatch, now: float, high_before: SeqNo) -> MutateResult:
        """Takes in a plain batch that is new."""
        # What has expired becomes a deletion before anything is written to it. There may be more
        # than one call deletes: the rest reads as missing, and is deleted later.
        if self._expiries.is_due(now):
            self._expire_due(now, EXPIRE_BEFORE_RUN_MAX)
        rows = self.rows
        first_seq, first_cas = SeqNo(rows.high + 1), self.next_cas(now)
        columns, low, high = batch.columns, batch.low, batch.high
        count = high - low
        if count:
            chunk = columns.chunk
            self.snapshots.open.add_rows(chunk, low, high, first_seq, first_cas, self.table)
            rows.last_cas = first_cas + count - 1
            if columns.may_expire:
                self.note_expiries(columns, low, high, first_seq)
        result = MutateResult(
            self.failover_log.current, first_seq, SeqNo(first_seq + count - 1), first_cas
        )
        return self._finish(batch, result, high_before)

    def _store_all(self, evaluation: Evaluation) -> MutateResult:
        assert evaluation.is_done, "the evaluation must be done"
        result = evaluation.result
        assert result.content_version == self.content_version, (
            "the partition must not have changed since"
        )
        first_seq, last_seq = result.first_seq, result.last_seq
        first_cas, rows = result.first_cas, result.rows
        if result.arrays is not None:
            self.snapshots.open.add_evaluated(result.arrays, result.counter_rows, self.table)
            self._expiries.add_all([(row.expiry, row.seq, row.key) for row, _ in rows])
        else:
            for row, is_counter in rows:
                published_chunk = result.large_chunks.get(row.key)
                self._store(row, is_counter=is_counter, published_chunk=published_chunk)
        if last_seq >= first_seq:
            # By the successes, not the rows: the publisher was given a CAS for each of them.
            self.rows.last_cas = first_cas + last_seq - first_seq
        return MutateResult(
            self.failover_log.current,
            first_seq,
            last_seq,
            first_cas,
            result.failures,
            result.counters,
        )

    def _store(
        self, row: Mutation, *, is_counter: bool = False, published_chunk: Chunk | None = None
    ) -> None:
        previous_seq = self.table.put(row.key, row.seq, is_tombstone=row.op != Operation.SET)
        if is_counter:
            self.snapshots.open.add_counter(row, previous_seq)
        else:
            self.snapshots.open.add(row, previous_seq, published_chunk)
        if row.expiry:
            self._expiries.add(row.expiry, row.seq, row.key)

    # Expiring.

    def next_expiry(self) -> int | None:
        """When `expire` should next be called, at the earliest, in seconds since 1970; None for
        never."""
        return self._expiries.next_expiry()

    def clean_expiries(self, entries_max: int) -> bool:
        """Goes on removing what is stale of the index of expiry times, if that has begun. O(entries
        log entries).

        Returns:
            Whether there may be more.
        """
        return self._expiries.clean(entries_max) > 0

    def has_expired(self, now: float) -> bool:
        """Whether it is active, and items have expired, or may have."""
        return self.state is _ACTIVE and self._expiries.is_due(now)

    def may_have_expired(self, now: float) -> bool:
        """Whether `has_expired` may be true, which may have to look at many stale entries. O(1)."""
        return self.state is _ACTIVE and self._expiries.may_be_due(now)

    def may_expire(self, now: float) -> bool:
        """Whether `expire` has something to do."""
        return not self._holds_expiry and self.has_expired(now)

    def hold_expiry(self) -> None:
        """Has `expire` and `expire_stored` do nothing until `release_expiry`: a batch is being
        worked out, and would have to begin again. Meanwhile expired items read as missing."""
        self._holds_expiry = True

    def release_expiry(self) -> None:
        """The batch is applied, or given up."""
        self._holds_expiry = False

    def expire(self, now: float) -> int:
        """Deletes items that have expired, `EXPIRE_MAX` at most, if the partition is active.

        Returns:
            How many. There may be more: see `may_expire`.
        """
        if self.state is not _ACTIVE or self._holds_expiry:
            return 0
        expired_count = self._expire_due(now)
        if expired_count:
            self.snapshots.wake()
        return expired_count

    def expire_due(self, now: float) -> int:
        """Deletes items that have expired, `EXPIRE_MAX` at most, before a batch is applied, if the
        partition is still active: the batch's evaluation may have begun before a handover.

        Returns:
            How many entries left the index of expiry times, stale ones too.
        """
        count_before = len(self._expiries)
        if self.has_expired(now):
            self._expire_due(now)
            self.snapshots.wake()
        return count_before - len(self._expiries)

    def _expire_due(self, now: float, entries_max: int = EXPIRE_MAX) -> int:
        keys = self._expiries.take_expired(now, entries_max)
        if len(keys) < BULK_ROWS_MIN:
            for key in keys:
                self._store_expiry(key, now)
        else:
            self._store_expiries(keys, now)
        self.updates.notify_expired(keys)
        return len(keys)

    def expire_stored(self, key: bytes, seq: SeqNo, now: float) -> bool:
        """Deletes an item that the disk reports as expired, unless the key has changed since.

        The eviction must have been pinned since before the disk was asked. Neither the observer
        nor the readers, of which the disk's own is one, are told: `updates.notify_expired` and
        `snapshots.wake` do so for many items at once.

        Args:
            key: The key.
            seq: The item's number, on disk.
            now: Seconds since 1970.

        Returns:
            Whether it did. It does not if the disk's index was not ready when the oldest pin was
            given: what it reported then may not have been the key's newest mutation.
        """
        newest_seq, is_tombstone = self.table.newest(key)
        # A key that the table does not have (0) was evicted, so the disk's item is the newest.
        has_changed = newest_seq and (is_tombstone or newest_seq != seq)
        if self.state is not _ACTIVE or has_changed or self._holds_expiry:
            return False
        if self.eviction.pinned_seq < self.eviction.restored_seq:
            return False
        self._store_expiry(key, now)
        return True

    def _store_expiry(self, key: bytes, now: float) -> None:
        seq, cas = SeqNo(self.snapshots.high_seq + 1), self.next_cas(now)
        self._store(Mutation(Operation.EXPIRE, key, b"", seq, cas))
        self.rows.last_cas = cas

    def _store_expiries(self, keys: Sequence[bytes], now: float) -> None:
        """The same for many different keys."""
        first_seq, first_cas = self.snapshots.high_seq + 1, self.next_cas(now)
        rows = [
            Mutation(Operation.EXPIRE, key, b"", SeqNo(first_seq + index), Cas(first_cas + index))
            for index, key in enumerate(keys)
        ]
        array = EvaluatedArray(rows, Chunk.build(rows, SeqNo(first_seq - 1), rows[-1].seq))
        self.snapshots.open.add_evaluated((array,), (), self.table)
        self.rows.last_cas = rows[-1].cas

    # What this node is for it.

    def change_state(self, state: PartitionState, failover_log: FailoverLog) -> None:
        """Takes another state, and the failover log that goes with it.

        A node that hands over is still followed: in the same history, as active or pending, what
        its replicas report still counts.
        """
        is_followed = state in (PartitionState.ACTIVE, PartitionState.PENDING)
        assert not self.damage, self
        if not is_followed or failover_log != self.failover_log:
            # Numbers of another history would count as copies of mutations that nobody has.
            self.replicas.clear()
        self.state = state
        self.failover_log = failover_log
        self._note_history()

    def refuse(self, damage: str) -> None:
        """A record of it on disk is damaged: it is dead from here on, and what it has in memory
        only cannot be put on disk."""
        self.damage, self.state = damage, PartitionState.DEAD
        self.replicas.clear()
        self._note_history()

    def _note_history(self) -> None:
        """Says to the kernel whether plain runs may be added at once, and to which history."""
        is_active = self.state is _ACTIVE
        self.rows.history_id = self.failover_log.current if is_active else 0

    def restart_at(self, seq: SeqNo, last_cas: Cas = Cas(0)) -> None:
        """Begins again with nothing in memory: the disk has everything up to `seq`. A replica calls
        it with each commit, and a partition that becomes one calls it once.

        Args:
            seq: The last complete snapshot's end on disk.
            last_cas: The highest CAS up to there.

        Raises:
            ValueError: Memory holds something that the disk does not have.
        """
        self.manager.restart_at(seq)
        self.table.clear()
        self._expiries.clear()
        self.eviction.restart_at(seq)
        self.rows.last_cas = max(self.rows.last_cas, last_cas)

    def truncate(self, seq: SeqNo) -> None:
        """Everything above `seq` was truncated on disk: does the same in memory. O(answers to
        publishers above it), of which there may be many: `repeated_batches.answers` forgets them
        before, in steps."""
        self.restart_at(seq)
        self.updates.notify_undone()
        if not seq:
            self.eviction.indexed_seq = self.purge_seq = SeqNo(0)
            self.indexed_item_count = 0
        self.repeated_batches.answers.truncate(seq)

    def note_index_progress(self, indexed_seq: SeqNo, item_count: int) -> None:
        """The disk's index knows the newest mutation of every key up to `indexed_seq`, and
        `item_count` keys that exist."""
        self.eviction.indexed_seq = indexed_seq
        self.indexed_item_count = item_count

    # Reading.

    def missing_keys(
        self, keys: Sequence[bytes], now: float, fetched_items: FetchedItems = NOTHING_FETCHED
    ) -> list[FetchRequest]:
        """What must be read from disk before `get` of these keys. O(keys)."""
        return self._lookup.missing_for_get(keys, now, fetched_items)

    def get(
        self,
        keys: Sequence[bytes],
        now: float,
        bytes_max: int = GET_BYTES_MAX,
        fetched_items: FetchedItems = NOTHING_FETCHED,
    ) -> list[Mutation]:
        """What the keys hold, one row a key in the order asked, as a reply to a `GET`.

        O(keys * log mutations).

        Args:
            keys: The keys.
            now: Seconds since 1970.
            bytes_max: The reply ends before it exceeds this, but not before its first row: ask
                again for the keys without a row.
            fetched_items: What was read from disk. The reply ends before the first key that is
                still missing: see `missing_keys`.

        Returns:
            A `SET` with its number for each item, a `DELETE` with number 0 for each key that has
            none. In the flags of a `DELETE` is `BAD_KEY` where no item can have the key, and
            `DAMAGED` where the disk cannot tell what it holds. A large value may be a view of
            memory that others share.
        """
        return self._lookup.rows_for_get(keys, now, bytes_max, fetched_items)

    # Figures and checks.

    def recount(self, memory: MemoryAccount) -> None:
        """Adds what it holds to `memory`, by counting."""
        self.snapshots.recount(memory)
        memory.table += self.table.nbytes
        memory.expiries += self._expiries.nbytes
        memory.writers += self.repeated_batches.answers.nbytes

    def statistics(self) -> dict[str, int]:
        """Figures of this partition. O(snapshots)."""
        return {
            **self.manager.statistics(),
            "state": self.state,
            "items": self.item_count,
            "keys": len(self.table),
            "indexed": self.eviction.indexed_seq,
            "expiring": len(self._expiries),
            "writers": len(self.repeated_batches.answers),
        }

    def check_invariants(self) -> None:
        """Every structure, and that every key's newest mutation is where the table says. Slow."""
        self.table.check_invariants()
        self.manager.check_invariants()
        self._expiries.check_invariants()
        self.repeated_batches.answers.check_invariants()
        for key, seq, is_tombstone in self.table:
            if seq <= self.snapshots.oldest_start:
                continue  # the disk has it
            row = self.snapshots.find(seq)
            assert row.key == key, (row, key)
            assert (row.op != Operation.SET) == is_tombstone, row
            assert row.seq == seq, row
            assert row.cas <= self.rows.last_cas, row
