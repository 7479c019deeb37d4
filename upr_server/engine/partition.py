"""One partition: its numbers, its hash table, its mutation queue, and what writes do to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import accumulate, count, pairwise
from typing import Final

import msgspec

from upr_protocol.chunk import Chunk, ChunkBuilder, CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import (
    DESIGN_PREFIX,
    Cas,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_protocol.limits import FRAME_BODY_BYTES_MAX
from upr_server.engine.expiry import ExpiryIndex
from upr_server.engine.hash_table import HashTable
from upr_server.engine.manager import MutationManager
from upr_server.engine.memory import Memory
from upr_server.engine.operations import COUNTS, READS, outcome
from upr_server.engine.replica_reports import ReplicaReports
from upr_server.engine.wants import FetchNeeded, Found, Want
from upr_server.engine.writers import Writers, WriterToken

EXPIRE_MAX: Final = 512
"""Items that one call of `expire` deletes; at 4 µs each it holds the loop for 2 ms."""

GET_BYTES_MAX: Final = FRAME_BODY_BYTES_MAX - 64 * 1024
"""What one reply to a `GET` holds; the rest of the frame is for its head."""

_NANOSECONDS: Final = 1_000_000_000

_ACTIVE: Final = PartitionState.ACTIVE  # an enum's attributes are slow to look up

NOTHING_FOUND: Final[Found] = {}


class MutateResult(msgspec.Struct, frozen=True, omit_defaults=True):
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
            `TOKEN_TOO_OLD`, `FENCED`, `REPLAY_DIFFERS`, and `TEMPORARY_FAILURE` when one that the
            writer sent before it was.
        chain: What the batch's writer gave to vouch for it and all before it; 0 for nothing.
        attempt: Which run of the writer's task sent it, or what has run since; 0 for none.
    """

    history_id: HistoryId
    first_seq: SeqNo
    last_seq: SeqNo
    first_cas: Cas
    failures: list[tuple[int, Status]] = []
    counters: list[tuple[int, int]] = []
    repeated: bool = False
    status: Status = Status.OK
    chain: int = 0
    attempt: int = 0


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """A result as it is remembered: of a thousand counters it takes 3 to 10 KB, not 120.

    Attributes:
        failed: How far each failure stands behind the one before it.
        reasons: Why each failed, a byte each.
        counted: How far each counter stands behind the one before it.
        values: The counters' values.
        chain: See `MutateResult`. This and what follows are missing in answers on disk that are
            older than they are.
        attempt: See `MutateResult`.
    """

    history_id: HistoryId
    first_seq: SeqNo
    last_seq: SeqNo
    first_cas: Cas
    failed: list[int]
    reasons: bytes
    counted: list[int]
    values: list[int]
    chain: int = 0
    attempt: int = 0


_encode_packed: Final = msgspec.msgpack.Encoder().encode
_decode_packed: Final = msgspec.msgpack.Decoder(_Packed).decode


def _gaps(rows: Sequence[tuple[int, int]]) -> list[int]:
    if not rows:
        return []
    return [after - before for (before, _), (after, _) in pairwise([(0, 0), *rows])]


def pack(result: MutateResult) -> bytes:
    """The result of a batch that was not refused, in few bytes. O(failures + counters)."""
    return _encode_packed(
        _Packed(
            result.history_id,
            result.first_seq,
            result.last_seq,
            result.first_cas,
            _gaps(result.failures),
            bytes([status for _, status in result.failures]),
            _gaps(result.counters),
            [value for _, value in result.counters],
            result.chain,
            result.attempt,
        )
    )


def unpack(data: bytes, *, repeated: bool = False) -> MutateResult:
    """What was packed."""
    packed = _decode_packed(data)
    failures: list[tuple[int, Status]] = []
    counters: list[tuple[int, int]] = []
    if packed.failed:
        failures = list(zip(accumulate(packed.failed), map(Status, packed.reasons), strict=True))
    if packed.counted:
        counters = list(zip(accumulate(packed.counted), packed.values, strict=True))
    return MutateResult(
        packed.history_id,
        packed.first_seq,
        packed.last_seq,
        packed.first_cas,
        failures,
        counters,
        repeated,
        chain=packed.chain,
        attempt=packed.attempt,
    )


