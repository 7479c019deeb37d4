"""Several servers in this process that share a bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.kit.proxy import Proxy, proxy_to
from upr_protocol.client import Address, NodeClient, connect
from upr_protocol.client.operator import Operator, ReplicaLag, add_replicas, wait_caught_up
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.engine import Partition
from upr_server.startup import started_server
from upr_server.storage.simulated import SimulatedStore

BUCKET = "b"
PARTITIONS = 4


class MapInterrupter:
    """Interrupts an operator's command before or after it gives a node a map.

    Attributes:
        scope: The scope in which the command must run; it is cancelled at the interruption.
        stop_at: Where to interrupt: 0 before the first map, 1 after it, 2 before the second, and so
            on; -1 for nowhere.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._steps = 0
        self.stop_at = -1
        self.scope = trio.CancelScope()
        set_map = NodeClient.set_map

        async def interrupted(node: NodeClient, revision: int, new_map: PartitionMap) -> None:
            self._step()
            await trio.lowlevel.checkpoint()
            await set_map(node, revision, new_map)
            self._step()

        monkeypatch.setattr(NodeClient, "set_map", interrupted)

    def reset(self, stop_at: int) -> None:
        """Prepares for the next command."""
        self._steps, self.stop_at, self.scope = 0, stop_at, trio.CancelScope()

    def _step(self) -> None:
        if self._steps == self.stop_at:
            self.scope.cancel()
        self._steps += 1


