"""What a consumer must remember to go on where it was (seed 002; docs/guarantees.md).

A position is moved by what the stream says, and by nothing else:

- a stream is **accepted**: the server's whole log is recorded, before any data; a snapshot of which
  only the end was missing is complete;
- a chunk is **received**: the highest number moves, and with it comes the snapshot it belongs to.
  That snapshot begins at the last complete end, wherever the stream that carried it began: a
  consumer cut inside a snapshot has its front already;
- a snapshot is **complete**: its end is the last complete one, and nothing is partial;
- a rollback is **asked for**: until the consumer has said where it went back to, it is of a history
  of its own above the ceiling. If it dies half-way, whatever server it asks then has not that
  history, and asks for the rollback again, though it may have all that is being undone;
- a **rollback**: what is above the number it goes back to was never received.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self

import attrs
import msgspec

from upr_protocol.errors import UprError
from upr_protocol.failover import NOTHING_YET, FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import PARTITIONS_END, SEQ_MAX, HistoryId, PartitionId, SeqNo

_VERSION: Final = 1

GOING_BACK: Final = HistoryId(2**64 - 1)
"""The history of who is about to go back; see `going_back`. That a server draws it is as likely as
that two servers draw the same."""


class ResumeStateError(UprError, ValueError):
    """The bytes are no resume state, or that of another bucket."""


def accepted(position: Position, log: FailoverLog) -> Position:
    """The server accepted the stream, and this is its log.

    A consumer that was cut between a snapshot's last chunk and its end now knows that it has all of
    it: the server goes on behind it, and there may be nothing behind it for long.
    """
    partial = position.partial
    if partial is not None and position.highest_received == partial.end:
        return Position(log, partial.end, partial.end, None)
    return msgspec.structs.replace(position, log=log)


def received(position: Position, history_id: HistoryId, end: SeqNo, through: SeqNo) -> Position:
    """Everything up to `through` came, of the snapshot of `history_id` that ends at `end`."""
    if through <= position.highest_received:
        return position  # the server went back further than it had to
    return Position(
        position.log,
        position.last_complete,
        through,
        PartialSnapshot(history_id, position.last_complete, end),
    )


def completed(position: Position, end: SeqNo) -> Position:
    """The snapshot that ends at `end` is complete."""
    if end < position.highest_received:
        return position  # see `received`
    return Position(position.log, end, end, None)


def going_back(position: Position, ceiling: SeqNo) -> Position:
    """The consumer is about to go back to `ceiling` or below it: whoever it asks before it has says
    so, too."""
    # No rule asks anybody to keep a part of a snapshot and give up another.
    ceiling = min(ceiling, position.last_complete)
    log = _without_going_back(position.log).branch(GOING_BACK, ceiling)
    return msgspec.structs.replace(position, log=log)


def rolled_back(position: Position, to: SeqNo) -> Position:
    """The consumer went back to `to`, a complete snapshot's end or 0."""
    return Position(_without_going_back(position.log).until(to), to, to, None)


def _without_going_back(log: FailoverLog) -> FailoverLog:
    return FailoverLog(tuple(entry for entry in log if entry.history_id != GOING_BACK))


@attrs.define
class ResumeState:
    """How far a consumer has come in each partition of one bucket.

    Attributes:
        bucket: The bucket's name.
        positions: By partition; one that is missing has nothing yet.
    """

    bucket: str
    positions: dict[PartitionId, Position] = attrs.field(factory=dict)

    def position(self, partition: PartitionId) -> Position:
        """How far `partition` has come."""
        return self.positions.get(partition, NOTHING_YET)

    def check_bucket(self, bucket: str) -> None:
        """Makes sure that this is a state of `bucket`.

        Raises:
            ResumeStateError: It is not.
        """
        if self.bucket != bucket:
            raise ResumeStateError(
                f"the resume state is of the bucket {self.bucket!r}, not of {bucket!r}"
            )

    def copy(self) -> Self:
        """A state that goes its own way from here. O(partitions)."""
        return type(self)(self.bucket, dict(self.positions))

    def encode(self) -> bytes:
        """The state as JSON: the same state is always the same bytes."""
        partitions = {
            str(partition): _encode(self.positions[partition])
            for partition in sorted(self.positions)
        }
        document = {"version": _VERSION, "bucket": self.bucket, "partitions": partitions}
        return msgspec.json.encode(document) + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The reverse of `encode`.

        Raises:
            ResumeStateError: The bytes are no resume state.
        """
        try:
            document = msgspec.json.decode(data)
            if document["version"] != _VERSION:
                raise ResumeStateError(
                    f"a resume state of version {document['version']}; this program reads "
                    f"{_VERSION}"
                )
            positions = {
                _partition(name): _decode(fields) for name, fields in document["partitions"].items()
            }
            bucket = document["bucket"]
            if not isinstance(bucket, str):
                raise TypeError("the bucket is no text")
        except ResumeStateError:
            raise
        except msgspec.DecodeError as error:
            raise ResumeStateError(f"this is no resume state: {error}") from error
        except (
            UnicodeError,
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            raise ResumeStateError(f"this is no resume state: {error!r}") from error
        return cls(bucket, positions)


def _partition(name: str) -> PartitionId:
    partition = int(name)
    if not 0 <= partition < PARTITIONS_END or str(partition) != name:
        raise ValueError(f"{name!r} is no partition")
    return PartitionId(partition)


# History IDs are written as text: they need 64 bits, and most readers of JSON have 53.


def _encode(position: Position) -> dict[str, Any]:
    partial = position.partial
    return {
        "log": [[f"{history_id:016x}", seq] for history_id, seq in position.log.pairs()],
        "last_complete": position.last_complete,
        "highest_received": position.highest_received,
        "partial": partial
        and {
            "history": f"{partial.history_id:016x}",
            "start": partial.start,
            "end": partial.end,
        },
    }


def _decode(fields: Mapping[str, Any]) -> Position:
    log = FailoverLog.of((_history(text), _number(seq)) for text, seq in fields["log"])
    last_complete = _number(fields["last_complete"])
    highest = _number(fields["highest_received"])
    found = fields["partial"]
    if found is None:
        if highest != last_complete:
            raise ValueError("more was received than is complete, yet no partial snapshot is named")
        return Position(log, last_complete, highest, None)
    partial = PartialSnapshot(
        _history(found["history"]), _number(found["start"]), _number(found["end"])
    )
    if not partial.start <= last_complete < highest <= partial.end:
        raise ValueError("the partial snapshot does not hold what was received")
    return Position(log, last_complete, highest, partial)


def _history(text: str) -> HistoryId:
    return HistoryId(_number(int(text, 16)))


def _number(value: Any) -> SeqNo:
    if not isinstance(value, int) or not 0 <= value <= SEQ_MAX:
        raise ValueError(f"{value!r} is no 64-bit number")
    return SeqNo(value)
