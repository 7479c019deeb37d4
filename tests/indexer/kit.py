"""Indexers and servers in one event loop, and what a scan by brute force would find."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio
import trio.testing

from tests.indexer.brute_force import index_rows
from tests.kit.process import POLL_S, eventually
from upr_protocol.client import Address, Client, ReceivedKeysLimits
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.indexer.answer import Answer
from upr_server.indexer.config import IndexerConfig
from upr_server.indexer.definitions import Index
from upr_server.indexer.index_file import EntrySource
from upr_server.indexer.indexer import HolderMaker, Indexer, IndexerSettings, running_indexer
from upr_server.indexer.pipeline import BlockingRunner
from upr_server.indexer.pure.definition import IndexDefinition, IndexName, design_key
from upr_server.indexer.query import Query
from upr_server.indexer.slices import SliceId
from upr_server.indexer.worker import serve_slice
from upr_server.indexer.worker_process import WorkerProcess
from upr_server.storage.simulated import SimulatedStore

BUCKET = "b"
PARTITIONS = 4
POOL_BYTES = 64 * 1024 * 1024


@asynccontextmanager
async def a_server(
    store: SimulatedStore | None = None,
    *,
    partitions: int = PARTITIONS,
    port: int = 0,
    events: bool = True,
) -> AsyncIterator[Server]:
    config = ServerConfig(
        listen=f"127.0.0.1:{port}",
        buckets=(BucketConfig(BUCKET, partitions),),
        shutdown_deadline_s=0.1,
        events=events,
    )
    async with running_server(config, store or SimulatedStore()) as server:
        yield server


def settings(
    url: str,
    data_dir: Path,
    pool_bytes: int = POOL_BYTES,
    undo_mutations: int = 1000,
    slices: int = 1,
) -> IndexerSettings:
    limits = ReceivedKeysLimits(undo_mutations)
    return IndexerSettings(Address.parse(url), data_dir, pool_bytes, limits, slices=slices)


@asynccontextmanager
async def an_indexer(
    url: str,
    data_dir: Path,
    pool_bytes: int = POOL_BYTES,
    *,
    undo_mutations: int = 1000,
    slices: int = 1,
    work: BlockingRunner | None = None,
    make_holder: HolderMaker | None = None,
) -> AsyncIterator[Indexer]:
    async with running_indexer(
        settings(url, data_dir, pool_bytes, undo_mutations, slices),
        work=work,
        make_holder=make_holder,
    ) as indexer:
        yield indexer


def workers_in_the_loop(
    url: str, data_dir: Path, pool_bytes: int = POOL_BYTES, *, undo_mutations: int = 1000
) -> HolderMaker:
    """Makes holders of slices whose workers are tasks of this process, and not processes."""
    config = msgspec.json.encode(
        IndexerConfig(
            bucket=url,
            data_dir=str(data_dir),
            undo_mutations=undo_mutations,
            workers=1,
        )
    )

    @asynccontextmanager
    async def start_worker() -> AsyncIterator[trio.abc.Stream]:
        stream, worker_stream = trio.testing.memory_stream_pair()

        async def run_worker() -> None:
            async with worker_stream:
                await serve_slice(worker_stream, lambda _config: None)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_worker)
            try:
                yield stream
            finally:
                nursery.cancel_scope.cancel()

    def make_holder(slice_id: SliceId) -> WorkerProcess:
        return WorkerProcess(
            slice_id, config=config, pool_bytes=pool_bytes, start_worker=start_worker
        )

    return make_holder


async def define(client: Client, design: str, indexes: Mapping[str, IndexDefinition]) -> None:
    """Writes a design document with an ordinary client."""
    fields = {name: msgspec.structs.asdict(definition) for name, definition in indexes.items()}
    await client.set(design_key(design), json.dumps({"indexes": fields}))


async def until_ready(indexer: Indexer, *names: str, timeout_s: float = 20) -> None:
    """Waits until these indexes exist and are built."""
    index_names = [name_of(text) for text in names]

    def are_ready() -> bool:
        return all(is_built(indexer, name) for name in index_names)

    await eventually(are_ready, f"{names} are built", timeout_s)
    if indexer.slices:
        return
    # The slices are in workers, so the test cannot look at them; it asks for the status.
    for name in index_names:

        async def is_ready(name: IndexName = name) -> bool:
            return (await indexer.scanner.status(name)).state == "ready"

        await until(is_ready, timeout_s)


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 20) -> None:
    """Waits until `condition` returns true."""
    with trio.fail_after(timeout_s):
        is_true = await condition()
        while not is_true:
            await trio.sleep(POLL_S)
            is_true = await condition()


def is_built(indexer: Indexer, name: IndexName) -> bool:
    """Whether every slice has built an index by its newest definition."""
    if name not in indexer.designs.names():
        return False
    definition = indexer.designs.find(name)
    return all(
        name in part.definitions.names()
        and part.definitions.find(name).definition == definition
        and part.definitions.find(name).file.is_built
        for part in indexer.slices
    )


def name_of(text: str) -> IndexName:
    design, _, index = text.partition("/")
    return IndexName(design, index)


async def scan(indexer: Indexer, name: str, **query: Any) -> list[tuple[list[Any], str]]:
    """The index key and the document's key of each entry in the answer."""
    request = Query(**{"consistency": "now", "limit": 10_000, **query})
    answer = await ask(indexer, name, request)
    return [(entry.key, entry.id) for entry in answer.entries]


async def ask(indexer: Indexer, name: str, query: Query) -> Answer:
    """The answer to a query, encoded and decoded as over HTTP."""
    async with indexer.scanner.scan(name_of(name), query) as answer:
        return msgspec.json.decode(b"".join(answer.pieces()), type=Answer)


def by_brute_force(
    definition: IndexDefinition, contents: Mapping[bytes, bytes]
) -> list[tuple[list[Any], str]]:
    """The entries that an index of `contents` should have: evaluates the definition for each
    document, and sorts by comparing values."""
    return [(row.key, row.id) for row in index_rows(definition, contents)]


def without_designs(contents: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    return {key: value for key, value in contents if not key.startswith(b"_design/")}


def source_of(index: Index) -> EntrySource:
    """The entry source of an index, for a test that applies changes itself: there is no round that
    could be cancelled."""
    return index.pipeline_member(check_cancelled=lambda: None).source


def entries_of(indexer: Indexer, name: str) -> int:
    definitions = indexer.slices[0].definitions
    is_there = name_of(name) in definitions.names()
    return definitions.find(name_of(name)).file.entry_count() if is_there else 0
