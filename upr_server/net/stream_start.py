"""Where a requested stream starts, or why there is none.

`decide_start` compares two histories. Here the rest is asked: whether this node may stream the
partition in its present state, and whether a lease still protects what the client wants to read.
"""

from __future__ import annotations

import attrs

from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import Retry, RollBack, Start, decide_start
from upr_protocol.ids import PartitionState, SeqNo
from upr_protocol.limits import KEY_BYTES_MAX
from upr_protocol.wire import Stream
from upr_server.engine import Partition
from upr_server.net.state_text import state_text
from upr_server.storage.online.bucket_disk import BucketDisk


@attrs.frozen
class StreamRefusal:
    """Why there is no stream.

    Attributes:
        status: What the client is to do.
        reason: The reason, as a sentence for people.
        seq: The rollback's ceiling; or how far the server is, if the client is ahead of it.
    """

    status: Status
    reason: str
    seq: SeqNo = SeqNo(0)


def stream_start(disk: BucketDisk, partition: Partition, request: Stream) -> Start | StreamRefusal:
    """Where a stream starts, or why there is none. O(entries of the failover logs).

    Args:
        disk: The bucket's disk, for its leases.
        partition: The partition that is to be streamed.
        request: What the client asks for.
    """
    if sentence := _wrong_argument(request):
        return StreamRefusal(Status.BAD_ARGUMENT, sentence)
    if partition.damage and not request.with_answers:
        # A replica asks again: it follows other partitions, too.
        return StreamRefusal(Status.DAMAGED, f"its copy here is damaged: {partition.damage}")
    if partition.state is not request.state:
        is_dead = partition.state is PartitionState.DEAD
        return StreamRefusal(
            Status.NOT_MY_PARTITION if is_dead else Status.WRONG_STATE,
            f"the partition {state_text(partition)}",
        )
    if not partition.failover_log.entries:
        return StreamRefusal(Status.SEQ_TOO_HIGH, "this replica has not heard of its active yet")
    # Within a lease no deletion was forgotten, wherever in it the client goes on.
    purge_seq = SeqNo(0) if request.lease_id else partition.purge_seq
    decision = decide_start(partition.failover_log, partition.high_seq, purge_seq, request.position)
    if isinstance(decision, Retry):
        return StreamRefusal(Status.SEQ_TOO_HIGH, decision.reason.value, partition.high_seq)
    if isinstance(decision, RollBack):
        return StreamRefusal(Status.ROLLBACK, decision.reason.value, decision.ceiling)
    return _leased_start(disk, partition, request, decision) if request.lease_id else decision


def _wrong_argument(request: Stream) -> str:
    """What no partition could give to `request`; empty if there is nothing."""
    if request.state is PartitionState.DEAD:
        return "a dead partition is not streamed; ask for an active one or a replica"
    if request.state is PartitionState.PENDING and not request.with_answers:
        return "a pending partition is streamed to replicas only; ask for an active one"
    if request.key_prefix and request.with_answers:
        return "a replica streams all keys; leave out the key prefix"
    if len(request.key_prefix) > KEY_BYTES_MAX:
        return f"a key prefix has at most {KEY_BYTES_MAX} bytes, not {len(request.key_prefix)}"
    return ""


def _leased_start(
    disk: BucketDisk, partition: Partition, request: Stream, start: Start
) -> Start | StreamRefusal:
    """Where a stream under a lease starts, or why there is none."""
    try:
        disk.leases.check_range(request.lease_id, partition.id, start.seq, request.end_seq)
    except ServerError as error:
        return StreamRefusal(error.status, error.sentence, start.seq)
    if request.end_seq < start.end_at_least:
        return StreamRefusal(
            Status.BAD_ARGUMENT,
            f"a stream under a lease ends at its end_seq, {request.end_seq}, and the position has "
            f"a partial snapshot that ends at {start.end_at_least}",
        )
    return start
