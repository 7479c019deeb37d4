"""A simulated node: the real server on a simulated network and disk, killed and back again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from random import Random
from typing import Any, Final

import attrs
import msgspec
import trio

from tests.kit.history import Accepted, BeganHistory, Failed, History, Row, Said
from tests.simulation.bugs.patch import replaced
from tests.simulation.disk import FaultyStore, Wear, flip, repaired
from tests.simulation.network import PORT, Network
from tests.simulation.world import EPOCH_S
from upr_protocol.chunk import Mutation, decode_runs
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Cas, PartitionState, SeqNo
from upr_protocol.security import UNPROTECTED, Security
from upr_protocol.wire import decode_results
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.engine import Evaluation, MutationBatch, Partition, apply_set_runs
from upr_server.net.handlers import publishing, single_sets
from upr_server.runtime import BoundListeners, System
from upr_server.storage.errors import StorageError, StoreFailedError
from upr_server.storage.simulated import SimulatedDirectory
from upr_server.storage.simulated_disk import SimulatedDisk

BUCKET: Final = "b"

_NODE: ContextVar[Node] = ContextVar("_NODE")
"""The node whose task this is."""


def first_of(error: BaseException) -> BaseException:
    """The first exception inside of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class ServerDiedError(AssertionError):
    """A server ended by itself, and not because its disk failed."""


@attrs.define(eq=False)
class Node:
    """See the module.

    Attributes:
        name: Its name.
        partitions: How many the bucket is made with here; 0 where it is not made.
        quota_bytes: The bucket's.
        network: The network.
        chance: For its disk, its IDs, and its waits.
        history: Where what happens is written down.
        undo_mutations: See `ServerConfig`.
        purge_age_s: See `ServerConfig`.
        users: The users of the cluster, whom it gets before each start; none for no users.
        security: How it logs in to the other nodes.
        wear: What its disk is like.
        clock_s: What its clock is ahead of the true time.
        life: Counts its starts.
        server: The server; None while it is down.
        on_death: Called with the node when its disk has brought it down.
    """

    name: str
    partitions: int
    quota_bytes: int
    network: Network
    chance: Random
    history: History
    undo_mutations: int
    purge_age_s: float
    users: bytes = b""
    security: Security = UNPROTECTED
    wear: Wear = attrs.field(factory=Wear)
    directory: SimulatedDirectory = attrs.field(factory=SimulatedDirectory)
    clock_s: float = 0.0
    life: int = 0
    server: Server | None = None
    store: FaultyStore | None = None
    ended: trio.Event = attrs.field(factory=trio.Event)
    is_killed: bool = False
    is_rotten: bool = False
    on_death: Callable[[Node], None] = lambda _: None
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _stopping: trio.Event = attrs.field(factory=trio.Event)

    @property
    def is_up(self) -> bool:
        """Whether its process is there, though it may not serve yet."""
        return self.life > 0 and not self.ended.is_set()

    def _system(self) -> System:
        return System(
            time=lambda: EPOCH_S + trio.current_time() + self.clock_s,
            random_bits=self.chance.getrandbits,
            draw=self.chance.random,
            dial=partial(self.network.dial, self.name),
            security=self.security,
            bind=self._bind,
        )

    @asynccontextmanager
    async def _bind(self, _listen: str) -> AsyncIterator[BoundListeners]:
        listener = self.network.listen(self.name)
        try:
            yield BoundListeners([listener], PORT)
        finally:
            with trio.CancelScope(shield=True):
                await listener.aclose()

    async def start(self, nursery: trio.Nursery) -> None:
        """Starts it, with what its disk has, and does not wait until it serves."""
        assert not self.is_up
        self.life += 1
        self.history.add(Said(self.name, f"starts, life {self.life}"))
        repaired(self.directory)
        if not self.directory.users.data:
            self.directory.users.save(self.users)
        self.network.come_back(self.name)
        self._scope, self._stopping, self.ended = trio.CancelScope(), trio.Event(), trio.Event()
        self.is_killed = False
        self.store = FaultyStore(
            self.network.clock,
            self.directory,
            self.wear,
            self.chance,
            partial(self._failed, self.life),
        )
        nursery.start_soon(self._run)
        await trio.lowlevel.checkpoint()

    def _failed(self, life: int, after: str) -> None:
        self.history.add(Failed(self.name, life, after))

    async def _run(self) -> None:
        _NODE.set(self)
        buckets = (BucketConfig(BUCKET, self.partitions, self.quota_bytes),)
        config = ServerConfig(
            listen=f"{self.name}:{PORT}",
            insecure_no_authentication=True,
            node=self.name,
            identity=self.name,
            buckets=buckets if self.partitions else (),
            quota_bytes=self.quota_bytes,
            undo_mutations=self.undo_mutations,
            purge_age_s=self.purge_age_s,
            replication_timeout_s=5.0,
            shutdown_deadline_s=1.0,
        )
        has_died = False
        assert self.store is not None, "it is started with its disk"
        try:
            with self._scope:
                async with running_server(config, self.store, self._system()) as server:
                    self.server = server
                    await self._stopping.wait()
        except Exception as error:
            has_died = not self.is_killed
            if has_died and not _is_all_of_disk(error, self._expected()):
                raise ServerDiedError(f"I10: {self.name} died of {first_of(error)!r}") from error
        finally:
            self.server = None
            self.ended.set()
            self.history.add(Said(self.name, "is down"))
        if has_died:
            self.on_death(self)

    async def stop(self) -> None:
        """Ends it cleanly, if its disk lets it."""
        self._stopping.set()
        await self.ended.wait()

    async def kill(self, *, silently: bool) -> None:
        """Ends it as a loss of power would: what is not on disk is gone."""
        self.is_killed = True
        if self.store is not None:
            self.store.is_dead = True
        self.network.crash(self.name, silently=silently)
        self._scope.cancel()
        await self.ended.wait()

    def lose_disk(self) -> None:
        """It comes back with an empty one."""
        assert not self.is_up
        self.directory = SimulatedDirectory()
        self.partitions = 0
        self.is_rotten = False

    def lose_index(self) -> None:
        """It comes back without the index, which is made anew."""
        assert not self.is_up
        for name, (log, _) in self.directory.disks.items():
            self.directory.disks[name] = log, SimulatedDisk()

    def rot(self) -> bool:
        """Bits of its disk flip; whether it had anything on disk."""
        has_flipped = flip(self.directory, self.chance)
        self.is_rotten |= has_flipped
        return has_flipped

    def _expected(self) -> type[StorageError]:
        """What a server may die of."""
        return StorageError if self.is_rotten else StoreFailedError

    @property
    def held(self) -> tuple[Partition, ...]:
        """The bucket's partitions in its memory; none while there are none."""
        bucket = None if self.server is None else self.server.catalog.buckets.get(BUCKET)
        return () if bucket is None else bucket.partitions


