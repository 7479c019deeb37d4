"""The client for programs that block: scripts, workers of other frameworks."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, NoReturn, Self, TypeVar, Unpack

from upr_protocol.address import Address
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.client.blocking.connection import BLOCKING_IDLE_INTERVAL_S, SocketOptions
from upr_protocol.client.blocking.connection_pool import BlockingConnectionPool
from upr_protocol.client.blocking.consumer import BlockingConsumer
from upr_protocol.client.blocking.dispatcher import BlockingDispatcher
from upr_protocol.client.blocking.last_publisher import LastPublisher
from upr_protocol.client.blocking.publisher import BlockingPublisher
from upr_protocol.client.blocking.trio_thread import dial_in_thread
from upr_protocol.client.core import calls
from upr_protocol.client.core.calls import (
    LEASE_CLEANUP_S,
    NEW_LEASE_TRIES,
    BucketInfo,
    Call,
    HeldLease,
    LeaseRequest,
    PartitionInfo,
    PartitionNumbers,
    SeqnoAtTime,
)
from upr_protocol.client.core.changes import Change, change_call
from upr_protocol.client.core.key_lookup import LOOKUPS_AT_ONCE, Item, KeyLookup, Text
from upr_protocol.client.core.key_operations import ChangeOptions, KeyOperations
from upr_protocol.client.core.operations import OperationBatches
from upr_protocol.client.core.partition_batches import Batch
from upr_protocol.client.core.publish_options import BUFFER_BYTES_DEFAULT
from upr_protocol.client.core.results import Failure, PartitionBatchResult, WriteResult
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.client.core.retry import RETRY_TIMEOUT_S_DEFAULT, RetryState
from upr_protocol.client.core.subscription import End
from upr_protocol.client.core.writer_identity import WriterIdentity
from upr_protocol.client.options import CREDIT_TIMEOUT_S_DEFAULT, IDENTITY_DEFAULT, new_lease_id
from upr_protocol.client.trio.publisher import publisher as trio_publisher
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.ids import Durability, Operation, PartitionId, SeqNo
from upr_protocol.limits import HANDSHAKE_TIMEOUT_S, IDLE_INTERVAL_S_DEFAULT
from upr_protocol.timestamps import to_nanoseconds
from upr_protocol.transport import SocketDial, dial_socket
from upr_protocol.users import UserChange, UserListing
from upr_protocol.wire import LeaseAction

T = TypeVar("T")

REQUEST_TIMEOUT_S_DEFAULT: Final = 60.0
"""How long one request may take."""


class BlockingClient(KeyOperations[WriteResult]):
    """`Client` and `Publisher` for programs that block.

    Threads must not share one: make a client for each. A request while another thread waits for the
    answer to one raises `LocalProtocolError`, and nothing is sent; so does one in the handler of a
    signal that comes meanwhile. Only `close` may be called in any thread: a call that waits for an
    answer then raises `ClosedError`.

    It connects when it is first used, and again after the connection was lost. A request during
    which it is lost raises `BrokenError`, and may have been carried out or not. `publish`,
    `publish_all`, `publish_each` and `apply` send again instead, and have exactly one effect. They
    have connections of their own, in a thread, which sends and receives while the program makes the
    next batch; it stays until `close`, for the writer that was used last. They raise `ServerError`
    when the bucket is over its quota and no credit arrives in time, and `BrokenError` when the
    server cannot be reached for too long.

    A forked process may use the client of its parent: it makes connections of its own, and
    publishes as a writer of its own. In all other cases, each process makes its client: to copy or
    pickle one raises `TypeError`.

    Once its bucket is deleted, requests raise `ServerError` with `NO_BUCKET` for as long as the
    connection lasts, though a bucket of the same name is created later: make a new client then.

    Args:
        url: `upr://host:port/bucket`; without the bucket, for the calls about buckets only.
        identity: `what:who`, for the server's logs and statistics.
        timeout_s: How long one request may take. Then `TimeoutError` is raised, and it may still be
            carried out.
        credit_timeout_s: How long a change waits for a server that is over its memory quota.
        retry_timeout_s: How long the calls that send again go on without any answer.
        durability: How durable a change must be before the server answers it.
        copies: How many replicas beside the active node, for the replicated levels.
        idle_interval_s: How long the program may be busy with something else: after twice this the
            server takes it for dead.

    The others are those of `ConnectOptions`; `sleep` waits for so many seconds.

    Raises:
        AddressError: The URL is not valid.
    """

    def __init__(
        self,
        url: str | Address,
        *,
        identity: str = IDENTITY_DEFAULT,
        timeout_s: float = REQUEST_TIMEOUT_S_DEFAULT,
        credit_timeout_s: float = CREDIT_TIMEOUT_S_DEFAULT,
        retry_timeout_s: float = RETRY_TIMEOUT_S_DEFAULT,
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
        self._retry_timeout_s = retry_timeout_s
        self._durability = durability
        self._copies = copies
        self._draw = draw
        self._sleep = sleep
        self._last_publisher = LastPublisher()
        self._connections = BlockingConnectionPool(self.address, self.options, draw)
        self._dispatcher = BlockingDispatcher(self._connections, timeout_s, credit_timeout_s, sleep)

    def __reduce__(self) -> NoReturn:
        # A copy would have the same writer ID, and count its batches from the same number on: the
        # server would take them for those of the other, sent again.
        raise TypeError("a client cannot be copied or pickled: make one in each process and thread")

    def __enter__(self) -> Self:
        self._dispatcher.connect()
        return self

    def __exit__(self, *_exception_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; the client cannot be used any more. Closing again does
        nothing."""
        self._last_publisher.close()
        self._dispatcher.close()

    def connect(self) -> None:
        """Connects if it is not connected. Tries again for as long as `retry_timeout_s`.

        Raises:
            BrokenError: The server could not be reached for too long.
            ServerError: The server refused the bucket.
        """
        retry = RetryState(self._retry_timeout_s, self._draw)
        while True:
            try:
                self._dispatcher.connect()
            except UprError as error:
                self._sleep(retry.wait_after_failure_s(error, time.monotonic()))
            else:
                return

    def ask(self, call: Call[T]) -> T:
        """Sends a request and waits for its answer.

        Raises:
            ServerError: The server refused.
            BrokenError: The connection was lost; the request may have been carried out or not.
            TimeoutError: No answer arrived in time; the request may still be carried out.
        """
        return self._dispatcher.ask(call)

    # Keys.

    @property
    def partition_count(self) -> int:
        """How many partitions the bucket has.

        Raises:
            LocalProtocolError: The URL names no bucket.
        """
        return calls.check_partition_count(self._dispatcher.connect().handshake.partition_count)

    def get(self, key: Text) -> Item | None:
        """The item at `key`, or None."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[Text]) -> list[Item | None]:
        """The items at `keys`, in their order; None for each that is missing.

        Raises:
            RefusedKeysError: The server cannot read some of them; the error has the others.
        """
        lookup = KeyLookup.of_keys(keys, self.partition_count)
        requests = list(lookup.requests())
        while requests:
            batch = requests[:LOOKUPS_AT_ONCE]
            replies = self._dispatcher.ask_all([calls.get(request) for request in batch])
            requests[:LOOKUPS_AT_ONCE] = [
                request
                for request, reply in zip(batch, replies, strict=True)
                if not request.receive(reply)
            ]
        return lookup.checked_items()

    def _change(
        self,
        operation: Operation,
        key: Text,
        value: Text = b"",
        **options: Unpack[ChangeOptions],
    ) -> WriteResult:
        options = {"durability": self._durability, "copies": self._copies, **options}
        return self.ask(
            change_call(Change.of_key(self.partition_count, operation, key, value, **options))
        )

    # Buckets and partitions.

    def create_bucket(self, name: str, partition_count: int = 0, quota_bytes: int = 0) -> None:
        """Creates a bucket; zeros leave the choice to the server."""
        self.ask(calls.create_bucket(name, partition_count, quota_bytes))

    def delete_bucket(self, name: str) -> None:
        """Deletes a bucket with its contents."""
        self.ask(calls.delete_bucket(name))

    def list_buckets(self) -> list[BucketInfo]:
        """Every bucket, by name."""
        return self.ask(calls.list_buckets())

    def stats(self, bucket: str = "") -> dict[str, Any]:
        """Statistics of `bucket`, or of the server."""
        return self.ask(calls.stats(bucket))

    def list_users(self) -> UserListing:
        """The users of the cluster, as this node has them."""
        return self.ask(calls.list_users())

    def change_users(self, change: UserChange) -> int:
        """Changes a user; see `Client.change_users`."""
        return self.ask(calls.change_users(change))

    def partitions(self) -> list[PartitionInfo]:
        """The bucket's partitions, as the servers told them when they were connected to."""
        return calls.partition_infos(self._dispatcher.logs())

    def seqnos(self, partitions: Iterable[int] = ()) -> list[PartitionNumbers]:
        """The sequence numbers of partitions; of all when none are named."""
        return self._dispatcher.ask_about(tuple(partitions), calls.seqnos)

    def seqnos_at_time(
        self, time: float | datetime, partitions: Iterable[int] = ()
    ) -> list[SeqnoAtTime]:
        """Where partitions stood at a time; see `Client.seqnos_at_time`."""
        return self._dispatcher.ask_about(
            tuple(partitions), partial(calls.seqnos_at_time, to_nanoseconds(time))
        )

    def resume_state_at_time(
        self, time: float | datetime, partitions: Iterable[int] = ()
    ) -> ResumeState:
        """Where a consumer starts that wants every change since a time; see
        `Client.resume_state_at_time`."""
        rows = self.seqnos_at_time(time, partitions)
        return calls.resume_state_at_time(self.partitions(), rows, self.address.bucket)

    # Leases. `Client` documents their arguments.

    def acquire_lease(
        self,
        ranges: Iterable[tuple[int, int, int]],
        *,
        time_to_live_s: int,
        owner: str,
        lease_id: int = 0,
    ) -> HeldLease:
        """Protects ranges of sequence numbers from compaction: every version in them stays."""
        if lease_id:
            request = LeaseRequest(tuple(ranges), time_to_live_s, owner, lease_id)
            return self._dispatcher.acquire_lease(request)
        return self._acquire_new_lease(tuple(ranges), time_to_live_s, owner)

    def _acquire_new_lease(
        self, ranges: tuple[tuple[int, int, int], ...], time_to_live_s: int, owner: str
    ) -> HeldLease:
        failure: ServerError | None = None
        for _ in range(NEW_LEASE_TRIES):
            lease_id = new_lease_id()
            request = LeaseRequest(ranges, time_to_live_s, owner, lease_id)
            is_granted = False
            try:
                lease = self._dispatcher.acquire_lease(request)
                is_granted = True
                return lease
            except ServerError as error:
                # A partition has moved to a node that had granted its other part already.
                if error.status is not Status.RANGE_GONE:
                    raise
                failure = error
            finally:
                if not is_granted:
                    # Nobody else knows the ID, and a node may have granted its part.
                    with suppress(UprError, TimeoutError):
                        self._release_lease(lease_id, LEASE_CLEANUP_S)
        assert failure is not None
        raise failure

    def renew_lease(self, lease_id: int, *, time_to_live_s: int) -> HeldLease:
        """Lets a lease last for so long from now, even if it has lapsed; see
        `Client.renew_lease`."""
        return self._dispatcher.ask_all_holders(
            calls.lease(LeaseAction.RENEW, lease_id=lease_id, time_to_live_s=time_to_live_s),
            self._timeout_s,
        )

    def release_lease(self, lease_id: int) -> None:
        """Ends a lease. `ServerError` with `BAD_ARGUMENT` if it was released already."""
        self._release_lease(lease_id, self._timeout_s)

    def _release_lease(self, lease_id: int, timeout_s: float) -> None:
        call = calls.lease(LeaseAction.RELEASE, lease_id=lease_id)
        self._dispatcher.ask_all_holders(call, timeout_s)

    def await_durable(
        self,
        written: WriteResult,
        durability: Durability,
        copies: int = 0,
        *,
        timeout_s: float = 30.0,
    ) -> SeqNo:
        """Waits until a change is as durable as requested; gives the sequence number reached
        then. The request may take `timeout_s` more than others."""
        deadline = time.monotonic() + timeout_s
        return self._dispatcher.ask(
            calls.await_durable(
                written.partition,
                written.history_id,
                written.seq,
                durability,
                copies,
                lambda: deadline - time.monotonic(),
            ),
            wait_s=timeout_s,
        )

    def read_stream(
        self,
        partitions: Sequence[int] | None = None,
        *,
        resume: ResumeState | str | os.PathLike[str] | None = None,
        start: Literal["beginning", "now"] = "beginning",
        end: End = None,
    ) -> BlockingConsumer:
        """The bucket's changes, as an iterator of events with connections of its own."""
        return BlockingConsumer(
            self.address,
            partitions=partitions,
            start=start,
            resume=resume,
            end=end,
            identity=self.options.identity,
            retry_timeout_s=self._retry_timeout_s,
            connect_timeout_s=self.options.connect_timeout_s,
            dial=self.options.dial,
            draw=self._draw,
        )

    # Publishing.

    def publish(
        self, partition: PartitionId, chunk: Chunk, *, writer: WriterIdentity | None = None
    ) -> PartitionBatchResult:
        """Sends one published chunk, again if need be, and waits for its answer.

        Args:
            partition: The partition of every key in it.
            chunk: The operations.
            writer: Gives the tokens; by default the client's own. A new writer with the same
                ID gives the same tokens again: the batches of a task that runs a second time have
                no second effect, as long as they are the same.

        Raises:
            ServerError: The batch was refused.
        """
        batches: list[Batch] = []
        self.publish_each([(partition, chunk)], batches.append, writer=writer)
        (batch,) = batches
        if batch.refusal is not None:
            raise batch.error(batch.refusal)
        assert batch.result is not None
        return batch.result

    def publish_all(
        self,
        batches: Iterable[tuple[PartitionId, Chunk]],
        *,
        writer: WriterIdentity | None = None,
        on_answer: Callable[[Batch], None] | None = None,
    ) -> list[Failure]:
        """Sends published chunks, many at a time, and waits until all are answered. The arguments
        are those of `publish_each`.

        Returns:
            The operations that failed; of a batch that was refused, all of them.
        """
        failures: list[Failure] = []

        def collect(batch: Batch) -> None:
            failures.extend(batch.failures())
            if on_answer is not None:
                on_answer(batch)

        self.publish_each(batches, collect, writer=writer)
        return failures

    def publish_each(
        self,
        batches: Iterable[tuple[PartitionId, Chunk]],
        on_answer: Callable[[Batch], None],
        *,
        writer: WriterIdentity | None = None,
        buffer_bytes: int = BUFFER_BYTES_DEFAULT,
    ) -> None:
        """`publish_all` for any number of batches: it forgets each batch once it is answered.

        Args:
            batches: Partitions and chunks; taken as there is room.
            on_answer: Called with each batch that is answered, or refused for good. An exception
                of it ends the call; open batches may then be carried out or not. It may publish,
                as the same writer, and so may `batches`.
            writer: As for `publish`.
            buffer_bytes: How much may be unsent or unanswered before the next batch is taken.
        """
        self._dispatcher.check_open()
        publisher = self._last_publisher.get(writer, buffer_bytes, self._new_publisher)
        try:
            publisher.publish_each(batches, on_answer)
        except BaseException:
            # It may hold batches that nobody waits for any more.
            self._last_publisher.close()
            raise

    def _new_publisher(self, writer: WriterIdentity, buffer_bytes: int) -> BlockingPublisher:
        options = self.options
        # An address that never answered is more likely wrong than down.
        retry_s = self._retry_timeout_s if self._dispatcher.connections.was_connected else 0.0
        return BlockingPublisher(
            partial(
                trio_publisher,
                self.address,
                identity=options.identity,
                # Less than when the caller waits: there is room for several bundles at once then.
                buffer_bytes=buffer_bytes * 3 // 4,
                durability=self._durability,
                copies=self._copies,
                on_failure=_ignore,
                credit_timeout_s=self._credit_timeout_s,
                retry_timeout_s=self._retry_timeout_s,
                idle_interval_s=min(options.idle_interval_s, IDLE_INTERVAL_S_DEFAULT),
                connect_timeout_s=options.connect_timeout_s,
                dial=dial_in_thread(options.dial, options.connect_timeout_s),
                writer=writer,
                draw=self._draw,
            ),
            buffer_bytes,
            RetryState(retry_s, self._draw),
        )

    def apply(
        self, mutations: Iterable[Mutation], *, writer: WriterIdentity | None = None
    ) -> list[WriteResult | Failure]:
        """Carries out many operations, in batches by partition, and waits until all are answered.

        Operations on one key take effect in their order. The value of an increment or decrement is
        a `CounterDelta`.

        Args:
            mutations: The operations; their `cas` is the expected version, their `seq` is ignored.
            writer: As for `publish`.

        Returns:
            The result of each, in their order.

        Raises:
            ServerError: A key or value is longer than any server takes: operations before it may be
                carried out.
        """
        if self._dispatcher.connections.was_connected:
            self.connect()  # the server may be starting again
        operations = OperationBatches(mutations, self.partition_count)
        self.publish_each(operations.batches(), operations.note_answered, writer=writer)
        return operations.results()


def _ignore(_: Failure) -> None:
    """`on_answer` tells of failures."""
