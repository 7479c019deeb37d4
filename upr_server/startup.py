"""The start of the server: the disk's processes first, and the rest while those start.

This imports only what starts them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

import upr_kernel
from upr_protocol.concurrency import background_nursery, first_failure
from upr_protocol.partition_map import NODE_NAME
from upr_server.config import ServerConfig
from upr_server.runtime import AuditLog, essential, file_limit, is_loopback, run_until_signal
from upr_server.storage.errors import DiskFullError
from upr_server.storage.processes import open_store

if TYPE_CHECKING:
    from upr_server.app import Server

COLLECT_S: Final = 0.1
"""The time between two collections of young objects: one takes 5 µs where there is nothing."""

OTHER_FILES: Final = 256
"""Open files besides the connections that are served: some 20 of the server's own, 100 connections
that are refused at a time (`REFUSALS_MAX`), and those to other nodes."""

log = structlog.get_logger(__name__)


@asynccontextmanager
async def started_server(config: ServerConfig) -> AsyncIterator[Server]:
    """A server over its data directory, for as long as the context; in all else like
    `running_server`."""
    async with open_store(config.data_path, bytes_max=config.disk_bytes_max) as store:
        # Importing takes this process as long as the others need to start. It can hold up nobody,
        # as nobody is served yet.
        from upr_server.app import running_server

        audit_log = AuditLog(config.audit_path, time.time)
        async with (
            running_server(config, store, audit_log=audit_log) as server,
            background_nursery() as nursery,
        ):
            nursery.start_soon(essential(_collect_young_objects), server)
            yield server


async def _collect_young_objects(server: Server) -> None:
    """Has Python's collector look at young objects often. Where a publisher's changes come as fast
    as older ones go to disk, it would begin late, as `YoungObjects` says."""
    while True:
        await trio.sleep(COLLECT_S)
        server.connections.resources.young_objects.collect()


async def serve(config: ServerConfig, on_listening: Callable[[Server], None]) -> str:
    """Runs a server until SIGINT or SIGTERM. A second one, while peers still take what is queued,
    drops them at once.

    Args:
        config: What it is told.
        on_listening: Called once it listens.

    Returns:
        Why mutations that were only in memory are lost; empty if everything is on disk.

    Raises:
        StorageError: The disk cannot be used, or failed.
    """
    files_max, connections_wanted = file_limit(), config.connections_max
    # Without this limit, connections beyond it would wait without an answer, instead of being told
    # that there are too many.
    connections_max = min(connections_wanted, connections_within(files_max))
    config = msgspec.structs.replace(config, connections_max=connections_max)
    servers: list[Server] = []

    def on_running(server: Server) -> None:
        servers.append(server)
        # Some 9,000 objects were made since the imports. They are looked at before anybody waits.
        server.connections.resources.young_objects.start()
        server.connections.resources.turn_timer.start()
        on_listening(server)
        log.info(
            "listening",
            host=server.host,
            port=server.port,
            encrypted=server.certificates is not None,
        )
        if connections_max < connections_wanted:
            log.warning(
                "fewer connections than connections_max: the system allows too few open files "
                "(ulimit -Hn)",
                connections=connections_max,
                connections_max=connections_wanted,
                open_files=files_max,
            )
        _warn_of_settings(server, config)

    reason, is_complete = "", False
    try:
        is_complete = await run_until_signal(_daemon(config), on_running)
        reason = "stopped at once by a second signal"
    except* DiskFullError as errors:
        reason = f"stopped on a full disk: {first_failure(errors)}"
        if not _unsaved_mutations(servers):
            raise
    unsaved = _unsaved_mutations(servers)
    if is_complete or not unsaved:
        return ""
    log.error("mutations in memory are lost", reason=reason, mutations=unsaved)
    return reason


def _warn_of_settings(server: Server, config: ServerConfig) -> None:
    """Logs what an operator may not know, or not want."""
    if upr_kernel.BUILD != upr_kernel.NATIVE:
        log.warning(
            "the kernel runs in Python, and is slower than in C: install a C compiler, and then "
            "upr-server again",
            kernel=upr_kernel.BUILD,
        )
    if not NODE_NAME.fullmatch(server.partition_maps.node):
        log.warning(
            "no partition map can name this server: set node to 1 to 100 letters, digits, dots, "
            "underscores or hyphens before it gets replicas",
            node=server.partition_maps.node,
        )
    if config.insecure_no_authentication and not is_loopback(server.host):
        log.warning(
            "insecure_no_authentication: strangers in this network may be able to read and change "
            "everything",
            host=server.host,
        )


def connections_within(files_max: int) -> int:
    """How many connections may be open where `files_max` files may: if these are few, half."""
    return max(files_max - OTHER_FILES, files_max // 2)


@asynccontextmanager
async def _daemon(config: ServerConfig) -> AsyncIterator[Server]:
    """A server that reads its certificate again on SIGHUP."""
    async with started_server(config) as server, background_nursery() as nursery:
        if server.certificates is None:
            yield server
            return
        with trio.open_signal_receiver(signal.SIGHUP) as hangups:
            nursery.start_soon(server.certificates.reload_at, hangups)
            yield server


def _unsaved_mutations(servers: Sequence[Server]) -> dict[str, int]:
    """How many mutations of each bucket are in memory only, or were received and dropped; without
    the buckets that have none."""
    counts = {
        bucket.name: disk.flusher.lag_mutations
        + server.partition_maps.dropped_mutations(bucket.name)
        for server in servers
        for bucket, disk in server.catalog.disks.items()
    }
    return {name: count for name, count in counts.items() if count}
