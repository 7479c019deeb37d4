"""Publishing: many changes, in batches, each with exactly one effect."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Unpack

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.chunk import Chunk
from upr_protocol.client.core.batcher import BUNDLE_BYTES, BUNDLE_MUTATIONS, Batcher, BatchLimits
from upr_protocol.client.core.calls import over_quota_error
from upr_protocol.client.core.key_lookup import Text, counter_delta, to_bytes
from upr_protocol.client.core.partition_batches import Batch
from upr_protocol.client.core.publish_options import (
    BUFFER_BYTES_DEFAULT,
    IN_FLIGHT_DEFAULT,
    PublishOptions,
)
from upr_protocol.client.core.results import Failure, PartitionBatchResult
from upr_protocol.client.core.retry import RETRY_TIMEOUT_S_DEFAULT
from upr_protocol.client.core.unanswered_batches import UnansweredBatches
from upr_protocol.client.core.writer_identity import WRITER_ID_BYTES, WriterIdentity
from upr_protocol.client.options import CREDIT_TIMEOUT_S_DEFAULT
from upr_protocol.client.trio.client import Client
from upr_protocol.client.trio.connection import ConnectOptions, TrioOptions
from upr_protocol.client.trio.publisher_nodes import PublisherNodes
from upr_protocol.concurrency import Notifier, background_nursery, without_traceback
from upr_protocol.errors import ClosedError, ServerError, Status, UprError
from upr_protocol.ids import Durability, Operation, PartitionId

FAILURES_MAX: Final = 10_000
"""How many failures a publisher keeps; it only counts the rest."""

_CREDIT_POLL_S: Final = 1.0
"""How often a task that waits looks at least whether credit is lacking, whatever its timeout."""


class PublishError(UprError):
    """Some operations failed, and the application did not clear them: the first `FAILURES_MAX` of
    them are in `failures`."""

    def __init__(self, failures: list[Failure], failure_count: int) -> None:
        super().__init__(f"{failure_count} operations failed; the first: {failures[0]}")
        self.failures = failures


@attrs.frozen
class PublisherStatistics:
    """Figures of a publisher.

    Attributes:
        mutations: How many operations were answered, failed ones among them.
        resent_batches: How many times a batch was sent again.
        last_failure: Why the last connection, or attempt to make one, ended; empty at first.
        is_connected: Whether there is a connection to any node.
    """

    batches: int
    mutations: int
    failed_mutations: int
    resent_batches: int
    unanswered_batches: int
    unanswered_bytes: int
    connections: int
    last_failure: str
    is_connected: bool


class Publisher:
    """Publishes changes in batches; `publisher` makes it.

    Operations on one key take effect in the order in which they were added. Each takes effect once,
    though connections break and batches are sent again. An operation that fails, fails alone: see
    `failures`.

    Any number of tasks may use it. A cancelled call takes back nothing that it has added. Each call
    raises `BrokenError` once the server could not be reached for too long. Each call that waits
    raises `ServerError` when the bucket is over its quota and no credit arrives in time; what was
    added stays, and is sent when credit arrives.

    Attributes:
        failures: The operations that failed, unless a callback is told; at most `FAILURES_MAX`.
            Clear the list when you have dealt with them: failures left at the end of the context
            are raised as `PublishError`.
    """

    def __init__(
        self,
        address: Address,
        nodes: PublisherNodes,
        limits: BatchLimits,
        credit_timeout_s: float,
        on_failure: Callable[[Failure], None] | None,
    ) -> None:
        self.address = address
        self.failures: list[Failure] = []
        self._nodes = nodes
        self._unanswered = nodes.unanswered_batches
        self._limits = limits
        self._credit_timeout_s = credit_timeout_s
        self._on_failure = on_failure
        self._batcher: Batcher | None = None
        self._batch_begun = Notifier()
        self._failed = 0
        self._rows_before_checkpoint = BUNDLE_MUTATIONS
        self._bytes_before_checkpoint = BUNDLE_BYTES
        nodes.on_done = self._note_failures

    # Adding changes.

    @property
    def partition_count(self) -> int:
        """How many partitions the bucket has."""
        return self._nodes.partition_count

    @property
    def failure(self) -> UprError | None:
        """Why nothing more is sent, so that each call raises it; None while something is."""
        return self._nodes.error

    async def apply(
        self,
        operation: Operation,
        key: Text,
        value: Text = b"",
        *,
        cas: int = 0,
        flags: int = 0,
        expiry: int = 0,
    ) -> None:
        """Adds one operation. It is sent with others, soon. The value of an increment or decrement
        is a `CounterDelta`; the other arguments are those of `KeyOperations`.

        This is a checkpoint only when a batch becomes full; then it waits for room.

        Raises:
            ServerError: `BAD_KEY`, `TOO_LARGE` or `BAD_ARGUMENT`: it was not added.
        """
        batcher = self._batcher
        assert batcher is not None
        if self._nodes.error is not None:
            raise without_traceback(self._nodes.error)
        was_empty = not batcher
        batcher.add(
            trio.current_time(),
            operation,
            to_bytes(key),
            to_bytes(value),
            cas=cas,
            flags=flags,
            expiry=expiry,
        )
        if batcher.is_full:
            self._add_batches()
            await self.wait_for_room()
        elif was_empty:
            self._batch_begun.notify()

    async def set(
        self, key: Text, value: Text, *, cas: int = 0, flags: int = 0, expiry: int = 0
    ) -> None:
        """Stores `value`, whether or not the key exists. See `apply`."""
        await self.apply(Operation.SET, key, value, cas=cas, flags=flags, expiry=expiry)

    async def delete(self, key: Text, *, cas: int = 0) -> None:
        """Removes the key. See `apply`."""
        await self.apply(Operation.DELETE, key, cas=cas)

    async def increment(
        self, key: Text, delta: int = 1, *, initial: int | None = None, create: bool = True
    ) -> None:
        """Adds to a decimal counter, like `Client.increment`. See `apply`."""
        value = counter_delta(Operation.INCREMENT, delta, initial, create)
        await self.apply(Operation.INCREMENT, key, value)

    async def decrement(
        self, key: Text, delta: int = 1, *, initial: int | None = None, create: bool = True
    ) -> None:
        """Subtracts from a decimal counter, like `Client.decrement`. See `apply`."""
        value = counter_delta(Operation.DECREMENT, delta, initial, create)
        await self.apply(Operation.DECREMENT, key, value)

    async def publish(
        self,
        partition: PartitionId,
        chunk: Chunk,
        on_answer: Callable[[Batch], None] | None = None,
    ) -> Batch:
        """Adds a published chunk as one batch: the fast way for bulk loads. Waits for room. Many
        small chunks are faster together: see `publish_nowait`.

        This is a checkpoint when it waits, and once for each 1,024 operations or 256 KiB.

        Between this and `apply` on the same keys, call `flush`: batches that are not full yet are
        sent after this one.

        Args:
            partition: The partition of every key in it.
            chunk: The operations: at most 4,096, and 32 MiB with their frame.
            on_answer: Called once it is answered.

        Raises:
            ServerError: `BAD_ARGUMENT` or `TOO_LARGE`: it was not added.
        """
        (batch,) = self._add(((partition, chunk),), on_answer)
        self._nodes.send_added()
        # A turn of the loop costs as much as a small batch, so not each has one.
        self._rows_before_checkpoint -= chunk.count
        self._bytes_before_checkpoint -= chunk.nbytes
        if (
            self._rows_before_checkpoint <= 0
            or self._bytes_before_checkpoint <= 0
            or self._unanswered.is_full
        ):
            self._rows_before_checkpoint = BUNDLE_MUTATIONS
            self._bytes_before_checkpoint = BUNDLE_BYTES
            await self.wait_for_room()
        return batch

    def publish_nowait(
        self,
        chunks: Sequence[tuple[PartitionId, Chunk]],
        on_answer: Callable[[Batch], None] | None = None,
    ) -> list[Batch]:
        """Adds published chunks, each as one batch, without waiting for room: the caller bounds
        them, with `wait_for_room`. Best called with as many as make a bundle, 1,024 operations or
        256 KiB.

        Args:
            chunks: As for `publish`, each with its partition.
            on_answer: Called with each batch once it is answered.

        Raises:
            ServerError: `BAD_ARGUMENT` or `TOO_LARGE`: none of them was added.
        """
        batches = self._add(chunks, on_answer)
        self._nodes.send_added()
        return batches

    async def wait_for_room(self) -> None:
        """Waits until less than `buffer_bytes` are unsent or unanswered."""
        try:
            await self._wait_until(self._has_room, self._nodes.room.park)
        finally:
            # An answer wakes one task, which wakes the next while there is room: to wake all of
            # them for each answer would be quadratic work.
            if self._has_room():
                self._nodes.room.unpark()

    def _add(
        self,
        chunks: Sequence[tuple[PartitionId, Chunk]],
        on_answer: Callable[[Batch], None] | None,
    ) -> list[Batch]:
        nodes = self._nodes
        if nodes.error is not None:
            raise without_traceback(nodes.error)
        partition_count = nodes.partition_count
        for partition, _ in chunks:
            if not 0 <= partition < partition_count:
                raise ServerError(
                    Status.BAD_ARGUMENT,
                    f"the bucket has partitions 0 to {partition_count - 1}, not {partition}",
                )
        return self._unanswered.add_all(chunks, on_answer)

    async def publish_and_wait(self, partition: PartitionId, chunk: Chunk) -> PartitionBatchResult:
        """Adds a published chunk and waits for its answer.

        Raises:
            ServerError: The server refused the whole batch; or as for `publish`.
            NotDurableError: The server applied it, and it never reached the requested durability.
        """
        answered, answer_events = trio.Event(), self._nodes.answer_events
        answer_events.add(answered)
        try:
            batch = await self.publish(partition, chunk, lambda _: answered.set())
            await self._wait_until(lambda: batch.is_done, answered.wait)
        finally:
            answer_events.discard(answered)
        if batch.refusal is not None:
            raise batch.error(batch.refusal)
        assert batch.result is not None
        return batch.result

    async def flush(self) -> None:
        """Sends batches that are not full yet, and waits until all that was added before is
        answered."""
        self._add_batches()
        totals, events = self._unanswered.totals, self._nodes.flush_events
        period = totals.end_period()
        answered = events[period] = trio.Event()
        try:
            await self._wait_until(lambda: totals.is_answered(period), answered.wait)
        finally:
            events.pop(period, None)

    def _add_batches(self) -> None:
        assert self._batcher is not None
        self._unanswered.add_all(self._batcher.take())
        self._nodes.send(is_due=True)

    def _has_room(self) -> bool:
        return not self._unanswered.is_full

    async def _wait_until(
        self, condition: Callable[[], bool], wait: Callable[[], Awaitable[None]]
    ) -> None:
        """Waits until `condition` is true. `wait` returns when it may be, or the publisher is
        stopped."""
        nodes = self._nodes
        began_at = trio.current_time()
        if condition():
            await trio.lowlevel.checkpoint()
        while not condition():
            if nodes.error is not None:
                raise without_traceback(nodes.error)
            now = trio.current_time()
            out_of_credit_since = nodes.out_of_credit_since
            if out_of_credit_since is None:
                # If credit runs out meanwhile, this looks again before it has for too long.
                deadline = now + max(self._credit_timeout_s, _CREDIT_POLL_S)
            else:
                deadline = max(out_of_credit_since, began_at) + self._credit_timeout_s
                if now >= deadline:
                    raise over_quota_error(self.address, self._credit_timeout_s)
            with trio.move_on_at(deadline):
                await wait()

    # Internal.

    def _note_failures(self, batches: Sequence[Batch]) -> None:
        # Nearly always nothing has failed.
        for batch in batches:
            if batch.result is None or batch.result.failures:
                for failure in batch.failures():
                    self._note_failure(failure)

    def _note_failure(self, failure: Failure) -> None:
        self._failed += 1
        if self._on_failure is not None:
            self._on_failure(failure)
        elif len(self.failures) < FAILURES_MAX:
            self.failures.append(failure)

    async def _send_lingering(self) -> None:
        """Sends batches that did not become full when their time has come."""
        batcher = self._batcher
        assert batcher is not None
        while True:
            due_at = batcher.due_at
            if due_at is None:
                await self._batch_begun.wait()
            else:
                await trio.sleep_until(due_at)
                if batcher.due_at == due_at:
                    self._add_batches()

    async def _run_connections(self) -> None:
        try:
            await self._nodes.connections.run()
        except UprError as error:
            self._nodes.stop(error)

    async def _start(self, nursery: trio.Nursery) -> None:
        """Connects, and starts the tasks that send.

        Raises:
            UprError: It could not connect, or the server refused the bucket.
        """
        nodes = self._nodes
        nursery.start_soon(self._run_connections)
        await nodes.has_opened.wait()
        if nodes.error is not None:
            raise nodes.error
        self._batcher = Batcher(nodes.partition_count, self._limits)
        nursery.start_soon(self._send_lingering)
        nursery.start_soon(nodes.send_when_due)

    async def _finish(self) -> None:
        """Waits until everything is answered, and takes nothing more.

        Raises:
            PublishError: Operations failed, and no callback was told.
        """
        await self.flush()
        while self._unanswered.totals.count or self._batcher:  # other tasks have added more
            await self.flush()
        self._nodes.stop(ClosedError("the publisher was closed"))
        if self.failures:
            # The list may be too short, and the number counts those that were cleared, too.
            is_full = len(self.failures) == FAILURES_MAX
            raise PublishError(self.failures, self._failed if is_full else len(self.failures))

    def statistics(self) -> PublisherStatistics:
        """The publisher's figures."""
        totals = self._unanswered.totals
        return PublisherStatistics(
            totals.answered_count,
            totals.answered_mutations,
            self._failed,
            totals.resent_count,
            totals.count,
            totals.nbytes,
            self._nodes.connection_count,
            self._nodes.connections.last_failure,
            self._nodes.is_connected,
        )


