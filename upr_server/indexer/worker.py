"""A worker process: it has one slice, and answers the indexer's questions to it."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing
from functools import partial
from typing import Any, Final

import msgspec
import trio

from upr_protocol.concurrency import first_failure
from upr_protocol.errors import UprError
from upr_server.indexer.config import IndexerConfig
from upr_server.indexer.directory import retry_while_in_use
from upr_server.indexer.indexer import STOP_S, SWITCH_INTERVAL_S
from upr_server.indexer.pipeline import worker_thread
from upr_server.indexer.pool import MemoryPool
from upr_server.indexer.slice import Slice
from upr_server.indexer.slice_server import SliceServer
from upr_server.indexer.slices import CatalogReport, SliceId
from upr_server.indexer.worker_messages import (
    CancelQuestion,
    CatalogRead,
    DefineIndexes,
    MessageStream,
    NumberedQuestion,
    Question,
    ToWorker,
    WorkerEnds,
    WorkerSettings,
    failure_of,
)
from upr_server.runtime import collect_rarely, set_time_slice, set_up_logging

STOP_MARGIN_S: Final = 1.0
"""The indexer waits for so much longer than the worker applies what it has read."""


class SliceWorker:
    """Answers questions to a slice in this process.

    Args:
        frames: The socket to the indexer.
        part: The slice.
        pool: The memory pool of this process.
    """

    def __init__(self, frames: MessageStream, part: Slice, pool: MemoryPool) -> None:
        self._frames = frames
        self._slice = part
        self._server = SliceServer(frames, part, pool, Question, STOP_S - STOP_MARGIN_S)

    async def run(self, nursery: trio.Nursery) -> None:
        """Keeps the slice up to date; tells the indexer if that cannot go on."""
        try:
            await self._slice.run(self)
        except* (UprError, OSError) as errors:
            failure = failure_of(first_failure(errors))
            await self._frames.queue_message(WorkerEnds(failure)).wait()
            nursery.cancel_scope.cancel()

    def slice_restarted(self, index: int) -> None:
        """The indexer knows: it has started the worker."""

    def catalog_read(self, index: int, report: CatalogReport) -> None:  # noqa: ARG002  there is one slice
        """Sends a report on."""
        self._frames.queue_message(CatalogRead(report))

    def handle_message(
        self, message: DefineIndexes | NumberedQuestion | CancelQuestion, nursery: trio.Nursery
    ) -> None:
        """Does what a message says."""
        if isinstance(message, DefineIndexes):
            self._slice.define(dict(message.definitions))
        else:
            self._server.handle_message(message, nursery)


async def _new_slice(start: WorkerSettings, config: IndexerConfig, pool: MemoryPool) -> Slice:
    slice_id = SliceId(start.index, start.count)
    settings = config.settings().slice_settings()
    return await retry_while_in_use(partial(Slice, slice_id, settings, pool, worker_thread()))


async def serve_slice(stream: trio.abc.Stream, on_config: Callable[[IndexerConfig], None]) -> None:
    """Runs a worker until the indexer says so, or has gone.

    Args:
        stream: The stream to the indexer.
        on_config: Called with the configuration.
    """
    frames = MessageStream(stream, ToWorker)
    async with aclosing(frames.received_messages()) as messages:
        start = await anext(messages, None)
        # There is none if the indexer has gone already.
        if start is not None:
            config = msgspec.json.decode(start.config, type=IndexerConfig)
            on_config(config)
            await _serve_messages(frames, messages, start, config)


async def _serve_messages(
    frames: MessageStream,
    messages: AsyncGenerator[Any, None],
    start: WorkerSettings,
    config: IndexerConfig,
) -> None:
    pool = MemoryPool(start.pool_bytes)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_send, frames, nursery)
        try:
            with closing(await _new_slice(start, config, pool)) as part:
                async with trio.open_nursery() as tasks:
                    worker = SliceWorker(frames, part, pool)
                    tasks.start_soon(worker.run, tasks)
                    tasks.start_soon(_take_all, messages, worker, tasks)
        except (UprError, OSError) as error:
            # The slice cannot be opened.
            await frames.queue_message(WorkerEnds(failure_of(error))).wait()
        nursery.cancel_scope.cancel()


async def _take_all(messages: Any, worker: SliceWorker, nursery: trio.Nursery) -> None:
    async for message in messages:
        worker.handle_message(message, nursery)
    # The indexer has gone.
    nursery.cancel_scope.cancel()


async def _send(frames: MessageStream, nursery: trio.Nursery) -> None:
    try:
        await frames.run_sender()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        nursery.cancel_scope.cancel()


def _set_up(config: IndexerConfig) -> None:
    set_up_logging(config.log_level, config.log_format)
    # No other thread has been started yet; those that are started later are as nice.
    os.nice(config.worker_niceness)


async def _serve(descriptor: int) -> None:
    own_socket = socket.socket(fileno=descriptor)
    own_socket.setblocking(False)
    async with trio.SocketStream(trio.socket.from_stdlib_socket(own_socket)) as stream:
        await serve_slice(stream, _set_up)


def main(descriptor: int) -> None:
    """Runs a worker until the indexer says so, or has gone.

    Args:
        descriptor: The socket to the indexer.
    """
    # Signals that a terminal or a service manager sends to all processes are for the indexer, which
    # stops its workers in order. If it is killed, the socket says so.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A crash in C tells its place on standard error.
    faulthandler.enable(2)
    # Its threads wake each other thousands of times a second, and would interrupt the process that
    # answers scans each time.
    set_time_slice(0, is_batch=True)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    collect_rarely()
    trio.run(_serve, descriptor)
