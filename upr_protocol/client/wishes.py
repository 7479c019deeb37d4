"""What a consumer asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

from upr_protocol.ids import PARTITIONS_END, PartitionId, PartitionState

End = int | Mapping[int, int] | Literal["now"] | None
"""Where streams end: at one number, at one number a partition, at what the server has when the
first connection is made, or never."""


def partitions_wanted(partitions: Sequence[int] | None) -> tuple[PartitionId, ...]:
    """The partitions of a consumer's argument, each once; empty for all of the bucket's.

    Raises:
        ValueError: There are none, which must not come to mean all; or one that no bucket has.
    """
    if partitions is None:
        return ()
    if not partitions:
        raise ValueError("no partitions to stream; None means all of them")
    wanted = sorted(set(partitions))
    if not 0 <= wanted[0] <= wanted[-1] < PARTITIONS_END:
        raise ValueError(f"a partition is 0 to {PARTITIONS_END - 1}")
    return tuple(map(PartitionId, wanted))


@attrs.frozen
class Wishes:
    """What a consumer asks for.

    Attributes:
        partitions: The partitions to stream; none for all of the bucket's.
        from_now: Whether partitions without a position start at what the server has, instead of at
            the beginning.
        state: The state that the partitions must be in.
        end: Where the streams end.
        lease_id: The lease that holds what lies between the positions and `end`, and under which it
            is read; 0 for none.
        with_answers: Whether answers to publishers are to come, too.
        with_logs: Whether the application is told which log each stream was accepted with.
        undoes: Whether somebody undoes; otherwise a rollback goes back to 0.
    """

    partitions: tuple[PartitionId, ...] = ()
    from_now: bool = False
    state: PartitionState = PartitionState.ACTIVE
    end: End = None
    lease_id: int = 0
    with_answers: bool = False
    with_logs: bool = False
    undoes: bool = False
