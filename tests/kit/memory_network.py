"""A network in memory for real servers and clients, without sockets.

With it a whole cluster runs in one event loop with a mock clock, and takes the same steps in each
run.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Final

import pytest
import trio
import trio.testing

from tests.kit.fake_net import CuttableStream
from upr_server import app
from upr_server.app import Server, running_server
from upr_server.buckets import upkeep
from upr_server.config import BucketConfig, ServerConfig
from upr_server.runtime import BoundListeners, System
from upr_server.storage.api import Store
from upr_server.storage.simulated import SimulatedStore

HOST: Final = "127.0.0.1"
PARTITIONS: Final = 2


class _Listener(trio.abc.Listener[trio.abc.HalfCloseableStream]):
    def __init__(self) -> None:
        self.is_closed = False
        self._coming, self._accepted = trio.open_memory_channel[trio.abc.HalfCloseableStream](
            math.inf
        )

    def offer(self, stream: trio.abc.HalfCloseableStream) -> None:
        self._coming.send_nowait(stream)

    async def accept(self) -> trio.abc.HalfCloseableStream:
        return await self._accepted.receive()

    async def aclose(self) -> None:
        self.is_closed = True
        self._coming.close()
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
            while self._accepted.statistics().current_buffer_used:
                await trio.aclose_forcefully(self._accepted.receive_nowait())
        self._accepted.close()


class MemoryNetwork:
    """Connects all servers that are started and all clients that connect, from its creation on.

    Attributes:
        away: Ports that refuse connections.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away: set[int] = set()
        self._ports = count(1)
        self._listeners: dict[int, _Listener] = {}
        self._ends: dict[int, list[CuttableStream]] = {}
        monkeypatch.setattr(trio, "open_tcp_stream", self._connect)
        monkeypatch.setattr(app, "System", partial(System, bind=self._bind))
        # Turn off the search for expired items: it runs each second, and `check` would find
        # partitions that it has pinned.
        monkeypatch.setattr(upkeep, "EXPIRY_INTERVAL_S", math.inf)

    @property
    def open(self) -> int:
        """How many connections the clients have not closed."""
        return sum(not end.closed for ends in self._ends.values() for end in ends)

    def hang(self, port: int) -> None:
        """From now on a port accepts connections, but does not answer."""
        self._listeners[port] = _Listener()

    def cut(self, port: int) -> None:
        """Breaks the connections to a port."""
        for end in self._ends.pop(port, []):
            end.cut()

    @asynccontextmanager
    async def _bind(self, listen: str) -> AsyncIterator[BoundListeners]:
        port = int(listen.rpartition(":")[2]) or next(self._ports)
        listener = self._listeners[port] = _Listener()
        try:
            yield BoundListeners([listener], port)
        finally:
            del self._listeners[port]
            await listener.aclose()

    async def _connect(self, host: str, port: int) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        listener = self._listeners.get(port)
        if listener is None or listener.is_closed or port in self.away:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        own_end, peer_end = trio.testing.memory_stream_pair()

        def close() -> None:
            own_end.send_stream.close()
            own_end.receive_stream.close()

        end = CuttableStream(own_end, close)
        ends = [end for end in self._ends.get(port, []) if not end.closed]
        self._ends[port] = [*ends, end]
        listener.offer(peer_end)
        return end


@asynccontextmanager
async def node(
    name: str, *buckets: str, port: int = 0, store: Store | None = None
) -> AsyncIterator[Server]:
    """A server in the network, on a simulated disk, with buckets of two partitions."""
    config = ServerConfig(
        listen=f"{HOST}:{port}",
        node=name,
        buckets=tuple(BucketConfig(bucket, PARTITIONS) for bucket in buckets),
        shutdown_deadline_s=0.1,
    )
    async with running_server(config, SimulatedStore() if store is None else store) as server:
        yield server


def check(server: Server) -> None:
    """Checks that no task has left a lock or a reservation at a server, and checks its
    invariants."""
    assert server.connections.resources.frame_budget.used_bytes == 0
    assert server.connections.resources.queues.are_idle
    assert not server.catalog._lock.locked()
    for bucket in server.catalog.buckets:
        disk = server.catalog.disks[bucket]
        bucket.check_invariants()
        assert not is_left(disk.maintenance._step_lock)
        assert disk.memory.backfills == 0
        assert not any(partition.eviction.pin_count for partition in bucket.partitions)


def is_left(lock: trio.Lock) -> bool:
    """Whether the task that owns the lock has ended."""
    owner = lock.statistics().owner
    nursery = None if owner is None else owner.parent_nursery
    return nursery is not None and owner not in nursery.child_tasks
