"""Reading keys: the requests, and what the answers mean."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from struct import error as StructError
from typing import Final, Self

import msgspec

from upr_protocol.chunk import CounterDelta, Mutation
from upr_protocol.client.core.batcher import check_sizes
from upr_protocol.client.core.results import status_of
from upr_protocol.errors import RemoteProtocolError, ServerError, Status, quoted_key
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.limits import GET_REPLY_KEYS_MAX
from upr_protocol.wire import Get, GetReply

LOOKUPS_AT_ONCE: Final = 16
"""How many requests one `get_many` has open: each may bring a whole frame of values."""

Text = bytes | str
"""A key or a value; text stands for its UTF-8."""


def to_bytes(text: Text) -> bytes:
    """The bytes of a key or value. Raises `TypeError` for what has none."""
    if isinstance(text, str):
        return text.encode()
    if not isinstance(text, bytes):
        # A bytearray, or what has no bytes, against its type.
        return bytes(memoryview(text))
    return text


class Item(msgspec.Struct, frozen=True):
    """One item, as it is stored.

    Attributes:
        cas: Its version: give it with a change to lose no update of others.
        flags: The application's own 32 bits.
        expiry: When it expires, in seconds since 1970; 0 for never.
        seq: The number of its newest change.
        history_id: The history in which the number holds.
    """

    key: bytes
    value: bytes
    cas: Cas
    flags: int
    expiry: int
    seq: SeqNo
    partition: PartitionId
    history_id: HistoryId


def counter_delta(operation: Operation, delta: int, initial: int | None, create: bool) -> bytes:
    """The value that an increment or decrement carries.

    With `initial` None a missing counter is taken for 0 before the change: it then holds the delta,
    or 0 after a decrement.

    Raises:
        ServerError: `BAD_ARGUMENT`: a number does not fit.
    """
    if initial is None:
        initial = delta if operation is Operation.INCREMENT else 0
    try:
        return CounterDelta(delta, initial, create).encode()
    except StructError as error:
        raise ServerError(
            Status.BAD_ARGUMENT,
            "the delta and the initial value of a counter are whole numbers from 0 to 2**64 - 1, "
            f"not {delta!r} and {initial!r}",
        ) from error


class RefusedKeysError(ServerError):
    """The server cannot tell what some keys hold: their records on its disk are damaged.

    Attributes:
        statuses: Why, by key: `DAMAGED`.
        items: The items at all keys, in the order asked; None for each that is missing or refused.
    """

    def __init__(self, statuses: Mapping[bytes, Status], items: Sequence[Item | None]) -> None:
        key, status = next(iter(statuses.items()))
        more_keys = f" and {len(statuses) - 1} more" if len(statuses) > 1 else ""
        super().__init__(status, f"the server cannot read the key {quoted_key(key)}{more_keys}")
        self.statuses = statuses
        self.items = items

    def __reduce__(self) -> tuple[object, ...]:
        # As an exception of another process: `args` has the sentence only.
        return type(self), (dict(self.statuses), list(self.items))


class KeyLookup:
    """Reads many keys with as few requests as possible, and puts the answers in order.

    Args:
        keys_of: By partition its keys, each with its place among the answers.

    Attributes:
        items: The items, as `RefusedKeysError` has them, as far as the answers have come.
    """

    __slots__ = ("_history_id", "_keys_of", "items", "statuses")

    def __init__(
        self,
        keys_of: Mapping[PartitionId, list[tuple[int, bytes]]],
        history_id: HistoryId = HistoryId(0),
    ) -> None:
        self.items: list[Item | None] = [None] * sum(map(len, keys_of.values()))
        self.statuses: dict[bytes, Status] = {}
        self._keys_of = keys_of
        self._history_id = history_id

    @classmethod
    def of_keys(cls, keys: Sequence[Text], partition_count: int) -> Self:
        """Reads keys, in any order, repeated or not, of a bucket with so many partitions.

        Raises:
            ServerError: A key is empty, or longer than any server takes.
        """
        keys_of: defaultdict[PartitionId, list[tuple[int, bytes]]] = defaultdict(list)
        for index, key in enumerate(map(to_bytes, keys)):
            check_sizes(key)
            keys_of[partition_of(key, partition_count)].append((index, key))
        return cls(keys_of)

    def requests(self) -> Iterator[KeyRequest]:
        """The first requests; each may have to be sent again for the rest of its keys."""
        for partition, keys in self._keys_of.items():
            for start in range(0, len(keys), GET_REPLY_KEYS_MAX):
                request_keys = keys[start : start + GET_REPLY_KEYS_MAX]
                yield KeyRequest(self, partition, request_keys, self._history_id)

    def checked_items(self) -> list[Item | None]:
        """The items, once all keys are answered.

        Raises:
            RefusedKeysError: Some keys are refused.
        """
        if self.statuses:
            raise RefusedKeysError(self.statuses, self.items)
        return self.items


class KeyRequest:
    """Some keys of one partition, until all of them are answered."""

    __slots__ = ("_history_id", "_lookup", "_remaining_keys", "partition")

    def __init__(
        self,
        lookup: KeyLookup,
        partition: PartitionId,
        remaining_keys: list[tuple[int, bytes]],
        history_id: HistoryId,
    ) -> None:
        self.partition = partition
        self._lookup = lookup
        self._remaining_keys = remaining_keys
        self._history_id = history_id

    def message(self, opaque: int) -> Get:
        """The request for the keys that have no answer yet."""
        keys = tuple(key for _, key in self._remaining_keys)
        return Get(keys, self._history_id, partition=self.partition, opaque=opaque)

    def receive(self, reply: GetReply) -> bool:
        """Takes in an answer; whether all keys are answered. Raises `RemoteProtocolError` if it
        does not fit the request."""
        answer_count = reply.next_index
        if not 1 <= answer_count <= len(self._remaining_keys) or reply.chunk.count != answer_count:
            raise RemoteProtocolError(
                f"GetReply has {reply.chunk.count} items and next_index {answer_count}, the "
                f"request named {len(self._remaining_keys)} keys"
            )
        for (index, key), row in zip(self._remaining_keys, reply.chunk, strict=False):
            if row.op is Operation.SET:
                self._lookup.items[index] = _item_of(self.partition, reply.history_id, row)
            elif row.flags:
                self._lookup.statuses[key] = status_of(row.flags)
        self._remaining_keys = self._remaining_keys[answer_count:]
        return not self._remaining_keys


def _item_of(partition: PartitionId, history_id: HistoryId, row: Mutation) -> Item:
    return Item(row.key, row.value, row.cas, row.flags, row.expiry, row.seq, partition, history_id)
