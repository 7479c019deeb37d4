"""The standard work of design/8: the keys, the values, and chunks that are built beforehand."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from upr_protocol.chunk import Chunk, chunk_of_plain_sets
from upr_protocol.hashing import partition_of
from upr_protocol.ids import PartitionId

KEYS: Final = 100_000
PARTITIONS: Final = 64
CHUNK_MUTATIONS: Final = 1_000
SMALL_CHUNK: Final = 16
KEY_BYTES: Final = 12
VALUE_BYTES: Final = 100

PREPARED_MUTATIONS: Final = 1_000_000
"""Mutations that a publisher builds beforehand, 145 MB of them, and sends again and again."""

_DRAWN_AT_ONCE: Final = 10_000

Batch = tuple[PartitionId, Chunk]


def key_of(key_number: int) -> bytes:
    """The key with this number: 12 digits, as `redis-benchmark` makes them."""
    return b"%012d" % key_number


def values(draw: random.Random, count: int) -> list[bytes]:
    """`count` values that nobody can compress."""
    data = draw.randbytes(VALUE_BYTES * count)
    return [data[start : start + VALUE_BYTES] for start in range(0, len(data), VALUE_BYTES)]


def drawn_batches(
    mutations: int,
    *,
    seed: int,
    keys: int,
    partitions: int,
    chunk_mutations: int,
    in_rounds: bool = False,
) -> Iterator[Batch]:
    """Full chunks of `mutations` in all, or a few more.

    Their keys are drawn uniformly, or `in_rounds`: each once, in any order, and then all of them
    again. A chunk then has no key twice, but for those few in which one round ends.
    """
    draw = random.Random(seed)
    numbers = _rounds(draw, keys) if in_rounds else _drawn(draw, keys)
    chunks = _chunks(numbers, draw, partitions, chunk_mutations, with_remainder=False)
    return islice(chunks, -(-mutations // chunk_mutations))


def distinct_batches(
    *, seed: int, keys: int, partitions: int, chunk_mutations: int
) -> Iterator[Batch]:
    """Chunks that hold each key below `keys` once; the last of each partition may be shorter."""
    return _chunks(
        range(keys), random.Random(seed), partitions, chunk_mutations, with_remainder=True
    )


def _drawn(draw: random.Random, keys: int) -> Iterator[int]:
    while True:
        yield from draw.choices(range(keys), k=_DRAWN_AT_ONCE)


def _rounds(draw: random.Random, keys: int) -> Iterator[int]:
    while True:
        yield from draw.sample(range(keys), keys)


def distinct_share(keys: int, partitions: int, chunk_mutations: int) -> float:
    """How much of a chunk is left when each key stays once, its keys drawn uniformly; 0 to 1."""
    keys_each = keys / partitions
    return keys_each * (1 - (1 - 1 / keys_each) ** chunk_mutations) / chunk_mutations


def _chunks(
    numbers: Iterable[int],
    draw: random.Random,
    partitions: int,
    chunk_mutations: int,
    *,
    with_remainder: bool,
) -> Iterator[Batch]:
    """The keys with these numbers, by partition, a chunk whenever one is full."""
    by_partition: list[list[bytes]] = [[] for _ in range(partitions)]
    for key_number in numbers:
        key = key_of(key_number)
        partition = partition_of(key, partitions)
        keys = by_partition[partition]
        keys.append(key)
        if len(keys) == chunk_mutations:
            yield partition, chunk_of_plain_sets(keys, values(draw, chunk_mutations))
            keys.clear()
    for partition_id, keys in enumerate(by_partition):
        if keys and with_remainder:
            yield (
                PartitionId(partition_id),
                chunk_of_plain_sets(keys, values(draw, len(keys))),
            )