class PartitionImage(msgspec.Struct, frozen=True):
    """A partition as the disk has it.

    Attributes:
        state: What this node is for it.
        failover_log: The branches that led here.
        high: The persisted snapshot end.
        last_cas: No CAS up to here is given again.
        indexed: The disk knows the newest mutation up to here of every key.
        purge_seq: Tombstones at or below it may be gone.
        answers: What publishers were answered, by token, oldest first.
        items: Keys that exist, as of `indexed`.
    """

    state: PartitionState
    failover_log: FailoverLog
    high: SeqNo = SeqNo(0)
    last_cas: Cas = Cas(0)
    indexed: SeqNo = SeqNo(0)
    purge_seq: SeqNo = SeqNo(0)
    answers: Mapping[WriterToken, MutateResult] = {}
    items: int = 0


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
        image: What the disk has of it; None for a new one.
        on_update: Called whenever something in it has changed, with the keys of the design
            documents that did.

    Attributes:
        id: Its number.
        state: Only an active partition takes writes, and expires items.
        failover_log: The branches that led here.
        table: Key to number.
        manager: The snapshots, and the cursors that read them.
        purge_seq: Tombstones at or below it may be gone.
        replicas: What its replicas have reported.
        indexed: The disk knows the newest mutation up to here of every key.
        restored: The number with which it began, here and now: until `indexed` has come to it,
            the disk cannot be asked for a key.
        stored_items: Keys that exist, as of `indexed`.
    """

    __slots__ = (
        "_expiries",
        "_forgot_lately",
        "_has_forgotten",
        "_last_cas",
        "_memory",
        "_on_update",
        "_pins",
        "_pins_given",
        "_sweep_left",
        "_swept_through",
        "_writers",
        "failover_log",
        "id",
        "indexed",
        "manager",
        "purge_seq",
        "replicas",
        "restored",
        "state",
        "stored_items",
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
        image: PartitionImage | None = None,
        on_update: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        memory = Memory() if memory is None else memory
        self._on_update = on_update
        if image is None:
            image = PartitionImage(state, FailoverLog().branch(new_history_id(), SeqNo(0)))
        self._memory = memory
        self._last_cas: int = image.last_cas
        self._writers = Writers(memory)
        self.id = partition_id
        self.state = image.state
        self.failover_log = image.failover_log
        self.table = HashTable(memory)
        self.manager = MutationManager(image.high, memory, on_collapsible)
        self._expiries = ExpiryIndex(self.table, memory)
        self.replicas = ReplicaReports()
        self.purge_seq = image.purge_seq
        self.indexed = image.indexed
        self.restored = image.high
        self.stored_items = image.items
        # Whether the disk may know keys that the table does not.
        self._has_forgotten = image.high > 0
        # Whether it has forgotten some since the index of expiry times was cleaned.
        self._forgot_lately = False
        self._sweep_left = 0
        self._swept_through = SeqNo(0)
        # Fetches under way: what `indexed` was when each began.
        self._pins: dict[int, SeqNo] = {}
        self._pins_given = count()
        for token, answer in image.answers.items():
            # As of the number that it was given at, or nearly: what is undone later takes it along.
            at = min(answer.last_seq, image.high)
            self._writers.remember(token, pack(answer), at, answer.attempt)

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
    def items(self) -> int:
        """Keys that exist. Once the table has forgotten some, as of `indexed`."""
        return self.stored_items if self._has_forgotten else self.table.items

    @property
    def last_cas(self) -> Cas:
        """The highest CAS ever given here."""
        return Cas(self._last_cas)

    # Writing.

    def mutate(
        self,
        chunk: Chunk,
        *,
        now: float,
        writer: WriterToken | None = None,
        found: Found = NOTHING_FOUND,
        attempt: int = 0,
        chain: int = 0,
    ) -> MutateResult:
        """Takes in a batch of a publisher. O(mutations), O(log mutations) for those that read.

        Args:
            chunk: A published chunk; the engine keeps it, or parts of it.
            now: Seconds since 1970.
            writer: The batch's name. The answer to a batch that was here before is given again.
            found: What `FetchNeeded` asked for.
            attempt: Which run of the writer's task sends it; below the highest that was heard of,
                the batch is refused.
            chain: What the writer gives to vouch for the batch and all before it; 0 for nothing. A
                batch that was here before, or that follows one that was, must agree with it.

        Raises:
            ChunkError: The chunk breaks a rule of chunks; it had no effect.
            FetchNeeded: Items must be read from disk first; it had no effect.
        """
        keys = chunk.check_published()
        rows = None if chunk.is_unconditional else _checked_rows(chunk)
        if self.state is not _ACTIVE:
            self.put_off(writer)
            return self._refusal(Status.WRONG_STATE)
        if writer is not None:
            known = self._known(writer, attempt, chain, chunk)
            if known is not None:
                return known
        if rows is not None:
            self._check_found(rows, found, now)
        before = self.manager.high
        # What has expired becomes a deletion before anything is written to it. (There may be more
        # than one call's worth: the rest reads as missing, and has its deletion later.)
        if self._expiries.is_due(now):
            self._expire_due(now)
        result = self._set_all(chunk, keys, now) if rows is None else self._apply(rows, now, found)
        if writer is not None:
            if chain or attempt:
                result = msgspec.structs.replace(result, chain=chain, attempt=attempt)
            self._remember(writer, result)
        if self.manager.high > before:
            self.manager.wake()
            if self._on_update is not None:
                self.has_taken((chunk,), {index for index, _ in result.failures})
        return result

    def has_taken(self, chunks: Sequence[Chunk], failed: Set[int] = frozenset()) -> None:
        """Tells that something has changed: what is in these chunks. A replica, for which they went
        to disk and not through here, says so with this.

        It costs a look or two at the bytes of all keys of a chunk, and no more where no key begins
        as that of a design document does.

        Args:
            chunks: What was taken in.
            failed: Operations of these, by index, that had no effect.
        """
        if self._on_update is None or not chunks:
            return
        designs: Sequence[bytes] = ()
        for chunk in chunks:
            keys = chunk.key_bytes.tobytes()
            # Most keys have none of its first byte, which is found out thirty times as fast.
            if DESIGN_PREFIX[:1] in keys and DESIGN_PREFIX in keys:
                designs = [
                    *designs,
                    *(
                        key
                        for index, key in enumerate(chunk.keys())
                        if key.startswith(DESIGN_PREFIX) and index not in failed
                    ),
                ]
        self._on_update(designs)

    def fall_silent(self) -> None:
        """Its bucket was deleted: tells nothing any more."""
        self._on_update = None

    def _has_expired(self, keys: Sequence[bytes]) -> None:
        if keys and self._on_update is not None:
            self._on_update([key for key in keys if key.startswith(DESIGN_PREFIX)])

    def put_off(self, writer: WriterToken | None) -> None:
        """A batch is refused for what passes, or may yet be: it will be sent again, and what the
        writer has sent behind it must not be done before. See `writers`.

        Args:
            writer: The batch's name, if it has one.
        """
        if writer is not None:
            self._writers.put_off(writer)

    def _known(
        self, token: WriterToken, attempt: int, chain: int, chunk: Chunk
    ) -> MutateResult | None:
        """The answer to a batch that is not to be done now, or not again; None for one that is."""
        writers = self._writers
        if not chain and writers.is_plainly_new(token, attempt):
            return None
        if attempt < writers.attempt(token.writer):
            return self._refusal(Status.FENCED)
        if writers.must_wait(token):
            return self._refusal(Status.TEMPORARY_FAILURE)
        answer, too_old = writers.recall(token)
        if answer is not None:
            first = unpack(answer, repeated=True)
            if chain and first.chain and chain != first.chain:
                return self._differs(token)
            if attempt > writers.attempt(token.writer):
                self._fence(token.writer, attempt)
            return first
        if too_old:
            return self._refusal(Status.TOKEN_TOO_OLD)
        if chain and not self._continues(token, chain, chunk):
            return self._differs(token)
        return None

    def _differs(self, token: WriterToken) -> MutateResult:
        # What was sent behind it, before its writer heard of this, must not be done either.
        self._writers.put_off(token)
        return self._refusal(Status.REPLAY_DIFFERS)

    def _continues(self, token: WriterToken, chain: int, chunk: Chunk) -> bool:
        """Whether a new batch comes after what its writer has sent before, as far as is known."""
        newest = self._writers.newest(token.writer)
        if newest is None or newest[0].counter + 1 != token.counter:
            return True
        before = unpack(newest[1]).chain
        return not before or chunk.chained(before) == chain

    def _fence(self, writer: bytes, attempt: int) -> None:
        """An attempt is heard of that has sent nothing new so far: notes it, for the disk too."""
        newest = self._writers.newest(writer)
        assert newest is not None
        token, answer = newest
        result = msgspec.structs.replace(unpack(answer), attempt=attempt)
        self._writers.replace_newest(token, pack(result), self.manager.high, attempt)

    def _remember(self, writer: WriterToken, result: MutateResult) -> None:
        self._writers.remember(writer, pack(result), self.manager.high, result.attempt)

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
            if chunk.may_expire:
                self._expiries.add_all(chunk.expiries.tolist(), first_seq, keys)
        return MutateResult(
            self.failover_log.current, first_seq, SeqNo(first_seq + count - 1), first_cas
        )

    def _apply(self, rows: list[Mutation], now: float, found: Found) -> MutateResult:
        first_seq, first_cas = SeqNo(self.manager.high + 1), Cas(self._next_cas(now))
        seq, cas = first_seq, first_cas
        failures: list[tuple[int, Status]] = []
        counters: list[tuple[int, int]] = []
        for index, request in enumerate(rows):
            stored = outcome(request, self._item_for(request, now, found))
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

    def _check_found(self, rows: list[Mutation], found: Found, now: float) -> None:
        """Whether all is there that `rows` need to know: raises `FetchNeeded`."""
        wants: dict[bytes, Want] = {}
        for row in rows:
            if row.op == Operation.SET and not row.cas:
                continue
            value = bool(row.cas) or row.op in READS
            want = self._want(row.key, found, value=value, now=now)
            if want is not None and (value or row.key not in wants):
                wants[row.key] = want
        if wants:
            raise FetchNeeded(list(wants.values()))

    def _want(self, key: bytes, found: Found, *, value: bool, now: float) -> Want | None:
        """What must be read from disk to know what the key holds; None when all is known."""
        number = self.table.newest(key)
        if number < 0 or number > self.manager.oldest:
            return None
        if not number:
            if not self._has_forgotten:
                return None
            if key in found:
                item = found[key]
                if item is None or item.cas or not value:
                    return None
            return Want(key, 0, value)
        if not value and not self._expiries.is_due(now):
            return None
        item = found.get(key)
        if item is not None and item.seq == number and (item.cas or not value):
            return None
        return Want(key, number, True)

    def _item_for(self, request: Mutation, now: float, found: Found) -> Mutation | None:
        """What the key holds, as far as the operation needs to know."""
        number = self.table.newest(request.key)
        if number < 0:
            return None
        value = bool(request.cas) or request.op in READS
        # Whatever of the batch needs it from disk was looked for before any of it had an effect.
        item = found.get(request.key)
        if number > self.manager.oldest:
            needed = value or self._expiries.is_due(now)
            item = self.manager.find(number) if needed else _SOME_ITEM
        elif number and (item is None or item.seq != number):
            # Nothing was due then. If something is now, it is what the batch itself has stored.
            item = _SOME_ITEM
        return None if item is None or 0 < item.expiry <= now else item

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
        keys: list[bytes] = []
        while len(keys) < EXPIRE_MAX:
            key = self._expiries.take(now)
            if key is None:
                break
            seq, cas = SeqNo(self.manager.high + 1), Cas(self._next_cas(now))
            self._store(Mutation(Operation.EXPIRE, key, b"", seq, cas))
            self._last_cas = cas
            keys.append(key)
        self._has_expired(keys)
        return len(keys)

    def expire_stored(self, key: bytes, number: SeqNo, now: float) -> bool:
        """Makes a deletion of an item that the disk says has expired, unless the key has changed
        since.

        The partition must have been pinned since before the disk was asked.

        Args:
            key: The key.
            number: The item's number, on disk.
            now: Seconds since 1970.

        Returns:
            Whether it did. It does not before the disk could be asked when the oldest pin that
            there is was given: see `can_be_asked`.
        """
        if self.state is not PartitionState.ACTIVE or self.table.newest(key) not in (0, number):
            return False
        if min(self._pins.values(), default=self.indexed) < self.restored:
            # When the disk was asked, it may not have known all that the table does not.
            return False
        seq, cas = SeqNo(self.manager.high + 1), Cas(self._next_cas(now))
        self._store(Mutation(Operation.EXPIRE, key, b"", seq, cas))
        self._last_cas = cas
        self.manager.wake()
        self._has_expired([key])
        return True

    # What this node is for it.

    def become(self, state: PartitionState, failover_log: FailoverLog) -> None:
        """Has another state from now on, and the log that goes with it.

        Who hands over is still followed, and what its replicas report still counts.
        """
        leads = state in (PartitionState.ACTIVE, PartitionState.PENDING)
        if not leads or failover_log != self.failover_log:
            self.replicas.clear()
        self.state = state
        self.failover_log = failover_log

    def stand_at(self, seq: SeqNo, last_cas: Cas = Cas(0)) -> None:
        """Keeps nothing in memory: the disk has everything up to `seq`. A replica does with each
        commit, and whoever becomes one.

        Args:
            seq: The last complete snapshot's end on disk.
            last_cas: The highest CAS up to there.

        Raises:
            ValueError: Something is here that the disk does not have.
        """
        self.manager.stand_at(seq)
        memory = self._memory
        if self.table:
            memory.table -= self.table.nbytes
            memory.expiries -= self._expiries.nbytes
            self.table = HashTable(memory)
            self._expiries = ExpiryIndex(self.table, memory)
            self._sweep_left = 0
        self._last_cas = max(self._last_cas, last_cas)
        self._has_forgotten = seq > 0
        self.restored = seq

    def cut(self, seq: SeqNo) -> list[WriterToken]:
        """Everything above `seq` is gone from disk: goes back to there.

        Returns:
            The tokens whose answers are forgotten with that.
        """
        self.stand_at(seq)
        if self._on_update is not None:
            # Which design documents were undone with the rest, nobody has noted.
            self._on_update((DESIGN_PREFIX,))
        if not seq:
            self.indexed = self.purge_seq = SeqNo(0)
            self.stored_items = 0
        return self._writers.cut(seq)

    def answered_above(self, seq: SeqNo) -> list[WriterToken]:
        """The tokens of answers that a `cut` would forget. O(answers)."""
        return self._writers.above(seq)

    def answers(self, start: SeqNo, end: SeqNo) -> list[tuple[bytes, int, SeqNo, bytes]]:
        """Answers to batches of [`start`, `end`], for a replica: writer, counter, the high number
        then, and the answer; oldest first. Some may be of batches that are older than `start`.
        O(log answers), beside what is found."""
        return self._writers.between(start, end)

    def take_answers(self, rows: Iterable[tuple[bytes, int, SeqNo, bytes]]) -> None:
        """What another node gave as `answers`, of changes that are not here yet, or just came."""
        for writer, counter, seq, answer in rows:
            token = WriterToken(writer, counter)
            newest = self._writers.newest(writer)
            if newest is None or newest[0].counter < counter:
                self._writers.remember(token, answer, seq, unpack(answer).attempt)
            elif newest[0] == token and newest[1] != answer:
                self._writers.replace_newest(token, answer, seq, unpack(answer).attempt)

    # The disk.

    def keep_news(self) -> None:
        """A disk is there: from now on answers to publishers are noted for it."""
        self._writers.keep_news()

    def take_news(self, through: SeqNo) -> dict[WriterToken, MutateResult | None]:
        """Answers to keep on disk with everything up to `through`, and None for those to forget."""
        return {
            token: None if answer is None else unpack(answer)
            for token, answer in self._writers.take_news(through).items()
        }

    def is_indexed(self, indexed: SeqNo, items: int) -> None:
        """The disk knows the newest mutation of every key up to `indexed`; `items` of them exist
        there."""
        self.indexed = indexed
        self.stored_items = items

    @property
    def can_be_asked(self) -> bool:
        """Whether the disk knows every key that the table does not."""
        return self.indexed >= self.restored

    def pin(self) -> int:
        """The disk is about to be asked for keys: none is forgotten that may be newer there then.

        Returns:
            What to say to `unpin`.
        """
        pin = next(self._pins_given)
        self._pins[pin] = self.indexed
        return pin

    def unpin(self, pin: int) -> None:
        """The fetch is over, and what it found was used."""
        del self._pins[pin]

    def evict(self, budget: int) -> int:
        """Forgets keys that the disk knows: looks at `budget` of them.

        Returns:
            How many were looked at; 0 when there are none to be forgotten until more is indexed.
        """
        if not self._sweep_left:
            through = min(self._pins.values(), default=self.indexed)
            if through == self._swept_through:
                return 0
            self._swept_through = through
            self._sweep_left = len(self.table)
        looked = min(budget, self._sweep_left, len(self.table))
        self._sweep_left -= looked
        if looked:
            # Pins given since the sweep began hold back no more than those that were there then.
            if self.table.evict(self._swept_through, looked):
                self._has_forgotten = self._forgot_lately = True
            if not self._sweep_left and self._forgot_lately:
                self._forgot_lately = False
                self._expiries.clean()
        else:
            self._sweep_left = 0
        return looked

    # Reading.

    def get(self, key: bytes, now: float, found: Found = NOTHING_FOUND) -> Item | None:
        """What the key holds; None when it is missing, or has expired. O(log mutations).

        Raises:
            FetchNeeded: It must be read from disk first.
        """
        want = self._want(key, found, value=True, now=now)
        if want is not None:
            raise FetchNeeded([want])
        row = self._find(key, now, found)
        return None if row is None else Item(row.value, row.cas, row.flags, row.expiry, row.seq)

    def get_many(
        self,
        keys: Sequence[bytes],
        now: float,
        bytes_max: int = GET_BYTES_MAX,
        found: Found = NOTHING_FOUND,
    ) -> Chunk:
        """What the keys hold, one row a key in the order asked, as a reply to a `GET`.

        Args:
            keys: The keys.
            now: Seconds since 1970.
            bytes_max: The reply ends before it exceeds this, but not before its first row: ask
                again for `keys[chunk.count:]`.
            found: What `FetchNeeded` asked for. The reply ends before the first key that should be
                in it and is not.

        Returns:
            A `SET` with its number for what was found, a `DELETE` with number 0 for what is
            missing. Its range is (0, high number]; its numbers are in no order.

        Raises:
            FetchNeeded: The first key, and perhaps others, must be read from disk first.
        """
        builder = ChunkBuilder()
        room = bytes_max
        for index, key in enumerate(keys):
            if self._want(key, found, value=True, now=now) is not None:
                if found and index:
                    break
                raise FetchNeeded(list(self._wants(keys[index:], now)))
            row = self._find(key, now, found)
            room -= ROW_BYTES_MAX + len(key) + (len(row.value) if row is not None else 0)
            if room < 0 and len(builder):
                break
            if row is None:
                builder.append(Operation.DELETE, key)
            else:
                builder.append(row.op, key, row.value, row.seq, row.cas, row.flags, row.expiry)
        return builder.build(SeqNo(0), self.high_seq)

    def _wants(self, keys: Iterable[bytes], now: float) -> Iterable[Want]:
        for key in dict.fromkeys(keys):
            want = self._want(key, NOTHING_FOUND, value=True, now=now)
            if want is not None:
                yield want

    def _find(self, key: bytes, now: float, found: Found) -> Mutation | None:
        number = self.table.newest(key)
        if number < 0:
            return None
        in_memory = number > self.manager.oldest
        row = self.manager.find(number) if in_memory else found.get(key)
        return None if row is None or 0 < row.expiry <= now else row

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
            "items": self.items,
            "keys": len(self.table),
            "indexed": self.indexed,
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
