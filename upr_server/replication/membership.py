"""Which partitions this node holds, and what it is for them: carries partition maps out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import structlog
import trio

from upr_protocol.client import Address, NodeClient
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import Assignment, PartitionMap, PartitionMapError
from upr_server.engine import Partition
from upr_server.replication.host import Host
from upr_server.replication.incoming import Incoming
from upr_server.replication.replicator import Replicator
from upr_server.runtime import System
from upr_server.storage.calls import PutPartitionMap
from upr_server.storage.errors import DiskFullError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.records import PartialRecord, PartitionRecord

UNDO_MUTATIONS: Final = 64 * 1024
"""The newest mutations of a bucket that are left out of its index, so that they can be undone: at
100,000 a second, more than half a second of what a replica may have ahead of another. On an active
each takes some 150 bytes of memory for that time."""

PERSIST_S: Final = 10.0
"""How long a partition that hands over may take to be on disk; nobody writes to it meanwhile."""

log = structlog.get_logger(__name__)


@attrs.define(eq=False)
class _Held:
    """A bucket of which this node holds something.

    Attributes:
        disk: The bucket.
        map: The map that was carried out last.
        is_confirmed: Whether a peer has said since the start that there is no newer one.
        is_clean: Whether this node was stopped cleanly before it was started.
        doubtful: Partitions of which this node may not have all that it gave others, though the map
            has it active: it was killed, or has just been given the bucket. By each, the revision
            of the map that it had then. It does not become active for them before another was, or a
            failover has chosen it since: a map that only puts back what was knows nothing of this.
        incoming: What replicas have received.
        replicators: Whom this node follows, by the name of the node.
        turn: Maps are carried out one after the other.
    """

    disk: BucketDisk
    map: PartitionMap
    is_confirmed: bool
    is_clean: bool
    doubtful: dict[PartitionId, int] = attrs.field(factory=dict)
    incoming: dict[PartitionId, Incoming] = attrs.field(factory=dict)
    replicators: dict[str, Replicator] = attrs.field(factory=dict)
    turn: trio.Lock = attrs.field(factory=trio.Lock)


@attrs.frozen
class _Change:
    partition: Partition
    state: PartitionState
    failover_log: FailoverLog

    @property
    def leads_elsewhere(self) -> bool:
        """Whether who streams the partition must begin again."""
        return (
            self.failover_log != self.partition.failover_log
            or self.state is not self.partition.state
        )


class Membership:
    """See the module.

    Args:
        host: The server.
        node: This node's name.
        system: How other nodes are reached, and where history IDs come from.
        undo_mutations: How many of a bucket's newest mutations can be undone, about.
    """

    def __init__(
        self,
        host: Host,
        node: str,
        system: System,
        undo_mutations: int = UNDO_MUTATIONS,
    ) -> None:
        self.node = node
        self._host = host
        self.system = system
        self._undo_mutations = undo_mutations
        self._held: dict[str, _Held] = {}
        self._turn = trio.Lock()
        self._nursery: trio.Nursery | None = None

    # What others ask.

    def map_of(self, bucket: str) -> PartitionMap | None:
        """The bucket's map; None while this node holds it alone."""
        held = self._held.get(bucket)
        return None if held is None else held.map

    def maps(self) -> list[PartitionMap]:
        """All maps that there are here."""
        return [held.map for held in self._held.values()]

    def unconfirmed(self) -> list[str]:
        """Buckets of which this node was an active, and no peer has said yet that it still is."""
        return [name for name, held in self._held.items() if not held.is_confirmed]

    def revision(self, bucket: str) -> int:
        """The revision of the bucket's map; 0 for none."""
        held = self._held.get(bucket)
        return 0 if held is None else held.map.revision

    def replicas(self, bucket: str, partition: PartitionId) -> list[str]:
        """The nodes that follow this one for a partition."""
        held = self._held.get(bucket)
        if held is None:
            return []
        assignment = held.map.partitions[partition]
        return [name for name in assignment.replicas if assignment.source_of(name) == self.node]

    def is_replica(self, bucket: str, partition: PartitionId, name: str) -> bool:
        """Whether the node `name` follows this one for a partition."""
        held = self._held.get(bucket)
        return held is not None and held.map.partitions[partition].source_of(name) == self.node

    # The beginning and the end.

    def restore(
        self,
        disk: BucketDisk,
        document: str,
        partials: Mapping[PartitionId, PartialRecord],
        *,
        is_clean: bool,
    ) -> None:
        """A bucket was found on disk, with this map. Its partitions are what the map says, but an
        active waits until a peer has confirmed the map.

        Args:
            disk: The bucket.
            document: The map.
            partials: Snapshots of which the disk has the front.
            is_clean: Whether this node was stopped cleanly.

        Raises:
            PartitionMapError: What is on disk is no map.
        """
        found = PartitionMap.decode(document)
        held = _Held(disk, found, is_confirmed=False, is_clean=is_clean)
        self._held[found.bucket] = held
        disk.maintenance.undo_mutations = self._undo_mutations
        for partition in disk.bucket.partitions:
            assignment = found.partitions[partition.id]
            state = assignment.state_of(self.node)
            if state is PartitionState.ACTIVE:
                state = PartitionState.PENDING
            if not is_clean and _was_master(assignment, self.node):
                # What it had in memory is lost, and may have been acknowledged: a replica has it.
                held.doubtful[partition.id] = found.revision
            partition.become(state, partition.failover_log)
            if partition.id in partials:
                held.incoming[partition.id] = _incoming_of(partition, partials[partition.id])

    def forget(self, bucket: str) -> None:
        """A bucket was deleted here."""
        held = self._held.pop(bucket, None)
        if held is not None:
            for replicator in held.replicators.values():
                replicator.cancel()

    async def run(self) -> None:
        """Follows whom the maps name, for ever."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                for held in list(self._held.values()):
                    async with held.turn:
                        await self._follow(held)
                await trio.sleep_forever()
            finally:
                # A map may be half carried out; nobody is followed any more.
                self._nursery = None
                for held in self._held.values():
                    for replicator in held.replicators.values():
                        replicator.hurry()

    async def stop(self) -> None:
        """Follows nobody any more; what was received is on disk when this returns, or there is no
        room for it."""
        for held in self._held.values():
            async with held.turn:
                for name in list(held.replicators):
                    try:
                        await held.replicators.pop(name).stop()
                    except DiskFullError as error:
                        log.error("some of what was received is lost", error=str(error))

    def is_doubtful(self, bucket: str) -> bool:
        """Whether this node would lose something if it took its stop for a clean one: see
        `_Held`."""
        held = self._held.get(bucket)
        if held is None:
            return False
        # Before a peer has confirmed the map, what was lost has had no consequences yet.
        return bool(held.doubtful) or not (held.is_clean or held.is_confirmed)

    def peers(self, bucket: str) -> dict[str, str]:
        """The addresses of the other nodes of a bucket, by name."""
        held = self._held.get(bucket)
        if held is None:
            return {}
        return {name: there for name, there in held.map.nodes.items() if name != self.node}

    # Maps.

    async def give(self, expected_revision: int, document: str) -> PartitionMap:
        """Carries out a map, if the one before it is that of `expected_revision`; or if it was
        carried out already: the answer may have been lost, or a peer may have told of it.

        Returns:
            The map, on disk.

        Raises:
            ServerError: `REVISION_CONFLICT`; `BAD_ARGUMENT` for what is no map, or names no node of
                this name; `WRONG_STATE` when a partition is to be active here in a history of
                which this node has not everything.
        """
        given = _decoded(document)
        with trio.CancelScope(shield=True):
            async with self._turn:
                if self.map_of(given.bucket) == given:
                    return given
                revision = self.revision(given.bucket)
                if revision != expected_revision:
                    raise ServerError(
                        Status.REVISION_CONFLICT,
                        f"the map of {given.bucket!r} has revision {revision} here, "
                        f"not {expected_revision}",
                    )
                await self._carry_out(given)
        return given

    async def join(self, bucket: str, address: str) -> PartitionMap:
        """Asks another node for a bucket's map, and carries it out.

        Raises:
            ServerError: `BAD_ARGUMENT` when that node cannot be asked, or has no map; and what
                `give` raises.
        """
        node = NodeClient(
            Address.parse(f"upr://{address}/{bucket}"),
            identity=f"node:{self.node}",
            dial=self.system.dial,
        )
        try:
            found = (await node.status()).map
        except UprError as error:
            raise ServerError(
                Status.BAD_ARGUMENT, f"{address} cannot be asked for its map: {error}"
            ) from error
        if found is None:
            raise ServerError(Status.BAD_ARGUMENT, f"{address} has no map of {bucket!r}")
        await self.adopt(found)
        held = self.map_of(bucket)
        assert held is not None, "it was carried out, or a newer one is here"
        return held

    async def adopt(self, found: PartitionMap) -> bool:
        """Carries out a peer's map, if it is newer than the one that is here.

        Returns:
            Whether it did.
        """
        with trio.CancelScope(shield=True):
            async with self._turn:
                if found.revision <= self.revision(found.bucket):
                    return False
                log.info("a newer map", bucket=found.bucket, revision=found.revision)
                await self._carry_out(found, is_told=True)
        return True

    async def confirm(self, bucket: str, revision: int) -> None:
        """A peer says that there is no map newer than `revision`: this node is what that says."""
        with trio.CancelScope(shield=True):
            async with self._turn:
                held = self._held.get(bucket)
                if held is not None and held.map.revision == revision and not held.is_confirmed:
                    async with held.turn:
                        await self._change(held, held.map)

    async def _carry_out(self, new: PartitionMap, *, is_told: bool = False) -> None:
        if new.revision <= self.revision(new.bucket):
            raise ServerError(
                Status.REVISION_CONFLICT,
                f"revision {new.revision} of {new.bucket!r} is not above that of the map here",
            )
        held = self._held.get(new.bucket) or await self._first(new, is_told=is_told)
        if len(new.partitions) != len(held.disk.bucket.partitions):
            raise ServerError(
                Status.BAD_ARGUMENT,
                f"the bucket has {len(held.disk.bucket.partitions)} partitions here, not "
                f"{len(new.partitions)}",
            )
        if not is_told:
            self._check_hands_over(held, new)
        async with held.turn:
            await self._change(held, new)
        if self._host.disk_of(new.bucket) is held.disk:
            # It was not deleted meanwhile.
            self._held[new.bucket] = held

    def _check_hands_over(self, held: _Held, new: PartitionMap) -> None:
        """Who hands over says by it that it has all that it gave others."""
        for number in held.doubtful:
            # What was handed over before is on disk, whatever came since.
            before, after = held.map.partitions[number], new.partitions[number]
            if after.handing_over == self.node and before.handing_over != self.node:
                raise ServerError(
                    Status.WRONG_STATE,
                    f"{self.node} was killed while it was active for partition {number}, or has "
                    "lost its disk; its replicas may have more: use `upr failover`",
                )

    async def _first(self, new: PartitionMap, *, is_told: bool) -> _Held:
        """Of a bucket that had no map yet: this node held it alone, or not at all. If a peer told
        it, and no operator gave it, this node knew it once: what it has of the bucket was begun
        anew."""
        if self.node not in new.nodes:
            raise ServerError(
                Status.BAD_ARGUMENT,
                f"this node is called {self.node!r}, and the map does not name it; it names "
                f"{', '.join(sorted(new.nodes))}",
            )
        disk = self._host.disk_of(new.bucket)
        assignment = Assignment(active=self.node)
        doubtful: dict[PartitionId, int] = {}
        is_lost = is_told
        if disk is None:
            disk = await self._host.create_held(new.bucket, len(new.partitions))
            assignment = Assignment()
            # Unless this is where the bucket begins, it holds nothing of what it is said to have:
            # perhaps its disk was lost.
            is_lost = new.revision > 1
        if is_lost:
            doubtful = {
                PartitionId(number): new.revision
                for number, there in enumerate(new.partitions)
                if _was_master(there, self.node)
            }
        disk.maintenance.undo_mutations = self._undo_mutations
        before = PartitionMap(
            bucket=new.bucket,
            revision=0,
            nodes=new.nodes,
            partitions=(assignment,) * len(disk.bucket.partitions),
        )
        return _Held(disk, before, is_confirmed=True, is_clean=True, doubtful=doubtful)

    async def _change(self, held: _Held, new: PartitionMap) -> None:
        disk, bucket = held.disk, held.disk.bucket
        states = {
            partition: self._state_in(held, partition.id, new.partitions[partition.id])
            for partition in bucket.partitions
        }
        waiting = sum(
            state is PartitionState.PENDING
            and new.partitions[partition.id].state_of(self.node) is PartitionState.ACTIVE
            for partition, state in states.items()
        )
        if waiting:
            log.warning(
                "this node was killed while it was active, or has lost its disk; its replicas may "
                "have more: name the actives with `upr failover`",
                bucket=bucket.name,
                partitions=waiting,
            )
        leaving = [
            partition
            for partition, state in states.items()
            if partition.state is PartitionState.ACTIVE and state is not PartitionState.ACTIVE
        ]
        logs = {partition: partition.failover_log for partition in leaving}
        for partition in leaving:
            # From here on it takes no writes.
            partition.become(PartitionState.PENDING, partition.failover_log)
        failure: UprError | None = None
        changes: list[_Change] = []
        try:
            await self._stop_following(held, new)
            await self._persist(disk, leaving)
            changes = [
                _Change(partition, state, self._log_after(held, new, partition, state))
                for partition, state in states.items()
            ]
            changes = [c for c in changes if c.leads_elsewhere or c.partition in logs]
            records = [(change.partition.id, _record(change)) for change in changes]
            await disk.store.ask(PutPartitionMap(bucket.name, new.encode(), records))
        except UprError as error:
            failure = error
        if failure is not None:
            # Everything is as it was.
            for partition in leaving:
                partition.become(PartitionState.ACTIVE, logs[partition])
            await self._follow(held)
            raise failure
        held.map = new
        held.is_confirmed = True
        held.doubtful = {
            number: since
            for number, since in held.doubtful.items()
            if self._is_doubtful(since, new.partitions[number])
        }
        for change in changes:
            self._become(held, change, was_active=change.partition in logs)
        await self._follow(held)
        log.info(
            "partition map",
            bucket=bucket.name,
            revision=new.revision,
            **{
                state.name.lower(): sum(one is state for one in states.values())
                for state in PartitionState
            },
        )

    async def _persist(self, disk: BucketDisk, partitions: list[Partition]) -> None:
        """Waits until the disk has all of these partitions.

        Raises:
            DiskFullError: It does not in time.
        """
        with trio.move_on_after(PERSIST_S):
            await trio.lowlevel.checkpoint()
            for partition in partitions:
                await disk.flusher.wait_until_persisted(partition, partition.high_seq)
            return
        raise DiskFullError(
            f"what {disk.bucket.name!r} took in is not on disk after {PERSIST_S:.0f} s: "
            f"{disk.flusher.full or 'it is slow'}"
        )

    def _state_in(self, held: _Held, number: PartitionId, assignment: Assignment) -> PartitionState:
        """What a map makes of a partition."""
        state = assignment.state_of(self.node)
        since = held.doubtful.get(number)
        if (
            state is PartitionState.ACTIVE
            and since is not None
            and self._is_doubtful(since, assignment)
        ):
            return PartitionState.PENDING
        return state

    def _is_doubtful(self, since: int, assignment: Assignment) -> bool:
        """Whether a doubt that began with the map of revision `since` outlasts another map."""
        return assignment.active in ("", self.node) and assignment.chosen <= since

    def _is_confirming(self, held: _Held, new: PartitionMap) -> bool:
        """Whether this node is to be what it was when it went away."""
        return not held.is_confirmed and new.revision == held.map.revision

    def _become(self, held: _Held, change: _Change, *, was_active: bool) -> None:
        partition, state = change.partition, change.state
        hands_over = was_active and state is PartitionState.PENDING
        leads_elsewhere = change.leads_elsewhere
        partition.become(state, change.failover_log)
        if state in (PartitionState.REPLICA, PartitionState.DEAD):
            partition.stand_at(partition.manager.persistence.committed)
        if leads_elsewhere or hands_over:
            # Who hands over is still followed by replicas. But a barrier that it let others have
            # back would say nothing of what the next active has taken in by then.
            self._host.end_streams(
                held.disk.bucket, partition.id, Status.STATE_CHANGED, of_replicas=not hands_over
            )
        if state is PartitionState.ACTIVE:
            # What the index does not know yet nobody can ask for, nor can it expire.
            held.disk.maintenance.wake()
        if state is not PartitionState.REPLICA:
            held.incoming.pop(partition.id, None)

    def _log_after(
        self, held: _Held, new: PartitionMap, partition: Partition, state: PartitionState
    ) -> FailoverLog:
        """The failover log with which a partition will be in `state`."""
        failover_log = partition.failover_log
        if state is not PartitionState.ACTIVE or partition.state is PartitionState.ACTIVE:
            return failover_log
        assignment = new.partitions[partition.id]
        if self._is_confirming(held, new):
            keeps = held.is_clean
        elif assignment.keeps is not None:
            keeps = True
            _check_keeps(assignment, partition)
        else:
            keeps = False
        if keeps and failover_log.entries:
            return failover_log
        return failover_log.branch(self.system.new_history_id(), partition.high_seq)

    # Following.

    def _wanted(
        self, held: _Held, new: PartitionMap
    ) -> dict[str, tuple[str, dict[PartitionId, PartitionState]]]:
        """Whom to follow: by node its address, and for each partition its state there."""
        wanted: dict[str, tuple[str, dict[PartitionId, PartitionState]]] = {}
        for partition in held.disk.bucket.partitions:
            assignment = new.partitions[partition.id]
            source = assignment.source_of(self.node)
            if source:
                _, partitions = wanted.setdefault(source, (new.nodes[source], {}))
                partitions[partition.id] = assignment.state_of(source)
        return wanted

    async def _stop_following(self, held: _Held, new: PartitionMap) -> None:
        """Ends what `new` does not want, or wants otherwise; what came is on disk then."""
        wanted = self._wanted(held, new)
        for name, replicator in list(held.replicators.items()):
            if wanted.get(name) != (replicator.address, replicator.partitions):
                del held.replicators[name]
                await replicator.stop()

    async def _follow(self, held: _Held) -> None:
        """Follows whom the map names, and is not followed yet."""
        await self._stop_following(held, held.map)
        if self._nursery is None:
            return
        for name, (address, partitions) in self._wanted(held, held.map).items():
            if name in held.replicators:
                continue
            for number in partitions:
                if number not in held.incoming:
                    held.incoming[number] = _incoming_of(held.disk.bucket.partitions[number])
            replicator = Replicator(
                self._host,
                held.disk,
                self.node,
                name,
                address,
                partitions,
                held.incoming,
                self.system,
            )
            held.replicators[name] = replicator
            self._nursery.start_soon(replicator.run)

    def statistics(self, bucket: str) -> dict[str, object]:
        """Figures of one bucket; nothing when this node holds it alone."""
        held = self._held.get(bucket)
        if held is None:
            return {}
        return {
            "node": self.node,
            "revision": held.map.revision,
            "is_confirmed": held.is_confirmed,
            "follows": [one.statistics() for one in held.replicators.values()],
        }


def _was_master(assignment: Assignment, node: str) -> bool:
    """Whether `node` was the last to take writes of a partition, and others follow."""
    return bool(assignment.replicas) and node in (
        assignment.active,
        assignment.handing_over,
        assignment.lost,
    )


def _decoded(document: str) -> PartitionMap:
    try:
        return PartitionMap.decode(document)
    except PartitionMapError as error:
        raise ServerError(Status.BAD_ARGUMENT, str(error)) from error


def _check_keeps(assignment: Assignment, partition: Partition) -> None:
    keeps = assignment.keeps
    assert keeps is not None
    found = partition.failover_log.current, partition.high_seq
    if found != (keeps.history_id, keeps.seq):
        raise ServerError(
            Status.WRONG_STATE,
            f"partition {partition.id} is to go on in history {keeps.history_id:x} from "
            f"{keeps.seq}, and is in {found[0]:x} at {found[1]} here",
        )


def _record(change: _Change) -> PartitionRecord:
    partition = change.partition
    return PartitionRecord(
        change.state,
        tuple(change.failover_log.pairs()),
        partition.manager.persistence.committed,
        partition.last_cas,
    )


def _incoming_of(partition: Partition, partial: PartialRecord | None = None) -> Incoming:
    return Incoming(partition.failover_log, partition.high_seq, partition.last_cas, partial)
