"""Applies partition maps to one bucket: decides (`roles`), writes to disk, and then changes what is
in memory.

**Fencing.** Before a failover, replicas get a map without an active node.
`ClusteredBucket.apply_map` stops their replicators (`BucketReplicators.stop_all_but`), so a deposed
active that still runs has nothing more acknowledged as replicated. The deposed node itself, once it
gets a newer map, is demoted in `apply_map` before anything is awaited: `Partition.change_state`
makes it refuse writes. And a node streams only to replicas that its own map names
(`net.handlers.streams`).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Final

import attrs
import structlog
import trio

from upr_protocol.concurrency import run_steps
from upr_protocol.errors import Status, UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import PartitionId, PartitionState, SeqNo
from upr_protocol.partition_map import PartitionMap
from upr_server.engine import Partition
from upr_server.replication import roles
from upr_server.replication.bucket_replicators import BucketReplicators
from upr_server.replication.local_server import LocalServer, streams_ended
from upr_server.replication.roles import STEP_PARTITIONS, ReplicationSource, RoleChange
from upr_server.runtime import System
from upr_server.storage.calls import PutPartitionMap
from upr_server.storage.errors import DiskFullError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.records import PartitionRecord

PERSIST_S: Final = 10.0
"""How long a partition that hands over may take to be on disk; it takes no writes meanwhile."""

FORGOTTEN_KEYS: Final = 8 * 1024
"""Keys in memory that a partition which is handed over forgets in the time that it takes to change
one: at 2 to 6 ns each, 20 to 50 µs. 64 partitions of 64,000 keys took 7 ms in one step."""

FREED_SEGMENTS: Final = 16
"""Segments of snapshots that it frees in that time, at 1.6 µs each. 1 GiB of snapshots has 4,096 at
least."""

log = structlog.get_logger(__name__)


class ClusteredBucket:
    """A bucket whose partitions a map places on nodes.

    Args:
        server: The server that this runs in.
        disk: The bucket.
        node: This node's name.
        system: How other nodes are reached, and where history IDs come from.
        nursery: Tells where replicators run; None while this node replicates nothing.
        partition_map: The map that holds now.

    Attributes:
        disk: The bucket.
        map: The map that was applied last.
        settled_revision: The revision of the map that all partitions follow. While `map` is being
            applied, that of the map before.
        is_confirmed: Whether another node has said since the start that there is no newer one.
        is_clean: Whether this node was stopped cleanly before it was started.
        suspects: Partitions of which this node may lack what it gave to others; see `roles`.
        following: The replicators.
        lock: Held while a map is applied.
    """

    def __init__(
        self,
        server: LocalServer,
        disk: BucketDisk,
        node: str,
        system: System,
        nursery: Callable[[], trio.Nursery | None],
        partition_map: PartitionMap,
        *,
        is_confirmed: bool,
        is_clean: bool,
        suspects: dict[PartitionId, int],
    ) -> None:
        self._server = server
        self._node = node
        self._system = system
        self.disk = disk
        self.map = partition_map
        self.settled_revision = partition_map.revision
        self.is_confirmed = is_confirmed
        self.is_clean = is_clean
        self.suspects = suspects
        self.replicators = BucketReplicators(server, disk, node, system, self._promotion_seq)
        self.lock = trio.Lock()
        self._nursery = nursery

    def _promotion_seq(self, partition: PartitionId) -> SeqNo:
        """Up to where the active node had everything when it became active, by the map; 0 if the
        map does not say."""
        point = self.map.partitions[partition].promotion_point
        return SeqNo(0) if point is None else point.seq

    def actives_of_incomplete(self) -> list[str]:
        """The nodes that are active for partitions of which this node may lack what it
        acknowledged, and which it copies from another replica. O(partitions)."""
        assignments = [
            self.map.partitions[partition.id]
            for partition in self.disk.bucket.partitions
            if partition.is_incomplete and partition.state is PartitionState.REPLICA
        ]
        return list(
            dict.fromkeys(
                assignment.active
                for assignment in assignments
                if assignment.active and assignment.source_of(self._node) != assignment.active
            )
        )

    async def follow_map(self) -> None:
        """Replicates from the nodes that the map names. Call it with `lock` held."""
        await trio.lowlevel.checkpoint()
        sources = await self._sources(self.map)
        await run_steps(self.replicators.prepare(sources))
        nursery = self._nursery()
        # Others have had their turn: the bucket may be deleted, or the server about to stop.
        if nursery is not None and self._server.disk_of(self.map.bucket) is self.disk:
            self.replicators.start_missing(sources, nursery)

    async def apply_map(self, new_map: PartitionMap) -> None:
        """Makes this node what `new_map` says. Call it with `lock` held, and shielded.

        Raises:
            ServerError: `WRONG_STATE` when a partition is to continue a history of which this node
                does not have everything. Nothing changed.
            DiskFullError: The disk has no room. Nothing changed.
        """
        partitions = self.disk.bucket.partitions
        states: dict[Partition, PartitionState] = {}
        # A deposed active is fenced here: it takes no writes from here on, as its last number must
        # not move while the disk catches up with it. PENDING, because replicas still read its end.
        demoted_logs: dict[Partition, FailoverLog] = {}
        for count, partition in enumerate(partitions, 1):
            state = states[partition] = self._state_in(new_map, partition)
            if partition.state is PartitionState.ACTIVE and state is not PartitionState.ACTIVE:
                demoted_logs[partition] = partition.failover_log
                partition.change_state(PartitionState.PENDING, partition.failover_log)
            if count % STEP_PARTITIONS == 0:
                await trio.lowlevel.checkpoint()
        try:
            changes = await self._prepare(new_map, states, demoted_logs)
        except UprError:
            for partition, failover_log in demoted_logs.items():
                if not partition.damage:
                    partition.change_state(PartitionState.ACTIVE, failover_log)
            with trio.CancelScope(shield=True):
                await self.follow_map()
            raise
        # The disk has the map: from here on nothing fails.
        self.map = new_map
        states |= {change.partition: PartitionState.DEAD for change in changes if change.damage}
        self.is_confirmed = True
        self.suspects = {
            partition: since
            for partition, since in self.suspects.items()
            if roles.is_still_suspect(new_map.partitions[partition], self._node, since)
        }
        self._warn_of_suspects(new_map, states)
        await self._forget_former_replicas()
        await self._change(changes)
        self.settled_revision = new_map.revision
        await self.follow_map()
        counts = {state.name.lower(): 0 for state in PartitionState}
        for state in states.values():
            counts[state.name.lower()] += 1
        log.info(
            "partition map applied", bucket=new_map.bucket, revision=new_map.revision, **counts
        )

    def _state_in(self, new_map: PartitionMap, partition: Partition) -> PartitionState:
        if partition.damage:
            # Whatever the map says: until it is mended, nothing of it is read or written.
            return PartitionState.DEAD
        return roles.state_in(
            new_map.partitions[partition.id], self._node, self.suspects.get(partition.id)
        )

    async def _prepare(
        self,
        new_map: PartitionMap,
        states: dict[Partition, PartitionState],
        demoted_logs: dict[Partition, FailoverLog],
    ) -> list[RoleChange]:
        """Writes to disk what `new_map` relies on, then `new_map` and its changes of roles."""
        sources = await self._sources(new_map)
        # What a replica has received may be all that is left of what was acknowledged. A failover
        # would be refused if it were dropped here, and would go on without it when it is repeated.
        held_partitions = {
            partition.id for partition, state in states.items() if state is not PartitionState.DEAD
        }
        # A replicator moves numbers and failover logs: those that end are to be settled before the
        # new logs are made of them.
        await self.replicators.stop_all_but(sources, held_partitions)
        # The next active is told that everything up to the last number is here: a crash after this
        # must not take it back.
        await self._persist(list(demoted_logs))
        changes = await self._role_changes(new_map, states, demoted_logs)
        # One commit: after a crash the disk has the map and all of its records, or none of them.
        records: list[tuple[PartitionId, PartitionRecord]] = []
        for change in changes:
            records.append((change.partition.id, _record_of(change)))
            if len(records) % STEP_PARTITIONS == 0:
                await trio.lowlevel.checkpoint()
        document = await run_steps(new_map.encode_in_steps())
        # The call names the bucket, and another of its name may be there by now.
        self.disk.maintenance.check_not_deleted()
        damages = await self.disk.store.ask(PutPartitionMap(new_map.bucket, document, records))
        return [
            attrs.evolve(change, damage=damage)
            if (damage := damages.get(change.partition.id, ""))
            else change
            for change in changes
        ]

    async def _role_changes(
        self,
        new_map: PartitionMap,
        states: dict[Partition, PartitionState],
        demoted_logs: Container[Partition],
    ) -> list[RoleChange]:
        """What `new_map` changes in this node's partitions."""
        is_confirming = not self.is_confirmed and new_map.revision == self.map.revision
        changes: list[RoleChange] = []
        for count, (partition, state) in enumerate(states.items(), 1):
            if partition.damage:
                # It may have been met just now; nothing of it changes any more.
                continue
            before, after = self.map.partitions[partition.id], new_map.partitions[partition.id]
            failover_log = roles.failover_log_in(
                partition,
                state,
                after,
                was_active=roles.was_last_active(before, self._node),
                has_taken_over=roles.has_taken_over(before, after, self._node),
                is_confirming=is_confirming,
                is_clean=self.is_clean,
                new_history_id=self._system.new_id,
            )
            change = RoleChange(partition, state, failover_log)
            # Of a demoted partition the state here is PENDING already, and the disk's is still
            # ACTIVE. Judged before others have their turn: the log of a replica that goes on may
            # then become another, which this change would take back.
            if change.ends_streams or partition in demoted_logs:
                changes.append(change)
            if count % STEP_PARTITIONS == 0:
                await trio.lowlevel.checkpoint()
        return changes

    async def _persist(self, partitions: list[Partition]) -> None:
        with trio.move_on_after(PERSIST_S):
            await trio.lowlevel.checkpoint()
            for partition in partitions:
                await self.disk.flusher.wait_until_persisted(partition, partition.high_seq)
            return
        reason = self.disk.flusher.disk_full_reason or "the disk is slow"
        raise DiskFullError(
            f"the latest writes of {self.disk.bucket.name!r} are not on disk after "
            f"{PERSIST_S:.0f} s: {reason}; repeat the command"
        )

    async def _forget_former_replicas(self) -> None:
        """Has nobody count on nodes that are no replicas any more: a failover would not look at
        what they have. Their connections may last."""
        for count, partition in enumerate(self.disk.bucket.partitions, 1):
            partition.replicas.keep_replicas(
                self.map.partitions[partition.id].followers_of(self._node)
            )
            if count % STEP_PARTITIONS == 0:
                await trio.lowlevel.checkpoint()

    async def _change(self, changes: list[RoleChange]) -> None:
        """Changes the partitions, in steps. A stream ends before its partition changes."""
        bucket, status = self.disk.bucket, Status.STATE_CHANGED
        changing_partitions = [change.partition for change in changes if change.ends_streams]
        # Replicas follow a node that hands over to the end. But a consumer's barrier would come
        # back from here without anything that the next active has taken in by then. Streams of
        # consumers do not begin there: the partition is pending already.
        handed_over_ids = {change.partition.id for change in changes if not change.ends_streams}
        if handed_over_ids:
            for _ in self._server.end_streams(bucket, handed_over_ids, status, of_replicas=False):
                await trio.lowlevel.checkpoint()
        async with streams_ended(self._server, bucket, changing_partitions, status):
            step_cost = 0
            for change in changes:
                step_cost += _cost_of(change.partition)
                if change.damage:
                    self._refuse(change)
                else:
                    self._carry_out(change)
                if step_cost >= STEP_PARTITIONS:
                    step_cost = 0
                    await trio.lowlevel.checkpoint()
        for change in changes:
            if change.damage:
                await self.disk.flusher.refuse_callbacks(change.partition.id)
                # The record names a state and histories of an older map. Should it be readable at
                # the next start, that must not count as one after a clean stop.
                for _ in self.disk.note_refused(change.partition, is_on_disk=False):
                    await trio.lowlevel.checkpoint()

    def _refuse(self, change: RoleChange) -> None:
        change.partition.refuse(change.damage)
        self.replicators.discard_received(change.partition.id)

    def _carry_out(self, change: RoleChange) -> None:
        partition, state = change.partition, change.state
        has_new_history = change.failover_log != partition.failover_log
        partition.is_incomplete = _is_incomplete_after(change)
        partition.change_state(state, change.failover_log)
        if state in (PartitionState.REPLICA, PartitionState.DEAD):
            # Such a partition keeps nothing in memory: it stands where its disk stands.
            partition.restart_at(partition.manager.persistence.committed_seq)
        if state is PartitionState.ACTIVE:
            # A replica leaves its newest mutations out of the index, so that they can be undone;
            # until they are in it, they can neither be read by key nor expire.
            self.disk.maintenance.wake()
            if has_new_history:
                # The node before may have told of changes that are lost, and may never come back.
                partition.updates.notify_undone()
        if state is not PartitionState.REPLICA:
            self.replicators.discard_received(partition.id)

    async def _sources(self, partition_map: PartitionMap) -> dict[str, ReplicationSource]:
        partitions = [
            partition.id for partition in self.disk.bucket.partitions if not partition.damage
        ]
        return await run_steps(roles.sources_in(partition_map, self._node, partitions))

    def _warn_of_suspects(
        self, new_map: PartitionMap, states: dict[Partition, PartitionState]
    ) -> None:
        waiting_count = sum(
            state is PartitionState.PENDING
            and new_map.partitions[partition.id].state_of(self._node) is PartitionState.ACTIVE
            for partition, state in states.items()
        )
        if waiting_count:
            log.warning(
                "this node was killed while it was active, or has lost its disk; its replicas may "
                "have more: name the actives with `upr failover`",
                bucket=new_map.bucket,
                partitions=waiting_count,
            )


def _cost_of(partition: Partition) -> int:
    """What it costs to change a partition; 1 if it has nothing in memory, and nobody waits."""
    return (
        1
        # Some of those who wait for its replicas are answered at once.
        + partition.replicas.waiting_count
        + len(partition.table) // FORGOTTEN_KEYS
        + partition.snapshots.segment_count // FREED_SEGMENTS
    )


def _record_of(change: RoleChange) -> PartitionRecord:
    partition = change.partition
    persisted = partition.manager.persistence.committed_seq
    # A commit that is still under way would be taken back by this record, which says where it ends.
    assert persisted == partition.high_seq, partition
    return PartitionRecord(
        change.state,
        tuple(change.failover_log.pairs()),
        persisted,
        partition.last_cas,
        is_incomplete=_is_incomplete_after(change),
    )


def _is_incomplete_after(change: RoleChange) -> bool:
    # What an active node lacks is lost: nobody waits for it any more.
    return change.partition.is_incomplete and change.state is not PartitionState.ACTIVE
