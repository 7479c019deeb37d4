"""When a partition of a stream has to go back, how far, and what is said if it may not."""

from __future__ import annotations

from typing import Final

from upr_protocol.client import PartitionInfo
from upr_protocol.failover import FailoverLog, RollBack, decide_start
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.offset import PartitionOffset

BATCH_ENDS_MAX: Final = 6
"""How many ends of earlier batches an offset has for each partition. They make it longer."""


def rollback_needed(offset: PartitionOffset, info: PartitionInfo | None) -> RollBack | None:
    """How far a stream has to go back because the server's history has parted from its own below
    where it stands; None if it need not."""
    # Whether deletions are forgotten a lease will say; one that is held keeps them.
    log, high = (FailoverLog(), SeqNo(0)) if info is None else (info.log, info.high_seq)
    position = offset.position
    decision = decide_start(log, max(high, position.highest_received), SeqNo(0), position)
    return decision if isinstance(decision, RollBack) else None


def rewound(offset: PartitionOffset, info: PartitionInfo | None, ceiling: SeqNo) -> PartitionOffset:
    """A partition that went back: to the newest end of a batch up to `ceiling`, or to 0."""
    log = FailoverLog() if info is None else info.log
    batch_ends = tuple(seq for seq in offset.batch_ends if seq <= ceiling)
    seq = batch_ends[0] if batch_ends else SeqNo(0)
    rolled_back_from = offset.seq if offset.rolled_back_from is None else offset.rolled_back_from
    return PartitionOffset(log, seq, seq, seq, rolled_back_from, batch_ends)


def with_batch_end(offset: PartitionOffset) -> tuple[SeqNo, ...]:
    """The ends of earlier batches, with where the stream stands if the partition is consistent
    there. The first is 0. An end that was reached without `rewinds` does not count: the options
    may have been others then, with which a batch can lack rows.

    The two newest and the oldest stay. Of the others, those go first that stand close together for
    how far back they are: so a short way back repeats few rows, and a long way is possible.
    """
    if not offset.batch_ends:
        return (SeqNo(0),)
    seq, batch_ends = offset.seq, list(offset.batch_ends)
    if seq == offset.snapshot_end and seq not in batch_ends:
        batch_ends.insert(0, seq)
    while len(batch_ends) > BATCH_ENDS_MAX:
        closest = min(
            range(2, len(batch_ends) - 1),
            key=lambda index: (
                (batch_ends[index - 1] - batch_ends[index + 1]) / (seq - batch_ends[index + 1])
            ),
        )
        del batch_ends[closest]
    return tuple(batch_ends)


def rollback_error(
    bucket: str,
    partition: PartitionId,
    offset: PartitionOffset,
    info: PartitionInfo | None,
    rollback: RollBack,
) -> PipelineError:
    """The error of a stream that has to go back and does not mark rollbacks.

    Args:
        bucket: The bucket: a stream may be of several.
        partition: The partition.
        offset: Where the stream stands in it.
        info: The partition as it is now; None when there is none.
        rollback: How far it has to go back.
    """
    server_log = FailoverLog() if info is None else info.log
    to = rollback.ceiling if rollback.ceiling < offset.seq else offset.snapshot_start
    return PipelineError(
        "UPR_ROLLBACK",
        f"partition {partition} of {bucket} has to go back from {offset.seq} to {to}, as "
        f"{rollback.reason.value}: there was a failover, or data was lost. The stream followed "
        f"{_log_text(offset.log)}; the server now has {_log_text(server_log)}. Rows above {to} are "
        "in the sink and may be on no server. Begin with a new checkpoint and an empty sink; or "
        "stream with onRollback=marker into a sink that can undo (upr_protocol.spark.recipes)",
    )


def _log_text(log: FailoverLog) -> str:
    entries = [f"{history_id:016x} from {seq}" for history_id, seq in log.pairs()]
    return f"[{', '.join(entries)}]"
