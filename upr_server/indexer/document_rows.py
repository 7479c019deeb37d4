"""The newest changes of a round's documents, as columns that are made once for all indexes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from itertools import compress
from struct import Struct
from typing import Any, Final

from upr_protocol.ids import Operation, PartitionId, SeqNo
from upr_server.indexer.index_batch import DocumentChange, IndexBatch
from upr_server.indexer.pure.extractor import NOT_JSON, decode_value, decode_values

_PARTITION: Final = Struct(">H")


def back_prefix(partition: PartitionId) -> bytes:
    """What the back keys of a partition's documents begin with."""
    return _PARTITION.pack(partition)


class DocumentRows:
    """New states of some documents, each document once, in the order of their back keys.

    Attributes:
        back_keys: The partition and key of each document.
        keys: The key of each.
        values: The bytes of each; None for a deleted one.
    """

    def __init__(
        self,
        back_keys: Sequence[bytes],
        keys: Sequence[bytes],
        values: Sequence[bytes | None],
    ) -> None:
        self.back_keys = back_keys
        self.keys = keys
        self.values = values

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def documents(self) -> Sequence[Any]:
        """The values as JSON; `NOT_JSON` where one is not JSON, or the document was deleted."""
        if None in self.values:
            return [NOT_JSON if value is None else decode_value(value) for value in self.values]
        return decode_values(self.values)  # type: ignore[arg-type]  # none is None

    def changes(self) -> Iterable[DocumentChange]:
        """The rows one by one."""
        return map(DocumentChange, self.keys, self.values, self.documents)

    def with_prefix(self, prefix: bytes) -> DocumentRows:
        """The rows whose keys begin with `prefix`. O(rows)."""
        return self._at([place for place, key in enumerate(self.keys) if key.startswith(prefix)])

    def of_partitions(self, partitions: Collection[PartitionId]) -> DocumentRows:
        """The rows of some partitions. O(rows)."""
        prefixes = set(map(back_prefix, partitions))
        return self._at(
            [
                place
                for place, back_key in enumerate(self.back_keys)
                if back_key[: _PARTITION.size] in prefixes
            ]
        )

    def _at(self, places: Sequence[int]) -> DocumentRows:
        rows = DocumentRows(
            [self.back_keys[place] for place in places],
            [self.keys[place] for place in places],
            [self.values[place] for place in places],
        )
        # To decode them takes most of an index's time: that is done once.
        if "documents" in vars(self):
            documents = self.documents
            rows.documents = [documents[place] for place in places]
        return rows


class NewestChanges:
    """Collects changes of documents; a later one takes the place of an earlier one."""

    def __init__(self) -> None:
        self._newest: dict[bytes, tuple[bytes, bytes | None]] = {}

    def add(self, batch: IndexBatch, first_seq: int = 0) -> None:
        """Adds the changes of a batch that have this number or a higher one. O(changes)."""
        prefix = back_prefix(batch.partition)
        for key, value in (batch.rollback_documents or {}).items():
            self._newest[prefix + key] = key, value
        for chunk in batch.chunks:
            keys: Sequence[bytes] = chunk.keys()
            values: Sequence[bytes | None] = chunk.values()
            operations = bytes(chunk.operations)
            if operations.count(Operation.SET) < len(operations):
                values = [
                    value if operation == Operation.SET else None
                    for value, operation in zip(values, operations, strict=True)
                ]
            if first_seq > min(chunk.seqs, default=first_seq):
                is_new = [seq >= first_seq for seq in chunk.seqs]
                keys, values = list(compress(keys, is_new)), list(compress(values, is_new))
            back_keys = [prefix + key for key in keys]
            self._newest.update(zip(back_keys, zip(keys, values, strict=True), strict=True))

    def take(self) -> DocumentRows:
        """Takes out what was collected. O(n log n)."""
        newest, self._newest = self._newest, {}
        back_keys = sorted(newest)
        rows = [newest[back_key] for back_key in back_keys]
        return DocumentRows(back_keys, [key for key, _ in rows], [value for _, value in rows])


def _merged(batches: Iterable[IndexBatch]) -> list[IndexBatch]:
    """Makes one batch of each partition's batches of one history. Beside fast writers a batch has a
    few documents, and each index looks at the mark of each batch. O(batches)."""
    groups: list[list[IndexBatch]] = []
    open_groups: dict[PartitionId, list[IndexBatch]] = {}
    for batch in batches:
        group = open_groups.get(batch.partition)
        if group is None or not _may_follow(group[-1], batch):
            group = open_groups[batch.partition] = []
            groups.append(group)
        group.append(batch)
    return [
        group[0]
        if len(group) == 1
        else IndexBatch(
            group[0].partition, group[-1].mark, [chunk for batch in group for chunk in batch.chunks]
        )
        for group in groups
    ]


def _may_follow(batch: IndexBatch, following: IndexBatch) -> bool:
    log, following_log = batch.mark.position.log, following.mark.position.log
    return (
        not (batch.is_rollback or following.is_rollback)
        and batch.mark.seq <= following.mark.seq
        # What came again must not take the place of what came first.
        and all(batch.mark.seq < min(chunk.seqs) for chunk in following.chunks if len(chunk))
        and (log is following_log or log == following_log)
    )


class RoundChanges:
    """The batches of a round, and their changes. For one thread at a time.

    Args:
        batches: The batches, each partition's in order.
        whole: If these are the batches of some partitions only, the changes of all of them.

    Attributes:
        batches: The batches, with those of one partition and one history joined into one.
    """

    def __init__(self, batches: Sequence[IndexBatch], whole: RoundChanges | None = None) -> None:
        self.batches = _merged(batches)
        self._whole = whole

    @cached_property
    def rows(self) -> DocumentRows:
        """The newest change of each document."""
        if self._whole is not None:
            return self._whole.rows.of_partitions({batch.partition for batch in self.batches})
        newest = NewestChanges()
        for batch in self.batches:
            newest.add(batch)
        return newest.take()

    @cached_property
    def first_seqs(self) -> Sequence[SeqNo | None]:
        """The lowest number in each batch; None if it has no numbered changes."""
        return [
            min((SeqNo(min(chunk.seqs)) for chunk in batch.chunks if len(chunk)), default=None)
            for batch in self.batches
        ]

    def of(self, covers: Callable[[PartitionId], bool]) -> RoundChanges:
        """The changes of some partitions; the same object if these are all. O(batches)."""
        batches = [batch for batch in self.batches if covers(batch.partition)]
        if len(batches) == len(self.batches):
            return self
        return RoundChanges(batches, self if self._whole is None else self._whole)
