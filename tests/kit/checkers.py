"""Checks that a history keeps the promises I1 to I9, I12, I13 and events of docs/guarantees.md.

A checker takes one event after the other, and some check more at the end. The error that it raises
names the broken promise. It works for histories of simulated clusters and of real processes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

import attrs

from tests.kit.history import (
    Accepted,
    Answered,
    AskedForNow,
    Began,
    BeganHistory,
    Ended,
    Event,
    Failed,
    Fault,
    Follows,
    History,
    Level,
    ReachedNow,
    Received,
    Restarted,
    Row,
    Sent,
    Streamed,
    Told,
    WentBack,
)
from tests.kit.history import (
    Final as FinalState,
)
from upr_protocol.bucket_event import ANY_DESIGN
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import DESIGN_PREFIX, HistoryId, Operation, PartitionId, PartitionState, SeqNo

_SEQ: Final = attrgetter("seq")

Items = dict[bytes, tuple[SeqNo, bytes]]

MEMORY_S: Final = 10.0
"""After so long, changes that replicas had only in memory are on disk. Before that, the loss of a
second machine may lose them."""


STREAMED_STATES: Final = (PartitionState.ACTIVE, PartitionState.REPLICA)
"""In other states a copy may be outdated, or about to become so."""


class BrokenPromiseError(AssertionError):
    """A promise was broken.

    Attributes:
        promise: The name of the promise: `I5`, for instance.
    """

    def __init__(self, promise: str, sentence: str) -> None:
        super().__init__(f"{promise}: {sentence}")
        self.promise = promise


def check(history: History) -> None:
    """Raises the first `BrokenPromiseError` in a history."""
    truth, order = Truth(), Snapshots()
    order.truth = truth
    if not any(isinstance(event, Accepted) for event in history):
        truth.learn(history)
    durability, ends, events_told = Durability(), Ends(), EventsTold()
    finals: list[FinalState] = []
    for time_s, event in history.events:
        truth.take(event)
        order.take(event)
        durability.take(time_s, event)
        ends.take(event)
        events_told.take(time_s, event)
        if isinstance(event, Failed) and event.after:
            raise BrokenPromiseError(
                "I12", f"{event.node} goes on after its disk failed: {event.after}"
            )
        if isinstance(event, Streamed) and event.state not in STREAMED_STATES:
            raise BrokenPromiseError(
                "I5", f"partition {event.partition} is {event.state.name} and streamed: {event}"
            )
        if isinstance(event, FinalState):
            finals.append(event)
    events_told.check()
    check_replicas_agree(finals)
    actives = {final.partition: final for final in finals if final.is_active}
    durability.check({key: value for copy in actives.values() for key, value in copy.items.items()})
    for final in actives.values():
        expected = truth.items(final.partition, final.log, final.high)
        if expected != final.items:
            raise BrokenPromiseError(
                "I5", f"{final.node} itself: {differences(final.items, expected)}"
            )


def check_received(history: History) -> None:
    """Raises the first `BrokenPromiseError` in what consumers have received so far."""
    truth, order = Truth(), Snapshots()
    order.truth = truth
    for event in history:
        truth.take(event)
        order.take(event)


def check_replicas_agree(finals: Iterable[FinalState]) -> None:
    """I9: once all faults have ended and nothing is written, all copies of a partition are
    equal."""
    first: dict[PartitionId, FinalState] = {}
    for final in finals:
        other_final = first.setdefault(final.partition, final)
        where = f"partition {final.partition} at {other_final.node} and {final.node}"
        if (other_final.high, other_final.log) != (final.high, final.log):
            raise BrokenPromiseError(
                "I9",
                f"{where}: {other_final.high} {other_final.log.pairs()}, "
                f"{final.high} {final.log.pairs()}",
            )
        if other_final.items != final.items:
            raise BrokenPromiseError(
                "I9", f"{where}: {differences(other_final.items, final.items)}"
            )


def differences(actual: Items, expected: Items) -> str:
    """Some of the keys whose values differ between two contents."""
    keys = sorted(k for k in actual.keys() | expected.keys() if actual.get(k) != expected.get(k))
    return "; ".join(
        f"{key!r} is {actual.get(key)!r:.60}, not {expected.get(key)!r:.60}" for key in keys[:5]
    )


def apply(items: Items, rows: Iterable[Row]) -> None:
    """Applies changes to contents."""
    for row in rows:
        if row.op is Operation.SET:
            items[row.key] = (row.seq, row.value)
        else:
            items.pop(row.key, None)


class Truth:
    """All changes to which active nodes have given sequence numbers, by partition and history:
    checks I2, I4 and I8."""

    def __init__(self) -> None:
        self._rows: dict[tuple[PartitionId, HistoryId], list[Row]] = defaultdict(list)
        self._by: dict[tuple[PartitionId, HistoryId], tuple[str, int]] = {}
        self._known: dict[PartitionId, set[Row]] = defaultdict(set)
        self._sent: set[bytes] = set()
        self._folded: dict[tuple[PartitionId, tuple[tuple[int, int], ...]], _Fold] = {}

    def take(self, event: Event) -> None:
        """Takes the next event."""
        if isinstance(event, Sent):
            if event.value is not None:
                self._sent.add(event.value)
        elif isinstance(event, Accepted):
            self._accept(event)
        elif isinstance(event, Received):
            for row in event.rows:
                if row not in self._known[event.partition]:
                    raise BrokenPromiseError(
                        "I2", f"{event.consumer} was told {row}, which nobody gave"
                    )

    def learn(self, history: History) -> None:
        """For a cluster whose nodes record no events: takes what consumers received as what was
        accepted. So consumers are compared with each other, and with what was sent."""
        under_way: dict[tuple[str, PartitionId], list[Row]] = defaultdict(list)
        rows_of: dict[tuple[PartitionId, HistoryId], dict[SeqNo, Row]] = defaultdict(dict)
        for event in history:
            if isinstance(event, Received):
                under_way[event.consumer, event.partition] += event.rows
                self._known[event.partition].update(event.rows)
            elif isinstance(event, Ended):
                for row in under_way.pop((event.consumer, event.partition), ()):
                    branch = rows_of[event.partition, event.log.branch_of(row.seq)]
                    if branch.setdefault(row.seq, row) != row:
                        raise BrokenPromiseError(
                            "I4", f"{row} and {branch[row.seq]} have one number"
                        )
            elif isinstance(event, WentBack):
                under_way.pop((event.consumer, event.partition), None)
            elif isinstance(event, Restarted):
                for copy_id in [copy_id for copy_id in under_way if copy_id[0] == event.consumer]:
                    del under_way[copy_id]
        for where, rows in rows_of.items():
            self._rows[where] = [rows[seq] for seq in sorted(rows)]

    def _accept(self, event: Accepted) -> None:
        where, row = (event.partition, event.history_id), event.row
        rows = self._rows[where]
        copy_id = event.node, event.life
        if event.state is not PartitionState.ACTIVE:
            raise BrokenPromiseError(
                "I8",
                f"partition {event.partition}: {copy_id} gave {row} while it was "
                f"{event.state.name.lower()}",
            )
        before = self._by.get(where, copy_id)
        self._by[where] = copy_id
        # A takeover moves a history to another node, and the next may move it back. If two nodes
        # were active in one history, one would give a sequence number that was already given.
        if rows and row.seq != rows[-1].seq + 1:
            raise BrokenPromiseError(
                "I8",
                f"partition {event.partition}, history {event.history_id:x}: {copy_id} gave {row}, "
                f"and {before} had given {rows[-1] if rows else 'nothing'}",
            )
        rows.append(row)
        self._known[event.partition].add(row)
        if row.op is Operation.SET and row.value not in self._sent and not row.value.isdigit():
            raise BrokenPromiseError("I2", f"{event.node} took in {row}, which nobody sent")

    def items(self, partition: PartitionId, log: FailoverLog, end: SeqNo) -> Items:
        """The items of a partition at `end`, in the history to which this failover log belongs."""
        pairs = tuple(log.up_to(end).pairs())
        fold = self._folded.get((partition, pairs))
        if fold is None or fold.end > end:
            fold = self._folded[partition, pairs] = _Fold()
        for index in reversed(range(len(pairs))):
            history_id, start = pairs[index]
            last = pairs[index - 1][1] if index else end
            rows = self._rows.get((partition, HistoryId(history_id)), ())
            start = max(start, fold.end)
            if rows and last > start:
                first, end_at = (bisect_right(rows, seq, key=_SEQ) for seq in (start, last))
                apply(fold.items, rows[first:end_at])
        fold.end = end
        return fold.items


@attrs.define
class _Fold:
    end: SeqNo = SeqNo(0)
    items: Items = attrs.field(factory=dict)


@attrs.define
class _Copy:
    """A consumer's copy of a partition."""

    seq: SeqNo = SeqNo(0)
    items: Items = attrs.field(factory=dict)
    inside: Began | None = None
    keys: set[bytes] = attrs.field(factory=set)


