"""Changing single keys: the same methods for clients of both kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypedDict, TypeVar, Unpack

from upr_protocol.client.core.key_lookup import Text, counter_delta
from upr_protocol.ids import Durability, Operation

R_co = TypeVar("R_co", covariant=True)


class DurabilityOptions(TypedDict, total=False):
    """How durable a change must be before the server answers it, and for the replicated levels on
    how many replicas beside the active; by default as the client says."""

    durability: Durability
    copies: int


class CasOptions(DurabilityOptions, total=False):
    """The version that the item must have: `cas`; 0 for any."""

    cas: int


class ItemOptions(DurabilityOptions, total=False):
    """The application's own 32 bits, and when the item expires, in seconds since 1970; 0 for
    never."""

    flags: int
    expiry: int


class ChangeOptions(CasOptions, ItemOptions, total=False):
    """All options of a change."""


class KeyOperations(ABC, Generic[R_co]):
    """The changes of one key, each a request of its own.

    Each method gives the `WriteResult` of its change; with a `Client`, a coroutine that does. A key
    has 1 to 250 bytes, a value at most 20 MiB; text stands for its UTF-8.

    Each method raises a `ServerError` when the server refuses, for instance with `CAS_MISMATCH`,
    `TOO_LARGE` or `BAD_KEY`, or when it grants no credit in time. Numbers that do not fit are
    refused here, with `BAD_ARGUMENT`.
    """

    @abstractmethod
    def _change(
        self,
        operation: Operation,
        key: Text,
        value: Text = b"",
        **options: Unpack[ChangeOptions],
    ) -> R_co:
        """Makes one change."""

    def set(self, key: Text, value: Text, **options: Unpack[ChangeOptions]) -> R_co:
        """Stores `value`, whether or not the key exists."""
        return self._change(Operation.SET, key, value, **options)

    def add(self, key: Text, value: Text, **options: Unpack[ItemOptions]) -> R_co:
        """Stores `value` if the key does not exist; `ServerError` with `EXISTS` if it does."""
        return self._change(Operation.ADD, key, value, **options)

    def replace(self, key: Text, value: Text, **options: Unpack[ChangeOptions]) -> R_co:
        """Stores `value` if the key exists; `ServerError` with `NOT_FOUND` if it does not."""
        return self._change(Operation.REPLACE, key, value, **options)

    def delete(self, key: Text, **options: Unpack[CasOptions]) -> R_co:
        """Removes the key; `ServerError` with `NOT_FOUND` if it does not exist."""
        return self._change(Operation.DELETE, key, **options)

    def increment(
        self,
        key: Text,
        delta: int = 1,
        *,
        initial: int | None = None,
        create: bool = True,
        expiry: int = 0,
        **options: Unpack[DurabilityOptions],
    ) -> R_co:
        """Adds `delta` to a decimal counter, which wraps at 2**64; `count` is its new value.

        A missing counter is taken for 0, or set to `initial` as it is; without `create` it is a
        `ServerError` with `NOT_FOUND`.
        """
        value = counter_delta(Operation.INCREMENT, delta, initial, create)
        return self._change(Operation.INCREMENT, key, value, expiry=expiry, **options)

    def decrement(
        self,
        key: Text,
        delta: int = 1,
        *,
        initial: int | None = None,
        create: bool = True,
        expiry: int = 0,
        **options: Unpack[DurabilityOptions],
    ) -> R_co:
        """Subtracts `delta` from a decimal counter, which stops at 0; in all else like
        `increment`."""
        value = counter_delta(Operation.DECREMENT, delta, initial, create)
        return self._change(Operation.DECREMENT, key, value, expiry=expiry, **options)

    def append(self, key: Text, value: Text, **options: Unpack[CasOptions]) -> R_co:
        """Appends bytes to the stored value; `ServerError` with `NOT_FOUND` without one."""
        return self._change(Operation.APPEND, key, value, **options)

    def prepend(self, key: Text, value: Text, **options: Unpack[CasOptions]) -> R_co:
        """Adds bytes in front of the stored value; `ServerError` with `NOT_FOUND` without one."""
        return self._change(Operation.PREPEND, key, value, **options)

    def touch(self, key: Text, expiry: int, **options: Unpack[CasOptions]) -> R_co:
        """Gives the item a new expiry time, in seconds since 1970; 0 for never."""
        return self._change(Operation.TOUCH, key, expiry=expiry, **options)
