"""A partition as the disk has it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Cas, PartitionState, SeqNo
from upr_server.engine.mutate_result import MutateResult
from upr_server.engine.publisher_answers import WriterToken


class PartitionImage(msgspec.Struct, frozen=True):
    """A partition as the disk has it.

    Attributes:
        state: What this node is for it.
        failover_log: The branches that led here.
        high_seq: The persisted snapshot end.
        last_cas: No CAS up to here is given again.
        indexed_seq: The disk's index knows the newest mutation up to here of every key.
        purge_seq: Tombstones at or below it may be gone.
        answers: What publishers were answered, by token, oldest first.
        item_count: Keys that exist, as of `indexed_seq`.
        damage: Which of its records is damaged; empty for none.
        is_incomplete: Whether it may lack changes that this node once acknowledged.
    """

    state: PartitionState
    failover_log: FailoverLog
    high_seq: SeqNo = SeqNo(0)
    last_cas: Cas = Cas(0)
    indexed_seq: SeqNo = SeqNo(0)
    purge_seq: SeqNo = SeqNo(0)
    answers: Mapping[WriterToken, MutateResult] = {}
    item_count: int = 0
    damage: str = ""
    is_incomplete: bool = False
