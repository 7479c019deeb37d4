"""Nodes and consumers crash, and what consumers know is compared with the buckets.

When a consumer has received all events, it knows which buckets exist, and has read each bucket and
each design document after its last change.

A consumer here reads only what events tell it to read: the bucket after an update, a design
document after an event that names it, and everything after "look at everything". The engine and its
hooks, the producer, the feeds and the queues are the real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Final

import attrs
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from trio.testing import MockClock

from tests.engine.helpers import request
from upr_protocol.bucket_event import ANY_DESIGN, BucketEvent, BucketFate, EventFilter
from upr_protocol.chunk import Chunk
from upr_protocol.concurrency import Notifier
from upr_protocol.ids import HistoryId, Operation
from upr_server.engine import Bucket, Buckets, batch_of
from upr_server.events import EventBatch
from upr_server.events.feeds import EventFeeds
from upr_server.events.producer import Producer
from upr_server.events.queues import EventQueues

NAMES: Final = ("a", "ba")
CONSUMERS: Final = ("one", "two")
KEYS: Final = (b"k", b"_design/x", b"_design/y", b"not_design/x")
TIMEOUT_S: Final = 10
ALL: Final = EventFilter()


class Listener:
    """The engine's listener, which stays the same when the node restarts."""

    def __init__(self) -> None:
        self.producer: Producer | None = None

    def bucket_created(self, bucket: Bucket) -> None:
        assert self.producer is not None
        self.producer.bucket_created(bucket)

    def bucket_deleted(self, bucket: Bucket) -> None:
        assert self.producer is not None
        self.producer.bucket_deleted(bucket)

    def bucket_updated(self, bucket: Bucket, designs: Sequence[bytes], batch_count: int) -> None:
        assert self.producer is not None
        self.producer.bucket_updated(bucket, designs, batch_count)


@attrs.define
class Knowledge:
    """What a consumer knows of a bucket.

    Attributes:
        incarnation: Which of the buckets of that name it is.
        read: The partition's highest sequence number when the bucket was last read.
        designs: The sequence number of each design document when it was last read.
    """

    incarnation: int
    read: int = 0
    designs: dict[bytes, int] = attrs.field(factory=dict)


class Client:
    """A consumer and what it knows. Until it receives the event of a deletion, it may know of
    deleted buckets."""

    def __init__(self, name: str, buckets: Buckets) -> None:
        self.name = name
        self.acknowledged = 0
        self.knows: dict[str, Knowledge] = {}
        self.event_filter = ALL
        self._buckets = buckets

    def follows(self, bucket: str) -> bool:
        """Whether its filter accepts events of the bucket."""
        return bool(self.event_filter.kinds_of(bucket))

    def take(self, batch: EventBatch) -> None:
        if not batch.id:
            return
        self.acknowledged = batch.id
        if batch.everything:
            self.knows = {
                bucket.name: everything_of(bucket)
                for bucket in self._buckets
                if self.follows(bucket.name)
            }
        for event in batch.events:
            if self.follows(event.bucket):
                self._take(event)

    def _take(self, event: BucketEvent) -> None:
        knowledge = self.knows.get(event.bucket)
        if event.fate is BucketFate.DELETED:
            # Also if it knew an earlier bucket of that name, whose deletion may not have been
            # reported.
            self.knows.pop(event.bucket, None)
            return
        if event.fate is BucketFate.CREATED and (
            knowledge is None or knowledge.incarnation != event.incarnation
        ):
            knowledge = self.knows[event.bucket] = Knowledge(event.incarnation)
        if knowledge is None or knowledge.incarnation != event.incarnation:
            return
        bucket = self._buckets.get(event.bucket)
        if bucket is None or bucket.incarnation != event.incarnation:
            return  # it was deleted, and the event will follow
        now = everything_of(bucket)
        if event.updates:
            knowledge.read = now.read
        for design in event.designs:
            if design == ANY_DESIGN:
                knowledge.designs = now.designs
            elif design in now.designs:
                knowledge.designs[design] = now.designs[design]


def everything_of(bucket: Bucket) -> Knowledge:
    partition = bucket.partitions[0]
    designs = {key: seq for key, seq, _ in partition.table if key.startswith(b"_design/")}
    return Knowledge(bucket.incarnation, partition.high_seq, designs)


class BusMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ids = count(1)
        self.now = 0.0
        self.listener = Listener()
        self.buckets = Buckets(lambda: HistoryId(next(self.ids)), observer=self.listener)
        self.clients = {name: Client(name, self.buckets) for name in CONSUMERS}
        self.start_node(EventQueues())
        for name in NAMES:
            self.create(name)
        for name in CONSUMERS:
            for _ in range(2):  # all registered, and the first batch acknowledged
                self.poll(name)

    def start_node(self, queues: EventQueues) -> None:
        self.queues = queues
        changed = Notifier()
        self.feeds = EventFeeds(queues, changed, lambda: self.now, lambda: next(self.ids), 0.0)
        self.listener.producer = Producer(queues, changed.notify)

    # The engine.

    @rule(name=st.sampled_from(NAMES))
    def create(self, name: str) -> None:
        if name not in self.buckets:
            self.buckets.create(name, 1, incarnation=next(self.ids))

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        if name in self.buckets:
            self.buckets.delete(name)

    @rule(
        name=st.sampled_from(NAMES),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3),
        operation=st.sampled_from([Operation.SET, Operation.DELETE]),
        expiry=st.sampled_from([0, 0, 5]),
    )
    def write(self, name: str, keys: list[bytes], operation: Operation, expiry: int) -> None:
        bucket = self.buckets.get(name)
        if bucket is not None:
            rows = [
                request(operation, key, expiry=expiry if operation is Operation.SET else 0)
                for key in keys
            ]
            bucket.partitions[0].mutate(batch_of(Chunk.build(rows)), now=1.0)

    @rule(name=st.sampled_from(NAMES))
    def expire(self, name: str) -> None:
        bucket = self.buckets.get(name)
        if bucket is not None:
            bucket.partitions[0].expire(10.0)

    # The node.

    @rule()
    def remove_dead_consumers(self) -> None:
        self.queues.remove_dead(self.now)

    @rule()
    def stop_and_start_the_node(self) -> None:
        queues = EventQueues()
        queues.restore(self.queues.to_bytes(), self.now)
        self.start_node(queues)

    @rule()
    def kill_the_node(self) -> None:
        self.start_node(EventQueues())

    @rule(seconds=st.sampled_from([1, 4, 11]))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    # Consumers.

    def ask(self, client: Client) -> EventBatch:
        async def ask() -> EventBatch:
            return await self.feeds.next_batch(
                client.name,
                client.event_filter,
                timeout_s=TIMEOUT_S,
                acknowledged=client.acknowledged,
                wait_s=0,
            )

        # Each run has its own clock, so no time passes between two requests.
        return trio.run(ask, clock=MockClock())

    @rule(name=st.sampled_from(CONSUMERS))
    def poll(self, name: str) -> None:
        client = self.clients[name]
        client.take(self.ask(client))

    @rule(name=st.sampled_from(CONSUMERS))
    def poll_and_lose_the_answer(self, name: str) -> None:
        self.ask(self.clients[name])

    @rule(name=st.sampled_from(CONSUMERS))
    def kill_a_consumer(self, name: str) -> None:
        # It keeps what it knows, and forgets what it has acknowledged.
        self.clients[name].acknowledged = 0

    @rule(name=st.sampled_from(CONSUMERS), pattern=st.sampled_from(("*", "a", "b*")))
    def ask_with_another_filter(self, name: str, pattern: str) -> None:
        self.clients[name].event_filter = EventFilter(pattern=pattern)
        self.poll(name)

    @rule(name=st.sampled_from(CONSUMERS))
    def consumer_loses_all(self, name: str) -> None:
        queue = self.queues.get(name)
        if queue is not None:
            queue.reported_at = float("-inf")
            self.queues.remove_dead(self.now)
        self.clients[name] = Client(name, self.buckets)

    # Checks.

    @invariant()
    def queues_are_bounded(self) -> None:
        for queue in self.queues:
            assert len(queue.counters) <= len(NAMES)
            assert all(len(counter.designs) <= len(KEYS) for counter in queue.counters.values())

    def be_quiet(self) -> None:
        for client in self.clients.values():
            while (batch := self.ask(client)).id:
                client.take(batch)
            followed = [bucket for bucket in self.buckets if client.follows(bucket.name)]
            for bucket in followed:
                knowledge = client.knows[bucket.name]
                now = everything_of(bucket)
                assert knowledge.incarnation == now.incarnation
                assert knowledge.read == now.read
                assert {key: abs(n) for key, n in knowledge.designs.items()} == {
                    key: abs(n) for key, n in now.designs.items()
                }
            assert client.knows.keys() == {bucket.name for bucket in followed}

    def teardown(self) -> None:
        self.be_quiet()


TestBus = BusMachine.TestCase
TestBus.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
