"""Why requests are refused, and what their clients are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from upr_protocol.errors import ServerError, Status, quoted_key
from upr_protocol.failover import FailoverLog
from upr_protocol.hashing import partition_of
from upr_protocol.ids import SeqNo
from upr_protocol.wire import Message, Refusal, Stream, StreamReply
from upr_server.engine import Partition
from upr_server.net.state_text import state_text

_SENTENCE_MAX: Final = 900
"""Characters of a refusal: in any script they fit its frame."""


def refusal_of(
    request: Message, status: Status, sentence: str, map_revision: int
) -> Message | None:
    """The message that refuses `request`, or what `request` is the answer to.

    Args:
        request: The request.
        status: Why it is refused.
        sentence: The same for people; its first 900 characters are sent.
        map_revision: The revision of the bucket's map; 0 for none.

    Returns:
        The message; None if the request is of a kind that is never answered.
    """
    if isinstance(request, Stream):
        return StreamReply(
            SeqNo(0),
            sentence[:_SENTENCE_MAX],
            FailoverLog(),
            map_revision,
            partition=request.partition,
            opaque=request.opaque,
            status=status,
        )
    if not request.answers:
        return None
    return Refusal(
        sentence[:_SENTENCE_MAX],
        map_revision,
        partition=request.partition,
        opaque=request.opaque,
        status=status,
    )


def not_active_error(partition: Partition) -> ServerError:
    """Says that this node is not active for a partition; or that its copy is damaged."""
    if partition.damage:
        return ServerError(
            Status.DAMAGED,
            f"partition {partition.id} is not served, because it is damaged: {partition.damage}",
        )
    return ServerError(
        Status.NOT_MY_PARTITION,
        f"partition {partition.id} {state_text(partition, 'active')}",
    )


def misplaced_error(key: bytes, partition: Partition, partition_count: int) -> ServerError:
    """Says that a key does not belong to a partition."""
    return ServerError(
        Status.BAD_ARGUMENT,
        f"key {quoted_key(key[:40])} belongs to partition {partition_of(key, partition_count)}, "
        f"not {partition.id}",
    )


def check_partitions_differ(partitions: Sequence[int]) -> None:
    """Raises `ServerError` when a request names a partition twice: its answer has a row for each
    partition, and is bounded by their number."""
    if len(set(partitions)) != len(partitions):
        raise ServerError(Status.BAD_ARGUMENT, "a partition is named twice")
