"""The index of one bucket: the number of each key's newest mutation, and what expires when.

It is derived from the log and follows behind it in large sorted batches, partition by partition
(keys are sorted by partition first, so that a batch touches few pages). A watermark a partition
says how far it has come; what is above it is in the hash table. Lost, it is made anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

import msgspec

from upr_protocol.chunk import Buffer, Chunk, Mutation
from upr_protocol.ids import Operation, PartitionId, SeqNo
from upr_server.engine import Want
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.errors import CorruptionError
from upr_server.storage.ordered_map import OrderedMap, ReadTransaction
from upr_server.storage.records import (
    EXPIRY,
    INDEX_KEY_PREFIX,
    KEY,
    WATERMARK,
    IndexEntry,
    Watermark,
    expiry_key,
    index_key,
    pack_entries,
    pack_record,
    parse_expiry_key,
    parse_record,
    partition_key,
    seal,
    unseal,
)

READ_BYTES_MAX: Final = 8 * 1024 * 1024
"""What one step reads of the log at most."""


FIND_BYTES_MAX: Final = 32 * 1024 * 1024
"""What one answer of `find` comes to, about."""


CHUNK_BYTES: Final = 128
"""What a chunk takes on disk beside its mutations, about: it shows where chunks are small."""


class Due(msgspec.Struct, frozen=True):
    """An item whose time has come.

    Attributes:
        partition: Its partition.
        number: Its number.
        key: Its key.
        expiry: When it expired.
    """

    partition: PartitionId
    number: SeqNo
    key: bytes
    expiry: int


class KeyIndex:
    """One bucket's index.

    Args:
        ordered_map: Where it is kept.
        log: The log that it follows.
    """

    def __init__(self, ordered_map: OrderedMap, log: ChunkLog) -> None:
        self.ordered_map = ordered_map
        self._log = log

    def watermark(self, partition: int) -> Watermark:
        """How far it has come."""
        with self.ordered_map.read() as transaction:
            return _watermark(transaction, partition)

    # Following the log.

    def step(
        self, partition: int, mutations_max: int, *, through: SeqNo | None = None
    ) -> Watermark:
        """Takes in about so many mutations of the log behind the watermark.

        Args:
            partition: The partition.
            mutations_max: How many.
            through: Goes no further than the chunk that ends here or before, or than one chunk; by
                default as far as the log does. The watermark stands where a chunk ends: a
                compaction, which goes as far as it does, takes whole chunks.

        Returns:
            The new watermark.
        """
        high = self._log.high(partition)
        mark = self.watermark(partition)
        if mark.seq > high:
            raise CorruptionError(
                f"the index of partition {partition} knows number {mark.seq}, the log only {high}"
            )
        if mark.seq >= (high if through is None else through):
            return mark
        chunks = self._log.read(
            partition, mark.seq, high, bytes_max=READ_BYTES_MAX, mutations_max=mutations_max
        )
        if through is not None:
            chunks = [chunk for chunk in chunks if chunk.end <= through] or chunks[:1]
        newest = _newest(partition, chunks)
        items = mark.items
        with self.ordered_map.write() as transaction:
            keys = sorted(newest)
            entries = [newest[key] for key in keys]
            known = 0
            for key, old in transaction.get_all(keys):
                known += 1
                entry = IndexEntry.parse(key, old)
                items -= entry.number > 0
                if entry.expiry:
                    transaction.delete(expiry_key(entry.expiry, partition, entry.number))
            items += sum(number > 0 for number, _ in entries)
            transaction.put_all(pack_entries(keys, entries))
            transaction.put_all(_expiring(partition, keys, entries))
            mark = Watermark(
                chunks[-1].end, items, mark.garbage_bytes + _garbage(chunks, len(keys) - known)
            )
            key = partition_key(WATERMARK, partition)
            transaction.put(key, pack_record(key, mark))
        return mark

    def knows(self, partition: int) -> bool:
        """Whether anything stands in it of a partition."""
        first, last = index_key(partition, b""), index_key(partition, b"\xff" * 251)
        with self.ordered_map.read() as transaction:
            return transaction.last(first, last) is not None

    def forget(self, partition: int, keys_max: int) -> bool:
        """Takes so many keys of a partition out, whatever stands there, and the watermark first.

        Returns:
            Whether there are more.
        """
        first, last = index_key(partition, b""), index_key(partition, b"\xff" * 251)
        with self.ordered_map.write() as transaction:
            transaction.delete(partition_key(WATERMARK, partition))
            scanned = islice(transaction.scan(first, last), keys_max)
            found = [(bytes(key), bytes(value)) for key, value in scanned]
            for key, value in found:
                entry = IndexEntry.parse(key, value)
                transaction.delete(key)
                if entry.expiry:
                    transaction.delete(expiry_key(entry.expiry, partition, entry.number))
        return len(found) == keys_max

    def compacted(
        self, partition: int, purged: Iterable[tuple[bytes, int]], garbage_bytes: int
    ) -> None:
        """A compaction has dropped these tombstones (key and number), and what is superseded now
        takes about so many bytes."""
        with self.ordered_map.write() as transaction:
            for key, number in purged:
                indexed = index_key(partition, key)
                value = transaction.get(indexed)
                if value is not None and IndexEntry.parse(indexed, value).number == -number:
                    transaction.delete(indexed)
            mark = msgspec.structs.replace(
                _watermark(transaction, partition), garbage_bytes=garbage_bytes
            )
            key = partition_key(WATERMARK, partition)
            transaction.put(key, pack_record(key, mark))

    # Reading.

    def find(
        self,
        partition: int,
        wants: Sequence[Want],
        *,
        indexed: int = 0,
        bytes_max: int = FIND_BYTES_MAX,
    ) -> list[Mutation | None]:
        """The items of these keys, as of the watermark; None for what is missing or deleted.

        Where no value is wanted, only number and expiry are those of the item.

        Args:
            partition: The partition.
            wants: The keys.
            indexed: A watermark that is known to have been reached.
            bytes_max: The answer ends with the item that comes to this: ask again for the others.

        Raises:
            CorruptionError: What there is of one is damaged; or the index is that of a commit of
                the past, as a flipped bit in a meta page makes it.
        """
        entries = self._entries_of(partition, wants, indexed)
        while True:
            try:
                return self._items_of(partition, wants, entries, bytes_max)
            except CorruptionError:
                # The log is read in a transaction of its own: what the index named may have been
                # superseded, and compacted, in between.
                again = self._entries_of(partition, wants, indexed, is_second_look=True)
                if again == entries:
                    raise
                entries = again

    def _entries_of(
        self, partition: int, wants: Sequence[Want], indexed: int, *, is_second_look: bool = False
    ) -> list[IndexEntry | None]:
        """What is to be read of each, None for what does not exist.

        At a second look a number that was given may have been superseded, too.
        """
        entries: list[IndexEntry | None] = []
        with self.ordered_map.read() as transaction:
            mark = _watermark(transaction, partition)
            if mark.seq < indexed:
                raise CorruptionError(
                    f"the index of partition {partition} was at {indexed}, and is at {mark.seq}"
                )
            for want in wants:
                if want.number and not is_second_look:
                    entries.append(IndexEntry(want.number, 0))
                    continue
                key = index_key(partition, want.key)
                value = transaction.get(key)
                if value is None:
                    _check_neighbours(transaction, key)
                entry = None if value is None else IndexEntry.parse(key, value)
                if want.number and (entry is None or abs(entry.number) < want.number):
                    # The index has not come so far.
                    entry = IndexEntry(want.number, 0)
                entries.append(None if entry is None or entry.number < 0 else entry)
        return entries

    def _items_of(
        self,
        partition: int,
        wants: Sequence[Want],
        entries: Sequence[IndexEntry | None],
        bytes_max: int,
    ) -> list[Mutation | None]:
        needed = [
            entry.number
            for want, entry in zip(wants, entries, strict=True)
            if entry is not None and want.value
        ]
        rows = iter(self._log.find(partition, needed, bytes_max) if needed else ())
        found: list[Mutation | None] = []
        for want, entry in zip(wants, entries, strict=True):
            if entry is None:
                found.append(None)
            elif want.value:
                row = next(rows, None)
                if row is None:
                    break
                if row.key != want.key or row.op != Operation.SET:
                    raise CorruptionError(
                        f"number {entry.number} of partition {partition} is {row.key!r}"
                    )
                found.append(row)
            else:
                found.append(
                    Mutation(Operation.SET, want.key, seq=SeqNo(entry.number), expiry=entry.expiry)
                )
        return found

    def entries(self, partition: int, keys: Iterable[bytes]) -> Iterator[IndexEntry | None]:
        """What is known of each of these keys."""
        with self.ordered_map.read() as transaction:
            for key in keys:
                indexed = index_key(partition, key)
                value = transaction.get(indexed)
                yield None if value is None else IndexEntry.parse(indexed, value)

    def due(self, now: int, after: bytes, limit: int) -> tuple[list[Due], bytes]:
        """Items that expired at `now` or before, by time.

        Args:
            now: Seconds since 1970.
            after: Where the last call ended; empty to begin.
            limit: The most that is returned.

        Returns:
            The items, and where to go on; empty when that was all.
        """
        items: list[Due] = []
        last = expiry_key(now, 0xFFFF, (1 << 64) - 1)
        with self.ordered_map.read() as transaction:
            for key, value in transaction.scan(after + b"\0" if after else EXPIRY, last):
                expiry, partition, number = parse_expiry_key(key)
                indexed = unseal(key, value)
                items.append(Due(PartitionId(partition), SeqNo(number), indexed, expiry))
                if len(items) == limit:
                    return items, key
        return items, b""


def _check_neighbours(transaction: ReadTransaction, key: bytes) -> None:
    """Raises `CorruptionError` if an entry beside the place of `key`, which is not there, is
    damaged: a flipped bit in a key hides its entry, and leaves it where the search for it ends."""
    found = [transaction.last(KEY, key)]
    for after in transaction.scan(key, WATERMARK):
        found.append(after)
        break
    for entry in found:
        if entry is not None:
            IndexEntry.parse(*entry)


def _watermark(transaction: ReadTransaction, partition: int) -> Watermark:
    key = partition_key(WATERMARK, partition)
    value = transaction.get(key)
    return Watermark() if value is None else parse_record(key, value, Watermark)


def _garbage(chunks: Sequence[Chunk], new: int) -> int:
    """What is superseded when `new` of the mutations in these chunks are of keys that the index did
    not know, as if all were of one size; and what the chunks take beyond their mutations."""
    count = sum(chunk.count for chunk in chunks)
    superseded = sum(chunk.nbytes for chunk in chunks) * (count - new) // max(count, 1)
    return superseded + CHUNK_BYTES * len(chunks)


def _expiring(
    partition: int, keys: Iterable[bytes], entries: Iterable[tuple[int, int]]
) -> list[tuple[bytes, Buffer]]:
    """What is to be entered of items that expire."""
    items: list[tuple[bytes, Buffer]] = []
    for key, (number, expiry) in zip(keys, entries, strict=True):
        if expiry:
            expires = expiry_key(expiry, partition, number)
            items.append((expires, seal(expires, key[INDEX_KEY_PREFIX:])))
    return sorted(items)


def _newest(partition: int, chunks: Sequence[Chunk]) -> dict[bytes, tuple[int, int]]:
    """The signed number and the expiry time of each key's newest mutation, by key of the index."""
    newest: dict[bytes, tuple[int, int]] = {}
    prefix = index_key(partition, b"")
    for chunk in chunks:
        numbers = chunk.seqs.tolist()
        expiries = chunk.expiries.tolist()
        operations = chunk.operations.tobytes()
        if operations != bytes((Operation.SET,)) * chunk.count:
            numbers = [
                number if operation == Operation.SET else -number
                for number, operation in zip(numbers, operations, strict=True)
            ]
            # A tombstone does not expire, whatever another node says of it.
            expiries = [
                expiry if number > 0 else 0
                for number, expiry in zip(numbers, expiries, strict=True)
            ]
        plain = chunk.keys()
        keys = [prefix + key for key in plain]
        newest.update(zip(keys, zip(numbers, expiries, strict=True), strict=True))
    return newest
