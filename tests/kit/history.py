"""The events of a run, in the order in which they happened; the checkers read them."""

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
    """A change, as a node or a consumer has it."""

    seq: SeqNo
    op: Operation
    key: bytes
    value: bytes


class Sent(msgspec.Struct, frozen=True):
    """A publisher is about to send an operation. `number` counts the operations of one key. An
    increment adds `delta`, and sends no value. An item that `expires` may be deleted by the
    server."""

    publisher: str
    key: bytes
    number: int
    value: bytes | None
    level: Level
    delta: int = 0
    expires: bool = False


class Answered(msgspec.Struct, frozen=True):
    """The answer to an operation: done, and as durable as required; or refused, and not done. If
    the outcome is unknown, there is no such event."""

    key: bytes
    number: int
    done: bool
    partition: PartitionId = PartitionId(0)
    history_id: HistoryId = HistoryId(0)
    seq: SeqNo = SeqNo(0)


class Accepted(msgspec.Struct, frozen=True):
    """A node gave a change its sequence number. Only an active node may."""

    node: str
    life: int
    partition: PartitionId
    history_id: HistoryId
    row: Row
    state: PartitionState = PartitionState.ACTIVE


class Began(msgspec.Struct, frozen=True):
    """A consumer received the start of a snapshot."""

    consumer: str
    partition: PartitionId
    history_id: HistoryId
    start: SeqNo
    end: SeqNo
    may_repeat: bool


class Received(msgspec.Struct, frozen=True):
    """A consumer received changes; the snapshot has no others in (start, end]."""

    consumer: str
    partition: PartitionId
    start: SeqNo
    end: SeqNo
    rows: tuple[Row, ...]


class Ended(msgspec.Struct, frozen=True):
    """A consumer received the end of a snapshot; `log` is its failover log."""

    consumer: str
    partition: PartitionId
    end: SeqNo
    log: FailoverLog


class WentBack(msgspec.Struct, frozen=True):
    """A consumer undid everything above `to`, because it has at most `ceiling` in common with the
    server. Before, its position was `was`, and it could go back to the snapshot ends in `ends`.
    `log` is the failover log that it had at `to`."""

    consumer: str
    partition: PartitionId
    ceiling: SeqNo
    to: SeqNo
    was: SeqNo
    ends: tuple[SeqNo, ...]
    log: FailoverLog = FailoverLog()


class Restarted(msgspec.Struct, frozen=True):
    """A consumer started again with its saved copies: by partition, the position, and each key's
    sequence number and value."""

    consumer: str
    copies: dict[PartitionId, tuple[SeqNo, dict[bytes, tuple[SeqNo, bytes]]]]


class AskedForNow(msgspec.Struct, frozen=True):
    """A consumer is about to ask for all changes up to now."""

    consumer: str


class ReachedNow(msgspec.Struct, frozen=True):
    """A consumer has received all changes of a partition that it asked for: up to `end`, in the
    history to which `log` belongs."""

    consumer: str
    partition: PartitionId
    end: SeqNo
    log: FailoverLog


class Streamed(msgspec.Struct, frozen=True):
    """The node at `url` began to stream a partition, which the consumer had requested in this
    state."""

    consumer: str
    url: str
    partition: PartitionId
    state: PartitionState


class BeganHistory(msgspec.Struct, frozen=True):
    """A node became active in a new history; changes that only the former active node had are
    lost."""

    node: str
    partition: PartitionId


class Follows(msgspec.Struct, frozen=True):
    """A consumer of events starts, and knows nothing."""

    consumer: str


class Told(msgspec.Struct, frozen=True):
    """A consumer of events has processed an event that it received at `received_at`. `designs` are
    the design documents that the event names; if it `names_all`, any may have changed."""

    consumer: str
    received_at: float
    designs: tuple[bytes, ...]
    names_all: bool


class Fault(msgspec.Struct, frozen=True):
    """A fault that the test caused.

    Attributes:
        what: The kind of fault.
        survives: The levels whose acknowledged changes it must not lose.
        takes: How many such faults can lose changes acknowledged at another level.
        is_late: Whether it can lose changes however old they are, because it loses more than
            memory.
        on_the_way: Whether it can lose all changes that were numbered before it. The node still
            runs, so answers to them may arrive after the fault.
    """

    what: str
    survives: tuple[Level, ...] = ALL_LEVELS
    takes: int = 1
    is_late: bool = False
    on_the_way: bool = False


class Failed(msgspec.Struct, frozen=True):
    """A disk failed in one run of a node; or, with `after`, the disk was asked for a change after
    it had failed."""

    node: str
    life: int
    after: str = ""


class Final(msgspec.Struct, frozen=True):
    """The items that a node has of a partition at the end."""

    node: str
    partition: PartitionId
    is_active: bool
    high: SeqNo
    log: FailoverLog
    items: dict[bytes, tuple[SeqNo, bytes]]


class Said(msgspec.Struct, frozen=True):
    """A message for whoever reads the history; checkers ignore it."""

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
        events: The events, each with its time.
        clock: Returns the present time.
    """

    clock: Callable[[], float]
    events: list[tuple[float, Event]] = attrs.field(factory=list)

    def add(self, event: Event) -> None:
        """Adds an event with the present time."""
        self.events.append((self.clock(), event))

    def __iter__(self) -> Iterator[Event]:
        return (event for _, event in self.events)
