"""Queues: what is counted, polled, cleared and saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol import bucket_event
from upr_protocol.bucket_event import (
    ANY_DESIGN,
    BucketEvent,
    BucketFate,
    EventFilter,
    EventKind,
)
from upr_protocol.ids import HistoryId
from upr_protocol.limits import CONSUMERS_MAX, CONSUMERS_OF_USER_MAX, DESIGNS_MAX
from upr_server.engine import Bucket
from upr_server.events import queues as queues_module
from upr_server.events.producer import Producer
from upr_server.events.queues import (
    _KINDS_REMEMBERED_MAX,
    EventBatch,
    EventQueue,
    EventQueues,
    TooManyConsumersError,
)

TIMEOUT_S = 10.0


def new_queue() -> EventQueue:
    return EventQueue(TIMEOUT_S, reported_at=0.0)


def polled(queue: EventQueue, keys_max: int = 3) -> list[BucketEvent]:
    """The events of all polls until one has reached the end of the queue."""
    events: list[BucketEvent] = []
    is_all = False
    while not is_all:
        some_events, is_all = queue.poll(keys_max)
        events += some_events
    return events


def test_an_event_is_delivered_once() -> None:
    queue = new_queue()
    queue.count_creation("b", 1)
    for designs in ((b"_design/x",), (), (b"_design/y", b"_design/x")):
        queue.count_updates("b", 1, designs)
    queue.count_updates("other", 2, (), batch_count=4)
    assert polled(queue) == [
        BucketEvent("b", 1, BucketFate.CREATED, 3, (b"_design/x", b"_design/y")),
        BucketEvent("other", 2, BucketFate.NONE, 4),
    ]
    assert polled(queue) == []


def test_a_counter_that_stays_idle_is_removed_by_the_next_poll() -> None:
    queue = new_queue()
    queue.count_updates("b", 1, (b"_design/x",))
    polled(queue)
    assert list(queue.counters) == ["b"]
    polled(queue)
    assert not queue.counters


def test_a_deletion_after_a_poll_is_delivered() -> None:
    queue = new_queue()
    queue.count_creation("b", 1)
    polled(queue)
    queue.count_deletion("b", 1)
    assert polled(queue) == [BucketEvent("b", 1, BucketFate.DELETED)]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("update"), st.sampled_from("abcdef")),
            st.tuples(st.just("poll"), st.integers(1, 4)),
        ),
        max_size=60,
    )
)
def test_a_poll_and_its_reset_lose_no_update(steps: list[tuple[str, str | int]]) -> None:
    """Whenever a poll happens, and however early it stops, each update is reported exactly once."""
    queue = new_queue()
    update_counts: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for step, argument in steps:
        if isinstance(argument, str):
            queue.count_updates(argument, 1, (f"_design/{update_counts[argument]}".encode(),))
            update_counts[argument] += 1
        else:
            assert step == "poll"
            for event in queue.poll(argument)[0]:
                received[event.bucket] += event.updates
                assert len(event.designs) == event.updates
    for event in polled(queue):
        received[event.bucket] += event.updates
    assert received == update_counts


def test_a_poll_that_stops_early_continues_with_the_remaining_buckets() -> None:
    """This also holds if the reported buckets are updated all the time."""
    queue = new_queue()
    for bucket in "abcde":
        queue.count_updates(bucket, 1, ())
    buckets: list[str] = []
    for _ in range(5):
        events, _ = queue.poll(2)
        buckets += [event.bucket for event in events]
        for bucket in "ab":
            queue.count_updates(bucket, 1, ())
    assert buckets[:5] == ["a", "b", "c", "d", "e"]


def test_a_poll_has_a_limit_of_keys_but_reports_its_first_bucket_completely() -> None:
    queue = new_queue()
    for bucket in "ab":
        queue.count_updates(bucket, 1, tuple(b"_design/%d" % index for index in range(5)))
    events, is_all = queue.poll(3)
    assert [len(event.designs) for event in events] == [5]
    assert not is_all
    assert len(queue.poll(12)[0]) == 1


def test_only_what_the_filters_let_through_is_counted() -> None:
    queue = new_queue()
    queue.set_filters((EventFilter(EventKind.UPDATED, "a*"), EventFilter(EventKind.DESIGN, "*b")))
    for bucket in ("a", "ab", "b", "c"):
        queue.count_updates(bucket, 1, ())
        queue.count_updates(bucket, 1, (b"_design/x",))
    queue.count_creation("c", 2)
    queue.count_deletion("c", 2)
    assert list(queue.counters) == ["a", "ab", "b"]
    assert {event.bucket: (event.updates, event.designs) for event in polled(queue)} == {
        "a": (2, ()),
        "ab": (2, (b"_design/x",)),
        "b": (1, (b"_design/x",)),
    }
    queue.set_filters(())
    queue.count_updates("a", 1, (b"_design/x",))
    assert polled(queue) == []


def test_counting_compiles_no_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest patterns take 3 ms each to compile. An event of a new bucket is counted for all
    consumers at once, and a client could have filled the cache of compiled patterns with others."""
    queue = EventQueue(TIMEOUT_S, 0.0, (EventFilter(pattern="b*"),))
    queue.set_filters((EventFilter(pattern="c*"),))
    bucket_event._expression.cache_clear()
    monkeypatch.setattr(bucket_event, "compile_expression", None)
    queue.count_creation("b", 1)
    queue.count_creation("c", 2)
    queue.count_updates("cd", 3, ())
    assert list(queue.counters) == ["c", "cd"]


