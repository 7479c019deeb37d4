"""What a consumer must remember to continue where it was; docs/guarantees.md has the rules.

Only the stream moves a position:

- **stream accepted**: the server's whole failover log is recorded, before any data. A snapshot that
  lacked only its end is complete.
- **chunk received**: the highest received number moves, and with it comes the snapshot that the
  chunk belongs to. That snapshot starts at the last complete end, wherever the stream that carried
  it started: a consumer that was cut inside a snapshot has its front already.
- **snapshot completed**: its end is the last complete one, and no snapshot is partial.
- **rollback pending**: until the consumer has reported where it rolled back to, its log ends in a
  history of its own above the ceiling. If it dies half-way, no server that it asks then has that
  history. So every server asks for the rollback again, even one that has all that is being undone.
- **rolled back**: what is above the target was never received.
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

ROLLBACK_PENDING: Final = HistoryId(2**64 - 1)
"""The history of a consumer that is about to roll back; see `position_during_rollback`. A server
gives it to a history with the same probability with which two servers give theirs the same ID."""


class ResumeStateError(UprError, ValueError):
    """The bytes are not a resume state, or it is the state of another bucket or of other keys."""


def position_after_acceptance(position: Position, log: FailoverLog) -> Position:
    """The position after the server accepted the stream with this log.

    A consumer that was cut between a snapshot's last chunk and its end now knows that it has the
    whole snapshot: the server continues after it, and may have nothing to send for long.
    """
    partial = position.partial
    if partial is not None and position.highest_received == partial.end:
        return Position(log, partial.end, partial.end, None)
    return msgspec.structs.replace(position, log=log)


def position_after_chunk(
    position: Position, history_id: HistoryId, end: SeqNo, through: SeqNo
) -> Position:
    """The position after everything up to `through` came, of a snapshot that ends at `end`."""
    return Position(
        position.log,
        position.last_complete,
        through,
        PartialSnapshot(history_id, position.last_complete, end),
    )


def position_after_snapshot(position: Position, end: SeqNo) -> Position:
    """The position after the snapshot that ends at `end` is complete."""
    return Position(position.log, end, end, None)


def position_during_rollback(position: Position, ceiling: SeqNo) -> Position:
    """The position while the consumer rolls back to `ceiling` or below. Any server that it asks
    meanwhile orders the same rollback."""
    # No rule for resuming keeps one part of a snapshot and gives up another.
    ceiling = min(ceiling, position.last_complete)
    log = _without_marker(position.log).with_branch(ROLLBACK_PENDING, ceiling)
    return msgspec.structs.replace(position, log=log)


def position_after_rollback(position: Position, to: SeqNo) -> Position:
    """The position after the consumer rolled back to `to`, a complete snapshot's end or 0."""
    return Position(_without_marker(position.log).up_to(to), to, to, None)


def _without_marker(log: FailoverLog) -> FailoverLog:
    return FailoverLog(tuple(entry for entry in log if entry.history_id != ROLLBACK_PENDING))


