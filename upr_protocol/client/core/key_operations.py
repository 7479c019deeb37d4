"""Changing single keys: the same methods for clients of both kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from upr_protocol.client.core.key_lookup import Text, counter_delta
from upr_protocol.ids import Durability, Operation

R_co = TypeVar("R_co", covariant=True)


class KeyOperations(ABC, Generic[R_co]):
    """The changes of one key, each a request of its own.

    Each method gives the `WriteResult` of its change; with a `Client`, a coroutine that does. These
    arguments mean the same everywhere:

    - `key`: 1 to 250 bytes; text stands for its UTF-8.
    - `value`: At most 20 MiB.
    - `cas`: The version that the item must have; 0 for any.
    - `flags`: The application's own 32 bits.
    - `expiry`: When the item expires, in seconds since 1970; 0 for never.
    - `durability`: What must hold before the server answers; by default the client's setting.
    - `copies`: How many replicas beside the active, for the replicated levels.

    Each method raises a `ServerError` when the server refuses, for instance with `CAS_MISMATCH`,
    `TOO_LARGE` or `BAD_KEY`, or when it grants no credit in time.
    """

    @abstractmethod
    def _change(
        self,
        operation: Operation,
        key: Text,
        value: Text = b"",
        *,
        cas: int = 0,
        flags: int = 0,
        expiry: int = 0,
        durability: Durability | None,
        copies: int | None,
    ) -> R_co:
        """Makes one change."""

    def set(
        self,
        key: Text,
        value: Text,
        *,
        cas: int = 0,
        flags: int = 0,
        expiry: int = 0,
        durability: Durability | None = None,
        copies: int | None = None,
    ) -> R_co:
        """Stores `value`, whether or not the key exists."""
        return self._change(
            Operation.SET,
            key,
            value,
            cas=cas,
            flags=flags,
            expiry=expiry,
            durability=durability,
            copies=copies,
        )

    def add(
        self,
        key: Text,
        value: Text,
        *,
        flags: int = 0,
        expiry: int = 0,
        durability: Durability | None = None,
        copies: int | None = None,
    ) -> R_co:
        """Stores `value` if the key does not exist; `ServerError` with `EXISTS` if it does."""
        return self._change(
            Operation.ADD,
            key,
            value,
            flags=flags,
            expiry=expiry,
            durability=durability,
            copies=copies,
        )

    def replace(
        self,
        key: Text,
        value: Text,
        *,
        cas: int = 0,
        flags: int = 0,
        expiry: int = 0,
        durability: Durability | None = None,
        copies: int | None = None,
    ) -> R_co:
        """Stores `value` if the key exists; `ServerError` with `NOT_FOUND` if it does not."""
        return self._change(
            Operation.REPLACE,
            key,
            value,
            cas=cas,
            flags=flags,
            expiry=expiry,
            durability=durability,
            copies=copies,
        )

    def delete(
        self,
        key: Text,
        *,
        cas: int = 0,
        durability: Durability | None = None,
        copies: int | None = None,
    ) -> R_co:
        """Removes the key; `ServerError` with `NOT_FOUND` if it does not exist."""
        return self._change(Operation.DELETE, key, cas=cas, durability=durability, copies=copies)

    def increment(
        self,
        key: Text,
        delta: int = 1,
        *,
        initial: int | None = None,
        create: bool = True,
        expiry: int = 0,
        durability: Durability | None = None,
        copies: int | None = None,
    ) -> R_co:
        """Adds `delta` to a decimal counter, which wraps at 2**64; `count` is its new value.

        A missing counter is taken for 0, or set to `initial` as it is; without `create` it is a
        `ServerError` with `NOT_FOUND`.
        """
        return self._change(
            Operation.INCREMENT,
            key,
            counter_delta(Operation.INCREMENT, delta, initial, create),
            expiry=expiry,
            durability=durability,
            copies=copies,
        )

    def decrement(
        self,
        key: Text,
        delta: int = 1,
        *,
        initial: int | None = None,
        create: bool = True,
        expiry: int = 0,
        durability: Durability | None = None,
        copies: int | None = None,
    ) -> R_co:
        """Subtracts `delta` from a decimal counter, which stops at 0; else like `increment`."""
        return self._change(
            Operation.DECREMENT,
            key,
            counter_delta(Operation.DECREMENT, delta, initial, create),
            expiry=expiry,
            durability=durability,
            copies=copies,
        )

    def append(
        self,
        key: Text,
        value: Text,
        *,
        cas: int = 0,
        durability: Durability | None = None,
        copies: int | None = None,
    ) -> R_co:
        """Adds bytes behind the stored value; `ServerError` with `NOT_FOUND` without one."""
        return self._change(
            Operation.APPEND, key, value, cas=cas, durability=durability, copies=copies
        )

    def prepend(
        self,
        key: Text,
        value: Text,
        *,
        cas: int = 0,
        durability: Durability | None = None,
        copies: int | None = None,
    ) -> R_co:
        """Adds bytes in front of the stored value; `ServerError` with `NOT_FOUND` without one."""
        return self._change(
            Operation.PREPEND, key, value, cas=cas, durability=durability, copies=copies
        )

    def touch(
        self,
        key: Text,
        expiry: int,
        *,
        cas: int = 0,
        durability: Durability | None = None,
        copies: int | None = None,
    ) -> R_co:
        """Gives the item a new expiry time, in seconds since 1970; 0 for never."""
        return self._change(
            Operation.TOUCH, key, cas=cas, expiry=expiry, durability=durability, copies=copies
        )
