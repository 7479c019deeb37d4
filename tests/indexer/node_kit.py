"""Several nodes of an indexer in one event loop, with links in memory that tests cut or stop."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import attrs
import trio
import trio.testing

from tests.indexer.kit import name_of, settings, until
from upr_protocol.client import Address, Security
from upr_protocol.errors import UprError
from upr_server.indexer.bucket_histories import BucketHistories
from upr_server.indexer.indexer import Indexer, running_indexer
from upr_server.indexer.membership import Membership
from upr_server.indexer.moments import MomentGoneError
from upr_server.indexer.node_links import serve_link
from upr_server.indexer.pure.node_map import NodeMap
from upr_server.indexer.replicated_slice import ReplicatedSlice
from upr_server.indexer.slice_scanner import BuildingError, NotFreshError
from upr_server.indexer.slices import SliceMissingError

LINKS_MAX = 100


def urls(count: int) -> tuple[str, ...]:
    return tuple(f"http://n{place}:1" for place in range(count))


class _StoppableStream(trio.abc.Stream):
    """A stream between two nodes that transfers nothing while one of them is stopped."""

    def __init__(self, stream: trio.abc.Stream, nodes: Nodes, places: tuple[int, int]) -> None:
        self._stream = stream
        self._nodes = nodes
        self._places = places

    async def _wait(self) -> None:
        for place in self._places:
            if place in self._nodes.stopped:
                await self._nodes.stopped[place].wait()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._wait()
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data = bytes(await self._stream.receive_some(max_bytes))
        await self._wait()
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()


class Nodes:
    """The nodes of an indexer.

    Args:
        url: The bucket.
        folder: The parent of the nodes' data directories.
        node_map: The nodes and their slices.
        nursery: Runs the nodes.

    Attributes:
        node_map: The nodes and their slices.
        running: By place in the map, the nodes that run.
        stopped: By place, the nodes that send and receive nothing; the event is set when they
            continue.
        buckets: By place, the URL of the bucket, for a node that follows another one than `url`.
    """

    def __init__(self, url: str, folder: Path, node_map: NodeMap, nursery: trio.Nursery) -> None:
        self.node_map = node_map
        self.running: dict[int, Indexer] = {}
        self.stopped: dict[int, trio.Event] = {}
        self.buckets: dict[int, str] = {}
        self._url = url
        self._folder = folder
        self._nursery = nursery
        self._scopes: dict[int, trio.CancelScope] = {}
        self._ended: dict[int, trio.Event] = {}

    async def start(self, place: int) -> Indexer:
        """Starts a node."""
        return await self._nursery.start(self._hold, place)  # type: ignore[no-any-return]

    async def _hold(
        self, place: int, task_status: trio.TaskStatus[Indexer] = trio.TASK_STATUS_IGNORED
    ) -> None:
        url = self.buckets.get(place, self._url)
        membership = Membership(
            self.node_map,
            place,
            "b",
            BucketHistories(Address.parse(url)),
            LINKS_MAX,
            open_stream=partial(self._open_stream, place),
        )
        end_event = self._ended[place] = trio.Event()
        try:
            with trio.CancelScope() as self._scopes[place]:
                async with node(url, self._folder / str(place), membership) as indexer:
                    self.running[place] = indexer
                    task_status.started(indexer)
                    await trio.sleep_forever()
        finally:
            self.running.pop(place, None)
            end_event.set()

    async def kill(self, place: int) -> None:
        """Ends a node as a crash would: it saves nothing and closes no link in order."""
        self.go_on(place)
        self._scopes[place].cancel()
        await self._ended[place].wait()

    def stop(self, place: int) -> None:
        """Makes a node send and receive nothing."""
        self.stopped[place] = trio.Event()

    def go_on(self, place: int) -> None:
        """Lets a stopped node continue."""
        if place in self.stopped:
            self.stopped.pop(place).set()

    async def _open_stream(self, origin: int, url: str, _security: Security) -> trio.abc.Stream:
        parts = urlsplit(url)
        place = self.node_map.nodes.index(f"{parts.scheme}://{parts.netloc}")
        index = int(parts.path.rpartition("/")[2])
        await trio.lowlevel.checkpoint()
        indexer = self.running.get(place)
        if indexer is None or indexer.membership is None:
            raise OSError(f"nobody listens at {parts.netloc}")
        query = parse_qs(parts.query)
        await indexer.membership.check(index, query["map"][0], query["bucket"][0])
        part = indexer.holders[index]
        assert isinstance(part, ReplicatedSlice)
        own_end, peer_end = trio.testing.memory_stream_pair()
        places = origin, place
        self._nursery.start_soon(
            self._serve, place, _StoppableStream(peer_end, self, places), part, indexer
        )
        return _StoppableStream(own_end, self, places)

    async def _serve(
        self, place: int, stream: trio.abc.Stream, part: ReplicatedSlice, indexer: Indexer
    ) -> None:
        """Serves a link for as long as the node runs."""
        async with stream, trio.open_nursery() as nursery:

            async def end_with_node() -> None:
                await self._ended[place].wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(end_with_node)
            await serve_link(stream, part, indexer.pool)
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def node(url: str, folder: Path, membership: Membership) -> AsyncIterator[Indexer]:
    """One node, without HTTP."""
    own = settings(url, folder, slices=membership.node_map.slices)
    async with running_indexer(attrs.evolve(own, membership=membership)) as indexer:
        yield indexer


@asynccontextmanager
async def some_nodes(
    url: str, folder: Path, count: int = 3, slices: int = 3, replicas: int = 1
) -> AsyncIterator[Nodes]:
    """Nodes that run for as long as the context."""
    async with trio.open_nursery() as nursery:
        nodes = Nodes(url, folder, NodeMap(urls(count), slices, replicas), nursery)
        for place in range(count):
            await nodes.start(place)
        yield nodes
        nursery.cancel_scope.cancel()


def is_expected(error: UprError) -> bool:
    """Whether unavailable nodes may cause this error, and it names the missing slice and node."""
    if isinstance(error, SliceMissingError):
        return re.search(r"slice \d of \d\b.*http://n\d:1", str(error)) is not None
    return isinstance(error, MomentGoneError | BuildingError | NotFreshError)


async def until_ready(indexer: Indexer) -> None:
    """Waits until every copy of every slice is ready."""

    async def is_ready() -> bool:
        if name_of("d/city") not in indexer.designs.names():
            return False
        status = await indexer.scanner.status(name_of("d/city"))
        states = {copy.state for part in status.slices for copy in part.replicas}
        return states == {"ready"}

    await until(is_ready)
