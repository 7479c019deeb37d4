"""The indexer as a daemon: indexes, HTTP, and an end in order."""

from __future__ import annotations

import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import hypercorn
import msgspec
import structlog
import trio
from hypercorn.trio import serve as serve_http

from upr_protocol.concurrency import background_nursery
from upr_server.indexer.api import application
from upr_server.indexer.config import IndexerConfig
from upr_server.indexer.http_access import HttpAccess
from upr_server.indexer.indexer import Indexer, running_indexer
from upr_server.indexer.worker_process import WorkerProcess
from upr_server.runtime import (
    Certificates,
    certificate_files,
    open_listeners,
    run_until_signal,
)

SEND_TIMEOUT_S: Final = 10.0
"""A connection whose peer takes nothing for so long is closed. Its answer counts in the pool until
then, and a stop waits for it."""

HANDSHAKE_TIMEOUT_S: Final = 10.0
"""How long a handshake of TLS may take."""

log = structlog.get_logger(__name__)


class _HttpSettings(hypercorn.Config):
    """Hypercorn's settings, with certificates that may change while it runs."""

    ssl_handshake_timeout = HANDSHAKE_TIMEOUT_S

    def __init__(self, certificates: Certificates | None) -> None:
        super().__init__()
        self._certificates = certificates

    @property
    def ssl_enabled(self) -> bool:
        """Whether to speak HTTPS only."""
        return self._certificates is not None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        """What OpenSSL needs for all connections."""
        return None if self._certificates is None else self._certificates.context_for_renewals()


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
    settings = _HttpSettings(certificates)
    async with open_listeners(listen) as listeners:
        for listener in listeners:
            # Its connections inherit this. Hypercorn sends without a deadline of its own, and
            # shielded from cancellation.
            listener.socket.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_TIMEOUT_S * 1000)
            )
        settings.bind = [f"fd://{listener.socket.detach()}" for listener in listeners]
    settings.errorlog = logging.getLogger("hypercorn.error")
    settings.graceful_timeout = 1.0
    stop = trio.Event()
    access = HttpAccess(indexer.address, asks_users=asks_users)
    app = application(indexer, access)
    async with background_nursery() as background, trio.open_nursery() as nursery:
        background.start_soon(access.run)
        start = partial(serve_http, app, settings, shutdown_trigger=stop.wait, mode="asgi")  # type: ignore[arg-type]
        (url, *_) = await nursery.start(start)
        yield url
        stop.set()


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
