"""What a consumer asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

from upr_protocol.ids import PARTITIONS_END, PartitionId, PartitionState

End = int | Mapping[int, int] | Literal["now"] | None
"""Where streams end: at one sequence number, at one for each partition, at what the server has when
the first connection is made, or never."""


def checked_partitions(partitions: Sequence[int] | None) -> tuple[PartitionId, ...]:
    """The partitions of a consumer's argument, sorted and without duplicates; empty for all.

    Raises:
        ValueError: The argument is empty, which must not come to mean all; or it names a partition
            that no bucket has.
    """
    if partitions is None:
        return ()
    if not partitions:
        raise ValueError("the list of partitions is empty; give None to stream all of them")
    unique = sorted(set(partitions))
    if not 0 <= unique[0] <= unique[-1] < PARTITIONS_END:
        raise ValueError(f"a partition must be 0 to {PARTITIONS_END - 1}")
    return tuple(map(PartitionId, unique))


@attrs.frozen
class Subscription:
    """What a consumer asks for.

    Attributes:
        partitions: The partitions to stream; empty for all of the bucket's.
        from_now: Whether partitions without a position start at what the server has, instead of at
            the beginning.
        state: The state that the partitions must be in.
        end: Where the streams end.
        lease_id: The lease that holds what lies between the positions and `end`, and under which it
            is read; 0 for no lease.
        with_answers: Whether the server's answers to publishers come, too.
        with_logs: Whether the application is given the log of each accepted stream.
        has_undo: Whether the application undoes a rollback itself; otherwise the partition starts
            again at 0.
    """

    partitions: tuple[PartitionId, ...] = ()
    from_now: bool = False
    state: PartitionState = PartitionState.ACTIVE
    end: End = None
    lease_id: int = 0
    with_answers: bool = False
    with_logs: bool = False
    has_undo: bool = False
