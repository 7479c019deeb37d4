"""How far an index has what a stream has, in histories that have parted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import HistoryId, SeqNo
from upr_server.indexer.mark import NO_MARK, Mark

SEQS = st.integers(0, 8).map(SeqNo)


def mark(log: FailoverLog, seq: int) -> Mark:
    return Mark(Position(log, SeqNo(seq), SeqNo(seq)))


@st.composite
def parted_logs(draw: st.DrawFn) -> tuple[FailoverLog, FailoverLog]:
    """Two logs that have a beginning in common, and branches of their own."""
    names = iter(range(2, 100))
    common = FailoverLog.of_pairs([(1, 0)])
    for seq in draw(st.lists(SEQS, max_size=2)):
        common = common.with_branch(HistoryId(next(names)), seq)
    logs = []
    for _ in range(2):
        log = common
        for seq in draw(st.lists(SEQS, max_size=2)):
            log = log.with_branch(HistoryId(next(names)), seq)
        logs.append(log)
    return logs[0], logs[1]


@given(parted_logs(), SEQS, SEQS)
def test_the_shared_numbers_are_those_of_the_same_branches(
    logs: tuple[FailoverLog, FailoverLog], seq: SeqNo, newer_seq: SeqNo
) -> None:
    own, newer = logs
    shared = mark(own, seq).shared_seq(mark(newer, newer_seq))
    if newer.current in {entry.history_id for entry in own}:
        assert shared == seq
        return
    expected = 0
    while expected < seq and own.branch_of(SeqNo(expected + 1)) == newer.branch_of(
        SeqNo(expected + 1)
    ):
        expected += 1
    assert shared == expected


def test_an_index_that_has_nothing_or_hears_of_nothing() -> None:
    saved_mark = mark(FailoverLog.of_pairs([(7, 0)]), 5)
    assert NO_MARK.shared_seq(saved_mark) == 0
    assert saved_mark.shared_seq(NO_MARK) == 5
