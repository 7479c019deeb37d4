"""Keys that are written to disk, and overwritten until they are compacted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from tests.spark.waiting import until
from upr_protocol.chunk import Mutation
from upr_protocol.client import BlockingClient
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Durability, Operation


@contextmanager
def durable_client(url: str) -> Iterator[BlockingClient]:
    with BlockingClient(url, durability=Durability.PERSISTED) as client:
        yield client


def overwrite(client: BlockingClient, keys: list[str], until_compacted: int) -> None:
    """Writes keys again and again, until so many more compactions were done."""
    draw = random.Random(2)

    def compactions() -> int:
        bucket = client.address.bucket
        return int(client.stats(bucket)["disk"]["compactions"])

    for _ in range(until_compacted):
        before = compactions()
        for _ in range(3):
            client.apply(
                Mutation(Operation.SET, key.encode(), draw.randbytes(20_000)) for key in keys
            )
        # It is looked after when nothing is written for a moment.
        until(lambda before=before: compactions() > before, "a compaction")  # type: ignore[misc]


def keys_of(partition: int, partitions: int, count: int) -> list[str]:
    candidates = (f"key {index}" for index in range(10_000_000))
    partition_keys = (
        key for key in candidates if partition_of(key.encode(), partitions) == partition
    )
    return [next(partition_keys) for _ in range(count)]
