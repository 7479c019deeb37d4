"""The indexer as a daemon: indexes, HTTP, and an end in order."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import hypercorn
import structlog
import trio
from hypercorn.trio import serve as serve_http

from upr_protocol.errors import UprError
from upr_server.indexer.api import application
from upr_server.indexer.config import Config
from upr_server.indexer.indexer import Indexer, running_indexer

log = structlog.get_logger(__name__)


class ListenError(UprError):
    """The address cannot be listened on."""


@asynccontextmanager
async def serving(indexer: Indexer, listen: str) -> AsyncIterator[str]:
    """Answers over HTTP for as long as the context; gives `http://HOST:PORT`.

    Raises:
        ListenError: The address cannot be listened on.
    """
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), int(port)), family=family)
    except OSError as error:
        raise ListenError(f"{listen} cannot be listened on: {error.strerror}") from error
    settings = hypercorn.Config()
    settings.bind = [f"fd://{listener.detach()}"]
    settings.errorlog = logging.getLogger("hypercorn.error")
    settings.graceful_timeout = 1.0
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        app = application(indexer)
        start = partial(serve_http, app, settings, shutdown_trigger=stop.wait, mode="asgi")  # type: ignore[arg-type]
        (url, *_) = await nursery.start(start)
        yield url
        stop.set()


async def serve(config: Config, on_listening: Callable[[str], None]) -> None:
    """Runs an indexer until SIGINT or SIGTERM. Then what was read is applied; a second signal ends
    it at once.

    Args:
        config: What it is told.
        on_listening: Called with `http://HOST:PORT` once it answers.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            async with (
                running_indexer(config.settings()) as indexer,
                serving(indexer, config.listen) as url,
            ):
                on_listening(url)
                log.info("listening", url=url)
                log.info("stopping", signal=await _next(signals))
                nursery.start_soon(_hurry, signals, nursery.cancel_scope)
            nursery.cancel_scope.cancel()
    log.info("stopped")


async def _next(signals: AsyncIterator[int]) -> str:
    return signal.Signals(await anext(signals)).name


async def _hurry(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    log.warning("stopping at once", signal=await _next(signals))
    scope.cancel()
