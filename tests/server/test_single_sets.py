"""Single operations at a server: frames of one read are answered as if each had come alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.answer_tokens import tokens_above
from tests.kit.placed_keys import key_in
from tests.server.connected_peer import QUOTA_BYTES, Peer, connected, make_server
from tests.server.modelled_partition import INDEXED_S, Model
from tests.server.served_bucket import BUCKET
from upr_protocol.chunk import Bundle, Chunk, CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Cas, Durability, Operation, PartitionId, PartitionState, SeqNo
from upr_protocol.wire import (
    HEADER_BYTES,
    Credit,
    Error,
    Get,
    Message,
    Mutate,
    MutateReply,
    Refusal,
    SetFrames,
)
from upr_server.app import Server
from upr_server.engine import Partition
from upr_server.net.request_context import RequestContext
from upr_server.storage.calls import Commit, FindItems, StoreCall
from upr_server.storage.simulated import SimulatedStore

PARTITIONS: Final = 3
WRITERS: Final = (bytes(16), b"sixteen bytes id", b"another sixteen!")
KEYS: Final = [
    [key_in(partition, PARTITIONS, name) for name in (b"a", b"b")]
    for partition in range(PARTITIONS)
]
ONE: Final = CounterDelta(1).encode()

Request = tuple[str, int, int, int, int]
"""A request: its kind, a partition, the index of one of its keys, the index of a writer, and the
counter of the run."""

MUTATIONS: Final = {
    "set": lambda key: Mutation(Operation.SET, key, b"v"),
    "expiring": lambda key: Mutation(Operation.SET, key, b"w", flags=3, expiry=1001),
    "persisted": lambda key: Mutation(Operation.SET, key, b"p"),
    "misplaced": lambda key: Mutation(Operation.SET, key, b"v"),
    # On an evicted key these wait for the disk, and so do the requests after them.
    "add": lambda key: Mutation(Operation.ADD, key, b"v"),
    "increment": lambda key: Mutation(Operation.INCREMENT, key, ONE),
    "compare": lambda key: Mutation(Operation.SET, key, b"c", cas=Cas(5)),
    "delete": lambda key: Mutation(Operation.DELETE, key),
    "long key": lambda key: Mutation(Operation.SET, key * 200, b"v"),
}


class HeldDisk(SimulatedStore):
    """A store on which reads by key and commits wait while `released` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.released = trio.Event()
        self.released.set()

    async def wait(self, call: StoreCall[Any]) -> None:
        if isinstance(call, FindItems | Commit):
            await self.released.wait()
        await super().wait(call)


def message_of(request: Request, opaque: int) -> Message:
    kind, partition, key, writer, counter = request
    name = KEYS[partition][key]
    if kind == "get":
        return Get((name,), partition=PartitionId(partition), opaque=opaque)
    if kind == "misplaced":
        partition = (partition + 1) % PARTITIONS
    chunk = Chunk.build([MUTATIONS[kind](name)], SeqNo(0), SeqNo(0))
    durability = Durability.PERSISTED if kind == "persisted" else Durability.MEMORY
    bundle = Bundle.of_one_run(PartitionId(partition), chunk, counter)
    return Mutate(bundle, WRITERS[writer], durability, opaque=opaque)


