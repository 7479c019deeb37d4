"""The store: what the server asks of its disk, behind which there is LMDB or a simulated disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

import trio

from upr_server.storage.calls import CloseBucket, CreateBucketFiles, DeleteBucketFiles, StoreCall
from upr_server.storage.errors import StoreFailedError

Answer = TypeVar("Answer")


class Store(ABC):
    """The disk of one node.

    Calls that change something are carried out one after the other, in the order in which they were
    made. Reads run beside them, and see everything that was committed before they were asked for.

    Attributes:
        failed: Set when the store has failed: nothing more is acknowledged, and the server stops.
        failure: Why; empty before.
    """

    def __init__(self) -> None:
        self.failed = trio.Event()
        self.failure = ""

    async def ask(self, call: StoreCall[Answer]) -> Answer:
        """Has a call carried out; `calls` lists them. On cancellation it may be carried out
        nevertheless.

        Raises:
            StorageError: It was not carried out. After `StoreFailedError` of a call that changes
                something nobody knows what it changed, and no further change is acknowledged.
        """
        if call.is_read:
            return await self.execute(call)
        self.check_not_failed()
        try:
            answer = await self.execute(call)
        except StoreFailedError as error:
            self.fail(str(error))
            raise
        # A call that waited behind the one that failed was carried out, and nobody knows what that
        # is worth: the system reports a failed write once, and then goes on as if it had succeeded.
        self.check_not_failed()
        if isinstance(call, CreateBucketFiles | DeleteBucketFiles):
            # The side that reads may have the deleted files open, or open them again in a read that
            # races the deletion; so it closes them afterwards, and not before. Otherwise the disk
            # would not get their space back, and a new bucket of this name would be read from them.
            await self.execute(CloseBucket(call.name))
        return answer

    @abstractmethod
    async def execute(self, call: StoreCall[Answer]) -> Answer:
        """Has a call carried out where the disk is, whatever has failed before."""

    def fail(self, reason: str) -> None:
        """From here on nothing is acknowledged. The first reason is kept."""
        if not self.failed.is_set():
            self.failure = reason
            self.failed.set()

    def check_not_failed(self) -> None:
        """Raises `StoreFailedError` once the store has failed."""
        if self.failed.is_set():
            raise StoreFailedError(self.failure)