class Snapshots:
    """Checks what consumers receive: I3, I5, I6 and I7.

    Attributes:
        truth: What the copies are compared with.
    """

    truth: Truth

    def __init__(self) -> None:
        self._copies: dict[tuple[str, PartitionId], _Copy] = defaultdict(_Copy)

    def take(self, event: Event) -> None:
        """Takes the next event."""
        if isinstance(event, Began):
            self._began(event)
        elif isinstance(event, Received):
            self._received(event)
        elif isinstance(event, Ended):
            self._ended(event)
        elif isinstance(event, WentBack):
            self._went_back(event)
        elif isinstance(event, Restarted):
            for copy_id in [copy_id for copy_id in self._copies if copy_id[0] == event.consumer]:
                del self._copies[copy_id]
            for partition, (seq, items) in event.copies.items():
                copy = self._copies[event.consumer, partition]
                copy.seq, copy.items = seq, dict(items)

    def _began(self, event: Began) -> None:
        copy = self._copies[event.consumer, event.partition]
        if event.start != copy.seq or event.end < event.start:
            raise BrokenPromiseError("I3", f"{event} follows {copy.seq}")
        copy.inside = event
        copy.keys.clear()

    def _received(self, event: Received) -> None:
        copy = self._copies[event.consumer, event.partition]
        inside = copy.inside
        if inside is None or event.start != copy.seq or event.end > inside.end:
            raise BrokenPromiseError("I3", f"{event} inside {inside} follows {copy.seq}")
        seq = event.start
        for row in event.rows:
            if not seq < row.seq <= event.end:
                raise BrokenPromiseError("I3", f"{event.consumer}: {row} follows {seq}")
            if row.key in copy.keys and not inside.may_repeat:
                raise BrokenPromiseError(
                    "I5", f"{event.consumer}: {row} comes again in one snapshot"
                )
            seq = row.seq
            copy.keys.add(row.key)
        apply(copy.items, event.rows)
        copy.seq = event.end

    def _ended(self, event: Ended) -> None:
        copy = self._copies[event.consumer, event.partition]
        if copy.inside is None or not copy.inside.end == copy.seq == event.end:
            raise BrokenPromiseError("I6", f"{event} ends {copy.inside} at {copy.seq}")
        copy.inside = None
        expected = self.truth.items(event.partition, event.log, event.end)
        if copy.items != expected:
            raise BrokenPromiseError(
                "I5",
                f"{event.consumer}, partition {event.partition}, at {event.end} of "
                f"{event.log.current:x}: {differences(copy.items, expected)}",
            )

    def _went_back(self, event: WentBack) -> None:
        copy = self._copies[event.consumer, event.partition]
        best = max((end for end in event.ends if end <= event.ceiling), default=SeqNo(0))
        if event.to not in (0, best):
            raise BrokenPromiseError("I7", f"{event}: {best} is the newest complete snapshot end")
        items: Items = {}
        if event.to:
            items = dict(self.truth.items(event.partition, event.log, event.to))
        copy.seq, copy.items, copy.inside = event.to, items, None


