"""A naive disk: a list of what was committed, an index that lags behind it, remembered answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.engine.model import Model, Reader
from tests.kit.answer_rows import unpack_rows
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Cas, Operation, PartitionState, SeqNo
from upr_server.engine import (
    FetchRequest,
    MutateResult,
    Partition,
    PartitionImage,
    SnapshotEndItem,
    WriterToken,
    unpack_result,
)


class NaiveDisk:
    """What there is on disk of one partition.

    Attributes:
        log: The mutations of all snapshots committed, in order.
        high: The end of the last of them.
        indexed: How far the index has come: it knows the newest mutation of each key up to here.
        answers: What publishers were answered.
    """

    def __init__(self) -> None:
        self.log: list[Mutation] = []
        self.high = SeqNo(0)
        self.last_cas = Cas(0)
        self.indexed = SeqNo(0)
        self.answers: dict[WriterToken, MutateResult] = {}
        # Where the index may stop.
        self.chunk_ends: list[SeqNo] = []
        # Snapshots that were read and are not committed yet: mutations, ends of chunks, end.
        self._read: list[tuple[list[Mutation], list[SeqNo], SeqNo]] = []
        self._rows: list[Mutation] = []
        self._ends: list[SeqNo] = []

    # Writing.

    def read(self, partition: Partition, items: int) -> None:
        """Reads so many items of the persistence cursor."""
        for _ in range(items):
            item = partition.manager.persistence.next()
            if item is None:
                return
            if isinstance(item, Chunk):
                self._rows += item
                self._ends.append(item.end)
            elif isinstance(item, SnapshotEndItem):
                self._read.append((self._rows, self._ends, item.end))
                self._rows, self._ends = [], []

    def commit(self, partition: Partition, snapshots: int) -> None:
        """Commits so many of the snapshots that were read whole, at once."""
        committed, self._read = self._read[:snapshots], self._read[snapshots:]
        if not committed:
            return
        for rows, ends, _ in committed:
            self.log += rows
            self.chunk_ends += ends
        self.high = committed[-1][2]
        self.last_cas = partition.last_cas
        answer_rows, _ = partition.repeated_batches.answers.take_unsaved(self.high)
        for name, answer in unpack_rows(answer_rows).items():
            token = WriterToken(*name)
            if answer is None:
                self.answers.pop(token, None)
            else:
                assert token not in self.answers
                self.answers[token] = unpack_result(answer)
        partition.manager.persistence.commit(self.high)

    def advance_index(self, chunks: int) -> None:
        """Enters so many chunks into the index."""
        ahead = [end for end in self.chunk_ends if end > self.indexed]
        if ahead and chunks:
            self.indexed = ahead[:chunks][-1]

    def report(self, partition: Partition) -> None:
        """Tells the partition how far the index has come."""
        partition.note_index_progress(
            self.indexed, sum(row.op == Operation.SET for row in self._newest())
        )

    def crash(self) -> None:
        """Loses what was not committed."""
        self._read.clear()
        self._rows, self._ends = [], []

    def image(self, failover_log: FailoverLog) -> PartitionImage:
        """The partition as it is after a restart."""
        by_age = sorted(self.answers.items(), key=lambda item: (item[1].last_seq, item[0].counter))
        return PartitionImage(
            PartitionState.ACTIVE,
            failover_log,
            self.high,
            self.last_cas,
            self.indexed,
            SeqNo(0),
            dict(by_age),
        )

    # Reading.

    def _newest(self) -> Iterator[Mutation]:
        newest = {row.key: row for row in self.log if row.seq <= self.indexed}
        return iter(newest.values())

    def find(self, requests: list[FetchRequest]) -> dict[bytes, Mutation | None]:
        """Items, as the disk knows them at this moment."""
        newest = {row.key: row for row in self._newest()}
        by_seq = {row.seq: row for row in self.log}
        items: dict[bytes, Mutation | None] = {}
        for request in requests:
            row = by_seq[SeqNo(request.seq)] if request.seq else newest.get(request.key)
            assert row is None or row.key == request.key
            if row is None or row.op != Operation.SET:
                assert not request.seq
                items[request.key] = None
            elif request.needs_value:
                items[request.key] = row
            else:
                items[request.key] = Mutation(
                    Operation.SET, row.key, seq=row.seq, expiry=row.expiry
                )
        return items

    def due(self, now: float) -> list[Mutation]:
        """Items that have expired, as far as the index knows."""
        return [row for row in self._newest() if row.op == Operation.SET and 0 < row.expiry <= now]


class DiskModel(Model):
    """The naive model, which never evicts anything, with the CAS of every mutation.

    When an item that has expired becomes a deletion depends on who remembers when it expires; what
    publishers and readers see does not.

    Args:
        knows: Whether the partition's memory tells that this item is its key's newest.
    """

    def __init__(self, knows: Callable[[Mutation], bool]) -> None:
        super().__init__()
        self.knows = knows
        self.cas: dict[int, int] = {}

    def expire(self, now: float) -> int:
        expired = [row for row in self.now.values() if 0 < row.expiry <= now and self.knows(row)]
        for row in sorted(expired, key=lambda row: (row.expiry, row.seq)):
            self.store(Operation.EXPIRE, row.key)
        return len(expired)

    def cas_of_all(self) -> dict[bytes, int]:
        """The CAS of every item."""
        return {key: self.cas[row.seq] for key, row in self.now.items()}

    def answered(self, result: MutateResult) -> None:
        """Enters the CAS values that a batch was given."""
        for seq in range(result.first_seq, result.last_seq + 1):
            self.cas[seq] = result.first_cas + seq - result.first_seq

    def fall_back(self, high: int) -> None:
        """Loses what is above `high`."""
        del self.log[high:]
        self.now = self.state(high)


class DiskReader(Reader):
    """A reader whose backfills come from the naive disk."""

    def __init__(self, partition: Partition, model: Model, start: int, disk: NaiveDisk) -> None:
        self.disk = disk
        super().__init__(partition, model, start)

    def stored(self, start: int, end: int) -> list[Mutation]:
        assert end in {start, self.disk.high}, "a state on disk is that at its end"
        return [row for row in self.disk.log if start < row.seq <= end]
