"""What each operation does to an item: the rules of memcached, as a table.

An operation sees the item as it is (or None: it is missing, deleted or expired) and says what is to
be stored, or why not. Nothing here has an effect; numbering and storing is the partition's part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import msgspec

from upr_protocol.chunk import Buffer, CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Cas, Operation
from upr_protocol.limits import VALUE_BYTES_MAX

COUNTER_MASK: Final = (1 << 64) - 1
COUNTER_DIGITS_MAX: Final = 20


class JoinedValue:
    """A value and what a batch appends and prepends to it, which are joined once.

    Args:
        value: The value.
    """

    __slots__ = ("_nbytes", "_parts")

    def __init__(self, value: bytes) -> None:
        self._parts = deque((value,))
        self._nbytes = len(value)

    def __len__(self) -> int:
        """How many bytes the value has."""
        return self._nbytes

    def append(self, part: bytes) -> None:
        """Adds bytes at the end. O(1)."""
        self._parts.append(part)
        self._nbytes += len(part)

    def prepend(self, part: bytes) -> None:
        """Adds bytes at the beginning. O(1)."""
        self._parts.appendleft(part)
        self._nbytes += len(part)

    def pieces(self, nbytes_max: int) -> Iterator[Buffer]:
        """The whole value, in pieces of so many bytes at most. They refer to its parts."""
        for part in self._parts:
            for start in range(0, len(part), nbytes_max):
                yield memoryview(part)[start : start + nbytes_max]

    def join(self) -> bytes:
        """The whole value. O(bytes)."""
        return b"".join(self._parts)


class StoredItem(Protocol):
    """What a key holds: a mutation, or what is to become one."""

    @property
    def value(self) -> bytes | JoinedValue:
        """The value."""

    @property
    def cas(self) -> Cas:
        """The CAS."""

    @property
    def flags(self) -> int:
        """The flags."""

    @property
    def expiry(self) -> int:
        """The expiry time."""


class StoredOutcome(msgspec.Struct, frozen=True):
    """What an operation comes to.

    Attributes:
        op: `SET` or `DELETE`.
        value: The new value.
        flags: The new flags.
        expiry: The new expiry time.
        counter: The counter's new value, when it is one.
    """

    op: Operation
    value: bytes | JoinedValue = b""
    flags: int = 0
    expiry: int = 0
    counter: int | None = None


Outcome = StoredOutcome | Status


def operation_outcome(request: Mutation, item: StoredItem | None) -> Outcome:
    """What `request` comes to.

    Args:
        request: One mutation of a published chunk: its `cas` is the one expected, 0 for any.
        item: What the key holds now; None when it is missing.

    Returns:
        What to store, or why it failed.
    """
    if request.op == Operation.ADD and item is not None:
        return Status.EXISTS
    if request.cas:
        if item is None:
            return Status.NOT_FOUND
        if item.cas != request.cas:
            return Status.CAS_MISMATCH
    return _RULES[request.op](request, item)


def _set(request: Mutation, _item: StoredItem | None) -> Outcome:
    return StoredOutcome(Operation.SET, request.value, request.flags, request.expiry)


def _replace(request: Mutation, item: StoredItem | None) -> Outcome:
    return Status.NOT_FOUND if item is None else _set(request, item)


def _delete(_request: Mutation, item: StoredItem | None) -> Outcome:
    return Status.NOT_FOUND if item is None else StoredOutcome(Operation.DELETE)


def _touch(request: Mutation, item: StoredItem | None) -> Outcome:
    if item is None:
        return Status.NOT_FOUND
    return StoredOutcome(Operation.SET, item.value, item.flags, request.expiry)


def _append(request: Mutation, item: StoredItem | None) -> Outcome:
    return _joined(request, item, JoinedValue.append)


def _prepend(request: Mutation, item: StoredItem | None) -> Outcome:
    return _joined(request, item, JoinedValue.prepend)


def _joined(
    request: Mutation, item: StoredItem | None, join: Callable[[JoinedValue, bytes], None]
) -> Outcome:
    if item is None:
        return Status.NOT_FOUND
    value = item.value
    if len(value) + len(request.value) > VALUE_BYTES_MAX:
        return Status.TOO_LARGE
    # A value that an earlier operation of the batch has joined is taken over: that operation's item
    # is superseded now. To copy it would cost as much as joining at each operation.
    joined_value = value if isinstance(value, JoinedValue) else JoinedValue(value)
    join(joined_value, request.value)
    return StoredOutcome(Operation.SET, joined_value, item.flags, item.expiry)


def _increment(request: Mutation, item: StoredItem | None) -> Outcome:
    return _counted(request, item, 1)


def _decrement(request: Mutation, item: StoredItem | None) -> Outcome:
    return _counted(request, item, -1)


def _counted(request: Mutation, item: StoredItem | None, sign: int) -> Outcome:
    delta = CounterDelta.decode(request.value)
    if item is None:
        if not delta.create:
            return Status.NOT_FOUND
        count, flags, expiry = delta.initial, request.flags, request.expiry
    else:
        old_number = _number(item.value)
        if old_number is None:
            return Status.NOT_A_NUMBER
        count = (
            (old_number + delta.delta) & COUNTER_MASK
            if sign > 0
            else max(0, old_number - delta.delta)
        )
        flags, expiry = item.flags, item.expiry
    return StoredOutcome(Operation.SET, b"%d" % count, flags, expiry, count)


def _number(value: bytes | JoinedValue) -> int | None:
    if len(value) > COUNTER_DIGITS_MAX:
        return None
    if isinstance(value, JoinedValue):
        value = value.join()
    if not value.isdigit():
        return None
    count = int(value)
    return count if count <= COUNTER_MASK else None


_RULES: Final[dict[Operation, Callable[[Mutation, StoredItem | None], Outcome]]] = {
    Operation.SET: _set,
    Operation.ADD: _set,
    Operation.REPLACE: _replace,
    Operation.DELETE: _delete,
    Operation.INCREMENT: _increment,
    Operation.DECREMENT: _decrement,
    Operation.APPEND: _append,
    Operation.PREPEND: _prepend,
    Operation.TOUCH: _touch,
}

PUBLISHED: Final = tuple(_RULES)
"""The operations that a publisher may ask for."""

COUNTS: Final = frozenset((Operation.INCREMENT, Operation.DECREMENT))
"""The operations whose value is a `CounterDelta`, and whose results are counters."""

READS: Final = COUNTS | {Operation.APPEND, Operation.PREPEND, Operation.TOUCH}
"""The operations that need the item's value, not only whether there is one."""
