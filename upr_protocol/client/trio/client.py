"""Reading and changing keys, and managing buckets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, Final, Unpack

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.client.core import calls
from upr_protocol.client.core.calls import (
    LEASE_CLEANUP_S,
    NEW_LEASE_TRIES,
    BucketInfo,
    HeldLease,
    LeaseRequest,
    PartitionInfo,
    PartitionNumbers,
    SeqnoAtTime,
)
from upr_protocol.client.core.changes import Change
from upr_protocol.client.core.key_lookup import LOOKUPS_AT_ONCE, Item, KeyLookup, Text
from upr_protocol.client.core.key_operations import ChangeOptions, KeyOperations
from upr_protocol.client.core.results import WriteResult
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.client.options import CREDIT_TIMEOUT_S_DEFAULT, new_lease_id
from upr_protocol.client.trio.connection import ConnectOptions, TrioOptions
from upr_protocol.client.trio.dispatcher import REQUEST_RETRY_TIMEOUT_S, RequestDispatcher
from upr_protocol.concurrency import background_nursery
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.ids import Durability, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.timestamps import to_nanoseconds
from upr_protocol.users import UserChange, UserListing
from upr_protocol.wire import LeaseAction

LOCATE_S: Final = 1.0
"""How long `connect` gives the nodes beside the first: one that is down may not even refuse
connections. If the first node took a third of this or more, the others get three times as long."""


@attrs.frozen
class ClientStatistics:
    """Figures of a client.

    Attributes:
        requests: Requests that were sent.
        open_requests: Those of them without an answer yet.
        credit_left: How many bytes of changes the servers would take.
        last_failure: Why the last connection, or attempt to make one, ended; empty at first.
    """

    requests: int
    open_requests: int
    credit_left: int
    last_failure: str


class Client(KeyOperations[Coroutine[Any, Any, WriteResult]]):
    """One connection to a server, or to each of the nodes that hold a bucket. `connect` makes it.

    Requests of any number of tasks share the connection; none waits for another's answer. Changes
    that several tasks make at once are sent together, and each succeeds or fails alone. When the
    connection is lost, every open request raises `BrokenError`, and so does every later one. An
    open request may have been carried out or not. If you need to know, use a publisher: it sends
    again, and has one effect. Where several nodes hold the bucket, later requests go on with the
    nodes that are left: each waits for a while for the node of its partition.

    Once its bucket is deleted, requests raise `ServerError` with `NO_BUCKET`, though another bucket
    of that name is created later: make a new client then.

    A cancelled request is not undone: it may have reached the server. The connection stays good,
    and the client drops the answer when it arrives.
    """

    def __init__(
        self, address: Address, options: TrioOptions, dispatcher: RequestDispatcher
    ) -> None:
        self.address = address
        self.options = options
        self._dispatcher = dispatcher

    # Keys.

    @property
    def partition_count(self) -> int:
        """How many partitions the bucket has.

        Raises:
            LocalProtocolError: The URL names no bucket.
        """
        return calls.check_partition_count(self._dispatcher.partition_count)

    async def get(self, key: Text) -> Item | None:
        """The item at `key`, or None."""
        return (await self.get_many([key]))[0]

    async def get_many(self, keys: Sequence[Text]) -> list[Item | None]:
        """The items at `keys`, in their order; None for each that is missing.

        The items of one partition are read at one moment; items of different partitions are not.

        Raises:
            RefusedKeysError: The server cannot read some of them; the error has the others.
        """
        dispatcher = self._dispatcher
        lookup = KeyLookup.of_keys(keys, self.partition_count)
        requests = lookup.requests()
        while batch := list(islice(requests, LOOKUPS_AT_ONCE)):
            answers = [await dispatcher.send(calls.get(request)) for request in batch]
            for request, answer in zip(batch, answers, strict=True):
                reply = await answer()
                while not request.receive(reply):
                    reply = await dispatcher.ask(calls.get(request))
        return lookup.checked_items()

    async def get_from(
        self, partition: int, keys: Sequence[bytes], history_id: int
    ) -> tuple[list[Item | None], SeqNo]:
        """The items at `keys`, all of one partition and one history; and the partition's sequence
        number when the last of them was read.

        Raises:
            ServerError: `HISTORY_CHANGED`: the partition is in another history.
            RefusedKeysError: The server cannot read some of them; the error has the others.
        """
        lookup = KeyLookup({PartitionId(partition): list(enumerate(keys))}, HistoryId(history_id))
        high = SeqNo(0)
        for request in lookup.requests():
            is_answered = False
            while not is_answered:
                reply = await self._dispatcher.ask(calls.get(request))
                is_answered, high = request.receive(reply), reply.chunk.end
        return lookup.checked_items(), high

    async def _change(
        self,
        operation: Operation,
        key: Text,
        value: Text = b"",
        **options: Unpack[ChangeOptions],
    ) -> WriteResult:
        change = Change.of_key(self.partition_count, operation, key, value, **options)
        return await self._dispatcher.change(change)

    # Buckets.

    async def create_bucket(
        self, name: str, partition_count: int = 0, quota_bytes: int = 0
    ) -> None:
        """Creates a bucket; zeros leave the choice to the server. `ServerError` with
        `BUCKET_EXISTS` if it exists."""
        await self._dispatcher.ask(calls.create_bucket(name, partition_count, quota_bytes))

    async def delete_bucket(self, name: str) -> None:
        """Deletes a bucket with its contents. `ServerError` with `NO_BUCKET` if it does not exist.
        Of several nodes that hold it, only the one that this is connected to deletes it: connect
        to each, with a URL without the bucket."""
        await self._dispatcher.ask(calls.delete_bucket(name))

    async def list_buckets(self) -> list[BucketInfo]:
        """Every bucket, by name."""
        return await self._dispatcher.ask(calls.list_buckets())

    async def stats(self, bucket: str = "") -> dict[str, Any]:
        """Statistics of `bucket`, or of the server."""
        return await self._dispatcher.ask(calls.stats(bucket))

    async def list_users(self) -> UserListing:
        """The users of the cluster, as this node has them."""
        return await self._dispatcher.ask(calls.list_users())

    async def change_users(self, change: UserChange) -> int:
        """Changes a user, and gives the revision of the users after it. This node has the change on
        disk when it returns; the others take it from this one.

        Raises:
            ServerError: `NOT_ALLOWED`, or `BAD_ARGUMENT` if the change is not possible.
        """
        return await self._dispatcher.ask(calls.change_users(change))

    # Partitions.

    def partitions(self) -> list[PartitionInfo]:
        """The bucket's partitions, as the servers told them when they were connected to; `seqnos`
        asks for their present numbers. Where several nodes hold the bucket, each partition is the
        one of its own node; a partition is left out if it has no node, or its node is not connected
        to."""
        return calls.partition_infos(self._dispatcher.logs)

    async def seqnos(
        self, partitions: Iterable[int] = (), *, of_copies: bool = False
    ) -> list[PartitionNumbers]:
        """The sequence numbers of partitions, each from the node that is active for it; of all when
        none are named.

        Args:
            partitions: The partitions.
            of_copies: Whether a node that is not active tells the numbers of its copy, instead of
                refusing. With `follow_map=False` this shows how far one node is.

        Raises:
            ServerError: `NOT_MY_PARTITION`: the bucket does not have one of them.
            BrokenError: One of them has had no active node for as long as a request waits for one.
        """
        return await self._dispatcher.ask_about(
            tuple(map(PartitionId, partitions)), partial(calls.seqnos, of_copies=of_copies)
        )

    async def seqnos_at_time(
        self, time: float | datetime, partitions: Iterable[int] = ()
    ) -> list[SeqnoAtTime]:
        """Where partitions stood at a time: the last sequence number on disk from before it. Start
        a stream there to get every change since. What is not on disk yet counts as later.

        Args:
            time: Seconds since 1970, or a `datetime` with a time zone. The server's clock gave
                each change its time.
            partitions: The partitions; all when none are named.

        Raises:
            ValueError: The time has no time zone, or is before 1970 or after 2554.
        """
        return await self._dispatcher.ask_about(
            tuple(map(PartitionId, partitions)), partial(calls.seqnos_at_time, to_nanoseconds(time))
        )

    async def resume_state_at_time(
        self, time: float | datetime, partitions: Iterable[int] = ()
    ) -> ResumeState:
        """Where a consumer starts that wants every change since a time: `consume(resume=...)`. The
        arguments and errors are those of `seqnos_at_time`.

        Raises:
            ServerError: With `HISTORY_CHANGED`, after a failover since the client connected. Use
                a new client.
        """
        rows = await self.seqnos_at_time(time, partitions)
        return calls.resume_state_at_time(self.partitions(), rows, self.address.bucket)

    # Leases.

    async def acquire_lease(
        self,
        ranges: Iterable[tuple[int, int, int]],
        *,
        time_to_live_s: int,
        owner: str,
        lease_id: int = 0,
    ) -> HeldLease:
        """Protects ranges of sequence numbers from compaction: every version in them stays.

        Args:
            ranges: (partition, start, end), start exclusive; the end must be persisted. `SEQ_MAX`
                stands for the snapshot end that is persisted when the lease is granted.
            time_to_live_s: How long it lasts without renewal. The lease outlives this connection,
                and a restart of the server.
            owner: The name of its holder, for the server's list of leases.
            lease_id: A random number of your own. Asking again with it makes no second lease: an
                existing one is renewed with the ranges that it has. 0 draws a number, and another
                one if partitions move between nodes while the lease is acquired. If it fails then,
                or is cancelled, what some nodes have granted is released, within two seconds.

        Raises:
            ServerError: `BAD_ARGUMENT`, `LIMIT_REACHED`; `ROLLBACK_NEEDED` when a range is no
                longer whole; `RANGE_GONE` when the lease exists and is no longer whole, or one of
                its partitions has another active node since.
        """
        if lease_id:
            request = LeaseRequest(tuple(ranges), time_to_live_s, owner, lease_id)
            return await self._dispatcher.acquire_lease(request)
        return await self._acquire_new_lease(tuple(ranges), time_to_live_s, owner)

    async def _acquire_new_lease(
        self, ranges: tuple[tuple[int, int, int], ...], time_to_live_s: int, owner: str
    ) -> HeldLease:
        failure: ServerError | None = None
        for _ in range(NEW_LEASE_TRIES):
            lease_id = new_lease_id()
            request = LeaseRequest(ranges, time_to_live_s, owner, lease_id)
            is_granted = False
            try:
                lease = await self._dispatcher.acquire_lease(request)
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
                    with suppress(UprError), trio.move_on_after(LEASE_CLEANUP_S, shield=True):
                        await self.release_lease(lease_id)
        assert failure is not None
        raise failure

    async def renew_lease(self, lease_id: int, *, time_to_live_s: int) -> HeldLease:
        """Lets a lease last for so long from now, even if it has lapsed. Gives it with the ranges
        that nodes still hold: those are missing that a node has lost, or that a node held which was
        failed over.

        Raises:
            ServerError: `RANGE_GONE`: it does not exist, its ranges are no longer whole, or one of
                its partitions has another active node since.
            BrokenError: A node that may have a part of it could not be asked.
        """
        return await self._dispatcher.ask_all_holders(
            calls.lease(LeaseAction.RENEW, lease_id=lease_id, time_to_live_s=time_to_live_s)
        )

    async def release_lease(self, lease_id: int) -> None:
        """Ends a lease. `ServerError` with `BAD_ARGUMENT` if it was released already."""
        await self._dispatcher.ask_all_holders(calls.lease(LeaseAction.RELEASE, lease_id=lease_id))

    async def await_durable(
        self,
        written: WriteResult,
        durability: Durability,
        copies: int = 0,
        *,
        timeout_s: float = 60.0,
    ) -> SeqNo:
        """Waits until a change is as durable as requested; gives the sequence number reached then.

        Raises:
            ServerError: `TIMED_OUT`; or `HISTORY_CHANGED`: there was a failover, and the change may
                be lost.
        """
        deadline = trio.current_time() + timeout_s
        return await self._dispatcher.ask(
            calls.await_durable(
                written.partition,
                written.history_id,
                written.seq,
                durability,
                copies,
                lambda: deadline - trio.current_time(),
            )
        )

    def statistics(self) -> ClientStatistics:
        """The client's figures."""
        dispatcher = self._dispatcher
        return ClientStatistics(
            dispatcher.requests,
            len(dispatcher),
            dispatcher.credit_left,
            dispatcher.connections.last_failure,
        )