def test_a_bucket_that_no_filter_wants_any_more_is_forgotten() -> None:
    queue = EventQueue(10.0, 0.0)
    queue.count_creation("a", 1)
    queue.count_creation("b", 2)
    queue.set_filters((EventFilter(pattern="b*"),))
    queue.count_deletion("a", 1)
    queue.set_filters((EventFilter(),))
    events, is_all = queue.poll()
    assert (events, is_all) == ((BucketEvent("b", 2, BucketFate.CREATED),), True)


def test_a_filter_takes_bounded_memory_however_many_buckets_there_are() -> None:
    queue = EventQueue(10.0, 0.0, (EventFilter(pattern="b*"),))
    lengths: list[int] = []
    for number in range(2 * _KINDS_REMEMBERED_MAX):
        queue.count_creation("ab"[number % 2] + str(number), number)
        lengths.append(len(queue._kinds))
    # The queue remembers as many buckets as it may, so it evaluates the filters once for each.
    assert max(lengths) == _KINDS_REMEMBERED_MAX
    assert len(queue.counters) == _KINDS_REMEMBERED_MAX


def test_an_earlier_bucket_does_not_hide_a_later_one_whose_creation_is_filtered_out() -> None:
    queue = new_queue()
    queue.set_filters((EventFilter(EventKind.UPDATED),))
    queue.count_updates("b", 1, ())
    queue.count_deletion("b", 1)
    queue.count_creation("b", 2)
    queue.count_updates("b", 1, ())
    queue.count_updates("b", 2, ())
    assert [(event.incarnation, event.updates) for event in polled(queue)] == [(2, 1)]


def test_too_many_design_documents_are_reported_as_any() -> None:
    queue = new_queue()
    for index in range(DESIGNS_MAX):
        queue.count_updates("b", 1, (b"_design/%d" % index,))
    assert len(queue.counters["b"].designs) == DESIGNS_MAX
    queue.count_updates("b", 1, (b"_design/more",))
    queue.count_updates("b", 1, (b"_design/even more",))
    assert [event.designs for event in polled(queue)] == [(ANY_DESIGN,)]
    # After that poll, design documents are named again.
    queue.count_updates("b", 1, (b"_design/more",))
    assert [event.designs for event in polled(queue)] == [(b"_design/more",)]


