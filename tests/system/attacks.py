"""Attacks on a server, each of which goes on until it is cancelled.

Each is a legal or an illegal use of the protocol that costs the attacker little. They are named in
`ATTACKS`, by what they try to hold: the loop for long, memory, an answer without a bound, or a key
where nobody looks for it. `beside_attacks.py` measures good clients beside them, and
`test_longest_step.py` holds the server's steps to a bound.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from random import getrandbits
from typing import Final

import attrs
import trio

from tests.kit.peer import Peer, peer
from tests.kit.placed_keys import key_in
from upr_kernel import pack_header
from upr_protocol.chunk import Bundle, Chunk, CounterDelta, Mutation
from upr_protocol.client import Address, NodeClient, connect, publisher
from upr_protocol.failover import NOTHING_YET
from upr_protocol.ids import (
    Durability,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_protocol.limits import PARTITIONS_MAX
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_protocol.wire import (
    VERSION,
    Await,
    CloseStream,
    Get,
    GetMap,
    Go,
    Hello,
    Mutate,
    Seqnos,
    SeqnosReply,
    Stats,
    Stream,
)

MIB: Final = 1024 * 1024
P0: Final = PartitionId(0)
NARROW, WIDE, SMALL, SHORT_LIVED = "narrow", "wide", "small", "short-lived"


@attrs.frozen
class Target:
    """A server that another process has started.

    Attributes:
        host: Its host.
        port: Its port.
    """

    host: str
    port: int

    def url(self, bucket: str = "") -> str:
        """The URL of a bucket there, or of the server."""
        return f"upr://{self.host}:{self.port}" + (f"/{bucket}" if bucket else "")


Attack = Callable[[Target], Awaitable[None]]


def _mutate(asking: Peer, rows: Sequence[Mutation]) -> Mutate:
    return Mutate(Bundle.of_one_run(P0, Chunk.build(rows)), opaque=asking.opaque())


async def _drain(asking: Peer) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while await asking.stream.receive_some():
            pass


async def _for_ever(server: Target, bucket: str, ask: Callable[[Peer], Awaitable[None]]) -> None:
    """Asks over and over, over one connection after the other."""
    while True:
        await trio.lowlevel.checkpoint()
        with suppress(trio.BrokenResourceError, AssertionError):
            async with (
                peer(server.host, server.port, bucket) as asking,
                trio.open_nursery() as drain,
            ):
                drain.start_soon(_drain, asking)
                for _ in range(20):
                    await ask(asking)
                await trio.sleep(0.2)
                drain.cancel_scope.cancel()


async def appends(server: Target) -> None:
    """200 appends of a byte to a value of 19 MiB, in one frame."""
    async with connect(server.url(NARROW)) as client:
        await client.set(key_in(0, 1), bytes(19 * MIB))
    rows = [Mutation(Operation.APPEND, key_in(0, 1), b"x")] * 200

    await _for_ever(server, NARROW, lambda asking: asking.send(_mutate(asking, rows)))


async def touches(server: Target) -> None:
    """200 touches of a value of 19 MiB, in one frame."""
    async with connect(server.url(NARROW)) as client:
        await client.set(key_in(0, 1), bytes(19 * MIB))
    rows = [Mutation(Operation.TOUCH, key_in(0, 1), b"", expiry=2_000_000_000)] * 200

    await _for_ever(server, NARROW, lambda asking: asking.send(_mutate(asking, rows)))


async def many_touches(server: Target) -> None:
    """900 touches of values of 70 kB, in one frame."""
    keys = [key_in(0, 1, b"%d" % index) for index in range(900)]
    async with publisher(server.url(NARROW)) as sink:
        for key in keys:
            await sink.set(key, bytes(70_000))
    rows = [Mutation(Operation.TOUCH, key, b"", expiry=2_000_000_000) for key in keys]

    await _for_ever(server, NARROW, lambda asking: asking.send(_mutate(asking, rows)))


async def many_appends(server: Target) -> None:
    """4,000 appends of a byte to one value of 3 MiB, in one frame, over ten connections."""
    async with connect(server.url(NARROW)) as client:
        await client.set(key_in(0, 1), bytes(3 * MIB))
    rows = [Mutation(Operation.APPEND, key_in(0, 1), b"x")] * 4000

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(
                _for_ever, server, NARROW, lambda asking: asking.send(_mutate(asking, rows))
            )


async def waits(server: Target) -> None:
    """Five connections wait 4,000 times each for a replica that does not come, and all of them at
    most half a second."""
    node = NodeClient(Address.parse(server.url(NARROW)))
    nodes = {"a": f"{server.host}:{server.port}", "b": "127.0.0.1:1"}
    partitions = (Assignment(active="a", replicas={"b": ""}),)
    await node.set_map(
        0, PartitionMap(bucket=NARROW, revision=1, nodes=nodes, partitions=partitions)
    )
    async with connect(server.url(NARROW)) as client:
        await client.set(key_in(0, 1), b"v")
    async with peer(server.host, server.port, NARROW) as asking:
        await asking.send(Seqnos(opaque=asking.opaque()))
        _, history, seq, *_ = (await asking.expect(SeqnosReply)).rows[0]

    async def wait(asking: Peer) -> None:
        opaque = asking.opaque()
        level = Durability.REPLICATED
        await asking.send(Await(HistoryId(history), SeqNo(seq), 500, level, 1, opaque=opaque))

    async def wait_for_ever() -> None:
        while True:
            async with peer(server.host, server.port, NARROW) as asking:
                with trio.move_on_after(2.0):
                    for _ in range(4000):
                        await wait(asking)
                    await _drain(asking)

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(wait_for_ever)


async def persisted(server: Target) -> None:
    """4,000 frames, each of one change that is to be on disk when it is answered."""

    async def ask(asking: Peer) -> None:
        for index in range(200):
            rows = [Mutation(Operation.ADD, key_in(0, 1, b"%x" % getrandbits(40)), b"%d" % index)]
            bundle = Bundle.of_one_run(P0, Chunk.build(rows))
            persisted = Durability.PERSISTED
            await asking.send(Mutate(bundle, durability=persisted, opaque=asking.opaque()))

    await _for_ever(server, NARROW, ask)


async def increments(server: Target) -> None:
    """4,096 increments a frame, as fast as they are taken."""
    delta = CounterDelta(1, 0).encode()
    rows = [
        Mutation(Operation.INCREMENT, key_in(0, 1, b"%d" % index), delta) for index in range(4096)
    ]

    await _for_ever(server, NARROW, lambda asking: asking.send(_mutate(asking, rows)))


async def questions(server: Target) -> None:
    """The figures of the server, and the numbers and the map of 1,024 partitions."""

    async def ask(asking: Peer) -> None:
        await asking.send(
            Stats(opaque=asking.opaque()),
            Seqnos(opaque=asking.opaque()),
            GetMap(WIDE, opaque=asking.opaque()),
        )

    await _for_ever(server, WIDE, ask)


async def reads(server: Target) -> None:
    """A value of 19 MiB, read over and over."""
    async with connect(server.url(NARROW)) as client:
        await client.set(key_in(0, 1), bytes(19 * MIB))

    async def ask(asking: Peer) -> None:
        await asking.send(Get((key_in(0, 1),), partition=P0, opaque=asking.opaque()))

    await _for_ever(server, NARROW, ask)


async def stored_reads(server: Target) -> None:
    """Values of 19 MiB, of which memory has room for none, read from disk over and over."""
    async with connect(server.url()) as client:
        await client.create_bucket(SMALL, 1, 64 * MIB)
    async with connect(server.url(SMALL)) as client:
        for index in range(8):
            key = key_in(0, 1, b"%d" % index)
            await client.set(key, bytes(19 * MIB), durability=Durability.PERSISTED)

    async def ask(asking: Peer) -> None:
        for index in range(4):
            key = key_in(0, 1, b"%d" % index)
            await asking.send(Get((key,), partition=P0, opaque=asking.opaque()))

    await _for_ever(server, SMALL, ask)


async def expiries(server: Target) -> None:
    """4,096 items a frame that expire within two seconds."""

    async def ask(asking: Peer) -> None:
        expiry = int(time.time()) + 2
        keys = [key_in(0, 1, b"%x" % getrandbits(40)) for _ in range(4096)]
        rows = [Mutation(Operation.SET, key, b"v", expiry=expiry) for key in keys]
        await asking.send(_mutate(asking, rows))

    await _for_ever(server, NARROW, ask)


async def expiring_increments(server: Target) -> None:
    """Items that expire all the time, and batches of 4,096 increments, in one partition."""
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(expiries, server)
            nursery.start_soon(increments, server)


async def openings(server: Target) -> None:
    """300 connections that open a bucket of 1,024 partitions, and leave."""

    async def open_for_ever() -> None:
        while True:
            await trio.lowlevel.checkpoint()
            with suppress(trio.BrokenResourceError, AssertionError, OSError):
                async with peer(server.host, server.port, WIDE):
                    pass

    async with trio.open_nursery() as nursery:
        for _ in range(300):
            nursery.start_soon(open_for_ever)


async def _stream_all(client: Peer) -> None:
    """Requests the streams of all partitions of a bucket of 1,024."""
    for partition in range(PARTITIONS_MAX):
        request = Stream(
            PartitionState.ACTIVE,
            NOTHING_YET,
            partition=PartitionId(partition),
            opaque=client.opaque(),
        )
        await client.send(request)
    await client.send(Go())


async def streams(server: Target) -> None:
    """Ten clients with 1,024 streams each come and leave."""
    while True:
        async with AsyncExitStack() as stack:
            for _ in range(10):
                client = await stack.enter_async_context(peer(server.host, server.port, WIDE))
                await _stream_all(client)


async def maps(server: Target) -> None:
    """A map makes 1,024 partitions replicas, and another one active again."""
    node = NodeClient(Address.parse(server.url(WIDE)))
    nodes = {"a": f"{server.host}:{server.port}", "b": "127.0.0.1:1"}
    revision = 0
    while True:
        for active, replica in (("a", "b"), ("b", "a")):
            partitions = (Assignment(active=active, replicas={replica: ""}),) * PARTITIONS_MAX
            new_map = PartitionMap(
                bucket=WIDE, revision=revision + 1, nodes=nodes, partitions=partitions
            )
            await node.set_map(revision, new_map)
            revision += 1


async def unfinished(server: Target) -> None:
    """Frames of 1 MiB of which 8 bytes are missing, from 300 connections."""

    async def begin() -> None:
        while True:
            async with peer(server.host, server.port, NARROW) as bad:
                with suppress(trio.BrokenResourceError):
                    await bad.send_bytes(pack_header(Mutate.opcode, 0, 0, 99, MIB, 0))
                    await bad.send_bytes(bytes(MIB - 8))
                    await _drain(bad)

    async with trio.open_nursery() as nursery:
        for _ in range(300):
            nursery.start_soon(begin)


async def headers(server: Target) -> None:
    """Sixteen headers of frames of 30 MiB, and nothing behind them."""
    async with AsyncExitStack() as stack:
        for _ in range(16):
            bad = await stack.enter_async_context(peer(server.host, server.port, NARROW))
            await bad.send_bytes(pack_header(Mutate.opcode, 0, 0, 99, 30 * MIB, 0) + b"x")
        await trio.sleep_forever()


async def connections(server: Target) -> None:
    """1,000 connections come, and leave together."""
    while True:
        async with AsyncExitStack() as stack:
            for _ in range(1000):
                await stack.enter_async_context(peer(server.host, server.port))


async def small_changes(server: Target) -> None:
    """Small changes in 1,024 partitions, of which each has five consumers: commits of many small
    snapshots."""

    async def consume() -> None:
        async with peer(server.host, server.port, WIDE) as client:
            await _stream_all(client)
            await _drain(client)

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(consume)
        async with publisher(server.url(WIDE)) as sink:
            while True:
                for index in range(4000):
                    await sink.set(b"key-%d" % index, b"v")
                await sink.flush()


async def deletions(server: Target) -> None:
    """A bucket of 20,000 items is made and deleted."""
    while True:
        async with connect(server.url()) as client:
            await client.create_bucket(SHORT_LIVED, 256)
            async with publisher(server.url(SHORT_LIVED)) as sink:
                for index in range(20_000):
                    await sink.set(b"key-%d" % index, b"a value")
            await client.delete_bucket(SHORT_LIVED)


async def repeated_partitions(server: Target) -> None:
    """The numbers of one partition, named 2,000 times in one question."""
    same = (P0,) * 2000

    await _for_ever(server, WIDE, lambda asking: asking.send(Seqnos(same, opaque=asking.opaque())))


async def identities(server: Target) -> None:
    """500 connections with identities as long as one may be ask for the figures of all; others have
    identities of control characters."""
    async with AsyncExitStack() as stack:
        peers = [
            await stack.enter_async_context(peer(server.host, server.port, greeted=False))
            for _ in range(500)
        ]
        for index, each in enumerate(peers):
            await each.greet(f"test:{index}".ljust(200, "x"))
        asking = peers[0]
        while True:
            await asking.send(Stats(opaque=asking.opaque()))
            async with peer(server.host, server.port, greeted=False) as bad:
                await bad.send(Hello("\x01" * 200, (VERSION,), 0, MIB, 20))
                await bad.receive()
            with trio.move_on_after(0.05):
                await asking.receive()


async def closes(server: Target) -> None:
    """3,000 frames at a time that close streams which the client does not have."""
    frame = b"".join(map(bytes, CloseStream(partition=P0, opaque=1).frame_buffers()))

    await _for_ever(server, NARROW, lambda asking: asking.send_bytes(3000 * frame))


async def misplaced_keys(server: Target) -> None:
    """4,096 keys a frame, nearly all in a partition that is not theirs."""
    keys = [key_in(0, PARTITIONS_MAX), *(b"%d" % index for index in range(4095))]
    rows = [Mutation(Operation.SET, key, b"v") for key in keys]

    await _for_ever(server, WIDE, lambda asking: asking.send(_mutate(asking, rows)))


ATTACKS: Final[dict[str, tuple[Attack, ...]]] = {
    "A1": (appends, touches, many_touches, many_appends),
    "A2": (
        increments,
        waits,
        persisted,
        questions,
        reads,
        stored_reads,
        expiries,
        expiring_increments,
        openings,
        streams,
        closes,
        maps,
        small_changes,
        deletions,
    ),
    "A3": (headers, unfinished),
    "A4": (connections,),
    "A5": (repeated_partitions, identities),
    "A7": (misplaced_keys,),
}
"""By what they attack: A1 is one frame that is a lot of work, A2 a lot of work in legal requests,
A3 frames that do not end, A4 memory that is not given back, A5 answers that grow with what was
asked or with the peers, and A7 keys in a partition that is not theirs."""
