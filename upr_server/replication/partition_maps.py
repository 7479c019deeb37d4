"""The partition maps of this node's buckets: which holds, who may replace it, and what others ask
about it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import trio

from upr_protocol.client import Address, NodeClient, PartitionInfo
from upr_protocol.concurrency import run_steps
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import Assignment, PartitionMap, PartitionMapError
from upr_server.replication import roles
from upr_server.replication.clustered_bucket import ClusteredBucket
from upr_server.replication.local_server import LocalServer
from upr_server.runtime import System
from upr_server.storage.errors import DiskFullError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.records import PartialRecord

UNDO_MUTATIONS: Final = 64 * 1024
"""The newest mutations of a bucket that are left out of its index, so that they can be undone: at
100,000 a second, more than half a second of what a replica may have ahead of another. On an active
each takes some 150 bytes of memory for that time."""

PARTITIONS_STEP: Final = 64
"""Partitions whose histories are compared with another node's before other tasks run."""


class PartitionMaps:
    """What this node is for the buckets whose partitions a map places on nodes.

    Args:
        server: The server that this runs in.
        node: This node's name.
        system: How other nodes are reached, and where history IDs come from.
        undo_mutations: How many of a bucket's newest mutations can be undone, about.
        configured_buckets: The buckets that the configuration makes when they are missing.

    Attributes:
        node: This node's name.
        system: How other nodes are reached.
    """

    def __init__(
        self,
        server: LocalServer,
        node: str,
        system: System,
        undo_mutations: int = UNDO_MUTATIONS,
        configured_buckets: Collection[str] = (),
    ) -> None:
        self.node = node
        self.system = system
        self._configured_buckets = frozenset(configured_buckets)
        self._server = server
        self._undo_mutations = undo_mutations
        self._buckets: dict[str, ClusteredBucket] = {}
        # Maps are applied one after the other, of whatever bucket.
        self._lock = trio.Lock()
        self._nursery: trio.Nursery | None = None

    # Questions.

    def map_of(self, bucket: str) -> PartitionMap | None:
        """The bucket's map; None while this node holds it alone."""
        clustered_bucket = self._buckets.get(bucket)
        return None if clustered_bucket is None else clustered_bucket.map

    def all_maps(self) -> list[PartitionMap]:
        """The maps of all buckets that have one."""
        return [clustered_bucket.map for clustered_bucket in self._buckets.values()]

    def unconfirmed_buckets(self) -> list[str]:
        """Buckets whose map no other node has confirmed since this node was started."""
        return [
            name
            for name, clustered_bucket in self._buckets.items()
            if not clustered_bucket.is_confirmed
        ]

    def revision(self, bucket: str) -> int:
        """The revision of the bucket's map; 0 for none."""
        clustered_bucket = self._buckets.get(bucket)
        return 0 if clustered_bucket is None else clustered_bucket.map.revision

    def settled_revision(self, bucket: str) -> int:
        """The revision of the map that all partitions of the bucket follow; 0 for none. While
        another map is being applied, it is lower than `revision`."""
        clustered_bucket = self._buckets.get(bucket)
        return 0 if clustered_bucket is None else clustered_bucket.settled_revision

    def replicas(self, bucket: str, partition: PartitionId) -> list[str]:
        """The nodes that replicate a partition from this one."""
        clustered_bucket = self._buckets.get(bucket)
        if clustered_bucket is None:
            return []
        return clustered_bucket.map.partitions[partition].followers_of(self.node)

    def is_replica(self, bucket: str, partition: PartitionId, name: str) -> bool:
        """Whether the node `name` replicates a partition from this one."""
        clustered_bucket = self._buckets.get(bucket)
        return (
            clustered_bucket is not None
            and clustered_bucket.map.partitions[partition].source_of(name) == self.node
        )

    def is_suspect(self, bucket: str) -> bool:
        """Whether this node may lack something of the bucket that it gave to others, so that its
        stop must not count as a clean one."""
        clustered_bucket = self._buckets.get(bucket)
        if clustered_bucket is None:
            return False
        # Until another node has confirmed the map, what a crash has lost has had no consequences.
        return bool(clustered_bucket.suspects) or not (
            clustered_bucket.is_clean or clustered_bucket.is_confirmed
        )

    def other_nodes(self, bucket: str) -> dict[str, str]:
        """The addresses of the other nodes of a bucket, by name."""
        clustered_bucket = self._buckets.get(bucket)
        if clustered_bucket is None:
            return {}
        return {
            name: address
            for name, address in clustered_bucket.map.nodes.items()
            if name != self.node
        }

    def actives_of_incomplete(self, bucket: str) -> list[str]:
        """The nodes that are active for partitions of a bucket of which this node may lack what it
        acknowledged, and which it copies from another replica. O(partitions)."""
        clustered_bucket = self._buckets.get(bucket)
        return [] if clustered_bucket is None else clustered_bucket.actives_of_incomplete()

    def note_active_numbers(
        self, partition_map: PartitionMap, partitions: Iterable[PartitionInfo]
    ) -> None:
        """A node has said how far its partitions are under `partition_map`; it was asked when this
        node had that map already. Copies of partitions that are active there are complete once they
        have so much."""
        clustered_bucket = self._buckets.get(partition_map.bucket)
        if clustered_bucket is not None and clustered_bucket.map is partition_map:
            for info in partitions:
                if info.is_held and info.state is PartitionState.ACTIVE:
                    clustered_bucket.replicators.note_active_number(
                        info.partition, info.log, info.high_seq
                    )

    def dropped_mutations(self, bucket: str) -> int:
        """How many received mutations of a bucket were dropped at the end: its disk was full."""
        clustered_bucket = self._buckets.get(bucket)
        return 0 if clustered_bucket is None else clustered_bucket.replicators.dropped_mutations

    def statistics(self, bucket: str) -> dict[str, object]:
        """Figures of one bucket; nothing when this node holds it alone."""
        clustered_bucket = self._buckets.get(bucket)
        if clustered_bucket is None:
            return {}
        return {
            "node": self.node,
            "revision": clustered_bucket.map.revision,
            "is_confirmed": clustered_bucket.is_confirmed,
            "follows": clustered_bucket.replicators.statistics(),
        }

    # The beginning and the end.

    def restore_map(
        self,
        disk: BucketDisk,
        document: str,
        partials: Mapping[PartitionId, PartialRecord],
        *,
        is_clean: bool,
    ) -> None:
        """A bucket was found on disk, with this map. Its partitions are what the map says, but an
        active waits until another node has confirmed the map.

        Args:
            disk: The bucket.
            document: The map.
            partials: Snapshots of which the disk has the front.
            is_clean: Whether this node was stopped cleanly.

        Raises:
            PartitionMapError: What is on disk is not a map.
        """
        stored_map = PartitionMap.decode(document)
        # What an active had in memory is lost, and may have been acknowledged: a replica has it.
        suspects = {} if is_clean else roles.suspects_in(stored_map, self.node)
        clustered_bucket = self._clustered_bucket(
            disk, stored_map, is_confirmed=False, is_clean=is_clean, suspects=suspects
        )
        self._buckets[stored_map.bucket] = clustered_bucket
        for partition in disk.bucket.partitions:
            if partition.damage:
                continue
            state = stored_map.partitions[partition.id].state_of(self.node)
            if state is PartitionState.ACTIVE:
                state = PartitionState.PENDING
            partition.change_state(state, partition.failover_log)
            if partition.id in partials:
                clustered_bucket.replicators.restore(partition, partials[partition.id])

    def drop_bucket(self, bucket: str) -> None:
        """A bucket was deleted here."""
        clustered_bucket = self._buckets.pop(bucket, None)
        if clustered_bucket is not None:
            clustered_bucket.replicators.cancel()

    async def run(self) -> None:
        """Replicates from the nodes that the maps name, for ever."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                for clustered_bucket in list(self._buckets.values()):
                    async with clustered_bucket.lock:
                        await clustered_bucket.follow_map()
                await trio.sleep_forever()
            finally:
                # A map may be half applied: it must not start replicators any more.
                self._nursery = None
                for clustered_bucket in self._buckets.values():
                    clustered_bucket.replicators.prepare_to_stop()

    async def stop(self) -> None:
        """Stops replicating. What was received is on disk when this returns.

        Raises:
            DiskFullError: Some of it found no room, and is dropped.
        """
        failure: DiskFullError | None = None
        for clustered_bucket in self._buckets.values():
            async with clustered_bucket.lock:
                try:
                    await clustered_bucket.replicators.stop_all_but({})
                except DiskFullError as error:
                    failure = error
            if clustered_bucket.replicators.dropped_mutations and failure is None:
                # A map that was being applied as the stop came has ended the replicators.
                failure = DiskFullError("changes that replicas had received found no room")
        if failure is not None:
            raise failure

    # Other maps.

    async def set_map(self, expected_revision: int, document: str) -> PartitionMap:
        """Applies a map in place of the one with `expected_revision`. One that holds already is
        fine: the first answer may have been lost, or another node may have told of the map.

        Returns:
            The map, on disk.

        Raises:
            ServerError: `REVISION_CONFLICT`; `BAD_ARGUMENT` when the document is not a map, or does
                not name this node; `WRONG_STATE` when a partition is to be active here in a history
                of which this node does not have everything.
        """
        try:
            new_map = await run_steps(PartitionMap.decode_in_steps(document))
        except PartitionMapError as error:
            raise ServerError(Status.BAD_ARGUMENT, str(error)) from error
        with trio.CancelScope(shield=True):
            async with self._lock:
                if self.map_of(new_map.bucket) == new_map:
                    return new_map
                revision = self.revision(new_map.bucket)
                if revision != expected_revision:
                    raise ServerError(
                        Status.REVISION_CONFLICT,
                        f"the map of {new_map.bucket!r} has revision {revision} here, "
                        f"not {expected_revision}: another command has changed it; repeat yours",
                    )
                await self._apply(new_map)
        return new_map

    async def adopt_map_from(self, bucket: str, address: str) -> PartitionMap:
        """Asks another node for a bucket's map, and applies it.

        Raises:
            ServerError: `BAD_ARGUMENT` when that node does not answer, has no map, or has another
                bucket of this name; and what `set_map` raises.
        """
        try:
            node = NodeClient(
                Address.of_bucket(address, bucket, self.system.security),
                identity=f"node:{self.node}",
                dial=self.system.dial,
            )
            status = await node.status_with_partitions()
        except UprError as error:
            raise ServerError(
                Status.BAD_ARGUMENT, f"cannot get the map from {address}: {error}"
            ) from error
        if status.map is None:
            raise ServerError(Status.BAD_ARGUMENT, f"{address} has no map of {bucket!r}")
        if await self._is_another_bucket(bucket, status.partitions):
            raise ServerError(
                Status.BAD_ARGUMENT,
                f"the bucket {bucket!r} at {address} is another one than that of node {self.node}, "
                "which was created anew: delete one of them",
            )
        await self.adopt_map(status.map)
        partition_map = self.map_of(bucket)
        if partition_map is None:
            raise ServerError(Status.NO_BUCKET, "the bucket was deleted")
        return partition_map

    async def _is_another_bucket(self, bucket: str, partitions: Iterable[PartitionInfo]) -> bool:
        """Whether this node has a bucket of its own that shares no history with another node's
        `partitions`, and that a command has made: under their map it would give up what it has
        accepted. The configuration makes a bucket again that was lost with the disk, and that is
        the same one."""
        disk = self._server.disk_of(bucket)
        if disk is None or bucket in self._configured_buckets or self.map_of(bucket) is not None:
            return False
        own_partitions = disk.bucket.partitions
        if all(partition.state is PartitionState.DEAD for partition in own_partitions):
            # It was made for a map that could not be applied then, and accepts nothing.
            return False
        for count, info in enumerate(partitions, 1):
            if info.is_held and info.partition < len(own_partitions):
                own_log = own_partitions[info.partition].failover_log
                histories = {entry.history_id for entry in info.log}
                if any(entry.history_id in histories for entry in own_log):
                    return False
            if count % PARTITIONS_STEP == 0:
                await trio.lowlevel.checkpoint()
        return True

    async def adopt_map(self, their_map: PartitionMap, *, replaces_only: bool = False) -> bool:
        """Applies another node's map, if it is newer than the one that holds here.

        Args:
            their_map: The map.
            replaces_only: Whether another map must hold here: a bucket that was deleted since that
                node was asked stays deleted.

        Returns:
            Whether it was applied.
        """
        with trio.CancelScope(shield=True):
            async with self._lock:
                revision = self.revision(their_map.bucket)
                if their_map.revision <= revision or (replaces_only and not revision):
                    return False
                await self._apply(their_map, is_from_operator=False)
        return True

    async def confirm_map(self, bucket: str, revision: int) -> None:
        """Another node has no map newer than `revision`: this node becomes what that map says."""
        with trio.CancelScope(shield=True):
            async with self._lock:
                clustered_bucket = self._buckets.get(bucket)
                if (
                    clustered_bucket is not None
                    and clustered_bucket.map.revision == revision
                    and not clustered_bucket.is_confirmed
                ):
                    async with clustered_bucket.lock:
                        await clustered_bucket.apply_map(clustered_bucket.map)

    async def _apply(self, new_map: PartitionMap, *, is_from_operator: bool = True) -> None:
        if new_map.revision <= self.revision(new_map.bucket):
            raise ServerError(
                Status.REVISION_CONFLICT,
                f"the map of {new_map.bucket!r} has revision {self.revision(new_map.bucket)} here, "
                f"and {new_map.revision} is not higher; repeat the command",
            )
        clustered_bucket = self._buckets.get(new_map.bucket)
        has_map = clustered_bucket is not None
        if clustered_bucket is None:
            clustered_bucket = await self._bucket_without_map(
                new_map, is_from_operator=is_from_operator
            )
        partition_count = len(clustered_bucket.disk.bucket.partitions)
        if len(new_map.partitions) != partition_count:
            raise ServerError(
                Status.BAD_ARGUMENT,
                f"the bucket has {partition_count} partitions here, not {len(new_map.partitions)}",
            )
        if not has_map:
            self._note_incomplete(clustered_bucket.disk, clustered_bucket.map, new_map)
        if is_from_operator:
            # A map that another node tells was applied elsewhere: to refuse it would not undo it.
            roles.check_hand_over(
                clustered_bucket.map, new_map, self.node, clustered_bucket.suspects
            )
        else:
            clustered_bucket.suspects |= roles.taken_back_in(
                clustered_bucket.map, new_map, self.node
            )
        async with clustered_bucket.lock:
            await clustered_bucket.apply_map(new_map)
        if self._server.disk_of(new_map.bucket) is clustered_bucket.disk:
            # It was not deleted meanwhile.
            self._buckets[new_map.bucket] = clustered_bucket

    async def _bucket_without_map(
        self, new_map: PartitionMap, *, is_from_operator: bool
    ) -> ClusteredBucket:
        """A bucket that had no map yet, as if under one of revision 0: this node held it alone, or
        not at all."""
        if self.node not in new_map.nodes:
            raise ServerError(
                Status.BAD_ARGUMENT,
                f"this node is called {self.node!r}, and the map does not name it; it names "
                f"{', '.join(sorted(new_map.nodes))}",
            )
        disk = self._server.disk_of(new_map.bucket)
        assignment = Assignment(active=self.node)
        # Another node knows this one as a holder, and it has no map: it was one once, and what it
        # has of the bucket was created again.
        has_lost_its_disk = disk is not None and not is_from_operator
        if disk is None:
            disk = await self._server.create_dead_bucket(new_map.bucket, len(new_map.partitions))
        if all(partition.state is PartitionState.DEAD for partition in disk.bucket.partitions):
            # It was made for a map: now, or for one that could not be applied then. Unless the
            # bucket begins with this map, the node lacks what the map has it hold.
            assignment = Assignment()
            has_lost_its_disk = has_lost_its_disk or new_map.revision > 1
        map_before = PartitionMap(
            bucket=new_map.bucket,
            revision=0,
            nodes=new_map.nodes,
            partitions=(assignment,) * len(disk.bucket.partitions),
        )
        suspects = roles.suspects_in(new_map, self.node) if has_lost_its_disk else {}
        return self._clustered_bucket(
            disk, map_before, is_confirmed=True, is_clean=True, suspects=suspects
        )

    def _note_incomplete(
        self, disk: BucketDisk, map_before: PartitionMap, first_map: PartitionMap
    ) -> None:
        """Notes what this node may lack when it gets its first map of a bucket that it has.

        `upr replicas add` refuses a node that has a bucket of its own. So the map has named this
        one before: it has lost its disk, its configuration has made the bucket again, and it may
        have acknowledged changes of the partitions for which another node is active. A node that
        the command adds has no bucket; if it had one before, the map records what it may lack.
        """
        for partition in disk.bucket.partitions:
            before, after = map_before.partitions[partition.id], first_map.partitions[partition.id]
            partition.is_incomplete = before.active == self.node != after.active

    def _clustered_bucket(
        self,
        disk: BucketDisk,
        partition_map: PartitionMap,
        *,
        is_confirmed: bool,
        is_clean: bool,
        suspects: dict[PartitionId, int],
    ) -> ClusteredBucket:
        disk.maintenance.undo_mutations = self._undo_mutations
        return ClusteredBucket(
            self._server,
            disk,
            self.node,
            self.system,
            lambda: self._nursery,
            partition_map,
            is_confirmed=is_confirmed,
            is_clean=is_clean,
            suspects=suspects,
        )
