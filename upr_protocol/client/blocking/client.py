"""The client for programs that block: scripts, workers of other frameworks. No Trio, no threads."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, Self, TypeVar

from upr_protocol.address import Address
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.client.blocking.connection import (
    BLOCKING_IDLE_INTERVAL_S,
    BlockingConnection,
    SocketOptions,
)
from upr_protocol.client.blocking.connection_pool import BlockingConnectionPool
from upr_protocol.client.blocking.publish_run import PublishRun
from upr_protocol.client.blocking_consumer import BlockingConsumer
from upr_protocol.client.core import calls
from upr_protocol.client.core.accumulator import (
    BUFFER_BYTES_DEFAULT,
    Accumulator,
    AccumulatorLimits,
    Batch,
)
from upr_protocol.client.core.calls import (
    BucketInfo,
    Call,
    HeldLease,
    PartitionInfo,
    PartitionNumbers,
)
from upr_protocol.client.core.key_lookup import (
    LOOKUPS_AT_ONCE,
    Item,
    KeyLookup,
    Text,
    counter_delta,
    to_bytes,
)
from upr_protocol.client.core.operations import OperationBatches
from upr_protocol.client.core.options import IDENTITY_DEFAULT
from upr_protocol.client.core.results import Failure, WriteResult, status_of
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.client.core.retry import PATIENCE_S_DEFAULT, RetryPolicy
from upr_protocol.client.core.writer_identity import WriterIdentity
from upr_protocol.client.trio.node_publisher import WRONG_NODE
from upr_protocol.client.trio.request_channel import CREDIT_TIMEOUT_S_DEFAULT, over_quota
from upr_protocol.client.wishes import End
from upr_protocol.errors import (
    BrokenError,
    ClosedError,
    LocalProtocolError,
    ServerError,
    Status,
    UprError,
)
from upr_protocol.ids import Durability, Operation, PartitionId, SeqNo
from upr_protocol.limits import HANDSHAKE_TIMEOUT_S
from upr_protocol.transport import SocketDial, dial_socket
from upr_protocol.wire import LeaseAction, Message, Mutate, MutateReply, Refusal

T = TypeVar("T")

REQUEST_TIMEOUT_S_DEFAULT: Final = 60.0
"""How long one request may take."""


class BlockingClient:
    """`Client` and `Publisher` for programs that block; not to be shared between threads.

    It connects when it is first used, and anew after the connection was lost. A request during
    which it is lost raises `BrokenError`, and may have been done or not. `publish`, `publish_all`
    and `apply` ask again instead, and have exactly one effect.

    Args:
        url: `upr://host:port/bucket`; without the bucket, for the calls about buckets only.
        identity: `what:who`, for the server's logs and statistics.
        timeout_s: How long one request may take; then `TimeoutError` is raised, and it may still be
            done.
        credit_timeout_s: How long a change waits for a server that is over its memory quota.
        patience_s: How long the calls that ask again go on without any answer.
        durability: What must hold before a change is answered.
        copies: How many replicas beside the active, for the replicated levels.
        idle_interval_s: How long the program may be busy with something else: after twice this the
            server takes it for dead.
        connect_timeout_s: How long a connection and its first answers may take.
        dial: How to reach an address, where that is not plain TCP.
        draw: Gives numbers in [0, 1), for the waits between attempts.
        sleep: Waits for so many seconds.

    Raises:
        AddressError: The URL is none.
    """

    def __init__(
        self,
        url: str | Address,
        *,
        identity: str = IDENTITY_DEFAULT,
        timeout_s: float = REQUEST_TIMEOUT_S_DEFAULT,
        credit_timeout_s: float = CREDIT_TIMEOUT_S_DEFAULT,
        patience_s: float = PATIENCE_S_DEFAULT,
        durability: Durability = Durability.MEMORY,
        copies: int = 0,
        idle_interval_s: int = BLOCKING_IDLE_INTERVAL_S,
        connect_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        dial: SocketDial = dial_socket,
        draw: Callable[[], float] = random.random,
        sleep: Callable[[float], None] = time.sleep,  # noqa: TID251  there is no event to wait for
    ) -> None:
        self.address = Address.parse(url) if isinstance(url, str) else url
        self.options = SocketOptions(
            identity,
            idle_interval_s=idle_interval_s,
            connect_timeout_s=connect_timeout_s,
            dial=dial,
        )
        self._timeout_s = timeout_s
        self._credit_timeout_s = credit_timeout_s
        self._patience_s = patience_s
        self._durability = durability
        self._copies = copies
        self._draw = draw
        self._sleep = sleep
        self._writer = WriterIdentity()
        self._pool = BlockingConnectionPool(self.address, self.options, draw)
        self._closed = False

    def __enter__(self) -> Self:
        self._connected()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; the client is of no use afterwards. Closing again does nothing."""
        self._closed = True
        self._pool.close()

    def _connected(self) -> BlockingConnection:
        if self._closed:
            raise ClosedError("the client was closed")
        return self._pool.any()

    def connect(self) -> None:
        """Connects if it is not connected; for as long as `patience_s` it tries again.

        Raises:
            BrokenError: The server could not be reached for too long.
            ServerError: It refused the bucket.
        """
        patience = RetryPolicy(self._patience_s, self._draw)
        while True:
            try:
                self._connected()
            except UprError as error:
                self._sleep(patience.wait_s(error, time.monotonic()))
            else:
                return

    # Asking.

    def ask(self, call: Call[T]) -> T:
        """Makes a request and waits for its answer.

        Raises:
            ServerError: It was refused.
            BrokenError: The connection was lost; it may have been done or not.
            TimeoutError: No answer came in time; it may still be done.
        """
        return self._ask_all([call])[0]

    def _ask_all(self, some: Sequence[Call[T]]) -> list[T]:
        self._connected()
        deadline = time.monotonic() + self._timeout_s
        found: dict[int, Message] = {}
        refused: UprError = BrokenError("no node takes what was asked")
        while missing := [index for index in range(len(some)) if index not in found]:
            for address, indices in self._by_node(some, missing).items():
                try:
                    connection = self._connected() if address is None else self._pool.at(address)
                except BrokenError as error:
                    if self._pool.metadata.is_alone:
                        raise
                    refused = error  # nothing was asked of it
                    continue
                answers = self._ask_one_node(
                    connection, [some[index] for index in indices], deadline
                )
                found.update(zip(indices, answers, strict=True))
            if self._pool.metadata.is_alone:
                break
            for index, answer in list(found.items()):
                if isinstance(answer, Refusal) and status_of(answer.status) in WRONG_NODE:
                    del found[index]
                    refused = ServerError(status_of(answer.status), answer.sentence)
                    self._pool.metadata.note_revision(answer.map_revision)
            if len(found) < len(some):
                again_at = self._pool.refresh()
                if again_at >= deadline:
                    raise self._nobody_for(some[index] for index in missing) or refused
                self._sleep(max(0.0, again_at - time.monotonic()))
        return [call.result(calls.checked(found[index])) for index, call in enumerate(some)]

    def _by_node(
        self, some: Sequence[Call[T]], indices: Iterable[int]
    ) -> dict[Address | None, list[int]]:
        """Which calls go to which node, None for any; those that have none are left out."""
        found: dict[Address | None, list[int]] = {}
        for index in indices:
            partition = some[index].partition
            address = None if partition is None else self._pool.home_of(partition)
            if address is None and partition is not None:
                continue
            found.setdefault(address, []).append(index)
        return found

    def _nobody_for(self, some: Iterable[Call[T]]) -> UprError | None:
        partitions = (call.partition for call in some if call.partition is not None)
        said = next(filter(None, map(self._pool.no_holder_text, partitions)), None)
        return BrokenError(said) if said else None

    def _ask_one_node(
        self, connection: BlockingConnection, some: Sequence[Call[T]], deadline: float
    ) -> list[Message]:
        replies: dict[int, Message | None] = {}
        for call in some:
            opaque = connection.session.new_opaque()
            request = call.request(opaque)
            if isinstance(request, Mutate):
                self._await_credit(connection)
            connection.session.send(request)
            replies[opaque] = None
        missing = len(replies)
        while missing:
            message = connection.receive(deadline)
            if message is None:
                raise TimeoutError(f"{self.address} did not answer in {self._timeout_s:g} s")
            if replies.get(message.opaque, message) is None:
                replies[message.opaque] = message
                missing -= 1
        return [message for message in replies.values() if message is not None]

    def _await_credit(self, connection: BlockingConnection) -> None:
        deadline = time.monotonic() + self._credit_timeout_s
        while not connection.session.credit.open:
            if connection.receive(deadline) is None:
                raise over_quota(self.address, self._credit_timeout_s)

    # Keys. What each one means stands with `Client`.

    @property
    def partition_count(self) -> int:
        """How many partitions the bucket has.

        Raises:
            LocalProtocolError: The URL named no bucket.
        """
        count = self._connected().handshake.partition_count
        if not count:
            raise LocalProtocolError("connect with a URL that names a bucket", Status.BAD_ARGUMENT)
        return count

    def get(self, key: Text) -> Item | None:
        """The item at `key`, or None."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[Text]) -> list[Item | None]:
        """The items at `keys`, in their order; None for each that is missing."""
        lookup = KeyLookup([to_bytes(key) for key in keys], self.partition_count)
        open_questions = list(lookup.questions())
        while open_questions:
            some = open_questions[:LOOKUPS_AT_ONCE]
            answers = self._ask_all([calls.get(question) for question in some])
            open_questions[:LOOKUPS_AT_ONCE] = [
                question
                for question, answer in zip(some, answers, strict=True)
                if not question.answer(answer)
            ]
        return lookup.items

    def set(
        self, key: Text, value: Text, *, cas: int = 0, flags: int = 0, expiry: int = 0
    ) -> WriteResult:
        """Stores `value`, whether or not the key exists."""
        return self._one(Operation.SET, key, value, cas=cas, flags=flags, expiry=expiry)

    def add(self, key: Text, value: Text, *, flags: int = 0, expiry: int = 0) -> WriteResult:
        """Stores `value` if the key does not exist; `ServerError` with `EXISTS` if it does."""
        return self._one(Operation.ADD, key, value, flags=flags, expiry=expiry)

    def replace(
        self, key: Text, value: Text, *, cas: int = 0, flags: int = 0, expiry: int = 0
    ) -> WriteResult:
        """Stores `value` if the key exists; `ServerError` with `NOT_FOUND` if it does not."""
        return self._one(Operation.REPLACE, key, value, cas=cas, flags=flags, expiry=expiry)

    def delete(self, key: Text, *, cas: int = 0) -> WriteResult:
        """Removes the key; `ServerError` with `NOT_FOUND` if there is none."""
        return self._one(Operation.DELETE, key, cas=cas)

    def increment(
        self, key: Text, delta: int = 1, *, initial: int | None = None, create: bool = True
    ) -> WriteResult:
        """Adds to a decimal counter; see `Client.increment`."""
        return self._one(
            Operation.INCREMENT,
            key,
            counter_delta(Operation.INCREMENT, delta, initial, create),
        )

    def decrement(
        self, key: Text, delta: int = 1, *, initial: int | None = None, create: bool = True
    ) -> WriteResult:
        """Subtracts from a decimal counter; see `Client.decrement`."""
        return self._one(
            Operation.DECREMENT,
            key,
            counter_delta(Operation.DECREMENT, delta, initial, create),
        )

    def append(self, key: Text, value: Text, *, cas: int = 0) -> WriteResult:
        """Adds bytes behind the stored value."""
        return self._one(Operation.APPEND, key, value, cas=cas)

    def prepend(self, key: Text, value: Text, *, cas: int = 0) -> WriteResult:
        """Adds bytes in front of the stored value."""
        return self._one(Operation.PREPEND, key, value, cas=cas)

    def touch(self, key: Text, expiry: int, *, cas: int = 0) -> WriteResult:
        """Gives the item a new expiry time, in seconds since 1970; 0 for never."""
        return self._one(Operation.TOUCH, key, cas=cas, expiry=expiry)

    def _one(
        self,
        operation: Operation,
        key: Text,
        value: Text = b"",
        *,
        cas: int = 0,
        flags: int = 0,
        expiry: int = 0,
    ) -> WriteResult:
        call = calls.one(
            self.partition_count,
            operation,
            key,
            value,
            cas=cas,
            flags=flags,
            expiry=expiry,
            durability=self._durability,
            copies=self._copies,
        )
        return self.ask(call)

    # Buckets and partitions.

    def create_bucket(self, name: str, partition_count: int = 0, quota_bytes: int = 0) -> None:
        """Makes a bucket; zeros leave the choice to the server."""
        self.ask(calls.create_bucket(name, partition_count, quota_bytes))

    def delete_bucket(self, name: str) -> None:
        """Deletes a bucket and all that is in it."""
        self.ask(calls.delete_bucket(name))

    def list_buckets(self) -> list[BucketInfo]:
        """Every bucket, by name."""
        return self.ask(calls.list_buckets())

    def stats(self, bucket: str = "") -> dict[str, Any]:
        """Statistics of `bucket`, or of the server."""
        return self.ask(calls.stats(bucket))

    def partitions(self) -> list[PartitionInfo]:
        """The bucket's partitions, as the server told them when the connection was made."""
        logs = [
            connection.handshake.logs[partition]
            for connection, some in self._connections_of(
                range(self._connected().handshake.partition_count)
            )
            for partition in some
            if partition in connection.handshake.logs
        ]
        return calls.partition_infos(logs)

    def seqnos(self, partitions: Iterable[int] = ()) -> list[PartitionNumbers]:
        """How far partitions are; all of them when none are named."""
        wanted = tuple(partitions)
        rows: dict[PartitionId, PartitionNumbers] = {}
        deadline = time.monotonic() + self._timeout_s
        for connection, some in self._connections_of(wanted or range(self.partition_count)):
            call = calls.seqnos(some)
            (answer,) = self._ask_one_node(connection, [call], deadline)
            told: list[PartitionNumbers] = call.result(calls.checked(answer))
            rows.update((row.partition, row) for row in told)
        return [rows[partition] for partition in sorted(rows)]

    def _connections_of(
        self, partitions: Sequence[int]
    ) -> list[tuple[BlockingConnection, list[PartitionId]]]:
        """The nodes of partitions, with those that are there. Waits until each has one.

        Raises:
            BrokenError: Some have none, and so it stayed.
        """
        deadline = time.monotonic() + self._timeout_s
        self._connected()
        while True:
            homes: dict[Address | None, list[PartitionId]] = {}
            for partition in map(PartitionId, partitions):
                homes.setdefault(self._pool.home_of(partition), []).append(partition)
            unplaced = homes.pop(None, [])
            nobody = self._pool.no_holder_text(unplaced[0]) if unplaced else ""
            error: UprError = BrokenError(nobody or f"no node takes partitions {unplaced}")
            try:
                found = [(self._pool.at(home), some) for home, some in homes.items() if home]
                if sum(len(some) for _, some in found) == len(partitions):
                    return found
            except UprError as failure:
                error = failure
            again_at = self._pool.refresh()
            if self._pool.metadata.is_alone or again_at >= deadline:
                raise error
            self._sleep(max(0.0, again_at - time.monotonic()))

    # Leases.

    def acquire_lease(
        self,
        ranges: Iterable[tuple[int, int, int]],
        *,
        time_to_live_s: int,
        owner: str,
        lease_id: int = 0,
    ) -> HeldLease:
        """Keeps ranges of numbers as they are: compaction leaves every version in them.

        Args:
            ranges: (partition, start, end), start exclusive; the end must be persisted. `SEQ_MAX`
                stands for the snapshot end that is persisted when the lease is granted.
            time_to_live_s: How long, without renewal; the lease outlives this connection, and a
                restart of the server.
            owner: Who holds it, for those who look at the server's leases.
            lease_id: A random number of one's own, so that asking again makes no second lease: one
                that is there goes on with the ranges that it has. 0 leaves it to the server.

        Raises:
            ServerError: `BAD_ARGUMENT`, `LIMIT_REACHED`, `ROLLBACK_NEEDED` when a range is no
                longer whole, `RANGE_GONE` when the lease is there and is not whole any more.
        """
        wanted = tuple(ranges)
        lease_id = lease_id or int.from_bytes(os.urandom(8), "little") | 1
        held = []
        groups = self._connections_of(sorted({one[0] for one in wanted})) or [
            (self._connected(), [])
        ]
        for connection, some in groups:
            call = calls.lease(
                LeaseAction.ACQUIRE,
                lease_id=lease_id,
                time_to_live_s=time_to_live_s,
                owner=owner,
                ranges=[one for one in wanted if one[0] in some],
            )
            deadline = time.monotonic() + self._timeout_s
            (answer,) = self._ask_one_node(connection, [call], deadline)
            held.append(call.result(calls.checked(answer)))
        return calls.one_lease(held)

    def renew_lease(self, lease_id: int, *, time_to_live_s: int) -> HeldLease:
        """A lease goes on for so long from now, even if it has lapsed; `ServerError` with
        `RANGE_GONE` if it is not there, or what it held is not whole any more."""
        return self._everywhere(
            calls.lease(LeaseAction.RENEW, lease_id=lease_id, time_to_live_s=time_to_live_s)
        )

    def release_lease(self, lease_id: int) -> None:
        """Ends a lease; `ServerError` with `BAD_ARGUMENT` if it was released already."""
        self._everywhere(calls.lease(LeaseAction.RELEASE, lease_id=lease_id))

    def _everywhere(self, call: Call[HeldLease]) -> HeldLease:
        """Asks the same about a lease at every node; whatever some of them have of it counts."""
        held: list[HeldLease] = []
        refusal: ServerError | None = None
        for connection, _ in self._connections_of(range(self.partition_count)):
            (answer,) = self._ask_one_node(connection, [call], time.monotonic() + self._timeout_s)
            try:
                held.append(call.result(calls.checked(answer)))
            except ServerError as error:
                refusal = error
        if not held and refusal is not None:
            raise refusal
        return calls.one_lease(held)

    def await_durable(
        self,
        written: WriteResult,
        durability: Durability,
        copies: int = 0,
        *,
        timeout_s: float = 30.0,
    ) -> SeqNo:
        """Waits until a change is as durable as asked for; see `Client.await_durable`."""
        return self.ask(
            calls.await_durable(
                written.partition, written.history_id, written.seq, durability, copies, timeout_s
            )
        )

    def read_stream(
        self,
        partitions: Sequence[int] | None = None,
        *,
        resume: ResumeState | str | os.PathLike[str] | None = None,
        start: Literal["beginning", "now"] = "beginning",
        end: End = None,
    ) -> BlockingConsumer:
        """The bucket's changes, as an iterator of events with a connection of its own; see
        `BlockingConsumer`."""
        return BlockingConsumer(
            self.address,
            partitions=partitions,
            start=start,
            resume=resume,
            end=end,
            identity=self.options.identity,
            patience_s=self._patience_s,
            idle_interval_s=self.options.idle_interval_s,
            connect_timeout_s=self.options.connect_timeout_s,
            dial=self.options.dial,
            draw=self._draw,
            sleep=self._sleep,
        )

    # Publishing.

    def publish(
        self, partition: PartitionId, chunk: Chunk, *, writer: WriterIdentity | None = None
    ) -> MutateReply:
        """Sends one published chunk, again if need be, and waits for its answer.

        Args:
            partition: The partition of every key in it.
            chunk: The operations.
            writer: Gives the token; by default the client's own. A writer made anew with the same
                ID gives the same tokens again: the batches of a task that is run a second time have
                no second effect, as long as they are the same.

        Raises:
            ServerError: The batch was refused; or the bucket is over its quota.
            BrokenError: The server could not be reached for too long.
        """
        done: list[Batch] = []
        self.publish_all([(partition, chunk)], writer=writer, on_answer=done.append)
        (batch,) = done
        if batch.refusal is not None:
            raise batch.error(batch.refusal)
        assert batch.reply is not None
        return batch.reply

    def publish_all(
        self,
        batches: Iterable[tuple[PartitionId, Chunk]],
        *,
        writer: WriterIdentity | None = None,
        on_answer: Callable[[Batch], None] | None = None,
    ) -> list[Failure]:
        """Sends published chunks, many on their way at a time, and waits until all are answered.

        Args:
            batches: Partitions and chunks; taken as there is room.
            writer: See `publish`.
            on_answer: Called with each batch that is answered, or refused for good.

        Returns:
            The operations that failed; of a batch that was refused, all of them.

        Raises:
            ServerError: The bucket is over its quota and no credit came in time.
            BrokenError: The server could not be reached for too long.
        """
        failures: list[Failure] = []

        def done(batch: Batch) -> None:
            failures.extend(batch.failures())
            if on_answer is not None:
                on_answer(batch)

        self.publish_each(batches, done, writer=writer)
        return failures

    def publish_each(
        self,
        batches: Iterable[tuple[PartitionId, Chunk]],
        on_answer: Callable[[Batch], None],
        *,
        writer: WriterIdentity | None = None,
        buffer_bytes: int = BUFFER_BYTES_DEFAULT,
    ) -> None:
        """`publish_all` for any number of batches: it keeps nothing of those that are answered.

        Args:
            batches: Partitions and chunks; taken as there is room.
            on_answer: Called with each batch that is answered, or refused for good. What it raises
                ends the call; what is on its way then may be done or not.
            writer: See `publish`.
            buffer_bytes: What may be unsent or unanswered before the next batch is taken.

        Raises:
            ServerError: The bucket is over its quota and no credit came in time.
            BrokenError: The server could not be reached for too long.
        """
        limits = AccumulatorLimits(
            buffer_bytes=buffer_bytes,
            patience_s=self._patience_s,
            durability=self._durability,
            copies=self._copies,
        )
        if self._closed:
            raise ClosedError("the client was closed")
        writes = self._writer if writer is None else writer
        post = PublishRun(
            self._pool,
            lambda: Accumulator(writes, limits, self._draw),
            RetryPolicy(self._patience_s, self._draw),
            on_answer,
            self._sleep,
        )
        if post.run(iter(batches), buffer_bytes, self._timeout_s, self._credit_timeout_s):
            raise over_quota(self.address, self._credit_timeout_s)

    def apply(
        self, mutations: Iterable[Mutation], *, writer: WriterIdentity | None = None
    ) -> list[WriteResult | Failure]:
        """Does many operations, in batches by partition, and waits until all are answered.

        Operations on one key take effect in their order. The value of an increment or decrement is
        a `CounterDelta`.

        Args:
            mutations: The operations; their `cas` is what is expected, their `seq` is ignored.
            writer: See `publish`.

        Returns:
            What became of each, in their order.

        Raises:
            ServerError: A key or value is longer than any server takes: what was before it may be
                done; or the bucket is over its quota.
            BrokenError: The server could not be reached for too long.
        """
        rows = OperationBatches(mutations, self.partition_count)
        self.publish_all(rows.batches(), writer=writer, on_answer=rows.answered)
        return rows.results()
