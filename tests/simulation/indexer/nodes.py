"""The nodes of a simulated indexer: real ones, but for the network and the threads."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import attrs
import lmdb
import structlog
import trio

from tests.indexer.kit import settings
from tests.simulation.bugs.patch import replaced
from tests.simulation.network import PORT, Network, SimulatedStream
from upr_protocol.client import Address, Security
from upr_protocol.errors import BrokenError, UprError
from upr_server.indexer.bucket_histories import BucketHistories
from upr_server.indexer.indexer import Indexer, running_indexer
from upr_server.indexer.link_limit import LinkLimit
from upr_server.indexer.membership import Membership
from upr_server.indexer.node_links import serve_link
from upr_server.indexer.pure.node_map import NodeMap
from upr_server.indexer.replicated_slice import ReplicatedSlice
from upr_server.indexer.web_socket import WebSocketRefusedError

HOST: ContextVar[str] = ContextVar("HOST")
"""The host whose task this is."""

LINKS_MAX: Final = 100

_ACCEPTED: Final = b"\n"
"""What a node says first on a link that it accepts; otherwise the reason, in a line."""

LINE_BYTES_MAX: Final = 10_000


@attrs.define(eq=False)
class IndexerNode:
    """A node of the indexer.

    Attributes:
        place: Its place in the map.
        node_map: The map.
        url: The bucket.
        folder: Where it keeps its slices; what is there survives a kill.
        network: The network.
        indexer: The indexer; None while it does not run.
        is_paused: Whether its links carry nothing.
    """

    place: int
    node_map: NodeMap
    url: str
    folder: Path
    network: Network
    indexer: Indexer | None = None
    is_paused: bool = False
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _ended: trio.Event = attrs.field(factory=trio.Event)

    @property
    def host(self) -> str:
        """The host's name."""
        return f"n{self.place}"

    async def start(self, nursery: trio.Nursery) -> None:
        """Starts it with what its folder has, and waits until it answers."""
        self.network.come_back(self.host)
        self._scope, self._ended = trio.CancelScope(), trio.Event()
        await nursery.start(self._hold)

    async def _hold(self, task_status: trio.TaskStatus[None]) -> None:
        HOST.set(self.host)
        own = attrs.evolve(
            settings(self.url, self.folder, slices=self.node_map.slices),
            membership=Membership(
                self.node_map,
                self.place,
                "b",
                BucketHistories(Address.parse(self.url)),
                LINKS_MAX,
                open_stream=self._open_stream,
            ),
        )
        try:
            with self._scope:
                async with running_indexer(own) as indexer, self._listening(indexer):
                    self.indexer = indexer
                    task_status.started()
                    await trio.sleep_forever()
        finally:
            self.indexer = None
            self._ended.set()

    async def kill(self, *, silently: bool) -> None:
        """Ends it as a crash of its process, or of its machine, would."""
        self.network.crash(self.host, silently=silently)
        self._scope.cancel()
        await self._ended.wait()

    def lose_folder(self) -> None:
        """It comes back with an empty folder."""
        assert self.indexer is None
        shutil.rmtree(self.folder)

    # Links.

    async def _open_stream(self, url: str, _security: Security) -> SimulatedStream:
        """Opens a link, as `open_web_socket` does."""
        host = urlsplit(url).hostname or ""
        stream = await self.network.dial(self.host, Address(host, PORT))
        assert isinstance(stream, SimulatedStream)
        try:
            await stream.send_all(url.encode() + b"\n")
            answer = await _line(stream)
            if answer != _ACCEPTED:
                raise WebSocketRefusedError(answer.decode().strip())
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise BrokenError(f"{host} has closed the connection") from error
        except BaseException:
            await stream.aclose()
            raise
        return stream

    @asynccontextmanager
    async def _listening(self, indexer: Indexer) -> AsyncIterator[None]:
        listener, limit = self.network.listen(self.host), LinkLimit(LINKS_MAX)

        async def accept_all(nursery: trio.Nursery) -> None:
            while True:
                stream = await listener.accept()
                nursery.start_soon(_serve, stream, indexer, limit)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept_all, nursery)
                yield
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await listener.aclose()


async def _line(stream: SimulatedStream) -> bytes:
    """A line, with its end. Nothing comes behind it before it is answered."""
    data = b""
    while not data.endswith(b"\n") and len(data) < LINE_BYTES_MAX:
        more = await stream.receive_some()
        if not more:
            return data
        data += more
    return data


async def _serve(stream: SimulatedStream, indexer: Indexer, limit: LinkLimit) -> None:
    """Answers a link as the API does."""
    with ExitStack() as stack:
        try:
            parts = urlsplit((await _line(stream)).decode().strip())
            query, index = parse_qs(parts.query), int(parts.path.rpartition("/")[2] or 0)
            assert indexer.membership is not None
            try:
                await indexer.membership.check(index, query["map"][0], query["bucket"][0])
                stack.enter_context(limit.link_of(""))
            except UprError as error:
                await stream.send_all(f"{error}\n".encode())
                return
            part = indexer.holders[index]
            assert isinstance(part, ReplicatedSlice)
            await stream.send_all(_ACCEPTED)
            await serve_link(stream, part, indexer.pool)
        except (trio.BrokenResourceError, trio.ClosedResourceError, KeyError):
            return
        finally:
            await stream.aclose()


async def _in_the_loop(function: Callable[..., Any], *arguments: Any, **_options: Any) -> Any:
    """What a thread does, without one: it can be cancelled before it begins, and not after."""
    await trio.lowlevel.checkpoint()
    result = function(*arguments)
    await trio.lowlevel.cancel_shielded_checkpoint()
    return result


@contextmanager
def in_one_loop(network: Network) -> Iterator[None]:
    """For as long as the context, whoever connects uses the simulated network, and nobody uses
    threads or waits for a disk."""

    async def connect(host: str, port: int, **_options: Any) -> trio.abc.Stream:
        return await network.dial(HOST.get(), Address(host, port))

    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        with (
            replaced(trio, "open_tcp_stream", connect),
            replaced(trio.to_thread, "run_sync", _in_the_loop),
            replaced(trio.from_thread, "check_cancelled", lambda: None),
            replaced(lmdb, "open", partial(lmdb.open, sync=False)),
            replaced(os, "fsync", lambda _file: None),
        ):
            yield
    finally:
        structlog.configure(**before)
