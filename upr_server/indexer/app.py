"""The indexer as a daemon: indexes, HTTP, and an end in order."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import structlog
import trio

from upr_protocol.concurrency import background_nursery
from upr_server.indexer.api import application
from upr_server.indexer.config import IndexerConfig
from upr_server.indexer.http_access import HttpAccess
from upr_server.indexer.http_server import answering_over_http
from upr_server.indexer.indexer import Indexer, running_indexer
from upr_server.indexer.worker_process import WorkerProcess
from upr_server.runtime import (
    Certificates,
    certificate_files,
    open_listeners,
    run_until_signal,
)

log = structlog.get_logger(__name__)


@asynccontextmanager
async def serving(
    indexer: Indexer,
    listen: str,
    certificates: Certificates | None = None,
    *,
    asks_users: bool = True,
) -> AsyncIterator[str]:
    """Answers over HTTP for as long as the context; gives `http://HOST:PORT`.

    Args:
        indexer: What answers.
        listen: Where to listen, `HOST:PORT`.
        certificates: What to show over HTTPS; None to answer in the clear.
        asks_users: Whether clients must prove who they are, where the server has users.

    Raises:
        ListenError: The address cannot be listened on.
    """
    access = HttpAccess(indexer.address, asks_users=asks_users)
    tls = None if certificates is None else certificates.context_for_renewals()
    async with (
        open_listeners(listen) as listeners,
        background_nursery() as background,
        answering_over_http(application(indexer, access), listeners, tls),
    ):
        background.start_soon(access.run)
        host, port = listeners[0].socket.getsockname()[:2]
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def serve(config: IndexerConfig, on_listening: Callable[[str], None]) -> None:
    """Runs an indexer until SIGINT or SIGTERM, and then applies what was read. A second signal ends
    it at once.

    Args:
        config: The configuration.
        on_listening: Called with `http://HOST:PORT`, or `https://…`, once it answers.

    Raises:
        ConfigError: Strangers could scan the indexes, or a setting is wrong.
    """
    config.check_exposure()

    def on_running(url: str) -> None:
        on_listening(url)
        log.info("listening", url=url)

    await run_until_signal(_running(config), on_running)


@asynccontextmanager
async def _running(config: IndexerConfig) -> AsyncIterator[str]:
    files = certificate_files(config)
    certificates = None if files is None else Certificates(files)
    settings = config.settings()
    make_holder = None
    if len(settings.kept_slices) > 1:
        make_holder = partial(
            WorkerProcess,
            config=msgspec.json.encode(config),
            pool_bytes=settings.pool_bytes,
            data_dir=settings.data_dir,
        )
    async with (
        running_indexer(settings, make_holder=make_holder) as indexer,
        serving(
            indexer,
            config.listen,
            certificates,
            asks_users=not config.insecure_no_authentication,
        ) as url,
        background_nursery() as nursery,
    ):
        if certificates is None:
            yield url
            return
        with trio.open_signal_receiver(signal.SIGHUP) as hangups:
            nursery.start_soon(certificates.reload_at, hangups)
            nursery.start_soon(certificates.watch)
            yield url