def _is_all_of_disk(error: BaseException, expected: type[StorageError]) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_all_of_disk(cause, expected) for cause in error.exceptions)
    return isinstance(error, expected)


def _note(partition: Partition, rows: list[Mutation]) -> None:
    node = _NODE.get()
    for row in rows:
        node.history.add(
            Accepted(
                node.name,
                node.life,
                partition.id,
                partition.failover_log.current,
                Row(row.seq, row.op, row.key, row.value),
                partition.state,
            )
        )


def _set_runs(
    bucket: Any, columns: Any, directory: bytes, *args: Any, first_row: int = 0, **options: Any
) -> Any:
    """What handlers call to take in several runs at once, with what was given numbers to written
    down."""
    runs = apply_set_runs(bucket, columns, directory, *args, first_row=first_row, **options)
    rows, high = list(columns.chunk), first_row
    for run, result in zip(decode_runs(directory), decode_results(runs.answer_rows), strict=True):
        low, high = high, high + run.row_count
        if result.history_id:
            numbered = enumerate(rows[low:high], result.first_seq)
            _note(
                bucket.partitions[run.partition],
                [msgspec.structs.replace(row, seq=SeqNo(seq)) for seq, row in numbered],
            )
    return runs


@contextmanager
def observed() -> Iterator[None]:
    """Has what actives give numbers to written down, and the histories that they begin, for as
    long as the context."""
    cls: Any = Partition
    store, set_all, store_all = cls._store, cls._set_all, cls._store_all
    change_state_before = cls.change_state
    is_storing_all = False

    def _store(self: Any, row: Mutation, **options: Any) -> None:
        store(self, row, **options)
        if not is_storing_all:
            _note(self, [row])

    def _store_all(self: Any, evaluation: Evaluation) -> Any:
        nonlocal is_storing_all
        is_storing_all = True
        try:
            result = store_all(self, evaluation)
        finally:
            is_storing_all = False
        seq = evaluation.result.first_seq
        for row, _ in evaluation.result.rows:
            # The numbers before it are of changes that the same batch superseded. No snapshot ends
            # there, so that it does not matter what they were.
            while seq <= row.seq:
                _note(self, [msgspec.structs.replace(row, seq=seq)])
                seq = SeqNo(seq + 1)
        return result

    def _set_all(self: Any, batch: MutationBatch, *arguments: Any) -> Any:
        result = set_all(self, batch, *arguments)
        first = result.first_seq
        _note(
            self,
            [
                Mutation(row.op, row.key, row.value, SeqNo(first + index), Cas(0))
                for index, row in enumerate(batch.chunk)
            ],
        )
        return result

    def change_state(self: Any, state: PartitionState, failover_log: FailoverLog) -> None:
        has_begun = failover_log != self.failover_log and state is PartitionState.ACTIVE
        change_state_before(self, state, failover_log)
        if has_begun:
            node = _NODE.get()
            node.history.add(BeganHistory(node.name, self.id))

    cls._store, cls._set_all, cls._store_all = _store, _set_all, _store_all
    cls.change_state = change_state
    try:
        with (
            replaced(publishing, "apply_set_runs", _set_runs),
            replaced(single_sets, "apply_set_runs", _set_runs),
        ):
            yield
    finally:
        cls._store, cls._set_all, cls._store_all = store, set_all, store_all
        cls.change_state = change_state_before