class Ends:
    """Checks I6: when a consumer asked for the changes up to "now", it has at the end all changes
    that were acknowledged before it asked. Changes of another history do not count, because its
    node need not know them."""

    def __init__(self) -> None:
        self._acknowledged: list[Answered] = []
        self._asked: dict[str, int] = {}
        """By consumer, how much had been acknowledged when it asked."""

    def take(self, event: Event) -> None:
        """Takes the next event."""
        if isinstance(event, Answered) and event.done:
            self._acknowledged.append(event)
        elif isinstance(event, AskedForNow):
            self._asked[event.consumer] = len(self._acknowledged)
        elif isinstance(event, ReachedNow):
            for answered in self._acknowledged[: self._asked[event.consumer]]:
                if (
                    answered.partition == event.partition
                    and answered.seq > event.end
                    and event.log.branch_of(answered.seq) == answered.history_id
                ):
                    raise BrokenPromiseError(
                        "I6", f"{event} leaves out {answered}, acknowledged before it asked"
                    )


class EventsTold:
    """Checks that a consumer of events receives, after each change of a design document, an event
    that names it, or says that any may have changed; and after each new history, one of the latter
    kind."""

    def __init__(self) -> None:
        self._owed: dict[str, dict[bytes, float]] = {}
        """By consumer, the design documents whose events are missing, with the times of change."""

    def take(self, time_s: float, event: Event) -> None:
        """Takes the next event."""
        if isinstance(event, Follows):
            self._owed.setdefault(event.consumer, {ANY_DESIGN: time_s})
        elif isinstance(event, Accepted):
            if event.row.key.startswith(DESIGN_PREFIX):
                self._has_changed(event.row.key, time_s)
        elif isinstance(event, BeganHistory):
            self._has_changed(ANY_DESIGN, time_s)
        elif isinstance(event, Told):
            owed = self._owed[event.consumer]
            for design in list(owed) if event.names_all else event.designs:
                if owed.get(design, math.inf) <= event.received_at:
                    del owed[design]

    def _has_changed(self, design: bytes, time_s: float) -> None:
        for owed in self._owed.values():
            owed[design] = time_s

    @property
    def missing(self) -> str:
        """The events that consumers have not received; empty if there are none."""
        return "; ".join(
            f"{consumer} was told nothing of {design!r} after {time_s:.3f}"
            for consumer, owed in self._owed.items()
            for design, time_s in owed.items()
        )

    def check(self) -> None:
        """Raises `BrokenPromiseError` if an event is missing."""
        if self.missing:
            raise BrokenPromiseError("events", self.missing)


