"""What an answer means, and an answer that means nothing."""

from __future__ import annotations

import pytest

from upr_protocol.client.core.calls import (
    PartitionInfo,
    SeqnoAtTime,
    resume_state_at_time,
    seqnos,
    seqnos_at_time,
    stats,
)
from upr_protocol.errors import RemoteProtocolError, ServerError, Status
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.wire import SeqnosAtReply, SeqnosReply, StatsReply


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":' + "[" * 100_000])
def test_unreadable_statistics_raise_an_error(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="the statistics cannot be read"):
        stats("").result(StatsReply(text))


@pytest.mark.parametrize("partitions", [(), (1,), (1, 3), (1, 2, 3)])
def test_an_answer_about_other_partitions_raises_an_error(partitions: tuple[int, ...]) -> None:
    """A client that asks for what is missing asked again without end."""
    with pytest.raises(RemoteProtocolError, match="not about the partitions"):
        seqnos((1, 2)).result(SeqnosReply(tuple((p, 7, 0, 0, 0) for p in partitions)))
    with pytest.raises(RemoteProtocolError, match="not about the partitions"):
        seqnos_at_time(0, (1, 2)).result(SeqnosAtReply(tuple((p, 7, 0) for p in partitions)))


def test_whoever_asks_about_all_partitions_takes_what_comes() -> None:
    rows = seqnos(()).result(SeqnosReply(((1, 7, 5, 4, 3),)))
    assert [(row.partition, row.high_seq) for row in rows] == [(1, 5)]


@pytest.mark.parametrize(
    ("partition", "history_id", "is_known"), [(0, 2, True), (0, 1, False), (1, 2, False)]
)
def test_a_number_at_a_time_is_a_position_only_in_the_history_that_it_was_read_in(
    partition: int, history_id: int, is_known: bool
) -> None:
    """After a failover, the number may be that of another change."""
    log, seq = FailoverLog.of_pairs([(2, 3), (1, 0)]), SeqNo(5)
    info = PartitionInfo(PartitionId(0), True, PartitionState.ACTIVE, seq, seq, SeqNo(0), log)
    row = SeqnoAtTime(PartitionId(partition), HistoryId(history_id), seq)
    if is_known:
        assert resume_state_at_time([info], [row], "b").positions == {0: Position(log, seq, seq)}
        return
    with pytest.raises(ServerError) as caught:
        resume_state_at_time([info], [row], "b")
    assert caught.value.status is Status.HISTORY_CHANGED
