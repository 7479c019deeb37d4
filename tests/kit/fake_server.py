"""A server that is as simple as possible, and keeps the protocol's promises.

It has one bucket, uses a real `ServerSession`, and can be told to refuse requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import attrs
import trio

from tests.kit.fake_partition import FakePartition
from upr_protocol.chunk import BundleRun, Chunk, ChunkBuilder
from upr_protocol.errors import RemoteProtocolError, Status
from upr_protocol.failover import FailoverLog, Retry, RollBack, decide_start
from upr_protocol.hashing import partition_of
from upr_protocol.ids import SEQ_MAX, Operation, PartitionId, PartitionState, SeqNo, SnapshotKind
from upr_protocol.partition_map import PartitionMap
from upr_protocol.session import ServerSession, SessionState
from upr_protocol.wire import (
    Await,
    AwaitReply,
    BucketDone,
    CreateBucket,
    Credit,
    DeleteBucket,
    Get,
    GetMap,
    GetReply,
    Lease,
    LeaseAction,
    LeaseReply,
    ListBuckets,
    ListBucketsReply,
    MapReply,
    Message,
    Mutate,
    MutateReply,
    Open,
    Opened,
    PartitionAnswers,
    PartitionChunk,
    PartitionEnd,
    PartitionLog,
    PartitionStart,
    Refusal,
    ReplicaAck,
    RunResult,
    Seqnos,
    SeqnosAt,
    SeqnosAtReply,
    SeqnosReply,
    Stats,
    StatsReply,
    Stream,
    StreamEnd,
    StreamReply,
)

BUCKET = "b"

_NOTHING = SeqNo(0)


@attrs.define
class _Stream:
    state: PartitionState
    seq: SeqNo
    end_seq: SeqNo
    at_least: SeqNo
    opaque: int
    with_answers: bool = False
    end: SeqNo = _NOTHING
    chunks: Iterator[Chunk] | None = None


class FakeServer:
    """A server of one bucket.

    Attributes:
        partitions: The bucket's partitions.
        credit_bytes: How much credit a client gets when it opens the bucket. Each `Mutate` gives
            its credit back.
        chunk_mutations: Mutations in a streamed chunk.
        get_items_max: Items in one answer to `Get`.
        refuse: Called with each request; a status refuses it.
        connections: The open connections.
        bucket_opens: How many connections have opened the bucket.
        identities: The identities of all clients.
    """

    def __init__(self, partition_count: int = 4) -> None:
        self.partitions = [
            FakePartition(partition, 1000 + partition) for partition in range(partition_count)
        ]
        self.credit_bytes = 1 << 20
        self.pays = True
        self.chunk_mutations = 3
        self.get_items_max = 4096
        self.damaged_keys: set[bytes] = set()
        self.refuse: Callable[[Message], Status | None] = lambda _: None
        self.connections: set[FakeConnection] = set()
        self.bucket_opens = 0
        self.identities: list[str] = []
        self.buckets: dict[str, tuple[int, int]] = {BUCKET: (partition_count, 0)}
        self.held: set[type[Message]] = set()
        """Requests that are not answered before `release`."""
        self.reports: list[ReplicaAck] = []
        """What replicas reported."""
        self.leases: dict[int, tuple[tuple[int, int, int], ...]] = {}
        """The ranges of each lease: partition, start and end."""
        self.answers: tuple[tuple[bytes, int, int, bytes], ...] = ()
        """What is told in every snapshot on streams that ask for answers."""
        self.paused = False
        """Whether nothing is streamed, and no barrier comes back."""

        self.name = ""
        self.told_name = ""
        """What it says that its name is; empty if it has other nodes not believe its maps."""
        self.map: PartitionMap | None = None
        """The partition map that it has; None: it holds the bucket alone."""
        self.refused_counters: dict[tuple[PartitionId, bytes], int] = {}
        """By partition and writer the run that was refused last."""
        self.peers: list[FakeServer] = [self]
        """Those that have the same partitions."""

    @property
    def map_revision(self) -> int:
        return 0 if self.map is None else self.map.revision

    def state_of(self, partition: PartitionId) -> PartitionState:
        """What it is for a partition."""
        if self.map is None:
            return self.partitions[partition].state
        return self.map.partitions[partition].state_of(self.name)

    def set_map(self, new_map: PartitionMap) -> None:
        """Takes another map: streams of partitions that it is something else for end."""
        self.map = new_map
        for connection in list(self.connections):
            connection.end_changed()

    def partition_of(self, key: bytes) -> FakePartition:
        return self.partitions[partition_of(key, len(self.partitions))]

    def contents(self) -> dict[bytes, bytes]:
        contents: dict[bytes, bytes] = {}
        for partition in self.partitions:
            contents |= partition.contents()
        return contents

    def put(self, key: bytes, value: bytes, op: Operation = Operation.SET) -> None:
        """One change, as another client would make it."""
        builder = ChunkBuilder()
        builder.append(op, key, value)
        partition = self.partition_of(key)
        partition.mutate(builder.build(), bytes(16), 0)
        self.changed(partition.id)

    def changed(self, partition: PartitionId) -> None:
        for server in self.peers:
            for connection in server.connections:
                connection.session.mark_ready(partition)
                connection.wake()

    def resume(self) -> None:
        """Streaming goes on."""
        self.paused = False
        for connection in self.connections:
            connection.wake()

    def release(self) -> None:
        """What was held is dealt with now, and nothing is held any more."""
        self.held.clear()
        for connection in list(self.connections):
            connection.release()

    def end_streams(self, status: Status) -> None:
        for connection in list(self.connections):
            connection.end_streams(status)

    def grant(self, nbytes: int) -> None:
        for connection in self.connections:
            connection.session.send(Credit(nbytes))
            connection.wake()

    async def serve(self, stream: trio.abc.Stream) -> None:
        connection = FakeConnection(self, stream, trio.current_time())
        self.connections.add(connection)
        try:
            await connection.run()
        finally:
            self.connections.discard(connection)
            await trio.aclose_forcefully(stream)


class FakeConnection:
    """One connection to a `FakeServer`.

    Attributes:
        session: Its session.
        counts: How many messages of each kind came.
        scope: Cancelled, the connection ends.
    """

    def __init__(self, server: FakeServer, stream: trio.abc.Stream, now: float) -> None:
        self.session = ServerSession("fake", now=now)
        self._server = server
        self._stream = stream
        self.counts: Counter[type[Message]] = Counter()
        self._streams: dict[PartitionId, _Stream] = {}
        self._turn: PartitionId | None = None
        self._held: list[Message] = []
        self.scope = trio.CancelScope()
        self._wake = trio.Event()

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                nursery.start_soon(self._read)

    async def _read(self) -> None:
        try:
            while data := bytes(await self._stream.receive_some(65536)):
                self.receive(data, trio.current_time())
                self.wake()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except RemoteProtocolError:
            self.wake()
            return
        self.scope.cancel()

    async def _write(self) -> None:
        try:
            while True:
                if not self.scope.cancel_called:
                    self.step()
                if outgoing := self.session.take_outgoing(trio.current_time()):
                    await self._stream.send_all(b"".join(outgoing))
                elif self.session.state is SessionState.CLOSED:
                    break
                else:
                    self._wake = trio.Event()
                    # A little later than the exact moment: rounding may put that too early.
                    with trio.move_on_at(self.session.keep_alive.next_check() + 0.001):
                        await self._wake.wait()
                    if not self.session.tick(trio.current_time()):
                        self.session.fail(Status.IDLE, "silent")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self.scope.cancel()

    # Streaming.

    def receive(self, data: bytes, now: float) -> None:
        """Handles what arrived."""
        self.session.receive(data, now)
        for message in self.session.messages():
            self._handle(message)

    def step(self) -> None:
        """Queues a little of what the streams have to send."""
        session = self.session
        while session.outgoing_bytes < 4096 and session.window.is_open and not self._server.paused:
            if self._turn is None:
                self._turn = session.next_partition()
                if self._turn is None:
                    return
            self._advance(self._turn)

    def _advance(self, partition_id: PartitionId) -> None:
        stream, partition = self._streams[partition_id], self._server.partitions[partition_id]
        opaque = stream.opaque
        if stream.chunks is None:
            if partition.high <= stream.seq and stream.at_least <= stream.seq:
                self._turn = None
                self.session.end_turn()
                return
            stream.end, stream.chunks = partition.snapshot(
                stream.seq, stream.at_least, self._server.chunk_mutations
            )
            self.session.send(
                PartitionStart(
                    partition.log.current, stream.seq, stream.end, partition.purge_seq,
                    SnapshotKind.MEMORY, False, partition=partition_id, opaque=opaque,
                )
            )  # fmt: skip
            return
        chunk = next(stream.chunks, None)
        if chunk is not None:
            self.session.send(PartitionChunk(chunk, partition=partition_id, opaque=opaque))
            return
        if stream.with_answers:
            self.session.send(
                PartitionAnswers(self._server.answers, partition=partition_id, opaque=opaque)
            )
        stream.seq, stream.chunks = stream.end, None
        self._turn = None
        self.session.send(PartitionEnd(stream.end, partition=partition_id, opaque=opaque))
        if stream.end >= stream.end_seq:
            self._end(partition_id, Status.END_REACHED)
        else:
            self.session.end_turn()
            self.session.mark_ready(partition_id)

    def _end(self, partition: PartitionId, status: Status) -> None:
        stream = self._streams.pop(partition)
        if self._turn == partition:
            self._turn = None
        self.session.send(StreamEnd(partition=partition, opaque=stream.opaque, status=status))

    def end_stream(self, partition: PartitionId, status: Status) -> None:
        """Ends one stream."""
        self._end(partition, status)
        self.wake()

    def end_streams(self, status: Status) -> None:
        for partition in list(self._streams):
            self._end(partition, status)
        self.wake()

    def end_changed(self) -> None:
        """Ends the streams of partitions that are not what was asked for any more."""
        for partition, stream in list(self._streams.items()):
            if self._server.state_of(partition) is not stream.state:
                self._end(partition, Status.STATE_CHANGED)
        self.wake()

    def _misdirected(self, message: Message, state: PartitionState) -> bool:
        """Whether the partition is not `state` here; then that is the answer."""
        refusal = self._misdirection(message.partition, state)
        if refusal is not None:
            self._refuse(message, refusal)
        return refusal is not None

    def _misdirection(self, partition: PartitionId, state: PartitionState) -> Status | None:
        """Why the partition cannot be asked for as `state` here; None when it can."""
        current = self._server.state_of(partition)
        if current is state:
            return None
        return Status.NOT_MY_PARTITION if current is PartitionState.DEAD else Status.WRONG_STATE

    # Requests.

    def _handle(self, message: Message) -> None:
        self.counts[type(message)] += 1
        if type(message) in self._server.held:
            self._held.append(message)
            return
        self._answer(message)

    def release(self) -> None:
        messages, self._held = self._held, []
        for message in messages:
            self._answer(message)
        self.wake()

    def _answer(self, message: Message) -> None:
        if message.answers:
            status = self._server.refuse(message)
            if status is not None:
                self._refuse(message, status)
                return
        name = f"_on_{type(message).__name__.lower()}"
        if hasattr(self, name):
            getattr(self, name)(message)

    def _refuse(self, message: Message, status: Status) -> None:
        reply: Message
        if isinstance(message, Stream):
            reply = StreamReply(
                _NOTHING, "told to", FailoverLog(), partition=message.partition,
                opaque=message.opaque, status=status, map_revision=self._server.map_revision,
            )  # fmt: skip
        else:
            reply = Refusal(
                "told to", self._server.map_revision, partition=message.partition,
                opaque=message.opaque, status=status,
            )  # fmt: skip
        self.session.send(reply)

    def _on_open(self, message: Open) -> None:
        server = self._server
        if message.bucket != BUCKET or BUCKET not in server.buckets:
            self._refuse(message, Status.NO_BUCKET)
            return
        server.bucket_opens += 1
        server.identities.append(self.session.client_identity)
        for partition_number in message.partitions or range(len(server.partitions)):
            partition_id = PartitionId(partition_number)
            if (
                partition_number >= len(server.partitions)
                or server.state_of(partition_id) is PartitionState.DEAD
            ):
                self.session.send(
                    PartitionLog(
                        PartitionState.DEAD, _NOTHING, _NOTHING, _NOTHING, FailoverLog(),
                        partition=partition_id, opaque=message.opaque,
                        status=Status.NOT_MY_PARTITION,
                    )
                )  # fmt: skip
                continue
            partition = server.partitions[partition_number]
            self.session.send(
                PartitionLog(
                    server.state_of(partition.id), partition.high, _NOTHING, _NOTHING,
                    partition.log, partition=partition.id, opaque=message.opaque,
                )
            )  # fmt: skip
        self.session.send(
            Opened(len(server.partitions), server.map_revision, opaque=message.opaque)
        )
        if server.credit_bytes:
            self.session.send(Credit(server.credit_bytes))

    def _on_stream(self, message: Stream) -> None:
        partition = self._server.partitions[message.partition]
        if self._misdirected(message, message.state):
            return
        decision = decide_start(partition.log, partition.high, _NOTHING, message.position)
        if isinstance(decision, Retry):
            status, seq = Status.SEQ_TOO_HIGH, partition.high
        elif isinstance(decision, RollBack):
            status, seq = Status.ROLLBACK, decision.ceiling
        else:
            status, seq = Status.OK, decision.seq
        self.session.send(
            StreamReply(
                seq, decision.reason.value, partition.log, partition=partition.id,
                opaque=message.opaque, status=status,
            )
        )  # fmt: skip
        if isinstance(decision, Retry | RollBack):
            return
        self._streams[partition.id] = _Stream(
            message.state,
            decision.seq,
            message.end_seq,
            decision.end_at_least,
            message.opaque,
            message.with_answers,
        )
        if message.end_seq <= decision.seq:
            self._end(partition.id, Status.END_REACHED)
        else:
            self.session.mark_ready(partition.id)

    def _on_closestream(self, message: Message) -> None:
        self._end(message.partition, Status.STREAM_CLOSED)

    def _on_getmap(self, message: GetMap) -> None:
        if message.bucket not in self._server.buckets:
            self._refuse(message, Status.NO_BUCKET)
            return
        document = "" if self._server.map is None else self._server.map.encode()
        server = self._server
        self.session.send(
            MapReply(server.map_revision, document, server.told_name, opaque=message.opaque)
        )

    def _on_mutate(self, message: Mutate) -> None:
        server, bundle = self._server, message.bundle
        results: list[RunResult] = []
        failures: list[tuple[int, int]] = []
        counters: list[tuple[int, int]] = []
        for low, run, chunk in zip(bundle.bounds, bundle.runs, bundle.run_chunks(), strict=False):
            refusal = self._refusal(message.writer, run)
            if refusal is not None:
                results.append(RunResult(run.partition, refusal))
                continue
            partition = server.partitions[run.partition]
            result = partition.mutate(chunk, message.writer, run.counter)
            results.append(result.result)
            failures += [(low + index, status) for index, status in result.failures]
            counters += [(low + index, value) for index, value in result.counters]
            if result.result.status == Status.OK:
                server.changed(partition.id)
        self.session.send(
            MutateReply(
                server.map_revision,
                tuple(results),
                tuple(failures),
                tuple(counters),
                opaque=message.opaque,
            )
        )
        if server.pays:
            self.session.send(Credit(sum(map(len, message.frame_buffers()))))

    def _refusal(self, writer: bytes, run: BundleRun) -> Status | None:
        """Why a run is refused for a passing reason. So is one behind a refused run, which it would
        overtake, until its publisher sends that again."""
        refused_counters, name = self._server.refused_counters, (run.partition, writer)
        refusal = self._misdirection(run.partition, PartitionState.ACTIVE)
        if refusal is None and run.counter > refused_counters.get(name, run.counter):
            refusal = Status.TEMPORARY_FAILURE
        refused_counters.pop(name, None)
        if refusal is not None and any(writer):
            refused_counters[name] = run.counter
        return refusal

    def _on_replicaack(self, message: ReplicaAck) -> None:
        self._server.reports.append(message)

    def _on_get(self, message: Get) -> None:
        if self._misdirected(message, PartitionState.ACTIVE):
            return
        partition = self._server.partitions[message.partition]
        if message.history_id not in (0, partition.log.current):
            self._refuse(message, Status.HISTORY_CHANGED)
            return
        builder = ChunkBuilder()
        for key in message.keys[: self._server.get_items_max]:
            item = partition.newest(key)
            if item is None:
                flags = Status.DAMAGED if key in self._server.damaged_keys else 0
                builder.append(Operation.DELETE, key, flags=flags)
            else:
                builder.append(
                    item.op, key, item.value, item.seq, item.cas, item.flags, item.expiry
                )
        chunk = builder.build(_NOTHING, partition.high)
        self.session.send(
            GetReply(
                partition.log.current, len(builder), chunk, partition=partition.id,
                opaque=message.opaque,
            )
        )  # fmt: skip

    def _on_seqnos(self, message: Seqnos) -> None:
        partitions = self._named_in(message)
        if not message.of_copies and not self._are_active(partitions):
            self._refuse(message, Status.NOT_MY_PARTITION)
            return
        rows = tuple((p.id, p.log.current, p.high, 0, 0) for p in partitions)
        self.session.send(SeqnosReply(rows, opaque=message.opaque))

    def _named_in(self, message: Seqnos | SeqnosAt) -> list[FakePartition]:
        return [
            partition
            for partition in self._server.partitions
            if not message.partitions or partition.id in message.partitions
        ]

    def _are_active(self, partitions: list[FakePartition]) -> bool:
        states = {self._server.state_of(partition.id) for partition in partitions}
        return states == {PartitionState.ACTIVE}

    def _on_seqnosat(self, message: SeqnosAt) -> None:
        partitions = self._named_in(message)
        if not self._are_active(partitions):
            self._refuse(message, Status.NOT_MY_PARTITION)
            return
        rows = tuple((p.id, p.log.current, p.seq_before(message.time_ns)) for p in partitions)
        self.session.send(SeqnosAtReply(rows, opaque=message.opaque))

    def _on_lease(self, message: Lease) -> None:
        server, lease_id = self._server, message.lease_id
        if message.action is LeaseAction.RELEASE:
            if server.leases.pop(lease_id, None) is None:
                self._refuse(message, Status.BAD_ARGUMENT)
            else:
                self.session.send(LeaseReply(lease_id, 0, opaque=message.opaque))
            return
        if message.action is LeaseAction.ACQUIRE:
            if not self._are_active([server.partitions[number] for number, _, _ in message.ranges]):
                self._refuse(message, Status.NOT_MY_PARTITION)
                return
            ranges = tuple(
                (number, start, server.partitions[number].high if end == SEQ_MAX else end)
                for number, start, end in message.ranges
            )
            server.leases.setdefault(lease_id, ranges)
        if lease_id not in server.leases:
            self._refuse(message, Status.RANGE_GONE)
            return
        rows = tuple(
            (number, server.partitions[number].log.current, start, end, 0)
            for number, start, end in server.leases[lease_id]
        )
        self.session.send(LeaseReply(lease_id, message.time_to_live_s, rows, opaque=message.opaque))

    def _on_await(self, message: Await) -> None:
        if self._misdirected(message, PartitionState.ACTIVE):
            return
        self.session.send(
            AwaitReply(message.seq, partition=message.partition, opaque=message.opaque)
        )

    def _on_createbucket(self, message: CreateBucket) -> None:
        if message.name in self._server.buckets:
            self._refuse(message, Status.BUCKET_EXISTS)
            return
        self._server.buckets[message.name] = (message.partition_count, message.quota_bytes)
        self.session.send(BucketDone(opaque=message.opaque))

    def _on_deletebucket(self, message: DeleteBucket) -> None:
        if message.name not in self._server.buckets:
            self._refuse(message, Status.NO_BUCKET)
            return
        del self._server.buckets[message.name]
        self.session.send(BucketDone(opaque=message.opaque))

    def _on_listbuckets(self, message: ListBuckets) -> None:
        rows = tuple((name, *row) for name, row in sorted(self._server.buckets.items()))
        self.session.send(ListBucketsReply(rows, opaque=message.opaque))

    def _on_stats(self, message: Stats) -> None:
        self.session.send(StatsReply('{"fake": true}', opaque=message.opaque))


def put_keys(server: FakeServer, count: int) -> None:
    """Sets so many keys to an empty value."""
    for number in range(count):
        server.put(b"key-%d" % number, b"")
