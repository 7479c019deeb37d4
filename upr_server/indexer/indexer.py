"""The indexer of one bucket: slices, and what speaks for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from upr_protocol.client import Address, ReceivedKeysLimits
from upr_protocol.errors import UprError
from upr_server.indexer.announcements import consumer_name
from upr_server.indexer.definitions_file import DefinitionsFile
from upr_server.indexer.designs import Designs
from upr_server.indexer.directory import locked_folder, remove_other_slices
from upr_server.indexer.membership import Membership
from upr_server.indexer.node_links import replicated_slice
from upr_server.indexer.pipeline import BlockingRunner, worker_thread
from upr_server.indexer.pool import MemoryPool
from upr_server.indexer.replicated_slice import ReplicatedSlice
from upr_server.indexer.scanner import Scanner
from upr_server.indexer.server_progress import ServerProgress
from upr_server.indexer.slice import QUEUES_DEFAULT, Slice, SliceSettings
from upr_server.indexer.slices import SliceHolder, SliceId

STOP_S: Final = 10.0
"""How long a stop applies what was read. The rest is read again at the next start."""

STATISTICS_S: Final = 2.0
"""How long a slice may take to answer with its figures. A worker that hangs is noticed only after
ten seconds."""

SWITCH_INTERVAL_S: Final = 0.0005
"""How long a thread keeps the interpreter while another wants it. LMDB gives it up at every put,
and would wait for the default, 5 ms, each time that the loop has something to do."""


@attrs.frozen
class IndexerSettings:
    """How an indexer works.

    Attributes:
        address: The bucket.
        data_dir: Where indexes are kept; created if missing.
        pool_bytes: The memory pool of each process.
        received_keys_limits: How many received keys are kept for rollbacks.
        queues: Queues of a pipeline.
        slices: How many slices the indexes have.
        membership: Its place among several nodes; None if it is alone.
    """

    address: Address
    data_dir: Path
    pool_bytes: int
    received_keys_limits: ReceivedKeysLimits = attrs.field(factory=ReceivedKeysLimits)
    queues: int = QUEUES_DEFAULT
    slices: int = 1
    membership: Membership | None = None

    @property
    def kept_slices(self) -> list[SliceId]:
        """The slices that are kept here."""
        if self.membership is not None:
            return self.membership.kept_slices
        return [SliceId(index, self.slices) for index in range(self.slices)]

    def slice_settings(self) -> SliceSettings:
        """How each of its slices works."""
        return SliceSettings(self.address, self.data_dir, self.received_keys_limits, self.queues)


class Indexer:
    """The indexes of one bucket; `running_indexer` makes one.

    Args:
        settings: How it works.
        pool: The memory pool of this process.
        holders: The slices, by their numbers.

    Attributes:
        address: The bucket.
        membership: Its place among several nodes; None if it is alone.
        pool: The memory pool of this process.
        holders: The slices, by their numbers.
        designs: Which indexes there are.
        server_progress: How far the server is.
        scanner: Answers scans.
    """

    def __init__(
        self, settings: IndexerSettings, pool: MemoryPool, holders: Sequence[SliceHolder]
    ) -> None:
        self.address = settings.address
        self.membership = settings.membership
        self.pool = pool
        self.holders = holders
        self.designs = Designs(
            settings.address,
            consumer_name(settings.data_dir),
            holders,
            DefinitionsFile(settings.data_dir / "definitions.json"),
        )
        self.server_progress = ServerProgress(settings.address)
        self.scanner = Scanner(self.designs, holders, pool, self.server_progress)

    @property
    def slices(self) -> list[Slice]:
        """The slices in this process."""
        own_holders = (
            holder.own_copy if isinstance(holder, ReplicatedSlice) else holder
            for holder in self.holders
        )
        return [holder for holder in own_holders if isinstance(holder, Slice)]

    def nodes(self) -> dict[str, Any]:
        """Which node keeps what, and which of them answer, for `GET /v1/nodes`."""
        if self.membership is None:
            return {"nodes": [], "slices": len(self.holders), "replicas": 0}
        node_map = self.membership.node_map
        replicated = [holder for holder in self.holders if isinstance(holder, ReplicatedSlice)]
        silent = set[str]().union(*(holder.silent_nodes() for holder in replicated))
        return {
            "nodes": [
                {
                    "node": place,
                    "url": url,
                    "is_this": place == self.membership.place,
                    "answers": url not in silent,
                    "slices": list(node_map.kept_by(place)),
                }
                for place, url in enumerate(node_map.nodes)
            ],
            "slices": node_map.slices,
            "replicas": node_map.replicas,
        }

    async def run(self) -> None:
        """Keeps the indexes up to date, for as long as the bucket is there.

        Raises:
            IndexFileError: An index cannot be written.
            UprError: The server refused.
        """
        async with trio.open_nursery() as nursery:
            for holder in self.holders:
                nursery.start_soon(holder.run, self.designs)
            nursery.start_soon(self.designs.run)

    async def stop(self) -> None:
        """Tells every slice to apply what it has read."""
        async with trio.open_nursery() as nursery:
            for holder in self.holders:
                nursery.start_soon(holder.stop)

    async def statistics(self) -> dict[str, Any]:
        """Figures of the indexer, for `GET /v1/status`: sums over the slices, and each of them. A
        slice that does not answer within `STATISTICS_S` has a `failure` instead of figures."""
        figures = dict[int, dict[str, Any]]()

        async def ask(holder: SliceHolder) -> None:
            figures[holder.slice_id.index] = await _figures_of(holder)

        async with trio.open_nursery() as nursery:
            for holder in self.holders:
                nursery.start_soon(ask, holder)
        slices = [{"slice": index, **figures[index]} for index in sorted(figures)]
        totals = Counter[str](self.pool.figures())
        for slice_figures in figures.values():
            names = slice_figures.keys() - {"connected", "node", "failure"}
            totals.update({name: slice_figures[name] for name in names})
        return {
            "connected": all(slice_figures["connected"] for slice_figures in slices),
            **totals,
            "slices": slices,
        }


async def _figures_of(holder: SliceHolder) -> dict[str, Any]:
    """The figures of a slice; `failure` says why there are none."""
    try:
        with trio.move_on_after(STATISTICS_S):
            return await holder.statistics()
    except UprError as error:
        # It is missing, or none of its copies has memory to answer.
        return {"connected": False, "failure": str(error)}
    return {
        "connected": False,
        "failure": f"{holder.title} did not answer within {STATISTICS_S:.0f} s",
    }


def _holder(
    membership: Membership | None, slice_id: SliceId, own_holders: Mapping[SliceId, SliceHolder]
) -> SliceHolder:
    if membership is None:
        return own_holders[slice_id]
    return replicated_slice(membership, slice_id, own_holders.get(slice_id))


HolderMaker = Callable[[SliceId], SliceHolder]
"""Makes a holder of a slice."""


@asynccontextmanager
async def running_indexer(
    settings: IndexerSettings,
    *,
    work: BlockingRunner | None = None,
    make_holder: HolderMaker | None = None,
) -> AsyncIterator[Indexer]:
    """An indexer that runs for as long as the context.

    On leaving it, what was read is applied, for `STOP_S` at most. What is not applied then, or when
    it is cancelled or killed, it reads again.

    Args:
        settings: How it works.
        work: Where indexes are written; by default a worker thread.
        make_holder: Makes the holders of slices that are kept here; by default they are in this
            process.

    Raises:
        IndexFileError: The data directory cannot be used.
        UprError: The server refused.
    """
    with locked_folder(settings.data_dir), ExitStack() as files:
        await remove_other_slices(settings.data_dir, settings.kept_slices)
        pool = MemoryPool(settings.pool_bytes)
        if make_holder is None:
            make_holder = partial(
                Slice,
                settings=settings.slice_settings(),
                pool=pool,
                work=work or worker_thread(),
            )
        own_holders: dict[SliceId, SliceHolder] = {}
        for slice_id in settings.kept_slices:
            own_holders[slice_id] = make_holder(slice_id)
            files.callback(own_holders[slice_id].close)
        holders = [
            _holder(settings.membership, SliceId(index, settings.slices), own_holders)
            for index in range(settings.slices)
        ]
        indexer = Indexer(settings, pool, holders)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(indexer.run)
            yield indexer
            with trio.move_on_after(STOP_S):
                await indexer.stop()
            nursery.cancel_scope.cancel()
