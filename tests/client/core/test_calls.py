"""What an answer means, and an answer that means nothing."""

from __future__ import annotations

import pytest

from upr_protocol.client.core.calls import seqnos, seqnos_at_time, stats
from upr_protocol.errors import RemoteProtocolError
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
