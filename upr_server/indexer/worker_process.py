"""A slice in a worker process, which is started again when it ends or hangs."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import Any, Final

import attrs
import msgspec
import structlog
import trio

from upr_protocol.ids import PartitionId, SeqNo
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.slices import (
    SliceAnswer,
    SliceId,
    SliceListener,
    SliceMissingError,
    SliceScan,
    SliceStatus,
)
from upr_server.indexer.worker_messages import (
    Answered,
    Ask,
    Cancel,
    Confirm,
    Define,
    Ended,
    Failure,
    Frames,
    FromWorker,
    Ping,
    Question,
    Release,
    Reported,
    Scan,
    Start,
    Statistics,
    Status,
    Stop,
    error_of,
)

log = structlog.get_logger(__name__)

RESTART_S: Final = 0.5
"""The pause before a worker is started again. It doubles each time that a worker ends young."""

RESTART_S_MAX: Final = 30.0
"""The longest such pause."""

YOUNG_S: Final = 60.0
"""A worker that ends younger than this may end for a reason that the next one meets, too."""

PING_S: Final = 1.0
"""The pause between two questions whether a worker is alive."""

HANG_S: Final = 10.0
"""A worker that has not answered such a question for so long is killed. Its event loop answers it
while a thread indexes."""

START_S: Final = 60.0
"""The first answer may take so long: on a machine that is busy, to start takes many seconds, and
would take as long again."""

_MAIN: Final = "import sys; from upr_server.indexer.worker import main; main(int(sys.argv[1]))"


@asynccontextmanager
async def worker_process() -> AsyncIterator[trio.abc.Stream]:
    """A worker, and the socket to it, for as long as the context; it is killed then, unless it has
    ended."""
    own_socket, worker_socket = socket.socketpair()
    own_socket.setblocking(False)
    async with trio.SocketStream(trio.socket.from_stdlib_socket(own_socket)) as stream:
        with worker_socket:
            process = await trio.lowlevel.open_process(
                # Without -P, modules in the working directory would be imported.
                (sys.executable, "-P", "-c", _MAIN, str(worker_socket.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(worker_socket.fileno(),),
            )
        try:
            yield stream
        finally:
            with trio.CancelScope(shield=True):
                process.kill()
                await process.wait()


@attrs.define(eq=False)
class _Call:
    """A question that waits for its answer.

    Attributes:
        is_answered: Set when there is an answer.
        answer: What it asked for, in MessagePack.
        failure: Why there is none.
        is_lost: Whether the worker has gone.
    """

    is_answered: trio.Event = attrs.field(factory=trio.Event)
    answer: bytes = b""
    failure: Failure | None = None
    is_lost: bool = False


class WorkerProcess:
    """Holds a slice in a process of its own.

    Args:
        slice_id: Which one.
        config: The indexer's configuration, as JSON.
        pool_bytes: The worker's memory pool.
        start_worker: Starts a worker for as long as a context, and gives the stream to it.

    Attributes:
        slice_id: The slice.
    """

    def __init__(
        self,
        slice_id: SliceId,
        *,
        config: bytes,
        pool_bytes: int,
        start_worker: Callable[[], AbstractAsyncContextManager[trio.abc.Stream]] = worker_process,
    ) -> None:
        self.slice_id = slice_id
        self._start_worker = start_worker
        self._start = Start(config, slice_id.index, slice_id.count, pool_bytes)
        self._frames: Frames | None = None
        self._calls: dict[int, _Call] = {}
        self._call_count = 0
        self._is_stopping = False
        # How many workers in succession have ended young.
        self._ended_young = 0

    # The process.

    async def run(self, listener: SliceListener) -> None:
        """Keeps a worker running.

        Raises:
            UprError: The worker cannot go on, for a reason that would be the same for another one.
        """
        while True:
            began_at = trio.current_time()
            async with self._start_worker() as stream:
                self._frames = Frames(stream, FromWorker)
                try:
                    await self._talk(self._frames, listener)
                finally:
                    self._frames = None
                    self._lose_calls()
            if self._is_stopping:
                return
            is_young = trio.current_time() - began_at < YOUNG_S
            self._ended_young = self._ended_young + 1 if is_young else 0
            pause_s = min(RESTART_S * 2 ** min(max(self._ended_young - 1, 0), 16), RESTART_S_MAX)
            log.warning(
                "a worker has ended; starting it again",
                slice=str(self.slice_id),
                ended_young=self._ended_young,
                pause_s=pause_s,
            )
            await trio.sleep(pause_s)

    async def _talk(self, frames: Frames, listener: SliceListener) -> None:
        """Talks to a worker until it has gone, or hangs."""
        frames.put(self._start)
        listener.began(self.slice_id.index)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, frames, nursery.cancel_scope)
            nursery.start_soon(self._keep_pinging, nursery.cancel_scope)
            async with aclosing(frames.received()) as messages:
                async for message in messages:
                    self._take(message, listener)
            nursery.cancel_scope.cancel()

    def _lose_calls(self) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.is_lost = True
            call.is_answered.set()

    async def _send(self, frames: Frames, scope: trio.CancelScope) -> None:
        try:
            await frames.send_all()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            scope.cancel()

    async def _keep_pinging(self, scope: trio.CancelScope) -> None:
        limit_s = START_S
        while True:
            with trio.move_on_after(limit_s) as waiting:
                await self._ask(Ping())
            limit_s = HANG_S
            if waiting.cancelled_caught:
                log.warning("a worker does not answer; killing it", slice=str(self.slice_id))
                scope.cancel()
            await trio.sleep(PING_S)

    def _take(self, message: FromWorker, listener: SliceListener) -> None:
        match message:
            case Reported(report):
                listener.report(self.slice_id.index, report)
            case Answered(number, answer, failure):
                call = self._calls.pop(number, None)
                if call is not None:
                    call.answer, call.failure = answer, failure
                    call.is_answered.set()
            case Ended(failure):
                raise error_of(failure)

    async def stop(self) -> None:
        """Has the worker apply what it has read, and end."""
        self._is_stopping = True
        with suppress(SliceMissingError):
            await self._ask(Stop())

    def close(self) -> None:
        """Nothing is left to close."""

    # Questions.

    async def _ask(self, question: Question) -> bytes:
        """What the worker answers, in MessagePack."""
        if self._frames is None:
            # Where the indexer is being cancelled, its workers may have ended before their callers.
            await trio.lowlevel.checkpoint_if_cancelled()
            raise SliceMissingError(self.slice_id, f"does not run: {self._reason()}")
        frames, call = self._frames, _Call()
        self._call_count += 1
        number = self._call_count
        self._calls[number] = call
        frames.put(Ask(number, msgspec.json.encode(question)))
        try:
            await call.is_answered.wait()
        finally:
            if self._calls.pop(number, None) is not None:
                frames.put(Cancel(number))
        if call.is_lost:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise SliceMissingError(self.slice_id, "does not run: its worker has ended")
        if call.failure is not None:
            raise error_of(call.failure)
        return call.answer

    def _reason(self) -> str:
        """Why there is no worker."""
        if self._ended_young < 2:
            return "its worker is being started"
        return (
            f"{self._ended_young} workers in succession have ended within {YOUNG_S:g} s of their "
            "start; the indexer's log says why"
        )

    def define(self, definitions: Mapping[IndexName, IndexDefinition]) -> None:
        """Says which indexes there shall be."""
        if self._frames is not None:
            self._frames.put(Define(list(definitions.items())))

    async def confirm(self) -> int:
        """See `SliceHolder.confirm`."""
        return msgspec.msgpack.decode(await self._ask(Confirm()), type=int)

    async def scan(self, scan: SliceScan) -> SliceAnswer:
        """Answers a query; see `SliceHolder.scan`."""
        return msgspec.msgpack.decode(await self._ask(Scan(scan)), type=SliceAnswer)

    async def release(self, token: str) -> None:
        """Lets a moment go.

        Raises:
            MomentGoneError: It is not held.
        """
        await self._ask(Release(token))

    async def status(
        self, name: IndexName, definition: IndexDefinition, newest_seqs: Mapping[PartitionId, SeqNo]
    ) -> SliceStatus:
        """What can be told of an index."""
        seqs = {
            int(partition): int(seq)
            for partition, seq in newest_seqs.items()
            if self.slice_id.has(partition)
        }
        answer = await self._ask(Status(name, definition, seqs))
        return msgspec.msgpack.decode(answer, type=SliceStatus)

    async def statistics(self) -> dict[str, Any]:
        """Figures of the slice, and of the worker's memory."""
        answer = await self._ask(Statistics())
        return msgspec.msgpack.decode(answer, type=dict[str, Any])
