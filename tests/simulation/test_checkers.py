"""The checkers themselves: a short history that is right, and what is told of it once it is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import msgspec
import pytest

from tests.kit.checkers import BrokenPromiseError, check
from tests.kit.history import (
    Accepted,
    Answered,
    AskedForNow,
    Began,
    BeganHistory,
    Ended,
    Event,
    Failed,
    Fault,
    Final,
    Follows,
    History,
    ReachedNow,
    Received,
    Restarted,
    Row,
    Sent,
    Streamed,
    Told,
    WentBack,
)
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, Operation, PartitionId, PartitionState, SeqNo

P = PartitionId(0)
FIRST, SECOND = HistoryId(1), HistoryId(2)
LOG = FailoverLog.of_pairs([(1, 0)])
LATER = FailoverLog.of_pairs([(2, 1), (1, 0)])


def row(seq: int, key: bytes, value: bytes | None) -> Row:
    """A change."""
    op = Operation.DELETE if value is None else Operation.SET
    return Row(SeqNo(seq), op, key, value or b"")


ONE, TWO, THREE = row(1, b"k", b"v1"), row(2, b"l", b"v2"), row(3, b"k", b"v3")
REPLACED = row(2, b"k", b"v4")
"""What another history has in the place of `TWO`."""


def sent(key: bytes, operation_number: int, value: bytes | None, level: str = "replicated") -> Sent:
    """An operation."""
    return Sent("p", key, operation_number, value, level)  # type: ignore[arg-type]


def numbered(*rows: Row, history_id: HistoryId = FIRST, node: str = "a") -> list[Event]:
    """An active gives numbers."""
    return [Accepted(node, 1, P, history_id, row) for row in rows]


def streamed(start: int, *rows: Row, end: int, log: FailoverLog = LOG) -> list[Event]:
    """A consumer is given a snapshot."""
    first, last = SeqNo(start), SeqNo(end)
    return [
        Began("c", P, log.current, first, last, may_repeat=False),
        Received("c", P, first, last, rows),
        Ended("c", P, last, log),
    ]


def ended(*rows: Row, node: str = "a", log: FailoverLog = LOG, is_active: bool = True) -> Final:
    """What a node has in the end."""
    items = {row.key: (row.seq, row.value) for row in rows if row.op is Operation.SET}
    return Final(node, P, is_active, max(row.seq for row in rows), log, items)


SENT: list[Event] = [
    sent(b"k", 0, b"v1"),
    sent(b"l", 0, b"v2"),
    sent(b"k", 1, b"v3"),
    sent(b"k", 2, b"v4"),
]


def broken(events: Sequence[Event]) -> str:
    """The promise that a history breaks; empty for none."""
    clock = count()
    history = History(lambda: float(next(clock)))
    for event in events:
        history.add(event)
    try:
        check(history)
    except BrokenPromiseError as error:
        return error.promise
    return ""


RIGHT: list[Event] = [
    *SENT,
    *numbered(ONE, TWO),
    Answered(b"k", 0, True),
    *streamed(0, ONE, TWO, end=2),
    *numbered(THREE),
    Answered(b"k", 1, True),
    *streamed(2, THREE, end=3),
    ended(TWO, THREE),
    ended(TWO, THREE, node="b", is_active=False),
]

FAILED_OVER: list[Event] = [
    *SENT,
    *numbered(ONE, TWO),
    *streamed(0, ONE, end=1),
    *streamed(1, TWO, end=2),
    Fault("failover", ("replicated",)),
    *numbered(REPLACED, history_id=SECOND, node="b"),
    WentBack("c", P, SeqNo(1), SeqNo(1), SeqNo(2), (SeqNo(1), SeqNo(2)), LOG),
    *streamed(1, REPLACED, end=2, log=LATER),
    ended(REPLACED, node="b", log=LATER),
]

FROM_BEFORE: list[Event] = [
    *SENT,
    *numbered(ONE, TWO, THREE),
    *streamed(0, ONE, TWO, end=2),
    Fault("failover", ()),
    *numbered(REPLACED, history_id=SECOND, node="b"),
    WentBack("c", P, SeqNo(1), SeqNo(0), SeqNo(2), (SeqNo(2),)),
    *streamed(0, REPLACED, end=2, log=LATER),
    # What it had kept before counts again, as does the first history.
    Restarted("c", {P: (SeqNo(3), {b"l": (SeqNo(2), b"v2"), b"k": (SeqNo(3), b"v3")})}),
    WentBack("c", P, SeqNo(2), SeqNo(2), SeqNo(3), (SeqNo(2),), LOG),
    *streamed(2, THREE, end=3),
    ended(TWO, THREE),
]
"""A consumer goes back to an end of earlier; later it had another one of this number."""


def test_correct_histories_pass() -> None:
    assert not broken(RIGHT)
    assert not broken(FAILED_OVER)
    assert not broken(FROM_BEFORE)
    # Of processes nobody knows what their actives gave: consumers say what there is.
    assert not broken([event for event in RIGHT if not isinstance(event, Accepted)])
    assert not broken([event for event in FAILED_OVER if not isinstance(event, Accepted)])


def replaced(events: Sequence[Event], event: Event, *replacements: Event) -> list[Event]:
    """The history with other events in the place of one."""
    position = events.index(event)
    return [*events[:position], *replacements, *events[position + 1 :]]


WRONG: dict[str, tuple[str, Callable[[], list[Event]]]] = {
    "an acknowledged change is not there": (
        "I1",
        lambda: [
            *SENT,
            *numbered(ONE, TWO),
            Answered(b"l", 0, True),
            Fault("failover", ("replicated",)),
            ended(ONE),
        ],
    ),
    "a change that nobody sent": ("I2", lambda: [*SENT, *numbered(row(1, b"k", b"other"))]),
    "a consumer is told what nobody gave": (
        "I2",
        lambda: [*SENT, *numbered(ONE), *streamed(0, row(1, b"k", b"v2"), end=1)],
    ),
    "what was refused is there": (
        "I2",
        lambda: [*SENT, *numbered(ONE), Answered(b"k", 0, False), ended(ONE)],
    ),
    "an increment counts twice": (
        "I2",
        lambda: [
            Sent("p", b"n", 0, None, "memory", 1),
            *numbered(row(1, b"n", b"2")),
            ended(row(1, b"n", b"2")),
        ],
    ),
    "a number falls": ("I3", lambda: [*SENT, *numbered(ONE, TWO), *streamed(0, TWO, ONE, end=2)]),
    "something is left out between snapshots": (
        "I3",
        lambda: [*SENT, *numbered(ONE, TWO, THREE), *streamed(0, ONE, end=1), *streamed(2, end=3)],
    ),
    "a snapshot lacks a change": (
        "I5",
        lambda: [*SENT, *numbered(ONE, TWO), *streamed(0, ONE, end=2)],
    ),
    "what was superseded elsewhere is kept": (
        "I5",
        lambda: [
            *SENT,
            *numbered(ONE, TWO),
            *streamed(0, ONE, TWO, end=2),
            *numbered(REPLACED, history_id=SECOND, node="b"),
            *streamed(2, end=2, log=LATER),
        ],
    ),
    "a key comes twice in a snapshot": (
        "I5",
        lambda: [*SENT, *numbered(ONE, TWO, THREE), *streamed(0, ONE, TWO, THREE, end=3)],
    ),
    "a snapshot ends before its end": (
        "I6",
        lambda: [
            *SENT,
            *numbered(ONE, TWO),
            Began("c", P, FIRST, SeqNo(0), SeqNo(2), may_repeat=False),
            Received("c", P, SeqNo(0), SeqNo(1), (ONE,)),
            Ended("c", P, SeqNo(1), LOG),
        ],
    ),
    "somebody goes back to where no snapshot ended": (
        "I7",
        lambda: replaced(
            FAILED_OVER,
            FAILED_OVER[-5],
            WentBack("c", P, SeqNo(1), SeqNo(1), SeqNo(2), (SeqNo(2),), LOG),
        ),
    ),
    "two give one number in one history": (
        "I8",
        lambda: [*SENT, *numbered(ONE, TWO), *numbered(REPLACED, node="b")],
    ),
    "a node that hands over gives a number": (
        "I8",
        lambda: [*SENT, Accepted("a", 1, P, FIRST, ONE, PartitionState.PENDING)],
    ),
    "copies differ": (
        "I9",
        lambda: [*RIGHT[:-1], ended(ONE, THREE, node="b", is_active=False)],
    ),
    "a disk has failed, and something is acknowledged": (
        "I12",
        lambda: [*RIGHT, Failed("a", 1), Failed("a", 1, "a Commit is acknowledged")],
    ),
}


@pytest.mark.parametrize("case_name", WRONG)
def test_broken_promises_are_found(case_name: str) -> None:
    promise, events = WRONG[case_name]
    assert broken(events()) == promise


def test_what_was_numbered_before_a_fault_and_answered_behind_it() -> None:
    """The answer was on its way."""
    answered = Answered(b"l", 0, True, P, FIRST, SeqNo(2))
    for on_the_way, promise in ((True, ""), (False, "I1")):
        fault = Fault("it hears of the failover", ("replicated",), on_the_way=on_the_way)
        events = [msgspec.structs.replace(event, level="memory") for event in SENT]
        assert broken([*events, *numbered(ONE, TWO), fault, answered, ended(ONE)]) == promise
        assert (
            broken([*events, *numbered(ONE), fault, *numbered(TWO), answered, ended(ONE)]) == "I1"
        )


def test_what_was_acknowledged_before_a_consumer_asked_for_now_is_below_its_end() -> None:
    question = AskedForNow("c")
    answered = Answered(b"l", 0, True, P, FIRST, SeqNo(2))
    in_the_end = ended(ONE, TWO)
    began: list[Event] = [*SENT, *numbered(ONE, TWO)]
    too_early = ReachedNow("c", P, SeqNo(1), LOG)
    assert broken([*began, answered, question, too_early]) == "I6"
    assert not broken([*began, answered, question, ReachedNow("c", P, SeqNo(2), LOG), in_the_end])
    # It was acknowledged later; or in a history that was left before it.
    assert not broken([*began, question, answered, too_early, in_the_end])
    elsewhere = ReachedNow("c", P, SeqNo(1), LATER)
    assert not broken([*began, answered, question, elsewhere, in_the_end])


def test_a_consumer_of_events_hears_after_each_change() -> None:
    design = row(1, b"_design/d", b"v")

    def told(received_at: float, *designs: bytes, names_all: bool = False) -> Told:
        return Told("e", received_at, designs, names_all)

    began: list[Event] = [
        Follows("e"),
        told(1, names_all=True),
        sent(design.key, 0, b"v"),
        *numbered(design),  # the fourth event comes at 3
    ]
    in_the_end = ended(design)
    assert not broken([*began, told(4, design.key), in_the_end])
    assert not broken([*began, told(4, names_all=True), in_the_end])
    assert broken([*began, in_the_end]) == "events"
    assert broken([*began, told(4, b"_design/another"), in_the_end]) == "events"
    assert broken([*began, told(2, design.key), in_the_end]) == "events", "it was before that"
    later: list[Event] = [*began, told(4, design.key), BeganHistory("b", P)]
    assert broken([*later, told(6, design.key), in_the_end]) == "events"
    assert not broken([*later, told(6, names_all=True), in_the_end])


def test_no_consumer_is_streamed_a_dead_or_a_pending_partition() -> None:
    for state in PartitionState:
        is_right = state in (PartitionState.ACTIVE, PartitionState.REPLICA)
        streamed_event = Streamed("w", "upr://b/b", P, state)
        assert broken([*RIGHT, streamed_event]) == ("" if is_right else "I5")


def test_a_consumer_continues_from_its_saved_state() -> None:
    restarted = Restarted("c", {P: (SeqNo(1), {b"k": (SeqNo(1), b"v1")})})
    began: list[Event] = [*SENT, *numbered(ONE, TWO), *streamed(0, ONE, TWO, end=2), restarted]
    assert not broken([*began, *streamed(1, TWO, end=2)])
    assert broken([*began, *streamed(2, end=2)]) == "I3"