@asynccontextmanager
async def publisher(
    target: str | Address | Client,
    *,
    batch_mutations: int = BUNDLE_MUTATIONS,
    batch_bytes: int = BUNDLE_BYTES,
    linger_s: float = 0.005,
    in_flight: int = IN_FLIGHT_DEFAULT,
    buffer_bytes: int = BUFFER_BYTES_DEFAULT,
    durability: Durability = Durability.MEMORY,
    copies: int = 0,
    on_failure: Callable[[Failure], None] | None = None,
    credit_timeout_s: float = CREDIT_TIMEOUT_S_DEFAULT,
    retry_timeout_s: float = RETRY_TIMEOUT_S_DEFAULT,
    follow_map: bool = True,
    writer: WriterIdentity | None = None,
    **options: Unpack[ConnectOptions],
) -> AsyncIterator[Publisher]:
    """A publisher to one bucket, over connections of its own.

    Leaving the context waits until everything is answered. If it is left by an exception, or
    cancelled, operations without an answer may have been carried out or not.

    Args:
        target: `upr://host:port/bucket`, several nodes as `upr://host:port,host:port/bucket`; or
            a client, for its address and options.
        batch_mutations: Operations are sent at this many, of all partitions together,
        batch_bytes: or at this many bytes,
        linger_s: or after this time. Chunks that are published wait no longer than this for others
            to fill a bundle with, unless 4,096 operations are unanswered, and only while an earlier
            bundle has no answer.
        in_flight: Unanswered batches of one partition; at most 64, as many as servers remember.
        buffer_bytes: How much it holds, unsent or unanswered, before its callers wait.
        durability: How durable a batch must be before the server answers it.
        copies: How many replicas beside the active, for the replicated levels. An operation that
            does not become so durable within the retry timeout fails with `NOT_DURABLE_YET`: it was
            carried out, and may be lost.
        on_failure: Called with each operation that fails, instead of `Publisher.failures`.
        credit_timeout_s: How long it waits for a server that is over its memory quota.
        retry_timeout_s: How long it goes on without any answer before it gives up.
        follow_map: Whether to follow the partition map; otherwise everything goes to `target`.
        writer: Gives batches their tokens; by default a new writer.
        **options: How to connect; nothing with a client.

    Raises:
        AddressError: The URL is not valid, or names no bucket.
        BrokenError: It could not connect.
        ServerError: The server refused, for instance with `NO_BUCKET`.
        PublishError: On leaving: operations failed, and no `on_failure` was given.
    """
    if isinstance(target, Client):
        address = target.address
        connection = attrs.evolve(
            target.options, retry_timeout_s=retry_timeout_s, follow_map=follow_map
        )
    else:
        address = Address.parse(target) if isinstance(target, str) else target
        connection = TrioOptions(**options, retry_timeout_s=retry_timeout_s, follow_map=follow_map)
    publish_options = PublishOptions(
        in_flight, buffer_bytes, retry_timeout_s, durability, copies, linger_s
    )
    if writer is None:
        writer = WriterIdentity(os.urandom(WRITER_ID_BYTES))
    unanswered_batches = UnansweredBatches(writer, publish_options, connection.draw)
    nodes = PublisherNodes(address.with_bucket(), connection, unanswered_batches)
    batch_limits = BatchLimits(batch_mutations, batch_bytes, linger_s)
    new_publisher = Publisher(address, nodes, batch_limits, credit_timeout_s, on_failure)
    try:
        async with background_nursery() as nursery:
            await new_publisher._start(nursery)  # noqa: SLF001
            yield new_publisher
            await new_publisher._finish()  # noqa: SLF001
    finally:
        nodes.close()
