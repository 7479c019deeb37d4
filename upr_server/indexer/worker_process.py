"""A slice in a worker process, which is started again when it ends or hangs."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import structlog
import trio

from upr_protocol.concurrency import first_failure
from upr_server.indexer.index_file import DiskFullError
from upr_server.indexer.index_reader import IndexReader
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.short_scan import is_short
from upr_server.indexer.slice_link import LinkedSlice
from upr_server.indexer.slices import (
    SliceAnswer,
    SliceId,
    SliceMissingError,
    SliceObserver,
    SliceScan,
)
from upr_server.indexer.worker_messages import (
    AskStop,
    DefineIndexes,
    FromWorker,
    MessageStream,
    WorkerSettings,
)

log = structlog.get_logger(__name__)

RESTART_S: Final = 0.5
"""The pause before a worker is started again. It doubles each time that a worker ends young."""

RESTART_S_MAX: Final = 30.0
"""The longest such pause."""

YOUNG_S: Final = 60.0
"""A worker that ends younger than this may end for a reason that the next one meets, too."""

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


class WorkerProcess(LinkedSlice):
    """Holds a slice in a process of its own. One that hangs is killed.

    Args:
        slice_id: The slice.
        config: The indexer's configuration, as JSON.
        pool_bytes: The worker's memory pool.
        start_worker: Starts a worker for as long as a context, and gives the stream to it.
        data_dir: Where the indexer's slices are kept, if short scans may read the worker's files
            here; None if they may not, as the worker is in this process.

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
        data_dir: Path | None = None,
    ) -> None:
        super().__init__(slice_id)
        self._start_worker = start_worker
        self._start = WorkerSettings(config, slice_id.index, slice_id.count, pool_bytes)
        self._reader = None if data_dir is None else IndexReader(data_dir / slice_id.folder)
        self._definitions: Mapping[IndexName, IndexDefinition] = {}
        self._is_stopping = False
        # How many workers in succession have ended young.
        self._ended_young = 0
        self._trouble = ""
        """Why the last worker could not go on; empty if it has not said."""

    async def run(self, observer: SliceObserver) -> None:
        """Keeps a worker running.

        Raises:
            UprError: The worker cannot go on, for a reason that would be the same for another one.
        """
        while True:
            began_at = trio.current_time()
            await self._run_worker(observer)
            # A worker that was killed may have left files that the next one removes.
            self.close()
            if self._is_stopping:
                return
            is_young = trio.current_time() - began_at < YOUNG_S
            self._ended_young = self._ended_young + 1 if is_young else 0
            pause_s = min(RESTART_S * 2 ** min(max(self._ended_young - 1, 0), 16), RESTART_S_MAX)
            log.warning(
                "a worker has ended; starting it again",
                slice=str(self.slice_id),
                ended_young=self._ended_young,
                trouble=self._trouble,
                pause_s=pause_s,
            )
            await trio.sleep(pause_s)

    async def _run_worker(self, observer: SliceObserver) -> None:
        """Runs one worker until it ends."""
        self._trouble = ""
        try:
            async with self._start_worker() as stream:
                await self._talk(MessageStream(stream, FromWorker), observer, self._start, START_S)
        except* DiskFullError as errors:
            # It could not open its indexes. The next worker can, once there is room.
            self._trouble = str(first_failure(errors))
        except* OSError as errors:
            # Just now there may be no memory for a process, or too many of them, or no open file
            # left. The other slices need not end for that.
            reason = str(first_failure(errors))
            log.warning("a worker could not be started", slice=str(self.slice_id), reason=reason)

    async def stop(self) -> None:
        """Tells the worker to apply what it has read, and to end."""
        self._is_stopping = True
        with suppress(SliceMissingError):
            await self._ask(AskStop())

    def close(self) -> None:
        """Closes the files that scans read here."""
        if self._reader is not None:
            self._reader.close()

    @property
    def title(self) -> str:
        """The slice."""
        return str(self.slice_id)

    def _reason(self) -> str:
        """Why there is no worker."""
        if self._trouble:
            return self._trouble
        if self._ended_young < 2:
            return "its worker is being started"
        return (
            f"{self._ended_young} workers in succession have ended within {YOUNG_S:g} s of their "
            "start; the indexer's log says why"
        )

    def define(self, definitions: Mapping[IndexName, IndexDefinition]) -> None:
        """Says which indexes there shall be."""
        self._definitions = definitions
        if self._reader is not None:
            self._reader.keep_only(definitions)
        if self._frames is not None:
            self._frames.queue_message(DefineIndexes(list(definitions.items())))

    async def scan(self, scan: SliceScan) -> SliceAnswer:
        """Answers a query; see `SliceHolder.scan`. A short scan is read here, if the worker runs
        and has answered a scan of the index before."""
        reader = self._reader
        if reader is None or self._frames is None or not is_short(scan):
            return await super().scan(scan)
        answer = reader.answer(scan)
        if answer is not None:
            await trio.lowlevel.checkpoint()
            return answer
        definitions = self._definitions
        answer = await super().scan(scan)
        if definitions is self._definitions and definitions.get(scan.name) == scan.definition:
            # Otherwise the answer may be of an index that was dropped, before or meanwhile.
            reader.add(scan, answer.opening)
        return answer