@attrs.define
class ResumeState:
    """How far a consumer has come in each partition of one bucket. A partition without a position
    has received nothing.

    Attributes:
        bucket: The bucket.
        positions: How far each partition has come.
        key_prefix: What the keys begin with that the consumer asked for; empty for all keys. None
            if no consumer has had the state, or one of a release that did not save this: then the
            positions count for any keys.
    """

    bucket: str
    positions: dict[PartitionId, Position] = attrs.field(factory=dict)
    key_prefix: bytes | None = None

    def position(self, partition: PartitionId) -> Position:
        """How far `partition` has come."""
        return self.positions.get(partition, NOTHING_YET)

    def is_rollback_pending(self, partition: PartitionId) -> bool:
        """Whether `partition` is about to roll back: its log then has a marker, and is not that of
        any server."""
        return self.position(partition).log.current == ROLLBACK_PENDING

    def check_bucket(self, bucket: str) -> None:
        """Checks that this is a state of `bucket`.

        Raises:
            ResumeStateError: It is a state of another bucket.
        """
        if self.bucket != bucket:
            raise ResumeStateError(
                f"the resume state is of the bucket {self.bucket!r}, not of {bucket!r}: use one "
                "for each bucket"
            )

    def of_stream(self, bucket: str, key_prefix: bytes) -> Self:
        """An independent copy, for a consumer of these keys of this bucket. O(partitions).

        Raises:
            ResumeStateError: It is a state of another bucket, or of other keys: up to its positions
                the consumer would lack the changes of the keys that were left out.
        """
        self.check_bucket(bucket)
        if self.key_prefix not in (None, key_prefix):
            raise ResumeStateError(
                f"the resume state is of {_keys_text(self.key_prefix)}, not of "
                f"{_keys_text(key_prefix)}: ask for the same keys, or use one for each prefix"
            )
        return attrs.evolve(self.copy(), key_prefix=key_prefix)

    def copy(self) -> Self:
        """An independent copy. O(partitions)."""
        return attrs.evolve(self, positions=dict(self.positions))

    def encode(self) -> bytes:
        """The state as JSON: the same state is always the same bytes."""
        partitions = {
            str(partition): _encode(self.positions[partition])
            for partition in sorted(self.positions)
        }
        document = {"version": _VERSION, "bucket": self.bucket, "partitions": partitions}
        if self.key_prefix is not None:
            document["key_prefix"] = self.key_prefix.hex()  # keys need not be text
        return msgspec.json.encode(document) + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The reverse of `encode`.

        Raises:
            ResumeStateError: The bytes are not a resume state.
        """
        try:
            document = msgspec.json.decode(data)
            if document["version"] != _VERSION:
                raise ResumeStateError(
                    f"the resume state has version {document['version']}; this program reads "
                    f"version {_VERSION}"
                )
            positions = {
                _partition(name): _decode(fields) for name, fields in document["partitions"].items()
            }
            bucket = document["bucket"]
            if not isinstance(bucket, str):
                raise TypeError("the bucket is not a string")
            prefix_text = document.get("key_prefix")
            key_prefix = None if prefix_text is None else bytes.fromhex(prefix_text)
        except ResumeStateError:
            raise
        except msgspec.DecodeError as error:
            raise ResumeStateError(f"not a resume state: {error}") from error
        except (RecursionError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ResumeStateError(f"not a resume state: {error!r}") from error
        return cls(bucket, positions, key_prefix)


def _keys_text(key_prefix: bytes | None) -> str:
    if not key_prefix:
        return "all keys"
    return f"the keys that begin with {key_prefix.decode(errors='backslashreplace')!r}"


def _partition(name: str) -> PartitionId:
    partition = int(name)
    if not 0 <= partition < PARTITIONS_END or str(partition) != name:
        raise ValueError(f"{name!r} is not a partition")
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
    log = FailoverLog.of_pairs((_history(text), _uint64(seq)) for text, seq in fields["log"])
    last_complete = _uint64(fields["last_complete"])
    highest = _uint64(fields["highest_received"])
    partial_fields = fields["partial"]
    if partial_fields is None:
        if highest != last_complete:
            raise ValueError("highest_received is above last_complete, but partial is missing")
        return Position(log, last_complete, highest, None)
    partial = PartialSnapshot(
        _history(partial_fields["history"]),
        _uint64(partial_fields["start"]),
        _uint64(partial_fields["end"]),
    )
    if not partial.start <= last_complete < highest <= partial.end:
        raise ValueError("the partial snapshot does not cover highest_received")
    return Position(log, last_complete, highest, partial)


def _history(text: str) -> HistoryId:
    return HistoryId(_uint64(int(text, 16)))


def _uint64(value: Any) -> SeqNo:
    if not isinstance(value, int) or not 0 <= value <= SEQ_MAX:
        raise ValueError(f"{value!r} is not a 64-bit number")
    return SeqNo(value)
