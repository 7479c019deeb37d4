"""What each layer costs a bundle, a run and a mutation: `python -m benchmarks.costs [runs]`.

All of it runs in one process, without sockets and without a disk, once with the native kernel and
once with its twin in Python. What is measured is processor time; each figure is the median of the
runs. Beside these layers a whole server has its loop, its sockets and its disk's processes.

- **ingest**: from a `Mutate` frame's body to the `MutateReply` frame.
- **flush**: reading what is new, encoding the commit for the writer, noting that it is on disk, and
  collapsing. Eight bundles go in one commit.
- **stream**: closing the snapshots of a bundle, and the bytes for the socket of a consumer.
- **stream to a replica**: the same for a replica, which gets the answers to publishers, too.
- **replica**: from these bytes, with the answers to publishers, to a commit of a replica for each
  bundle, encoded for its writer.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from random import Random
from statistics import median
from time import process_time_ns
from typing import Final, TypeVar, cast

import attrs

from benchmarks.kit.machine import ROOT
from upr_kernel import BUILD, NATIVE
from upr_protocol.chunk import Bundle, BundleRun, Chunk, chunk_of_plain_sets
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.hashing import partition_of
from upr_protocol.ids import (
    NO_PARTITION,
    Cas,
    HistoryId,
    PartitionId,
    PartitionState,
    SeqNo,
    SnapshotKind,
)
from upr_protocol.session import ClientSession, ServerSession
from upr_protocol.wire import (
    HEADER_BYTES,
    Ack,
    Go,
    Mutate,
    MutateReply,
    Open,
    Opened,
    PartitionAnswers,
    PartitionChunk,
    PartitionEnd,
    PartitionStart,
    RunResult,
    Stream,
    StreamReply,
    encode_reply,
)
from upr_server.engine import Bucket, BundleBatches, Cursor, apply_set_runs
from upr_server.replication.received_snapshots import PublisherAnswer, ReceivedSnapshots
from upr_server.replication.replica_writer import move_to_record
from upr_server.storage.calls import Commit
from upr_server.storage.messages import RequestPacking
from upr_server.storage.online.flusher import record_of
from upr_server.storage.partition_write import PartitionWrite

T = TypeVar("T")

PARTITIONS: Final = 64
KEYS: Final = 100_000
VALUE: Final = bytes(100)
WRITER: Final = b"writer of a load"
NOW: Final = 1e9
COMMIT_BUNDLES: Final = 8


@attrs.frozen
class Shape:
    """What the bundles are like.

    Attributes:
        name: What the table calls it.
        runs: Runs of a bundle.
        rows: Rows of a run.
        bundles: Bundles of one measurement.
    """

    name: str
    runs: int
    rows: int
    bundles: int


SHAPES: Final = (
    Shape("64 runs of 16", 64, 16, 96),
    Shape("64 runs of 1", 64, 1, 96),
    Shape("1 run of 1,000", 1, 1000, 256),
)
LAYERS: Final = ("ingest", "flush", "stream", "stream to a replica", "replica")


def bodies_of(shape: Shape) -> list[bytes]:
    """`Mutate` frames of random keys, without their headers. Runs of a bundle have one length."""
    random = Random(1)
    keys: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    for index in range(KEYS):
        key = b"key:%08d" % index
        keys[partition_of(key, PARTITIONS)].append(key)
    bodies: list[bytes] = []
    for number in range(shape.bundles):
        partitions = sorted(PartitionId((number + run) % PARTITIONS) for run in range(shape.runs))
        runs = [BundleRun(partition, shape.rows, number + 1) for partition in partitions]
        chosen_keys = [key for p in partitions for key in random.choices(keys[p], k=shape.rows)]
        bundle = Bundle(chunk_of_plain_sets(chosen_keys, [VALUE] * len(chosen_keys)), runs)
        bodies.append(b"".join(map(bytes, Mutate(bundle, WRITER).body_buffers())))
    return bodies


class Node:
    """A node that is active for all partitions, with a consumer that keeps up.

    Args:
        has_replica: Whether the consumer is a replica.

    Attributes:
        used_ns: The processor time of each layer.
    """

    def __init__(self, *, has_replica: bool) -> None:
        self._has_replica = has_replica
        ids = count(1)
        self._bucket = Bucket(
            "bench", new_history_id=lambda: HistoryId(next(ids)), partition_count=PARTITIONS
        )
        self._replica = Bucket(
            "bench",
            new_history_id=lambda: HistoryId(1),
            partition_count=PARTITIONS,
            state=PartitionState.REPLICA,
        )
        for bucket in (self._bucket, self._replica):
            for partition in bucket.partitions:
                partition.repeated_batches.answers.track_unsaved()
        self._client, self._server = _conversation(self._bucket, with_answers=has_replica)
        self._ready: list[PartitionId] = []
        self._cursors: list[Cursor] = []
        for partition in self._bucket.partitions:
            on_ready = partial(self._ready.append, partition.id)
            cursor = partition.manager.register("bench", SeqNo(0), on_ready=on_ready).cursor
            cursor.poll()
            self._cursors.append(cursor)
        self._received = [
            ReceivedSnapshots(partition.failover_log, SeqNo(0), Cas(0))
            for partition in self._bucket.partitions
        ]
        self.used_ns = dict.fromkeys(LAYERS, 0)
        self._begun = set[PartitionId]()
        """Partitions whose first snapshot was sent: it names the history."""

    def run(self, bodies: Sequence[bytes]) -> None:
        """All bundles, through all layers."""
        for number, body in enumerate(bodies, 1):
            self._time("ingest", partial(self._ingest, body))
            if self._has_replica:
                frames = self._time("stream to a replica", self._stream)
                self._time("replica", partial(self._replicate, frames))
            else:
                self._take_in(self._time("stream", self._stream))
            if number % COMMIT_BUNDLES == 0:
                self._time("flush", self._flush)

    def _time(self, layer: str, call: Callable[[], T]) -> T:
        began_ns = process_time_ns()
        result = call()
        self.used_ns[layer] += process_time_ns() - began_ns
        return result

    def _ingest(self, body: bytes) -> None:
        message = Mutate.parse(body, NO_PARTITION, 1, 0)
        bundle, batches = message.bundle, BundleBatches(message.bundle, message.writer)
        runs = apply_set_runs(
            self._bucket, batches.columns, bundle.directory, batches.writer, 0, NOW
        )
        if not runs.remaining_indexes:
            encode_reply(message.opaque, runs.answer_rows)
            return
        # Of a long run.
        (run,) = bundle.runs
        result = self._bucket.partitions[run.partition].mutate(batches[0], now=NOW)
        numbers = result.history_id, result.first_seq, result.last_seq, result.first_cas
        MutateReply(0, (RunResult(run.partition, 0, *numbers),)).frame_buffers()

    def _stream(self) -> list[bytes]:
        session = self._server
        for ready in self._ready:
            session.mark_ready(ready)
        self._ready.clear()
        while (partition_id := session.next_partition()) is not None:
            partition, cursor = self._bucket.partitions[partition_id], self._cursors[partition_id]
            start = cursor.seq
            chunk = cursor.next_whole_snapshot()
            assert chunk is not None, "each bundle is one snapshot of each of its partitions"
            if self._has_replica:
                rows = tuple(partition.repeated_batches.answers.answers_between(start, chunk.end))
                opaque = partition_id + 1
                session.send(PartitionAnswers(rows, partition=partition_id, opaque=opaque))
            if partition_id in self._begun:
                session.send_snapshot(partition_id, chunk)
            else:
                self._send_first(partition_id, chunk)
            cursor.poll()
            session.end_turn()
        return list(map(bytes, session.take_outgoing(0.0)))

    def _send_first(self, partition_id: PartitionId, chunk: Chunk) -> None:
        opaque = partition_id + 1
        self._server.send(
            PartitionStart(
                self._bucket.partitions[partition_id].failover_log.current,
                chunk.start,
                chunk.end,
                SeqNo(0),
                SnapshotKind.MEMORY,
                may_repeat=False,
                partition=partition_id,
                opaque=opaque,
            )
        )
        self._server.send(PartitionChunk(chunk, partition=partition_id, opaque=opaque))
        self._server.send(PartitionEnd(chunk.end, partition=partition_id, opaque=opaque))
        self._begun.add(partition_id)

    def _replicate(self, frames: Sequence[bytes]) -> None:
        writes = [self._replica_write(partition_id) for partition_id in self._take_in(frames)]
        _pack(writes)
        for write in writes:
            move_to_record(self._replica.partitions[write.partition], write.record)

    def _take_in(self, frames: Sequence[bytes]) -> list[PartitionId]:
        """The client receives frames, and acknowledges them; which partitions have changed."""
        client, changed, received_bytes = self._client, list[PartitionId](), 0
        client.receive(b"".join(frames), 0.0)
        for message in client.messages():
            if isinstance(message, PartitionAnswers):
                rows = cast("tuple[PublisherAnswer, ...]", message.rows)
                self._received[message.partition].add_answers(rows)
            elif isinstance(message, PartitionChunk):
                received_bytes += HEADER_BYTES + message.chunk.nbytes
                changed.append(message.partition)
                if self._has_replica:
                    self._add(self._received[message.partition], message)
        client.acknowledge(received_bytes)
        self._server.receive(b"".join(map(bytes, client.take_outgoing(0.0))), 0.0)
        assert all(isinstance(message, Ack) for message in self._server.messages())
        return changed

    def _add(self, received: ReceivedSnapshots, message: PartitionChunk) -> None:
        chunk, history_id = message.chunk, HistoryId(message.partition + 1)
        received.begin_snapshot(history_id, chunk.end, SeqNo(0))
        received.add_chunk(chunk)
        received.end_snapshot(chunk.end)

    def _replica_write(self, partition_id: PartitionId) -> PartitionWrite:
        partition = self._replica.partitions[partition_id]
        write = self._received[partition_id].take_write()
        partition.repeated_batches.add_received(write.answers)
        answers, _ = partition.repeated_batches.answers.take_unsaved(write.record.high)
        return PartitionWrite(
            partition_id, write.record, write.chunks, [answers], write.ends, write.purge_seq
        )

    def _flush(self) -> None:
        writes: list[PartitionWrite] = []
        for partition in self._bucket.partitions:
            cursor, chunks = partition.manager.persistence, []
            while cursor.poll():
                partition.manager.join_unwritten()
                chunk = cursor.next_whole_snapshot()
                assert chunk is not None, "the consumer has had it, so it is closed"
                chunks.append(chunk)
            if chunks:
                end = chunks[-1].end
                answers, _ = partition.repeated_batches.answers.take_unsaved(end)
                record = record_of(partition, end)
                ends = [chunk.end for chunk in chunks]
                writes.append(PartitionWrite(partition.id, record, chunks, [answers], ends))
        _pack(writes)
        for write in writes:
            self._bucket.partitions[write.partition].manager.persistence.commit(write.record.high)
        while self._bucket.collapse_step():
            pass


def _pack(writes: Sequence[PartitionWrite]) -> None:
    for _ in RequestPacking(Commit("bench", writes)).steps():
        pass


def _conversation(bucket: Bucket, *, with_answers: bool) -> tuple[ClientSession, ServerSession]:
    """A client that streams all partitions, and its server."""
    client = ClientSession("bench:replica", window_bytes=16 << 20, idle_interval_s=3600, now=0.0)
    server = ServerSession("bench:server", now=0.0)

    def exchange() -> None:
        server.receive(b"".join(map(bytes, client.take_outgoing(0.0))), 0.0)
        for message in server.messages():
            if isinstance(message, Open):
                server.send(Opened(PARTITIONS, 0, opaque=message.opaque))
            elif isinstance(message, Stream):
                log = bucket.partitions[message.partition].failover_log
                reply = StreamReply(
                    SeqNo(0), "", log, partition=message.partition, opaque=message.opaque
                )
                server.send(reply)
        client.receive(b"".join(map(bytes, server.take_outgoing(0.0))), 0.0)
        assert list(client.messages())

    exchange()
    client.send(Open("bench", opaque=99))
    exchange()
    position = ResumeState("").position
    for partition in bucket.partitions:
        client.send(
            Stream(
                PartitionState.ACTIVE,
                position(partition.id),
                with_answers=with_answers,
                partition=partition.id,
                opaque=partition.id + 1,
            )
        )
    exchange()
    client.send(Go())
    server.receive(b"".join(map(bytes, client.take_outgoing(0.0))), 0.0)
    assert len(list(server.messages())) == 1
    return client, server


def measure(shape: Shape, runs: int) -> dict[str, float]:
    """The processor time of each layer for a bundle of this shape, in ns."""
    bodies, used_ns = bodies_of(shape), dict[str, list[int]]()
    for _ in range(runs):
        for has_replica in (False, True):
            gc.collect()
            node = Node(has_replica=has_replica)
            node.run(bodies)
            for layer, ns in node.used_ns.items():
                if ns:
                    used_ns.setdefault(layer, []).append(ns)
    return {layer: median(several) / shape.bundles for layer, several in used_ns.items()}


def table(native: Sequence[dict[str, float]], pure: Sequence[dict[str, float]]) -> Iterator[str]:
    """The table, in Markdown."""
    yield "| | layer | µs a bundle | µs a run | ns a mutation | the same in Python, ns |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for shape, costs, pure_costs in zip(SHAPES, native, pure, strict=True):
        for layer in LAYERS:
            ns, rows = costs[layer], shape.runs * shape.rows
            yield (
                f"| {shape.name} | {layer} | {ns / 1e3:,.0f} | {ns / shape.runs / 1e3:,.1f} "
                f"| {ns / rows:,.0f} | {pure_costs[layer] / rows:,.0f} |"
            )


def main() -> None:
    """Measures both builds, and prints the table."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    if os.environ.get("UPR_COSTS") == "1":
        print(json.dumps([measure(shape, runs) for shape in SHAPES]))
        return
    if BUILD != NATIVE:
        sys.exit(f"the kernel is {BUILD}: there is nothing to compare")
    costs: list[list[dict[str, float]]] = []
    for is_pure in ("0", "1"):
        output = subprocess.run(
            [sys.executable, "-m", "benchmarks.costs", str(runs)],
            check=True,
            capture_output=True,
            cwd=ROOT,
            env={**os.environ, "UPR_COSTS": "1", "UPR_PURE_PYTHON": is_pure},
        ).stdout
        costs.append(json.loads(output))
    print("\n".join(table(*costs)))


if __name__ == "__main__":
    main()