class CompetingCommands:
    """Runs two operator's commands that send their maps of one revision at the same time.

    Attributes:
        errors: What the commands raised that did not succeed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[UprError] = []
        self._running = 0
        self._newest_revision = 0
        # One for each command, though it gives several nodes its map.
        self._maps_sent: dict[int, PartitionMap] = {}
        self._sending = trio.lowlevel.ParkingLot()
        set_map = NodeClient.set_map

        async def together(node: NodeClient, revision: int, new_map: PartitionMap) -> None:
            if new_map.revision > self._newest_revision:
                self._maps_sent[id(new_map)] = new_map
                if len(self._maps_sent) < self._running:
                    await self._sending.park()
                else:
                    self._newest_revision = new_map.revision
                    self._maps_sent.clear()
                    self._sending.unpark_all()
            await set_map(node, revision, new_map)

        monkeypatch.setattr(NodeClient, "set_map", together)

    async def run(self, *commands: Callable[[], Awaitable[object]]) -> None:
        """Runs the commands until both have ended."""
        self._running = len(commands)
        async with trio.open_nursery() as nursery:
            for command in commands:
                nursery.start_soon(self._run, command)

    async def _run(self, command: Callable[[], Awaitable[object]]) -> None:
        try:
            await command()
        except UprError as error:
            self.errors.append(error)
        finally:
            self._running -= 1
            self._sending.unpark_all()


class ServerGroup:
    """Servers `a`, `b` and so on; the first has the bucket from the start.

    Attributes:
        servers: The running servers, by name.
        proxies: A proxy to each server. Maps have the proxies' addresses.
        progress: What operators reported.
    """

    def __init__(self, nursery: trio.Nursery, directory: Path | None, partitions: int) -> None:
        self._nursery = nursery
        self.servers: dict[str, Server] = {}
        self.proxies: dict[str, Proxy] = {}
        self.progress: list[str] = []
        self.stack = AsyncExitStack()
        self._directory = directory
        self._partitions = partitions
        self._stores: dict[str, SimulatedStore] = {}
        self._stop: dict[str, trio.Event] = {}
        self._stopped: dict[str, trio.Event] = {}

    async def start(self, name: str, *, has_bucket: bool = False, is_empty: bool = False) -> None:
        """Starts a server, with the data that it had when it stopped; or with none, if it has lost
        its disk, which must be a simulated one."""
        if is_empty:
            del self._stores[name]
        config = ServerConfig(
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
        config: ServerConfig,
        store: SimulatedStore | None,
        started: trio.Event,
    ) -> None:
        stop, stopped = trio.Event(), trio.Event()
        self._stop[name], self._stopped[name] = stop, stopped
        running = started_server(config) if store is None else running_server(config, store)
        async with running as server:
            self.servers[name] = server
            started.set()
            await stop.wait()
        stopped.set()

    async def start_apart(self, name: str, *, has_bucket: bool = False) -> None:
        """Starts a server that no map names yet."""
        await self.start(name, has_bucket=has_bucket)
        proxy = proxy_to("127.0.0.1", self.servers[name].port)
        self.proxies[name] = await self.stack.enter_async_context(proxy)

    async def stop(self, name: str) -> None:
        """Stops a server cleanly. Its proxy then leads nowhere."""
        del self.servers[name]
        self._stop[name].set()
        await self._stopped[name].wait()

    def address(self, name: str) -> Address:
        """The address of the bucket at a node, through its proxy."""
        return Address.parse(self.proxies[name].url(BUCKET))

    def operator(
        self, name: str = "a", on_progress: Callable[[str], None] | None = None, **options: Any
    ) -> Operator:
        """An operator that asks this node first, and records its progress."""

        def record(sentence: str) -> None:
            self.progress.append(sentence)
            if on_progress is not None:
                on_progress(sentence)

        return Operator(self.address(name), on_progress=record, **options)

    async def add_replica(self, name: str, **options: Any) -> None:
        """Makes a server a replica of all partitions, and waits until it has caught up."""
        operator = self.operator()
        address = f"127.0.0.1:{self.proxies[name].port}"
        added = await add_replicas(operator, name, address, **options)
        with trio.fail_after(20):
            await wait_caught_up(operator, name, added, ReplicaLag())

    def partition(self, name: str, partition: int = 0) -> Partition:
        """A partition in a server's memory."""
        bucket = self.servers[name].catalog.buckets.get(BUCKET)
        assert bucket is not None
        return bucket.partitions[PartitionId(partition)]

    def states(self, name: str) -> list[PartitionState]:
        """The states of a server's partitions."""
        return [self.partition(name, partition).state for partition in range(self._partitions)]

    def map(self, name: str) -> PartitionMap:
        """The map that a server has."""
        partition_map = self.servers[name].partition_maps.map_of(BUCKET)
        assert partition_map is not None
        return partition_map

    async def set(self, name: str, items: Mapping[str, str]) -> None:
        """Writes at one node, which must be active for all the keys."""
        async with connect(self.servers[name].url(BUCKET), follow_map=False) as client:
            for key, value in items.items():
                await client.set(key, value)

    async def get(self, name: str, key: str) -> str | None:
        """Reads at one node."""
        async with connect(self.servers[name].url(BUCKET), follow_map=False) as client:
            item = await client.get(key)
        return None if item is None else bytes(item.value).decode()

    async def set_map(
        self, name: str, revision: int, changed: Mapping[int, Assignment], base: PartitionMap
    ) -> None:
        """Gives one node a map, whichever map it has."""
        assignments = {
            PartitionId(partition): assignment for partition, assignment in changed.items()
        }
        cluster = self.servers[name].partition_maps
        new_map = base.with_assignments(assignments, revision)
        await cluster.set_map(cluster.revision(BUCKET), new_map.encode())

    def before_map(self, name: str, call: Callable[[], None]) -> None:
        """Calls `call` once, right before this node applies a map."""
        partition_maps: Any = self.servers[name].partition_maps
        replicators = partition_maps._buckets[BUCKET].replicators
        real = replicators.stop_all_but

        async def stop_all_but(*arguments: object) -> None:
            del replicators.stop_all_but
            await real(*arguments)
            call()

        replicators.stop_all_but = stop_all_but

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition that becomes true within seconds."""
        with trio.fail_after(20):
            await trio.lowlevel.checkpoint()
            while not condition():  # noqa: ASYNC110  a server tells nobody
                await trio.sleep(0.01)

    def check(self) -> None:
        """Checks that no two nodes are active in one history, and every server's invariants."""
        for partition in range(self._partitions):
            active = [
                self.partition(name, partition).failover_log.current
                for name in self.servers
                if self.partition(name, partition).state is PartitionState.ACTIVE
            ]
            assert len(set(active)) == len(active), f"partition {partition}: two in one history"
        for server in self.servers.values():
            bucket = server.catalog.buckets.get(BUCKET)
            assert bucket is not None
            bucket.check_invariants()


@asynccontextmanager
async def running_servers(
    names: str = "ab", *, partitions: int = PARTITIONS, directory: Path | None = None
) -> AsyncIterator[ServerGroup]:
    """A server for each letter of `names`; the first is active, and the others follow it."""
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        group = ServerGroup(nursery, directory, partitions)
        group.stack = stack
        for name in names:
            await group.start_apart(name, has_bucket=name == names[0])
        for name in names[1:]:
            await group.add_replica(name)
        group.progress.clear()
        yield group
        for name in list(group.servers):
            await group.stop(name)
