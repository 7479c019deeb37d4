"""What happened in a run, in the order in which it happened: what the checkers look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final as Constant
from typing import Literal, NamedTuple

import attrs
import msgspec

from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, Operation, PartitionId, PartitionState, SeqNo

Level = Literal["memory", "persisted", "replicated", "replicated_persisted"]

ALL_LEVELS: Constant[tuple[Level, ...]] = (
    "memory",
    "persisted",
    "replicated",
    "replicated_persisted",
)


class Row(NamedTuple):
    """A change as somebody has it."""

    seq: SeqNo
    op: Operation
    key: bytes
    value: bytes


class Sent(msgspec.Struct, frozen=True):
    """A publisher is about to send an operation. `number` counts those of one key; an increment
    adds `delta`, and sends no value; what `expires` may be gone by itself."""

    publisher: str
    key: bytes
    number: int
    value: bytes | None
    level: Level
    delta: int = 0
    expires: bool = False


class Answered(msgspec.Struct, frozen=True):
    """What became of it: done, and as durable as was asked; or refused, so that it has not been
    done; neither when nobody knows."""

    key: bytes
    number: int
    done: bool
    partition: PartitionId = PartitionId(0)
    history_id: HistoryId = HistoryId(0)
    seq: SeqNo = SeqNo(0)


class Accepted(msgspec.Struct, frozen=True):
    """A node gave a change its number. Only an active may."""

    node: str
    life: int
    partition: PartitionId
    history_id: HistoryId
    row: Row
    state: PartitionState = PartitionState.ACTIVE


class Began(msgspec.Struct, frozen=True):
    """A snapshot began at a consumer."""

    consumer: str
    partition: PartitionId
    history_id: HistoryId
    start: SeqNo
    end: SeqNo
    may_repeat: bool


class Received(msgspec.Struct, frozen=True):
    """Changes came to a consumer; nothing lies in (start, end] but these."""

    consumer: str
    partition: PartitionId
    start: SeqNo
    end: SeqNo
    rows: tuple[Row, ...]


class Ended(msgspec.Struct, frozen=True):
    """A snapshot ended at a consumer, whose failover log is this one."""

    consumer: str
    partition: PartitionId
    end: SeqNo
    log: FailoverLog


class WentBack(msgspec.Struct, frozen=True):
    """A consumer undid all above `to`, as it was told that it has at most `ceiling` in common; it
    had come to `was`, and had these snapshot ends to go back to. `log` is what it had been told at
    `to`."""

    consumer: str
    partition: PartitionId
    ceiling: SeqNo
    to: SeqNo
    was: SeqNo
    ends: tuple[SeqNo, ...]
    log: FailoverLog = FailoverLog()


class Restarted(msgspec.Struct, frozen=True):
    """A consumer began again with its copies: by partition, where its last complete snapshot ended,
    and each key's number and value."""

    consumer: str
    copies: dict[PartitionId, tuple[SeqNo, dict[bytes, tuple[SeqNo, bytes]]]]


class AskedForNow(msgspec.Struct, frozen=True):
    """A consumer is about to ask for all that there is now."""

    consumer: str


class ReachedNow(msgspec.Struct, frozen=True):
    """A consumer was told that it has all that it asked for of a partition: up to `end`, in the
    history that this log tells of."""

    consumer: str
    partition: PartitionId
    end: SeqNo
    log: FailoverLog


class Streamed(msgspec.Struct, frozen=True):
    """The node at `url` began to stream a partition that was to be in a state there."""

    consumer: str
    url: str
    partition: PartitionId
    state: PartitionState


class BeganHistory(msgspec.Struct, frozen=True):
    """A node became active in a new history: what only the active node before had is lost."""

    node: str
    partition: PartitionId


class Follows(msgspec.Struct, frozen=True):
    """A consumer of events begins, and knows nothing."""

    consumer: str


class Told(msgspec.Struct, frozen=True):
    """A consumer of events has processed an event that it received at `received_at`. `designs` are
    the design documents that the event names; if it `names_all`, any may have changed."""

    consumer: str
    received_at: float
    designs: tuple[bytes, ...]
    names_all: bool


class Fault(msgspec.Struct, frozen=True):
    """Something went wrong on purpose.

    Attributes:
        what: What.
        survives: Levels whose acknowledgements it must not touch.
        takes: How many such faults it takes to lose what was acknowledged at another level.
        is_late: Whether it counts however long ago that was: what it takes is not only in memory.
        on_the_way: Whether it concerns all that was numbered before it: answers may still be on
            their way from a node that goes on living.
    """

    what: str
    survives: tuple[Level, ...] = ALL_LEVELS
    takes: int = 1
    is_late: bool = False
    on_the_way: bool = False


class Failed(msgspec.Struct, frozen=True):
    """A disk failed in one life of a node; or `after` it was asked to change something then."""

    node: str
    life: int
    after: str = ""


class Final(msgspec.Struct, frozen=True):
    """What a node holds of a partition in the end."""

    node: str
    partition: PartitionId
    is_active: bool
    high: SeqNo
    log: FailoverLog
    items: dict[bytes, tuple[SeqNo, bytes]]


class Said(msgspec.Struct, frozen=True):
    """Something for the story only."""

    who: str
    what: str


Event = (
    Sent
    | Answered
    | Accepted
    | Began
    | Received
    | Ended
    | WentBack
    | Restarted
    | AskedForNow
    | ReachedNow
    | Streamed
    | BeganHistory
    | Follows
    | Told
    | Fault
    | Failed
    | Final
    | Said
)


@attrs.define
class History:
    """A recorded history.

    Attributes:
        events: Each with its time.
        clock: Says what time it is.
    """

    clock: Callable[[], float]
    events: list[tuple[float, Event]] = attrs.field(factory=list)

    def add(self, event: Event) -> None:
        """Something happened."""
        self.events.append((self.clock(), event))

    def __iter__(self) -> Iterator[Event]:
        return (event for _, event in self.events)
