"""A consumer's copy of a bucket, and checks of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from upr_protocol.chunk import Mutation
from upr_protocol.client import (
    ChunkReceived,
    Client,
    Event,
    Item,
    RolledBack,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
)
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Operation


class Mirror:
    """Applies a consumer's events, and checks for each what the protocol guarantees.

    After a resume, mutations may be received again. A test that resumes gives the old `items` to a
    new mirror.

    Attributes:
        items: By partition and key, the key's sequence number and value.
        ends: By partition, the end of its last complete snapshot.
        mutations: How many mutations were received.
    """

    def __init__(self, items: Mapping[int, dict[bytes, tuple[int, bytes]]] | None = None) -> None:
        self.items: dict[int, dict[bytes, tuple[int, bytes]]] = dict(items or {})
        self.ends: dict[int, int] = {}
        self.mutations = 0
        self._inside: dict[int, SnapshotStart] = {}
        self._keys: dict[int, set[bytes]] = {}
        self._at: dict[int, int] = {}

    def apply(self, event: Event) -> None:
        """Applies the next event."""
        if isinstance(event, SnapshotStart):
            self._start(event)
        elif isinstance(event, ChunkReceived):
            self._chunk(event)
        elif isinstance(event, SnapshotEnd):
            self._end(event)
        elif isinstance(event, RolledBack):
            self._roll_back(event)
        elif isinstance(event, StreamEnded):
            assert event.partition not in self._inside, event

    def _start(self, event: SnapshotStart) -> None:
        partition = event.partition
        assert event.start >= self.ends.get(partition, 0), event
        assert event.start <= event.end, event  # equal when only the end was missing
        assert event.start <= self._at.get(partition, event.start), event
        # If the snapshot before has no end, this one replaces it.
        self._inside[partition] = event
        self._keys[partition] = set()
        self._at[partition] = event.start

    def _chunk(self, event: ChunkReceived) -> None:
        partition, chunk = event.partition, event.chunk
        snapshot = self._inside[partition]
        known_keys = self._keys[partition]
        items = self.items.setdefault(partition, {})
        seq = self._at[partition]
        assert chunk.start == seq, (event, seq)
        assert chunk.end <= snapshot.end, (event, snapshot)
        for mutation in chunk:
            assert seq < mutation.seq <= chunk.end, (mutation, seq, chunk)
            seq = mutation.seq
            assert snapshot.may_repeat or mutation.key not in known_keys, mutation
            known_keys.add(mutation.key)
            apply_mutation(items, mutation)
        self._at[partition] = chunk.end
        self.mutations += chunk.count

    def _end(self, event: SnapshotEnd) -> None:
        partition = event.partition
        snapshot = self._inside.pop(partition)
        assert event.end == snapshot.end == self._at[partition], (event, snapshot)
        self.ends[partition] = event.end

    def _roll_back(self, event: RolledBack) -> None:
        assert event.to == 0, "a consumer that cannot undo drops everything"
        for by_partition in (self.items, self.ends, self._inside, self._keys, self._at):
            by_partition.pop(event.partition, None)

    @property
    def contents(self) -> dict[bytes, bytes]:
        """Key → value."""
        return {key: value for items in self.items.values() for key, (_, value) in items.items()}


def apply_mutation(items: dict[bytes, tuple[int, bytes]], mutation: Mutation) -> None:
    """Applies a streamed mutation to the items of its partition."""
    if mutation.op is Operation.SET:
        items[mutation.key] = (mutation.seq, mutation.value)
    else:
        assert mutation.op in (Operation.DELETE, Operation.EXPIRE), mutation
        assert mutation.value == b"", mutation
        items.pop(mutation.key, None)


async def server_contents(client: Client, keys: Iterable[bytes]) -> dict[bytes, bytes]:
    """The items that the server has of `keys`."""
    key_list = sorted(set(keys))
    items = await client.get_many(key_list)
    return {item.key: item.value for item in items if item is not None}


def assert_same(
    own_items: Mapping[bytes, bytes], server_items: Mapping[bytes, bytes], partition_count: int
) -> None:
    """Checks that two contents are equal, and names the keys that differ."""
    different = sorted(
        key
        for key in own_items.keys() | server_items.keys()
        if own_items.get(key) != server_items.get(key)
    )
    lines = [
        f"{key!r} (partition {partition_of(key, partition_count)}):"
        f" {own_items.get(key)!r:.60} here, {server_items.get(key)!r:.60} there"
        for key in different[:10]
    ]
    assert not different, f"{len(different)} keys differ: " + "; ".join(lines)


__all__ = ["Item", "Mirror", "apply_mutation", "assert_same", "server_contents"]
