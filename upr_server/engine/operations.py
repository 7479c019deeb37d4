"""What each operation does to an item: the rules of memcached, as a table.

An operation sees the item as it is (or None: it is missing, deleted or expired) and says what is to
be stored, or why not. Nothing here has an effect; numbering and storing is the partition's part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from upr_protocol.chunk import CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Operation
from upr_protocol.limits import VALUE_BYTES_MAX

COUNTER_MASK: Final = (1 << 64) - 1
COUNTER_DIGITS_MAX: Final = 20


class Stored(msgspec.Struct, frozen=True):
    """What an operation comes to.

    Attributes:
        op: `SET` or `DELETE`.
        value: The new value.
        flags: The new flags.
        expiry: The new expiry time.
        counter: The counter's new value, when it is one.
    """

    op: Operation
    value: bytes = b""
    flags: int = 0
    expiry: int = 0
    counter: int | None = None


Outcome = Stored | Status


def outcome(request: Mutation, item: Mutation | None) -> Outcome:
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


def _set(request: Mutation, _item: Mutation | None) -> Outcome:
    return Stored(Operation.SET, request.value, request.flags, request.expiry)


def _replace(request: Mutation, item: Mutation | None) -> Outcome:
    return Status.NOT_FOUND if item is None else _set(request, item)


def _delete(_request: Mutation, item: Mutation | None) -> Outcome:
    return Status.NOT_FOUND if item is None else Stored(Operation.DELETE)


def _touch(request: Mutation, item: Mutation | None) -> Outcome:
    if item is None:
        return Status.NOT_FOUND
    return Stored(Operation.SET, item.value, item.flags, request.expiry)


def _append(request: Mutation, item: Mutation | None) -> Outcome:
    return Status.NOT_FOUND if item is None else _joined(item, item.value, request.value)


def _prepend(request: Mutation, item: Mutation | None) -> Outcome:
    return Status.NOT_FOUND if item is None else _joined(item, request.value, item.value)


def _joined(item: Mutation, left: bytes, right: bytes) -> Outcome:
    if len(left) + len(right) > VALUE_BYTES_MAX:
        return Status.TOO_LARGE
    return Stored(Operation.SET, left + right, item.flags, item.expiry)


def _increment(request: Mutation, item: Mutation | None) -> Outcome:
    return _counted(request, item, 1)


def _decrement(request: Mutation, item: Mutation | None) -> Outcome:
    return _counted(request, item, -1)


def _counted(request: Mutation, item: Mutation | None, sign: int) -> Outcome:
    delta = CounterDelta.decode(request.value)
    if item is None:
        if not delta.create:
            return Status.NOT_FOUND
        number, flags, expiry = delta.initial, request.flags, request.expiry
    else:
        old = _number(item.value)
        if old is None:
            return Status.NOT_A_NUMBER
        number = (old + delta.delta) & COUNTER_MASK if sign > 0 else max(0, old - delta.delta)
        flags, expiry = item.flags, item.expiry
    return Stored(Operation.SET, b"%d" % number, flags, expiry, number)


def _number(value: bytes) -> int | None:
    if not value.isdigit() or len(value) > COUNTER_DIGITS_MAX:
        return None
    number = int(value)
    return number if number <= COUNTER_MASK else None


_RULES: Final[dict[Operation, Callable[[Mutation, Mutation | None], Outcome]]] = {
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

COUNTS: Final = frozenset((Operation.INCREMENT, Operation.DECREMENT))
"""The operations whose value is a `CounterDelta`, and whose results are counters."""

READS: Final = COUNTS | {Operation.APPEND, Operation.PREPEND, Operation.TOUCH}
"""The operations that need the item's value, not only whether there is one."""
