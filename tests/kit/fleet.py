"""Several servers in this process, with a bucket that they share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.kit.proxy import Proxy, proxy_to
from upr_protocol.client import Address, NodeClient, connect
from upr_protocol.client.operator import Operator, ReplicaLag, add_replicas, wait_caught_up
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, Config
from upr_server.engine import Partition
from upr_server.storage.simulated import SimulatedStore

BUCKET = "b"
PARTITIONS = 4


class Gives:
    """Interrupts an operator's command before or after one of the maps that it gives.

    Attributes:
        scope: What the command is to run in.
        stop_at: Where: twice the number of maps given before, and one more for after it; -1 for
            nowhere.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.stop_at = -1
        self.scope = trio.CancelScope()
        set_map = NodeClient.set_map

        async def interrupted(node: NodeClient, revision: int, given: PartitionMap) -> None:
            self._step()
            await trio.lowlevel.checkpoint()
            await set_map(node, revision, given)
            self._step()

        monkeypatch.setattr(NodeClient, "set_map", interrupted)

    def reset(self, stop_at: int) -> None:
        """For the next command."""
        self.count, self.stop_at, self.scope = 0, stop_at, trio.CancelScope()

    def _step(self) -> None:
        if self.count == self.stop_at:
            self.scope.cancel()
        self.count += 1


class Fleet:
    """Servers `a`, `b` and so on; the first has the bucket from the start.

    Attributes:
        servers: Those that run, by name.
        proxies: The way to each, which is what maps name.
        told: What operators said.
    """

    def __init__(self, nursery: trio.Nursery, directory: Path | None, partitions: int) -> None:
        self._nursery = nursery
        self.servers: dict[str, Server] = {}
        self.proxies: dict[str, Proxy] = {}
        self.told: list[str] = []
        self.stack = AsyncExitStack()
        self._directory = directory
        self._partitions = partitions
        self._stores: dict[str, SimulatedStore] = {}
        self._stop: dict[str, trio.Event] = {}
        self._stopped: dict[str, trio.Event] = {}

    async def start(self, name: str, *, has_bucket: bool = False) -> None:
        """Starts a server; one that ran before finds what it left."""
        config = Config(
            listen="127.0.0.1:0",
            node=name,
            data_dir=str(self._directory / name) if self._directory else "",
            buckets=(BucketConfig(BUCKET, self._partitions),) if has_bucket else (),
            shutdown_deadline_s=0.1,
        )
        store = None if self._directory else self._stores.setdefault(name, SimulatedStore())
        started = trio.Event()
        self._nursery.start_soon(self._run, name, config, store, started)
        await started.wait()
        if name in self.proxies:
            self.proxies[name]._target = ("127.0.0.1", self.servers[name].port)

    async def _run(
        self,
        name: str,
        config: Config,
        store: SimulatedStore | None,
        started: trio.Event,
    ) -> None:
        stop, stopped = trio.Event(), trio.Event()
        self._stop[name], self._stopped[name] = stop, stopped
        async with running_server(config, store) as server:
            self.servers[name] = server
            started.set()
            await stop.wait()
        stopped.set()

    async def start_apart(self, name: str, *, has_bucket: bool = False) -> None:
        """Starts a server that nobody knows of yet."""
        await self.start(name, has_bucket=has_bucket)
        there = proxy_to("127.0.0.1", self.servers[name].port)
        self.proxies[name] = await self.stack.enter_async_context(there)

    async def stop(self, name: str) -> None:
        """Stops a server in order; nothing is behind its proxy then."""
        del self.servers[name]
        self._stop[name].set()
        await self._stopped[name].wait()

    def address(self, name: str) -> Address:
        """The bucket at a node, through its proxy."""
        return Address.parse(self.proxies[name].url(BUCKET))

    def operator(
        self, name: str = "a", on_progress: Callable[[str], None] | None = None, **options: Any
    ) -> Operator:
        """An operator that asks this node first."""

        def told(sentence: str) -> None:
            self.told.append(sentence)
            if on_progress is not None:
                on_progress(sentence)

        return Operator(self.address(name), on_progress=told, **options)

    async def add(self, name: str, **options: Any) -> None:
        """Makes a server a replica of everything, and waits until it is one."""
        operator = self.operator()
        there = f"127.0.0.1:{self.proxies[name].port}"
        added = await add_replicas(operator, name, there, **options)
        with trio.fail_after(20):
            await wait_caught_up(operator, name, added, ReplicaLag())

    def partition(self, name: str, number: int = 0) -> Partition:
        """A partition in a server's memory."""
        bucket = self.servers[name].service.buckets.get(BUCKET)
        assert bucket is not None
        return bucket.partitions[PartitionId(number)]

    def states(self, name: str) -> list[PartitionState]:
        """What a server is."""
        return [self.partition(name, number).state for number in range(self._partitions)]

    def map(self, name: str) -> PartitionMap:
        """The map that a server has."""
        found = self.servers[name].service.cluster.map_of(BUCKET)
        assert found is not None
        return found

    async def set(self, name: str, items: Mapping[str, str]) -> None:
        """Writes at one node, which must be active for all of it."""
        async with connect(self.servers[name].url(BUCKET), by_map=False) as client:
            for key, value in items.items():
                await client.set(key, value)

    async def get(self, name: str, key: str) -> str | None:
        """Reads at one node."""
        async with connect(self.servers[name].url(BUCKET), by_map=False) as client:
            found = await client.get(key)
        return None if found is None else bytes(found.value).decode()

    async def give(
        self, name: str, revision: int, changed: Mapping[int, Assignment], base: PartitionMap
    ) -> None:
        """Gives one node a map, whatever it has."""
        assignments = {PartitionId(number): one for number, one in changed.items()}
        cluster = self.servers[name].service.cluster
        given = base.with_assignments(assignments, revision)
        await cluster.set_map(cluster.revision(BUCKET), given.encode())

    def before_map(self, name: str, call: Callable[[], None]) -> None:
        """Has something done once, right before this node carries out a map."""
        membership: Any = self.servers[name].service.cluster
        following = membership._buckets[BUCKET].following
        real = following.stop_all_but

        async def stop_all_but(sources: object) -> None:
            del following.stop_all_but
            await real(sources)
            call()

        following.stop_all_but = stop_all_but

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that takes a moment."""
        with trio.fail_after(20):
            await trio.lowlevel.checkpoint()
            while not condition():  # noqa: ASYNC110  a server tells nobody
                await trio.sleep(0.01)

    def check(self) -> None:
        """Nobody is active in the history of another, and every structure is whole."""
        for number in range(self._partitions):
            active = [
                self.partition(name, number).failover_log.current
                for name in self.servers
                if self.partition(name, number).state is PartitionState.ACTIVE
            ]
            assert len(set(active)) == len(active), f"partition {number}: two in one history"
        for server in self.servers.values():
            bucket = server.service.buckets.get(BUCKET)
            assert bucket is not None
            bucket.check_invariants()


@asynccontextmanager
async def running_fleet(
    names: str = "ab", *, partitions: int = PARTITIONS, directory: Path | None = None
) -> AsyncIterator[Fleet]:
    """Servers, one for each letter, of which the first is active and all others follow it."""
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        fleet = Fleet(nursery, directory, partitions)
        fleet.stack = stack
        for name in names:
            await fleet.start_apart(name, has_bucket=name == names[0])
        for name in names[1:]:
            await fleet.add(name)
        fleet.told.clear()
        yield fleet
        for name in list(fleet.servers):
            await fleet.stop(name)