async def receive_all(peer: Peer) -> list[Message]:
    """All messages that have come, once no task can run."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.wait_for_end)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    messages, peer.received = peer.received, []
    return messages


def contents(partition: Partition) -> list[Any]:
    """The items of a partition in memory, its highest sequence number and CAS, and its tokens."""
    partition.manager.check_invariants()
    partition.repeated_batches.answers.check_invariants()
    tokens = tokens_above(partition.repeated_batches.answers, 0)
    return [sorted(partition.table), partition.high_seq, partition.last_cas, tokens]


async def answers_to(
    requests: Sequence[Request], damaged: int | None, pending: int | None, *, together: bool
) -> tuple[list[Any], list[Any]]:
    """The answers of a server, and the contents of its partitions then.

    If `together`, the frames come in one piece. Otherwise they come one after the other, each in
    two pieces: a frame whose header came alone is never read together with others.

    """
    store = HeldDisk()
    server: Server = make_server(store, ids=count(1))
    async with server.recovered_buckets():
        await server.catalog.create_bucket(BUCKET, PARTITIONS, QUOTA_BYTES)
        bucket = server.catalog.bucket(BUCKET)
        async with connected(server) as peer:
            await peer.open()
            for partition_id, keys in enumerate(KEYS):
                rows = [Mutation(Operation.SET, key, b"1") for key in keys]
                await peer.mutate(Chunk.build(rows, SeqNo(0), SeqNo(0)), PartitionId(partition_id))
            await trio.sleep(INDEXED_S)
            for partition in bucket.partitions:
                Model(server.catalog.disks[bucket], partition).forget()
                assert not len(partition.table)
            store.released = trio.Event()
            # The clock stops here, because CAS values contain the time.
            clock = trio.lowlevel.current_clock()
            assert isinstance(clock, trio.testing.MockClock)
            clock.autojump_threshold = math.inf
            if pending is not None:
                partition = bucket.partitions[pending]
                partition.change_state(PartitionState.PENDING, partition.failover_log)
            frames = []
            for partition_id, request in enumerate(requests):
                peer.session.send(message_of(request, 1000 + partition_id))
                frames.append(b"".join(peer.session.take_outgoing(trio.current_time())))
            if damaged is not None and damaged < len(frames):
                frames[damaged] = frames[damaged][:-1] + b"\xff"
            if together:
                frames = [b"".join(frames)]
            for frame in frames:
                for piece in (frame,) if together else (frame[:HEADER_BYTES], frame[HEADER_BYTES:]):
                    # The server may have ended the connection.
                    with suppress(trio.BrokenResourceError):
                        await peer.stream.send_all(piece)
                    await trio.testing.wait_all_tasks_blocked()
            messages = await receive_all(peer)
            store.released.set()
            messages += await receive_all(peer)
            # The flusher answers requests that wait for a commit.
            clock.autojump_threshold = 0
            await trio.sleep(1)
            messages += await receive_all(peer)
            answers = [message for message in messages if not isinstance(message, Credit)]
            stored_items = [contents(partition) for partition in bucket.partitions]
    return answers, stored_items


def in_order(answers: Sequence[Message]) -> list[Any]:
    """The answers, sorted; and the order of the answers of each partition. The order between
    partitions is not fixed."""
    order: dict[int, list[int]] = {}
    for answer in answers:
        partition = answer.runs[0].partition if isinstance(answer, MutateReply) else -1
        order.setdefault(partition, []).append(answer.opaque)
    order.pop(-1, None)
    return [sorted(map(repr, answers)), order]


KINDS: Final = st.sampled_from(["set"] * 6 + [*MUTATIONS, "get"])
REQUESTS: Final = st.lists(
    st.tuples(
        KINDS,
        st.integers(0, PARTITIONS - 1),
        st.integers(0, 1),
        st.integers(0, len(WRITERS) - 1),
        st.integers(1, 6),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.none() | st.integers(0, 14), st.none() | st.integers(0, PARTITIONS - 1))
def test_frames_that_are_read_together_are_answered_as_if_read_one_by_one(
    requests: list[Request], damaged: int | None, pending: int | None
) -> None:
    outcomes = []
    for together in (False, True):
        clock = trio.testing.MockClock(autojump_threshold=0)
        answers, stored_items = trio.run(
            _answers_to, requests, damaged, pending, together, clock=clock
        )
        outcomes.append((in_order(answers), stored_items))
    assert outcomes[0] == outcomes[1]


async def _answers_to(
    requests: Sequence[Request], damaged: int | None, pending: int | None, together: bool
) -> tuple[list[Any], list[Any]]:
    return await answers_to(requests, damaged, pending, together=together)


async def test_frames_of_one_read_are_joined_once_though_some_are_refused(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the server would read all later frames again for each refused one."""
    server = make_server()
    frame_counts: list[int] = []
    read_sets = RequestContext.read_sets

    def recording_read_sets(context: RequestContext) -> SetFrames | None:
        sets = read_sets(context)
        if sets is not None:
            frame_counts.append(sets.frame_count)
        return sets

    monkeypatch.setattr(RequestContext, "read_sets", recording_read_sets)
    async with server.recovered_buckets():
        await server.catalog.create_bucket(BUCKET, PARTITIONS, QUOTA_BYTES)
        partition = server.catalog.bucket(BUCKET).partitions[1]
        partition.change_state(PartitionState.PENDING, partition.failover_log)
        async with connected(server) as peer:
            await peer.open()
            # Two frames of the active partition, then frames of the pending one, then others.
            placed = [0, 0] + [1] * 20 + [0] * 10
            await peer.send(
                *(message_of(("set", part, 0, 0, 1), index) for index, part in enumerate(placed))
            )
            answers = await receive_all(peer)
    applied = [answer.opaque for answer in answers if isinstance(answer, MutateReply)]
    refused_opaques = [answer.opaque for answer in answers if isinstance(answer, Refusal)]
    assert applied == [index for index, part in enumerate(placed) if part == 0]
    assert refused_opaques == [index for index, part in enumerate(placed) if part == 1]
    assert frame_counts == [len(placed)]


async def test_a_fault_of_the_server_ends_the_connection_and_changes_nothing(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    async with server.recovered_buckets():
        await server.catalog.create_bucket(BUCKET, PARTITIONS, QUOTA_BYTES)
        bucket = server.catalog.bucket(BUCKET)
        # Makes the server fail when it applies frames together.

        monkeypatch.setattr(bucket, "open_rows", None)
        async with connected(server) as peer:
            await peer.open()
            await peer.send(*(message_of(("set", index, 0, 1, 1), index) for index in range(3)))
            error = await peer.receive(Error)
            assert (error.status, error.sentence) == (
                Status.INTERNAL,
                "internal error in Mutate; the server's log has the cause",
            )
            assert not any(isinstance(message, MutateReply) for message in peer.received)
            assert [partition.high_seq for partition in bucket.partitions] == [0, 0, 0]
