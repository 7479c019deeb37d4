"""Replies to changes: when they are as durable as was asked, and in order a partition."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

import attrs
import msgspec

from upr_protocol.ids import Durability, PartitionId, SeqNo
from upr_server.engine import Partition
from upr_server.engine.replica_progress import OnReplicated
from upr_server.net.backlog import ConnectionBacklog
from upr_server.net.step_queue import StepQueue
from upr_server.storage.online.flusher import Flusher

STEP_REPLIES: Final = 128
"""Replies that one step sends: at 7 to 20 µs each, 1 to 2 ms."""

STEP_ROWS: Final = 8192
"""Rows of replies after which a step sends no further one: at 0.1 µs each, 0.8 ms. A reply has up
to 5,120, for each run and each counter or failure of its bundle."""


class DurabilityTarget(msgspec.Struct, frozen=True):
    """How durable a change must be before it is answered.

    Attributes:
        durability: The level.
        copies: How many replicas beside the active node, for the replicated levels; otherwise 0.
        deadline: When to stop waiting for replicas.
    """

    durability: Durability
    copies: int = 0
    deadline: float = math.inf

    @property
    def persists(self) -> bool:
        """Whether it is about the disk."""
        return self.durability in (Durability.PERSISTED, Durability.REPLICATED_AND_PERSISTED)

    def reached_seq(self, partition: Partition) -> SeqNo:
        """The number up to which a partition has reached this target; 0 where that is about the
        disk, and the partition is damaged there."""
        if self.persists and partition.damage:
            return SeqNo(0)
        seq = partition.manager.persistence.committed_seq if self.persists else partition.high_seq
        if self.copies:
            seq = min(seq, partition.replicas.seq_reached_by(self.copies, persisted=self.persists))
        return seq


IN_MEMORY: Final = DurabilityTarget(Durability.MEMORY)
PERSISTED: Final = DurabilityTarget(Durability.PERSISTED)


class OnDurable(Protocol):
    """Called when a change is as durable as was asked, or will not be."""

    def __call__(self, is_on_disk: bool, is_replicated: bool = True) -> None:
        """Tells whether the disk has it, and whether the replicas do; True for what was not asked
        for."""


def call_when_durable(
    call: OnDurable,
    partition: Partition,
    flusher: Flusher,
    seq: SeqNo,
    target: DurabilityTarget,
) -> None:
    """Calls `call` when everything up to `seq` is as durable as `target` says, or will not be;
    perhaps at once.

    Args:
        call: What is called.
        partition: The partition.
        flusher: The flusher of its bucket.
        seq: The number.
        target: How durable it must be.
    """
    on_replicated: OnReplicated
    if not target.copies:
        if target.persists:
            flusher.call_when_persisted(partition, seq, call)
        else:
            call(True)
        return
    if target.persists:
        wait = _DiskAndReplicasWait(call)
        flusher.call_when_persisted(partition, seq, wait.note_persisted)
        on_replicated = wait.note_replicated
    else:
        on_replicated = partial(call, True)
    partition.replicas.call_when_reached(
        seq,
        target.copies,
        persisted=target.persists,
        deadline=target.deadline,
        call=on_replicated,
    )


@attrs.define
class _DiskAndReplicasWait:
    """Waits for the disk and the replicas."""

    call: OnDurable
    is_on_disk: bool | None = None
    is_replicated: bool | None = None

    def note_persisted(self, is_met: bool) -> None:
        self.is_on_disk = is_met
        self._call_if_both()

    def note_replicated(self, is_met: bool) -> None:
        self.is_replicated = is_met
        self._call_if_both()

    def _call_if_both(self) -> None:
        if self.is_on_disk is not None and self.is_replicated is not None:
            self.call(self.is_on_disk, self.is_replicated)


class OrderedReply(ABC):
    """A reply that must not overtake earlier ones about the same partitions.

    What makes the reply derives from this: were it another object that this one calls, the two
    would hold each other, and a bundle's bytes stay until the next garbage collection.

    Args:
        partitions: The partitions that it is about.

    Attributes:
        partitions: The partitions that it is about.
        owed_bytes: About what it takes while it is owed; 0 if it is not.
        is_complete: Whether it can be sent, once those before it were.
        earlier_count: How many replies it waits for, one a partition that it shares with one.
        later: The replies that wait for it, as often.
    """

    __slots__ = ("earlier_count", "is_complete", "later", "owed_bytes", "partitions")

    def __init__(self, partitions: Sequence[PartitionId]) -> None:
        self.partitions = partitions
        self.owed_bytes = 0
        self.is_complete = False
        self.earlier_count = 0
        self.later: list[OrderedReply] = []

    @abstractmethod
    def send(self) -> int:
        """Sends the reply. Returns how many rows that took time for."""


class ReplyOrder:
    """The replies that one connection owes, so that those about one partition leave in the order of
    their requests.

    Args:
        steps: Sends those that are too many for one step.
        backlog: Counts what the connection has waiting.

    Attributes:
        newest: The last reply that is owed about each partition. Empty when none is owed.
    """

    __slots__ = ("_backlog", "_is_closed", "_is_queued", "_sendable", "_steps", "newest")

    def __init__(self, steps: ReplySteps, backlog: ConnectionBacklog) -> None:
        self.newest: dict[PartitionId, OrderedReply] = {}
        self._steps = steps
        self._backlog = backlog
        self._sendable: deque[OrderedReply] = deque()
        """Those that are complete, and wait for no other."""
        self._is_queued = False
        """Whether `steps` sends the next of them."""
        self._is_closed = False

    def add(self, reply: OrderedReply, nbytes: int = 0) -> None:
        """`reply` is owed from now on, after those that are. It takes about `nbytes` until it is
        sent. O(partitions)."""
        reply.owed_bytes = nbytes
        self._backlog.reply_owed(nbytes)
        for partition in reply.partitions:
            earlier = self.newest.get(partition)
            if earlier is not None:
                earlier.later.append(reply)
                reply.earlier_count += 1
            self.newest[partition] = reply

    def complete(self, reply: OrderedReply) -> None:
        """`reply` is known: sends it, and those that waited for it alone; now, or once the ones
        before it are sent. If they are many, or large, some are sent now."""
        reply.is_complete = True
        if reply.earlier_count or self._is_closed:
            return
        self._sendable.append(reply)
        if self._is_queued:
            return
        self.send_some()
        if self._sendable:
            self._is_queued = True
            self._steps.add(self)

    def send_some(self, count_max: int = STEP_REPLIES) -> int:
        """Sends at most `count_max` of those that can be sent, as far as `steps` has rows left for
        them. Returns how many."""
        sendable, steps, count = self._sendable, self._steps, 0
        while sendable and count < count_max and steps.rows_left > 0:
            count += 1
            reply = sendable.popleft()
            steps.rows_left -= reply.send()
            if reply.owed_bytes:
                self._backlog.reply_sent(reply.owed_bytes)
            for partition in reply.partitions:
                if self.newest.get(partition) is reply:
                    del self.newest[partition]
            for later in reply.later:
                later.earlier_count -= 1
                if later.is_complete and not later.earlier_count:
                    sendable.append(later)
        return count

    def send_queued(self, count_max: int) -> tuple[int, bool]:
        """The same, for `steps`; and whether there are more."""
        count = self.send_some(count_max)
        self._is_queued = bool(self._sendable)
        return count, self._is_queued

    def close(self) -> None:
        """The connection is over: nothing is sent any more."""
        self._is_closed = True
        self._sendable.clear()
        # Each refers to the connection.
        self.newest.clear()


class ReplySteps(StepQueue[ReplyOrder]):
    """Sends replies that can be sent in the same moment, some in each turn of the loop: thousands
    may have waited for one, and one commit may complete the replies of many connections.
    Connections take turns.

    Attributes:
        rows_left: How many rows of replies may still be sent, by this task or by others, before
            this task has its next turn. One reply may exceed it.
    """

    __slots__ = ("rows_left",)

    def __init__(self) -> None:
        super().__init__()
        self.rows_left = STEP_ROWS

    def _step(self, items: deque[ReplyOrder]) -> None:
        self.rows_left, replies_left = STEP_ROWS, STEP_REPLIES
        while items and replies_left > 0 and self.rows_left > 0:
            order = items.popleft()
            count, has_more = order.send_queued(replies_left)
            replies_left -= count
            if has_more:
                items.append(order)