@asynccontextmanager
async def connect(
    url: str | Address,
    *,
    credit_timeout_s: float = CREDIT_TIMEOUT_S_DEFAULT,
    retry_timeout_s: float = REQUEST_RETRY_TIMEOUT_S,
    follow_map: bool = True,
    **options: Unpack[ConnectOptions],
) -> AsyncIterator[Client]:
    """A client connected to `upr://host:port/bucket`; without the bucket, for the calls about
    buckets only. Several nodes are named as `upr://host:port,host:port/bucket`.

    Where several nodes hold the bucket, this tries to reach each of them, for a second at most, or
    three times as long as the first node took. Leaving the context closes the connections; open
    requests of other tasks raise `ClosedError`.

    Args:
        url: Where to connect to.
        credit_timeout_s: How long a change waits for a server that is over its memory quota.
        retry_timeout_s: In a cluster, how long a request waits for the node of its partition.
        follow_map: Whether to follow the partition map; otherwise every request goes to `url`.
        **options: How to connect.

    Raises:
        AddressError: The URL is not valid.
        BrokenError: It could not connect.
        ServerError: The server refused, for instance with `NO_BUCKET`.
    """
    address = Address.parse(url) if isinstance(url, str) else url
    connection = TrioOptions(**options, retry_timeout_s=retry_timeout_s, follow_map=follow_map)
    dispatcher = RequestDispatcher(address, connection, credit_timeout_s)
    try:
        async with background_nursery() as nursery:
            nursery.start_soon(dispatcher.run)
            await dispatcher.has_opened.wait()
            if dispatcher.error is None:
                # Requests wait for their nodes themselves.
                wait_s = max(LOCATE_S, 3 * dispatcher.connections.connect_s)
                with trio.move_on_after(min(wait_s, connection.connect_timeout_s)):
                    await dispatcher.connections.located.wait()
            if dispatcher.error is not None:
                raise dispatcher.error
            yield Client(address, connection, dispatcher)
    finally:
        dispatcher.close()
