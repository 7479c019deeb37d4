"""The work of an evaluation: its phases, each in slices, and what each thing costs.

The rows of the batch are made; what they need is read from disk; each operation's outcome is worked
out; values are joined; and the rows of a long batch become arrays.

**What is copied.** Of each key only the last state is stored. What a batch appends to a value is
joined to it once, at the end, and a touch does not copy it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final, Protocol

import msgspec

from upr_protocol.chunk import LARGE_BYTES, Chunk, LargeRow, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Cas, Operation, SeqNo
from upr_server.engine.batch import MutationBatch
from upr_server.engine.evaluation_result import ContentVersion, EvaluationResult
from upr_server.engine.lookup import (
    NOT_FETCHED,
    NOTHING_FETCHED,
    FetchedItems,
    FetchRequest,
    ItemLookup,
    is_damaged,
    is_plain_set,
)
from upr_server.engine.operations import JoinedValue, StoredItem, operation_outcome
from upr_server.engine.snapshots import (
    ARRAY_BYTES_MAX,
    ARRAY_MUTATIONS_MAX,
    LARGE_VALUE_BYTES,
    EvaluatedArray,
    SingleArray,
)

ROW_COST: Final = 2
"""What it costs to make a row of one operation, in rows of a plain batch: some 0.5 µs each."""

FETCH_CHECK_COST: Final = 3
"""What it costs to find out whether an operation needs the disk."""

EXPIRY_COST: Final = 6
"""What it costs to delete an item that has expired: some 3 µs."""

OUTCOME_COST: Final = 12
"""What an operation costs: up to 6 µs where its item is found in a closed snapshot."""

BLOCK_ROWS: Final = 64
"""Operations after which the cost is looked at, where none of them copies a value."""

BYTES_PER_COST: Final = 512
"""Bytes that are copied at the same cost: into new memory, of which each page of 4 KiB takes 2 µs,
and up to 10 on a virtual machine whose host has to find it first."""

JOINED_BYTES: Final = 1024 * 1024
"""Bytes of a large value that are joined before the cost is looked at."""

BULK_ROWS_MIN: Final = 64
"""Rows of a batch from which on they are stored in arrays: that costs 0.7 µs each instead of 2,
beside what an array itself costs. The arrays are made before the batch is stored, in slices."""

ARRAY_COST: Final = 2
"""What a row costs that becomes a row of an array."""

ARRAY_ROWS_MIN: Final = 8
"""Fewer rows between two large ones stand alone, as these do."""

SINGLE_COST: Final = 4
"""What a row costs that stands alone."""

CHUNK_COST: Final = 32
"""What an array costs beside its rows."""

PIECE_ROWS: Final = 256
PIECE_BYTES: Final = 256 * 1024
"""Rows are made so many at a time, unless one of them is larger."""


class EvaluatedPartition(Protocol):
    """What an evaluation asks of its partition."""

    @property
    def content_version(self) -> ContentVersion:
        """What its content depends on."""

    def expire_due(self, now: float) -> int:
        """Deletes items that have expired: that comes before anything that the batch does.

        Returns:
            How many entries left the index of expiry times.
        """

    def next_cas(self, now: float) -> Cas:
        """The CAS that the next mutation gets."""

    def hold_expiry(self) -> None:
        """Has no items expire before the batch is applied or given up, but those that the batch
        asks for."""


class _PendingItem(msgspec.Struct, gc=False):
    """What a key will hold. The attributes are those of `Mutation`."""

    op: Operation
    value: bytes | JoinedValue
    seq: SeqNo
    cas: Cas
    flags: int
    expiry: int
    is_counter: bool


class EvaluationSteps:
    """The work on one batch, in steps.

    Args:
        batch: The batch; the partition is active, and the batch is new to it.
        partition: Its partition.
        lookup: Finds what the partition's keys hold.
        result: Where to put what it comes to.

    Attributes:
        fetched_items: What was read from disk.
        cost_max: How much the step under way may cost.
        cost_left: How much of it is left.
    """

    __slots__ = (
        "_batch",
        "_lookup",
        "_partition",
        "_pending_items",
        "_requests",
        "_result",
        "cost_left",
        "cost_max",
        "fetched_items",
    )

    def __init__(
        self,
        batch: MutationBatch,
        partition: EvaluatedPartition,
        lookup: ItemLookup,
        result: EvaluationResult,
    ) -> None:
        self._batch = batch
        self._partition = partition
        self._lookup = lookup
        self._result = result
        self._requests: list[Mutation] = []
        self._pending_items: dict[bytes, _PendingItem] = {}
        self.fetched_items: FetchedItems = NOTHING_FETCHED
        self.cost_left = self.cost_max = 0

    def steps(self) -> Iterator[list[FetchRequest]]:
        """The whole work. It yields what is missing, and nothing where a slice ends."""
        yield from self._make_rows()
        while True:
            yield from self._fetch()
            # In this order: an expiry takes a number, and so moves the position.
            self.cost_left -= EXPIRY_COST * self._partition.expire_due(self._result.now)
            self._result.content_version = self._partition.content_version
            if (yield from self._find_outcomes()):
                break
        yield from self._join()
        if len(self._result.rows) >= BULK_ROWS_MIN:
            yield from self._make_arrays()
        if 2 * self.cost_left < self.cost_max:
            # To store it takes about half of a slice, and cannot be divided.
            yield []

    def _make_rows(self) -> Iterator[list[FetchRequest]]:
        """Makes the rows."""
        batch, requests = self._batch, self._requests
        while len(requests) < len(batch):
            piece = batch.piece(len(requests), PIECE_ROWS, PIECE_BYTES)
            requests += piece
            self.cost_left -= ROW_COST * piece.count + piece.nbytes // BYTES_PER_COST
            if self.cost_left <= 0:
                yield []

    def _fetch(self) -> Iterator[list[FetchRequest]]:
        """Has everything read from disk that an operation needs."""
        collect_missing, now = self._lookup.collect_missing, self._result.now
        misfits = self._batch.misfits
        while True:
            # All operations are looked at before anything is read: one read of the disk for the
            # batch, not one an operation. Then all are looked at again, because others have had
            # their turn, and a key that was in memory may have been evicted.
            fetch_requests: dict[bytes, FetchRequest] = {}
            for first_index, block in self._blocks():
                for index, operation in enumerate(block, first_index):
                    if misfits and index in misfits:
                        continue
                    collect_missing(operation, now, self.fetched_items, fetch_requests)
                self.cost_left -= FETCH_CHECK_COST * len(block)
                if self.cost_left <= 0:
                    yield []
            if not fetch_requests:
                return
            yield list(fetch_requests.values())

    def _blocks(self) -> Iterator[tuple[int, list[Mutation]]]:
        """The operations, a few at a time: to count each alone would show."""
        requests = self._requests
        if len(requests) <= BLOCK_ROWS:
            return iter(((0, requests),))
        return (
            (first_index, requests[first_index : first_index + BLOCK_ROWS])
            for first_index in range(0, len(requests), BLOCK_ROWS)
        )

    def _find_outcomes(self) -> Generator[list[FetchRequest], None, bool]:
        """Works out each operation.

        Returns:
            Whether it came to the end. If not, an item has left memory since `_fetch` saw it there.
        """
        result = self._result
        assert result.content_version is not None
        item_for, now, misfits = self._lookup.item_for, result.now, self._batch.misfits
        pending_items = self._pending_items = {}
        failures = result.failures = []
        counters = result.counters = []
        seq = result.first_seq = SeqNo(result.content_version.high_seq + 1)
        cas = result.first_cas = self._partition.next_cas(now)
        for index, operation in enumerate(self._requests):
            key = operation.key
            item: StoredItem | None = None
            if misfits and index in misfits:
                failures.append((index, misfits[index]))
                continue
            # A plain `SET` succeeds whatever the key held, so its item is not looked up.
            if not is_plain_set(operation):
                pending_item = pending_items.get(key)
                if pending_item is None:
                    item = mutation = item_for(operation, now, self.fetched_items)
                    if mutation is NOT_FETCHED:
                        return False
                    if mutation is not None:
                        if is_damaged(mutation):
                            failures.append((index, Status.DAMAGED))
                            continue
                        self._count_copied(len(mutation.value))
                elif pending_item.op == Operation.SET and not 0 < pending_item.expiry <= now:
                    # What the batch itself stored counts, unless it had expired when it came: once
                    # stored, such an item would read as missing.
                    item = pending_item
            outcome = operation_outcome(operation, item)
            if isinstance(outcome, Status):
                # It takes no number: those of the successes must follow on.
                failures.append((index, outcome))
            else:
                # Taken out first: the order is that of the numbers.
                pending_items.pop(key, None)
                pending_items[key] = _PendingItem(
                    outcome.op,
                    outcome.value,
                    seq,
                    cas,
                    outcome.flags,
                    outcome.expiry,
                    outcome.counter is not None,
                )
                if outcome.counter is not None:
                    counters.append((index, outcome.counter))
                seq, cas = SeqNo(seq + 1), Cas(cas + 1)
            self.cost_left -= OUTCOME_COST
            if self.cost_left <= 0:
                yield []
        result.last_seq = SeqNo(seq - 1)
        return True

    def _join(self) -> Iterator[list[FetchRequest]]:
        """Makes the rows that are to be stored."""
        rows = self._result.rows = []
        self._result.large_chunks = {}
        self._result.arrays = None
        self._result.counter_rows = []
        for key, item in self._pending_items.items():
            value = item.value
            if len(value) > LARGE_BYTES:
                # Also one that only a touch stores again: where it becomes a stored chunk, the copy
                # could not be divided.
                value = yield from self._join_large(key, item, value)
            elif isinstance(value, JoinedValue):
                value = value.join()
                self._count_copied(len(value))
            rows.append(
                (
                    Mutation(item.op, key, value, item.seq, item.cas, item.flags, item.expiry),
                    item.is_counter,
                )
            )
            self.cost_left -= ROW_COST
            if self.cost_left <= 0:
                yield []
        self._pending_items = {}

    def _join_large(
        self, key: bytes, item: _PendingItem, value: bytes | JoinedValue
    ) -> Generator[list[FetchRequest], None, bytes]:
        """Joins a large value, in slices, where it is to be stored: new memory costs more than the
        copy."""
        row = LargeRow(key, len(value), item.flags, item.expiry)
        if not isinstance(value, JoinedValue):
            value = JoinedValue(value)
        for piece in value.pieces(JOINED_BYTES):
            row.add(piece)
            self._count_copied(len(piece))
            self.cost_left -= ROW_COST
            if self.cost_left <= 0:
                yield []
        chunk = self._result.large_chunks[key] = row.chunk()
        return chunk.shared_mutation(0).value

    def _make_arrays(self) -> Iterator[list[FetchRequest]]:
        """Makes arrays of the rows of a long batch."""
        result = self._result
        arrays = result.arrays = []
        documents, nbytes = list[Mutation](), 0
        singles = list[Mutation]()
        for row, is_counter in result.rows:
            if is_counter:
                result.counter_rows.append(row)
            elif len(row.value) > LARGE_VALUE_BYTES:
                # A large value is in no array. The rows before it become an array if they are
                # enough; otherwise they stand alone, as it does, so that their order stays.
                if len(documents) >= ARRAY_ROWS_MIN:
                    arrays += self._arrays_of(singles, documents, nbytes)
                    singles = [row]
                else:
                    singles += [*documents, row]
                documents, nbytes = [], 0
            else:
                if nbytes > ARRAY_BYTES_MAX or len(documents) == ARRAY_MUTATIONS_MAX:
                    arrays += self._arrays_of(singles, documents, nbytes)
                    singles, documents, nbytes = [], [], 0
                documents.append(row)
                nbytes += len(row.key) + len(row.value)
            if self.cost_left <= 0:
                yield []
        arrays += self._arrays_of(singles, documents, nbytes)

    def _arrays_of(
        self, singles: list[Mutation], documents: list[Mutation], nbytes: int
    ) -> Iterator[EvaluatedArray]:
        """Arrays of documents that stand alone, and one of those behind them."""
        if singles:
            self.cost_left -= SINGLE_COST * len(singles)
            large_chunks = self._result.large_chunks
            yield EvaluatedArray(
                singles, singles=[SingleArray(row, large_chunks.get(row.key)) for row in singles]
            )
        if documents:
            self.cost_left -= CHUNK_COST + ARRAY_COST * len(documents) + nbytes // BYTES_PER_COST
            chunk = Chunk.build(documents, SeqNo(documents[0].seq - 1), documents[-1].seq)
            yield EvaluatedArray(documents, chunk)

    def _count_copied(self, nbytes: int) -> None:
        self._result.copied_bytes += nbytes
        self.cost_left -= nbytes // BYTES_PER_COST