def test_no_queue_processes_more_design_documents_than_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bundle may change thousands of design documents, and there may be a hundred queues."""
    counted: list[Sequence[bytes]] = []

    def count(_queue: EventQueue, *arguments: Any) -> None:
        counted.append(arguments[2])

    monkeypatch.setattr(EventQueue, "count_updates", count)
    queues = EventQueues()
    queues.register("c", TIMEOUT_S, 0.0)
    producer = Producer(queues, lambda: None)
    bucket = Bucket("b", new_history_id=lambda: HistoryId(1), partition_count=1)
    named = tuple(b"_design/%d" % index for index in range(DESIGNS_MAX))
    for designs, expected in (
        (named, named),
        (named + named, named),
        ((*named, b"_design/more"), (ANY_DESIGN,)),
    ):
        producer.bucket_updated(bucket, designs, 1)
        assert counted.pop() == expected


def test_a_late_update_of_the_bucket_before_does_not_hide_a_creation() -> None:
    queue = new_queue()
    queue.count_deletion("b", 1)
    assert polled(queue) == [BucketEvent("b", 1, BucketFate.DELETED)]
    queue.count_updates("b", 1, ())
    queue.count_creation("b", 2)
    queue.count_updates("b", 1, ())
    queue.count_deletion("b", 1)
    # With one counter for both buckets, the poll would report a deletion and no creation.
    assert polled(queue) == [BucketEvent("b", 2, BucketFate.CREATED)]


def test_a_bucket_that_is_created_many_times_has_one_counter() -> None:
    queue = new_queue()
    for incarnation in (7, 3, 9, 1, 5):
        queue.count_creation("b", incarnation)
        queue.count_updates("b", incarnation, (b"_design/x",))
        queue.count_creation("ba", incarnation)
        queue.count_deletion("b", incarnation)
        assert len(queue.counters) == 2
    assert polled(queue) == [
        BucketEvent("b", 5, BucketFate.DELETED),
        BucketEvent("ba", 5, BucketFate.CREATED),
    ]


def test_a_consumer_that_missed_too_many_deleted_buckets_looks_at_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queues_module, "COUNTERS_MAX", 20)
    queues = EventQueues()
    for consumer in ("absent", "away", "asking", ".own"):
        queues.register(consumer, TIMEOUT_S, now=0.0)
    for consumer in ("asking", ".own"):
        queue = queues.get(consumer)
        assert queue is not None
        queue.asker = object() if consumer == "asking" else None
    producer = Producer(queues, lambda: None)
    for number in range(1, 31):
        bucket = Bucket(f"b{number}", new_history_id=lambda: HistoryId(1), partition_count=1)
        producer.bucket_created(bucket)
        producer.bucket_deleted(bucket)
        assert (queues.get("absent") is None) == (number > 20)
        # Only one consumer is removed at a time.
        assert (queues.get("away") is None) == (number > 21)
    assert queues.report_health("absent", TIMEOUT_S, now=1.0) is None
    assert all(queues.get(consumer) is not None for consumer in ("asking", ".own"))


def test_dead_consumers_are_removed_with_their_queues_and_others_are_not() -> None:
    queues = EventQueues()
    for consumer in ("dead", "alive", "asking"):
        queues.register(consumer, TIMEOUT_S, now=0.0)
    asking = queues.get("asking")
    assert asking is not None
    asking.asker = object()
    assert queues.report_health("alive", 30.0, now=5.0) is not None
    assert queues.remove_dead(TIMEOUT_S - 0.1) == ([], TIMEOUT_S)
    assert queues.remove_dead(TIMEOUT_S)[0] == ["dead"]
    assert queues.get("dead") is None
    assert queues.report_health("dead", TIMEOUT_S, now=11.0) is None
    asking.asker = None
    assert queues.remove_dead(12.0) == (["asking"], 35.0)
    assert queues.remove_dead(35.0) == (["alive"], float("inf"))


def test_a_clean_restart_keeps_the_queues() -> None:
    queues = EventQueues()
    for consumer in ("c", ".own"):
        queue = queues.register(consumer, TIMEOUT_S, now=0.0)
        queue.count_creation("b", 7)
        queue.count_updates("b", 7, (b"_design/x", b"_design/\xff"))
    unacknowledged = EventBatch((BucketEvent("gone", 1, BucketFate.DELETED),), id=99)
    queue = queues.register("d", TIMEOUT_S, now=0.0)
    queue.unacknowledged = unacknowledged
    restored = EventQueues()
    restored.restore(queues.to_bytes(), now=1000.0)
    for consumer in ("c", ".own"):
        again = restored.get(consumer)
        assert again is not None
        assert polled(again) == [
            BucketEvent("b", 7, BucketFate.CREATED, 1, (b"_design/x", b"_design/\xff"))
        ]
    last = restored.get("d")
    assert last is not None
    assert last.unacknowledged == unacknowledged


def test_no_consumer_times_out_while_the_node_was_down() -> None:
    queues = EventQueues()
    queues.register("c", TIMEOUT_S, now=0.0)
    restored = EventQueues()
    restored.restore(queues.to_bytes(), now=1000.0)
    assert restored.remove_dead(1000.0 + TIMEOUT_S - 1) == ([], 1000.0 + TIMEOUT_S)
    assert restored.remove_dead(1000.0 + TIMEOUT_S)[0] == ["c"]


def test_the_number_of_event_consumers_of_one_user_is_bounded() -> None:
    queues = EventQueues()
    for index in range(CONSUMERS_OF_USER_MAX):
        queues.register(f"c{index}@bob@home", TIMEOUT_S, now=0.0)
    with pytest.raises(TooManyConsumersError, match="user bob@home already has 10"):
        queues.register("one-more@bob@home", TIMEOUT_S, now=0.0)
    queues.register("one-more@bob", TIMEOUT_S, now=0.0)
    assert queues.report_health("c0@bob@home", TIMEOUT_S, 0.0)


def test_the_number_of_event_consumers_is_bounded() -> None:
    queues = EventQueues()
    for index in range(CONSUMERS_MAX):
        queues.register(f"c{index}", TIMEOUT_S, now=0.0)
    with pytest.raises(TooManyConsumersError, match="already has 100 event consumers"):
        queues.register("one more", TIMEOUT_S, now=0.0)
    # A node's own consumers are neither counted nor refused.
    queues.register(".own", TIMEOUT_S, now=5.0)
    assert queues.consumer_count == CONSUMERS_MAX
    queues.remove_dead(TIMEOUT_S)
    queues.register("one more", TIMEOUT_S, now=0.0)
