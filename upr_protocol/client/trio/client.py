"""Reading and changing keys, and managing buckets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.client.core import calls
from upr_protocol.client.core.calls import BucketInfo, HeldLease, PartitionInfo, PartitionNumbers
from upr_protocol.client.core.key_lookup import (
    LOOKUPS_AT_ONCE,
    Item,
    KeyLookup,
    Text,
    counter_delta,
    items_of,
    to_bytes,
)
from upr_protocol.client.core.options import IDENTITY_DEFAULT
from upr_protocol.client.core.results import WriteResult
from upr_protocol.client.trio.connection import TrioOptions
from upr_protocol.client.trio.connection_pool import ConnectionPool
from upr_protocol.client.trio.dispatcher import REQUEST_PATIENCE_S, RequestDispatcher
from upr_protocol.client.trio.request_channel import CREDIT_TIMEOUT_S_DEFAULT
from upr_protocol.concurrency import background
from upr_protocol.errors import LocalProtocolError, RemoteProtocolError, Status
from upr_protocol.ids import Durability, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.limits import GET_KEYS_MAX, HANDSHAKE_TIMEOUT_S, IDLE_INTERVAL_S_DEFAULT
from upr_protocol.transport import Dial, dial_tcp
from upr_protocol.wire import LeaseAction


@attrs.frozen
class ClientStatistics:
    """What a client can tell about itself.

    Attributes:
        requests: Requests made.
        open: Requests that wait for their answers.
        credit_left: Bytes that the server would take of changes.
    """

    requests: int
    open: int
    credit_left: int


class Client:
    """One connection to a server, or to each of the nodes that hold a bucket. `connect` makes it.

    Requests of any number of tasks go over it together; none waits for another's answer. When the
    connection is lost every open request raises `BrokenError`, and so does every later one: what
    was asked may have been done or not. Whoever needs to know uses a publisher, which asks again.
    Where several nodes hold the bucket, later requests go on with the nodes that there are: each
    waits for a while for the one whose partition it is about.

    A request that is cancelled is not undone: it may have reached the server. The connection stays
    good, and the answer is dropped when it comes.
    """

    def __init__(self, address: Address, options: TrioOptions, channels: RequestDispatcher) -> None:
        self.address = address
        self.options = options
        self._channels = channels

    # Keys.

    @property
    def partition_count(self) -> int:
        """How many partitions the bucket has.

        Raises:
            LocalProtocolError: The URL named no bucket.
        """
        count = self._channels.partition_count
        if not count:
            raise LocalProtocolError("connect with a URL that names a bucket", Status.BAD_ARGUMENT)
        return count

    async def get(self, key: Text) -> Item | None:
        """The item at `key`, or None."""
        return (await self.get_many([key]))[0]

    async def get_many(self, keys: Sequence[Text]) -> list[Item | None]:
        """The items at `keys`, in their order; None for each that is missing.

        The items of one partition are read together; across partitions there is no common moment.
        """
        lookup = KeyLookup([to_bytes(key) for key in keys], self.partition_count)
        questions = lookup.questions()
        while some := list(islice(questions, LOOKUPS_AT_ONCE)):
            answers = [await self._channels.send(calls.get(question)) for question in some]
            for question, wait in zip(some, answers, strict=True):
                answer = await wait()
                while not question.answer(answer):
                    answer = await self._channels.ask(calls.get(question))
        return lookup.items

    async def get_from(
        self, partition: int, keys: Sequence[bytes], history_id: int
    ) -> tuple[list[Item | None], SeqNo]:
        """The items at `keys`, which are of one partition and one history, and the number that the
        partition had come to when the last of them was read.

        Raises:
            ServerError: `HISTORY_CHANGED`: the partition is in another history.
        """
        items: list[Item | None] = []
        high = SeqNo(0)
        while len(items) < len(keys):
            question = tuple(keys[len(items) : len(items) + GET_KEYS_MAX])
            reply = await self._channels.ask(
                calls.get_from(PartitionId(partition), question, HistoryId(history_id))
            )
            if not 1 <= reply.chunk.count <= len(question):
                raise RemoteProtocolError(
                    f"an answer of {reply.chunk.count} items to a question about {len(question)}"
                )
            items += items_of(PartitionId(partition), reply)
            high = reply.chunk.end
        return items, high

    async def set(
        self,
        key: Text,
        value: Text,
        *,
        cas: int = 0,
        flags: int = 0,
        expiry: int = 0,
        durability: Durability = Durability.MEMORY,
        copies: int = 0,
    ) -> WriteResult:
        """Stores `value`, whether or not the key exists.

        Args:
            key: 1 to 250 bytes; text stands for its UTF-8.
            value: At most 20 MiB.
            cas: The version that the item must have; 0 for any.
            flags: The application's own 32 bits.
            expiry: When the item expires, in seconds since 1970; 0 for never.
            durability: What must hold before this returns.
            copies: How many replicas beside the active, for the replicated levels.

        Raises:
            ServerError: `CAS_MISMATCH`, `TOO_LARGE`, `BAD_KEY`; or no credit came in time.
        """
        return await self._one(
            Operation.SET, key, value, cas, flags, expiry, durability=durability, copies=copies
        )

    async def add(
        self,
        key: Text,
        value: Text,
        *,
        flags: int = 0,
        expiry: int = 0,
        durability: Durability = Durability.MEMORY,
        copies: int = 0,
    ) -> WriteResult:
        """Stores `value` if the key does not exist; `ServerError` with `EXISTS` if it does."""
        return await self._one(
            Operation.ADD, key, value, 0, flags, expiry, durability=durability, copies=copies
        )

    async def replace(
        self,
        key: Text,
        value: Text,
        *,
        cas: int = 0,
        flags: int = 0,
        expiry: int = 0,
        durability: Durability = Durability.MEMORY,
        copies: int = 0,
    ) -> WriteResult:
        """Stores `value` if the key exists; `ServerError` with `NOT_FOUND` if it does not."""
        return await self._one(
            Operation.REPLACE, key, value, cas, flags, expiry, durability=durability, copies=copies
        )

    async def delete(
        self,
        key: Text,
        *,
        cas: int = 0,
        durability: Durability = Durability.MEMORY,
        copies: int = 0,
    ) -> WriteResult:
        """Removes the key; `ServerError` with `NOT_FOUND` if there is none."""
        return await self._one(
            Operation.DELETE, key, b"", cas, durability=durability, copies=copies
        )

    async def increment(
        self,
        key: Text,
        delta: int = 1,
        *,
        initial: int | None = None,
        create: bool = True,
        expiry: int = 0,
        durability: Durability = Durability.MEMORY,
        copies: int = 0,
    ) -> WriteResult:
        """Adds `delta` to a decimal counter, which wraps at 2**64; `count` is its new value.

        A missing counter is taken for 0, or set to `initial` as it is; without `create` it is a
        `ServerError` with `NOT_FOUND`.
        """
        value = counter_delta(Operation.INCREMENT, delta, initial, create)
        return await self._one(
            Operation.INCREMENT, key, value, 0, 0, expiry, durability=durability, copies=copies
        )

    async def decrement(
        self,
        key: Text,
        delta: int = 1,
        *,
        initial: int | None = None,
        create: bool = True,
        expiry: int = 0,
        durability: Durability = Durability.MEMORY,
        copies: int = 0,
    ) -> WriteResult:
        """Subtracts `delta` from a decimal counter, which stops at 0; see `increment`."""
        value = counter_delta(Operation.DECREMENT, delta, initial, create)
        return await self._one(
            Operation.DECREMENT, key, value, 0, 0, expiry, durability=durability, copies=copies
        )

    async def append(
        self,
        key: Text,
        value: Text,
        *,
        cas: int = 0,
        durability: Durability = Durability.MEMORY,
        copies: int = 0,
    ) -> WriteResult:
        """Adds bytes behind the stored value; `ServerError` with `NOT_FOUND` if there is none."""
        return await self._one(
            Operation.APPEND, key, value, cas, durability=durability, copies=copies
        )

    async def prepend(
        self,
        key: Text,
        value: Text,
        *,
        cas: int = 0,
        durability: Durability = Durability.MEMORY,
        copies: int = 0,
    ) -> WriteResult:
        """Adds bytes in front of the stored value; `ServerError` with `NOT_FOUND` if there is
        none."""
        return await self._one(
            Operation.PREPEND, key, value, cas, durability=durability, copies=copies
        )

    async def touch(
        self,
        key: Text,
        expiry: int,
        *,
        cas: int = 0,
        durability: Durability = Durability.MEMORY,
        copies: int = 0,
    ) -> WriteResult:
        """Gives the item a new expiry time, in seconds since 1970; 0 for never."""
        return await self._one(
            Operation.TOUCH, key, b"", cas, 0, expiry, durability=durability, copies=copies
        )

    async def _one(
        self,
        operation: Operation,
        key: Text,
        value: Text,
        cas: int = 0,
        flags: int = 0,
        expiry: int = 0,
        *,
        durability: Durability,
        copies: int,
    ) -> WriteResult:
        call = calls.one(
            self.partition_count,
            operation,
            key,
            value,
            cas=cas,
            flags=flags,
            expiry=expiry,
            durability=durability,
            copies=copies,
        )
        return await self._channels.ask(call)

    # Buckets.

    async def create_bucket(
        self, name: str, partition_count: int = 0, quota_bytes: int = 0
    ) -> None:
        """Makes a bucket; zeros leave the choice to the server. `ServerError` with
        `BUCKET_EXISTS` if there is one."""
        await self._channels.ask(calls.create_bucket(name, partition_count, quota_bytes))

    async def delete_bucket(self, name: str) -> None:
        """Deletes a bucket and all that is in it. `ServerError` with `NO_BUCKET` if there is
        none."""
        await self._channels.ask(calls.delete_bucket(name))

    async def list_buckets(self) -> list[BucketInfo]:
        """Every bucket, by name."""
        return await self._channels.ask(calls.list_buckets())

    async def stats(self, bucket: str = "") -> dict[str, Any]:
        """Statistics of `bucket`, or of the server."""
        return await self._channels.ask(calls.stats(bucket))

    # Partitions.

    def partitions(self) -> list[PartitionInfo]:
        """The bucket's partitions, as the server told them when the connection was made; `seqnos`
        asks for their present numbers. Where several nodes hold the bucket, each partition is told
        by its own; one that is with none just now is left out."""
        return calls.partition_infos(self._channels.logs)

    async def seqnos(self, partitions: Iterable[int] = ()) -> list[PartitionNumbers]:
        """How far partitions are; all of them when none are named."""
        return await self._channels.seqnos(tuple(map(PartitionId, partitions)))

    # Leases.

    async def acquire_lease(
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
        return await self._channels.acquire(
            tuple(ranges), time_to_live_s=time_to_live_s, owner=owner, lease_id=lease_id
        )

    async def renew_lease(self, lease_id: int, *, time_to_live_s: int) -> HeldLease:
        """A lease goes on for so long from now, even if it has lapsed; `ServerError` with
        `RANGE_GONE` if it is not there, or what it held is not whole any more; `BrokenError` if a
        node that may have some of it could not be asked."""
        return await self._channels.known_nodes(
            calls.lease(LeaseAction.RENEW, lease_id=lease_id, time_to_live_s=time_to_live_s)
        )

    async def release_lease(self, lease_id: int) -> None:
        """Ends a lease; `ServerError` with `BAD_ARGUMENT` if it was released already."""
        await self._channels.known_nodes(calls.lease(LeaseAction.RELEASE, lease_id=lease_id))

    async def await_durable(
        self,
        written: WriteResult,
        durability: Durability,
        copies: int = 0,
        *,
        timeout_s: float = 60.0,
    ) -> SeqNo:
        """Waits until a change is as durable as asked for; gives the number then reached.

        Raises:
            ServerError: `TIMED_OUT`, or `HISTORY_CHANGED`: a failover came between, and the change
                may be lost.
        """
        return await self._channels.ask(
            calls.await_durable(
                written.partition, written.history_id, written.seq, durability, copies, timeout_s
            )
        )

    def statistics(self) -> ClientStatistics:
        """What the client can tell about itself."""
        return ClientStatistics(
            self._channels.requests, len(self._channels), self._channels.credit_left
        )


@asynccontextmanager
async def connect(
    url: str | Address,
    *,
    identity: str = IDENTITY_DEFAULT,
    idle_interval_s: int = IDLE_INTERVAL_S_DEFAULT,
    connect_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    credit_timeout_s: float = CREDIT_TIMEOUT_S_DEFAULT,
    patience_s: float = REQUEST_PATIENCE_S,
    by_map: bool = True,
    dial: Dial = dial_tcp,
) -> AsyncIterator[Client]:
    """A client connected to `upr://host:port/bucket`; without the bucket, for the calls about
    buckets only. Several nodes are named as `upr://host:port,host:port/bucket`.

    Where several nodes hold the bucket, all of them were reached then, but for those that could not
    be, or did not answer in time.

    Leaving the context closes the connection; open requests of other tasks raise `ClosedError`.

    Args:
        url: Where to connect to.
        identity: `what:who`, for the server's logs and statistics.
        idle_interval_s: The silence after which a side says that it is there still.
        connect_timeout_s: How long the connection and its first answers may take.
        credit_timeout_s: How long a change waits for a server that is over its memory quota.
        patience_s: Of several nodes: how long a request waits for the one whose it is.
        by_map: Whether to go to the nodes that the partition map names, and not to stay with the
            one at `url`.
        dial: How to reach an address, where that is not plain TCP.

    Raises:
        AddressError: The URL is none.
        BrokenError: There is no connection to be had.
        ServerError: The server refused, for instance with `NO_BUCKET`.
    """
    address = Address.parse(url) if isinstance(url, str) else url
    options = TrioOptions(
        identity=identity,
        idle_interval_s=idle_interval_s,
        connect_timeout_s=connect_timeout_s,
        dial=dial,
    )
    channels = RequestDispatcher(address, credit_timeout_s, patience_s)
    channels.pool = ConnectionPool(address, options, channels, patience_s=patience_s, by_map=by_map)
    async with background() as nursery:
        nursery.start_soon(channels.run)
        await channels.opened.wait()
        if channels.error is None:
            with trio.move_on_after(connect_timeout_s):
                await channels.pool.settled.wait()
        if channels.error is not None:
            raise channels.error
        yield Client(address, options, channels)
