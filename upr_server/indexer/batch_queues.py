"""The queues of batches, and which of them the next round applies."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Final

from upr_protocol.ids import PartitionId
from upr_server.indexer.index_batch import IndexBatch

ROUND_BYTES: Final = 4 * 1024 * 1024
"""About what one round applies: enough to pay for its commits, some 0.2 s of work."""

QUEUE_BATCHES_MAX: Final = 4096
"""A queue's length: batches may be small, and each has its overhead."""

_NumberedBatch = tuple[int, IndexBatch]
"""A batch, and how many batches had been put when it was put, itself included."""


class BatchQueues:
    """Batches that wait, in a few queues by partition. A partition's batches stay in order. Several
    rounds may be under way; they end in the order in which they began.

    While nobody waits, the queues take turns, so that a busy partition does not delay the others.
    While scans wait, rounds go by these rules:

    1. Half of a round is for the partitions whose changes a scan requires, and for those of whose
       snapshots a part was applied. So a change waits for the batches of its own partition, and not
       for all that were put before it.
    2. The rest goes by age, and has one batch at least. So each round has the oldest batch, no
       partition is overtaken for ever, and a scan that requires all batches that were put before
       some moment does not wait for later ones.
    3. The rest begins no snapshot whose end the round does not have, unless with the oldest batch:
       a scan needs every partition at the end of a snapshot.

    Args:
        queues: How many queues.

    Attributes:
        put_count: How many batches were put so far.
        queued_bytes: The bytes of the batches that are not applied yet.
    """

    def __init__(self, queues: int) -> None:
        self._queue_count = queues
        self._batches: defaultdict[PartitionId, deque[_NumberedBatch]] = defaultdict(deque)
        self._lengths = [0] * queues
        """The batches of each queue, with those of the rounds under way."""
        self._rounds: deque[list[_NumberedBatch]] = deque()
        """The rounds under way, the oldest first."""
        self._counts_after: deque[int] = deque()
        """What `_applied_count` is after each of them."""
        self._unfinished: set[PartitionId] = set()
        """The partitions of whose snapshots a part is applied or in a round."""
        self._next_queue = 0
        """The queue whose turn comes next."""
        self._applied_count = 0
        """The first so many batches that were put are applied, and the next one is not."""
        self.put_count = 0
        self.queued_bytes = 0

    def put(self, batch: IndexBatch) -> None:
        """Puts a batch behind the others of its partition. O(1)."""
        self.put_count += 1
        self._batches[batch.partition].append((self.put_count, batch))
        self._lengths[self._queue_of(batch.partition)] += 1
        self.queued_bytes += batch.nbytes

    def _queue_of(self, partition: PartitionId) -> int:
        return partition % self._queue_count

    def __len__(self) -> int:
        """How many batches are not applied yet. O(queues)."""
        return sum(self._lengths)

    @property
    def is_full(self) -> bool:
        """Whether one of the queues has no room. O(queues)."""
        return max(self._lengths) >= QUEUE_BATCHES_MAX

    def partitions(self) -> set[PartitionId]:
        """The partitions of which batches are not applied yet. O(partitions + batches of rounds
        under way)."""
        in_rounds = {batch.partition for items in self._rounds for _, batch in items}
        return in_rounds.union(self._batches)

    def has_applied(self, put_count: int, rounds: int = 0) -> bool:
        """Whether the first `put_count` batches that were put are applied, or in the oldest
        `rounds` that are under way. O(1)."""
        return put_count <= (self._counts_after[rounds - 1] if rounds else self._applied_count)

    @property
    def waiting_count(self) -> int:
        """How many batches wait for a round. O(partitions)."""
        return sum(map(len, self._batches.values()))

    @property
    def round_bytes(self) -> int:
        """The bytes of the batches in the rounds under way. O(their batches)."""
        return sum(batch.nbytes for items in self._rounds for _, batch in items)

    # Rounds.

    def begin_round(
        self, required: Collection[PartitionId] = (), *, by_age: bool = False
    ) -> list[IndexBatch]:
        """Takes the batches of one more round. They count as queued until `end_round`.
        O(partitions + batches * log(partitions)).

        Args:
            required: The partitions whose changes scans wait for.
            by_age: Whether somebody waits.

        Returns:
            The batches; at least one if there is one.
        """
        items: list[_NumberedBatch] = []
        if by_age:
            self._take(items, self._unfinished.union(required), ROUND_BYTES // 2)
            required_count = len(items)
            nbytes = sum(batch.nbytes for _, batch in items)
            self._take(items, list(self._batches), ROUND_BYTES - nbytes)
            items = self._without_unfinished(items, required_count + 1)
        else:
            self._take_in_turn(items)
        self._rounds.append(items)
        self._counts_after.append(self._front_count())
        for _, batch in items:
            _note_applied(self._unfinished, batch)
        return [batch for _, batch in items]

    def _take(
        self, items: list[_NumberedBatch], partitions: Iterable[PartitionId], nbytes_max: int
    ) -> None:
        """Takes batches of these partitions by age, one at least, until they have `nbytes_max`."""
        fronts = [
            (self._batches[partition][0][0], partition)
            for partition in partitions
            if partition in self._batches
        ]
        heapq.heapify(fronts)
        nbytes = 0
        is_first = True
        while fronts and (is_first or nbytes < nbytes_max):
            is_first = False
            partition = fronts[0][1]
            nbytes += self._take_front(items, partition)
            if partition in self._batches:
                heapq.heapreplace(fronts, (self._batches[partition][0][0], partition))
            else:
                heapq.heappop(fronts)

    def _take_in_turn(self, items: list[_NumberedBatch]) -> None:
        """Takes a batch of each queue in turn, each queue's by age. The next round goes on with the
        queue that follows: where batches are as large as rounds, one queue would have them all."""
        fronts: dict[int, list[tuple[int, PartitionId]]] = {}
        for partition, batches in self._batches.items():
            fronts.setdefault(self._queue_of(partition), []).append((batches[0][0], partition))
        for heap in fronts.values():
            heapq.heapify(heap)
        nbytes = 0
        while fronts and nbytes < ROUND_BYTES:
            queue = self._next_queue
            self._next_queue = (queue + 1) % self._queue_count
            heap = fronts.get(queue, [])
            if heap:
                partition = heap[0][1]
                nbytes += self._take_front(items, partition)
                if partition in self._batches:
                    heapq.heapreplace(heap, (self._batches[partition][0][0], partition))
                else:
                    heapq.heappop(heap)
            if not heap:
                fronts.pop(queue, None)

    def _take_front(self, items: list[_NumberedBatch], partition: PartitionId) -> int:
        """Takes the oldest batch of a partition; gives its bytes."""
        batches = self._batches[partition]
        items.append(batches.popleft())
        if not batches:
            del self._batches[partition]
        return items[-1][1].nbytes

    def _without_unfinished(
        self, items: list[_NumberedBatch], kept_count: int
    ) -> list[_NumberedBatch]:
        """Puts back the batches that begin snapshots whose ends the round does not have; gives the
        others. The first `kept_count` stay."""
        unfinished = set(self._unfinished)
        for _, batch in items[:kept_count]:
            _note_applied(unfinished, batch)
        later_batches, items = items[kept_count:], items[:kept_count]
        last_ends = {
            batch.partition: place
            for place, (_, batch) in enumerate(later_batches)
            if _ends_snapshot(batch)
        }
        to_put_back: list[_NumberedBatch] = []
        for place, item in enumerate(later_batches):
            partition = item[1].partition
            is_needed = partition in unfinished and partition not in last_ends
            if is_needed or place <= last_ends.get(partition, -1):
                items.append(item)
            else:
                to_put_back.append(item)
        for item in reversed(to_put_back):
            self._batches[item[1].partition].appendleft(item)
        return items

    def end_round(self) -> None:
        """The batches of the oldest round are applied. O(its batches)."""
        for _, batch in self._rounds.popleft():
            self._lengths[self._queue_of(batch.partition)] -= 1
            self.queued_bytes -= batch.nbytes
        self._applied_count = self._counts_after.popleft()

    def _front_count(self) -> int:
        """How many batches were put before the oldest that waits for a round. O(partitions)."""
        oldest = min((batches[0][0] for batches in self._batches.values()), default=None)
        return self.put_count if oldest is None else oldest - 1

    def clear(self) -> list[IndexBatch]:
        """Takes out all batches, those of rounds, too. They will not be applied."""
        items = self._items()
        self._rounds.clear()
        self._counts_after.clear()
        self._batches.clear()
        self._lengths = [0] * self._queue_count
        self.queued_bytes = 0
        return [batch for _, batch in items]

    def _items(self) -> list[_NumberedBatch]:
        """All batches that are not applied yet, those of rounds first."""
        return [*chain.from_iterable(self._rounds), *chain.from_iterable(self._batches.values())]

    def check_invariants(self) -> None:
        """For tests: the counts are those of the batches, and each partition's are in order."""
        assert all(self._batches.values())
        items = self._items()
        assert len(items) == len(self)
        assert sum(batch.nbytes for _, batch in items) == self.queued_bytes
        for queue, length in enumerate(self._lengths):
            assert length == sum(self._queue_of(batch.partition) == queue for _, batch in items)
        for partition in {batch.partition for _, batch in items}:
            numbers = [number for number, batch in items if batch.partition == partition]
            assert numbers == sorted(numbers)
        oldest = min((number for number, _ in items), default=self.put_count + 1)
        assert self._applied_count == oldest - 1
        counts = [self._applied_count, *self._counts_after]
        assert counts == sorted(counts)
        for place, count in enumerate(self._counts_after, 1):
            later_items = [*chain.from_iterable([*self._rounds][place:])]
            later_items += chain.from_iterable(self._batches.values())
            oldest = min((number for number, _ in later_items), default=count + 1)
            assert count == oldest - 1


def _ends_snapshot(batch: IndexBatch) -> bool:
    return batch.mark.position.partial is None


def _note_applied(unfinished: set[PartitionId], batch: IndexBatch) -> None:
    """Adds the batch's partition to the `unfinished` ones, or removes it."""
    if _ends_snapshot(batch):
        unfinished.discard(batch.partition)
    else:
        unfinished.add(batch.partition)
