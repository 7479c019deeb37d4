"""How old the state is that a stream has, against a model that remembers every moment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.spark.manual_clock import Clock
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.spark.stream_backlog import MOMENTS_MAX, BacklogAge, StreamBacklog

Ends = dict[PartitionId, SeqNo]


def ends_of(*seqs: int) -> Ends:
    return {PartitionId(partition): SeqNo(seq) for partition, seq in enumerate(seqs)}


STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.tuples(st.integers(0, 2), st.integers(0, 2)), st.booleans()),
    max_size=20,
)


@given(STEPS)
def test_the_age_is_that_of_the_newest_moment_of_which_the_stream_has_everything(
    steps: list[tuple[int, tuple[int, int], bool]],
) -> None:
    clock = Clock()
    age = BacklogAge(clock)
    moments: list[tuple[float, tuple[int, int]]] = []
    ends, stands = (0, 0), (0, 0)
    for wait_s, writes, catches_up in steps:
        clock.now_s += wait_s
        if catches_up and moments:
            stands = moments[-1][1]
        ends = (ends[0] + writes[0], ends[1] + writes[1])
        moments.append((clock.now_s, ends))
        age.note_ends(ends_of(*ends))
        reached_s = [time_s for time_s, (first, second) in moments if (first, second) <= stands]
        expected_s = clock.now_s - reached_s[-1] if reached_s else None
        assert age.age_s(ends_of(*stands)) == expected_s


def test_a_backlog_that_does_not_end_takes_little_memory() -> None:
    clock = Clock()
    age = BacklogAge(clock)
    age.note_ends(ends_of(0))
    for seq in range(10 * MOMENTS_MAX):
        clock.now_s += 1
        age.note_ends(ends_of(seq))
        assert len(age._moments) <= MOMENTS_MAX
        age_s = age.age_s(ends_of(seq // 2))
        assert age_s is not None
        assert seq - seq // 2 <= age_s <= 1.1 * (seq - seq // 2) + 1


def test_numbers_that_a_failover_lost_are_not_waited_for() -> None:
    clock = Clock()
    age = BacklogAge(clock)
    age.note_ends(ends_of(30, 5))
    clock.now_s += 10
    age.note_ends(ends_of(20, 5))
    assert age.age_s(ends_of(20, 5)) == 0
    assert age.age_s(ends_of(20)) is None


def test_the_backlog_of_several_buckets() -> None:
    first_backlog, second_backlog = StreamBacklog((1, 2), 30, 4.04), StreamBacklog((3,), 5, 9.0)
    assert StreamBacklog.merged([first_backlog, second_backlog]) == StreamBacklog(
        (1, 2, 3), 35, 9.0
    )
    unknown = StreamBacklog((), None, None)
    assert StreamBacklog.merged([first_backlog, unknown]) == StreamBacklog((1, 2), None, None)
    assert StreamBacklog.merged([]) == StreamBacklog((), 0, 0.0)
    assert first_backlog.metrics()["secondsBehindLatest"] == 4.0
    assert "secondsBehindLatest" not in unknown.metrics()