@attrs.define
class _Operation:
    sent: Sent
    done: bool | None = None
    done_at: float = 0.0
    numbered_at: float = 0.0


class Durability:
    """Checks I1: acknowledged changes exist, unless there was a fault that their level does not
    survive. Checks I2: what was sent had its effect once."""

    def __init__(self) -> None:
        self._operations: dict[bytes, list[_Operation]] = defaultdict(list)
        self._faults: list[tuple[float, Fault]] = []
        self._numbered_at: dict[tuple[PartitionId, HistoryId, SeqNo], float] = {}

    def take(self, time_s: float, event: Event) -> None:
        """Takes the next event."""
        if isinstance(event, Sent):
            operations = self._operations[event.key]
            if event.number != len(operations):
                raise ValueError(f"{event} is not the next operation of its key")
            operations.append(_Operation(event))
        elif isinstance(event, Answered):
            operation = self._operations[event.key][event.number]
            operation.done, operation.done_at = event.done, time_s
            point = event.partition, event.history_id, event.seq
            operation.numbered_at = self._numbered_at.get(point, time_s)
        elif isinstance(event, Accepted):
            self._numbered_at[event.partition, event.history_id, event.row.seq] = time_s
        elif isinstance(event, Fault):
            self._faults.append((time_s, event))

    def _is_owed(self, operation: _Operation) -> bool:
        """Whether the operation's effect must exist at the end."""
        if not operation.done:
            return False
        level: Level = operation.sent.level
        later = [
            (time_s, fault)
            for time_s, fault in self._faults
            if time_s >= (operation.numbered_at if fault.on_the_way else operation.done_at)
        ]
        if any(level not in fault.survives and fault.takes == 1 for _, fault in later):
            return False
        # One copy survives the loss of one machine, not of two.
        most = operation.done_at + MEMORY_S if level == "replicated" else math.inf
        relevant = [
            fault
            for time_s, fault in later
            if level not in fault.survives and (time_s <= most or fault.is_late)
        ]
        return len(relevant) < 2

    def check(self, contents: Items) -> None:
        """Checks that everything that must exist does, and nothing else.

        Args:
            contents: The items that the cluster has at the end.
        """
        for key, operations in self._operations.items():
            value = contents[key][1] if key in contents else None
            if operations[0].sent.delta:
                _check_counter(key, operations, value, self._is_owed)
            else:
                self._check_value(key, operations, value)
        for key in contents.keys() - self._operations.keys():
            raise BrokenPromiseError("I2", f"{key!r} is there, and nobody sent it")

    def _check_value(self, key: bytes, operations: list[_Operation], value: bytes | None) -> None:
        owed = max(
            (n for n, operation in enumerate(operations) if self._is_owed(operation)), default=-1
        )
        can_be = [n for n, operation in enumerate(operations) if operation.sent.value == value]
        if value is None and (
            owed < 0 or any(operation.sent.expires for operation in operations[owed:])
        ):
            return
        if value is not None and not can_be:
            raise BrokenPromiseError("I2", f"{key!r} holds {value!r}, which nobody sent")
        if max(can_be, default=-1) < owed:
            raise BrokenPromiseError(
                "I1",
                f"{key!r} holds {value!r} (of operations {can_be}), but {operations[owed].sent} "
                f"was acknowledged at {operations[owed].done_at:.3f}",
            )
        if all(operations[n].done is False for n in can_be):
            raise BrokenPromiseError("I2", f"{key!r} holds {value!r}, which was refused")


def _check_counter(
    key: bytes, operations: list[_Operation], value: bytes | None, is_owed: object
) -> None:
    count = 0 if value is None else int(value)
    assert callable(is_owed)
    least = sum(operation.sent.delta for operation in operations if is_owed(operation))
    most = sum(operation.sent.delta for operation in operations if operation.done is not False)
    if count > most:
        raise BrokenPromiseError(
            "I2", f"{key!r} was counted to {count}, and increments come to {most}"
        )
    if count < least:
        raise BrokenPromiseError(
            "I1", f"{key!r} was counted to {count}, and {least} were acknowledged"
        )
