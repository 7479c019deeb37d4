"""A server made from its configuration, on what its store has from before."""

from __future__ import annotations

from upr_protocol.client import connect
from upr_server.app import running_server
from upr_server.config import BucketConfig, Config
from upr_server.storage.simulated_store import SimulatedRoom, SimulatedStore

MIB = 1024 * 1024


async def buckets_of(config: Config, room: SimulatedRoom) -> list[tuple[str, int, int]]:
    """Name, partitions and quota of each bucket of a server that was started so."""
    async with (
        running_server(config, SimulatedStore(room)) as server,
        connect(f"upr://127.0.0.1:{server.port}") as client,
    ):
        return [
            (row.name, row.partition_count, row.quota_bytes) for row in await client.list_buckets()
        ]


async def test_a_bucket_that_is_there_keeps_its_partitions_and_takes_a_new_quota() -> None:
    room = SimulatedRoom()

    async def started(*buckets: BucketConfig) -> list[tuple[str, int, int]]:
        config = Config(listen="127.0.0.1:0", quota_bytes=64 * MIB, buckets=buckets)
        return await buckets_of(config, room)

    assert await started(BucketConfig("b", 4)) == [("b", 4, 64 * MIB)]
    assert await started(BucketConfig("b", 8, 128 * MIB)) == [("b", 4, 128 * MIB)]
    assert await started(BucketConfig("c", 2)) == [("b", 4, 64 * MIB), ("c", 2, 64 * MIB)]
