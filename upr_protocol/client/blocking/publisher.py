"""Publishing in programs that block: the Trio client's publisher, in a thread of its own.

Batches cross to the thread a bundle at a time and without waiting. The caller waits only for room,
and at the end. Answered batches lie in a queue of their call until the caller looks, between two
bundles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager

import trio

from upr_protocol.chunk import Chunk
from upr_protocol.client.blocking.trio_thread import TrioThread
from upr_protocol.client.core.batcher import next_bundle
from upr_protocol.client.core.partition_batches import BATCH_OVERHEAD_BYTES, Batch
from upr_protocol.client.core.retry import RetryState
from upr_protocol.client.trio.publisher import Publisher
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId


class _PublisherInThread:
    """The half that lives in the thread. It does not refer to the other half, so that a client that
    nobody uses any more ends its thread."""

    def __init__(
        self,
        new_publisher: Callable[[], AbstractAsyncContextManager[Publisher]],
        retry: RetryState,
    ) -> None:
        self._new_publisher = new_publisher
        self._retry = retry
        self._publisher: Publisher | None = None
        self._error: UprError | None = None
        self._opened = trio.Event()

    @property
    def has_failed(self) -> bool:
        publisher = self._publisher
        return self._error is not None or (publisher is not None and publisher.failure is not None)

    async def run(self) -> None:
        try:
            while True:
                await self._run_once()
        except UprError as error:
            self._error = error
            self._opened.set()

    async def _run_once(self) -> None:
        """Has a publisher until that fails. After one that never connected there is another, if the
        time allows: the server may be away for a moment."""
        try:
            async with self._new_publisher() as self._publisher:
                self._opened.set()
                await trio.sleep_forever()
        except UprError as error:
            if self._opened.is_set():
                raise
            await trio.sleep(self._retry.wait_after_failure_s(error, trio.current_time()))

    async def wait_opened(self) -> None:
        await self._opened.wait()
        self._require_publisher()

    def publish(
        self,
        batches: Sequence[tuple[PartitionId, Chunk]],
        on_answer: Callable[[Batch], None],
    ) -> None:
        try:
            self._require_publisher().publish_nowait(batches, on_answer)
        except UprError as error:
            self._error = error  # the caller meets it when it waits

    async def wait_for_room(self) -> None:
        await self._require_publisher().wait_for_room()
        self._require_publisher()

    async def flush(self) -> None:
        await self._require_publisher().flush()
        self._require_publisher()

    def _require_publisher(self) -> Publisher:
        if self._error is not None:
            raise self._error
        assert self._publisher is not None
        return self._publisher


class BlockingPublisher:
    """A `Publisher` for callers that block. After an exception, close it and make a new one."""

    def __init__(
        self,
        new_publisher: Callable[[], AbstractAsyncContextManager[Publisher]],
        buffer_bytes: int,
        retry: RetryState,
    ) -> None:
        self._buffer_bytes = buffer_bytes
        self._thread = TrioThread()
        self._in_thread = _PublisherInThread(new_publisher, retry)
        self._thread.run_soon(self._thread.nursery.start_soon, self._in_thread.run)

    @property
    def has_failed(self) -> bool:
        """Whether it is of no more use, as the server was away for too long, perhaps while nobody
        published anything."""
        return self._in_thread.has_failed

    def close(self) -> None:
        """Closes the connections. Batches without an answer may be carried out or not."""
        self._thread.close()

    def publish_each(
        self,
        batches: Iterable[tuple[PartitionId, Chunk]],
        on_answer: Callable[[Batch], None],
    ) -> None:
        """Publishes all batches and waits until they are answered; see
        `BlockingClient.publish_each`. The source and `on_answer` may call it again."""
        self._thread.run(self._in_thread.wait_opened)
        # Each call has its own: a call within this one must not be told of the batches of this one.
        answered_batches = deque[Batch]()
        unanswered_bytes = 0
        source = iter(batches)

        def report() -> None:
            """Tells the caller of the batches that are answered."""
            nonlocal unanswered_bytes
            while answered_batches:
                batch = answered_batches.popleft()
                unanswered_bytes -= batch.nbytes
                on_answer(batch)

        while bundle := next_bundle(source):
            unanswered_bytes += sum(chunk.nbytes + BATCH_OVERHEAD_BYTES for _, chunk in bundle)
            self._thread.run_soon(self._in_thread.publish, bundle, answered_batches.append)
            report()
            if unanswered_bytes >= self._buffer_bytes:
                self._thread.run(self._in_thread.wait_for_room)
                report()
        self._thread.run(self._in_thread.flush)
        report()
