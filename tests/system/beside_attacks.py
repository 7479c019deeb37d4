"""What good clients keep of their rate beside attacks: a table, for a quiet machine.

    python -m tests.system.beside_attacks [--seconds 10] [NAME ...]

Not a test: rates mean nothing while others use the machine. Of each attack it prints the good
clients' rounds a second beside it, as a share of those without it; their longest round; the
processor time that the server took, as a share of one core; its memory before, at its peak, and
10 s after; and its longest step and turn. The good clients have a process of their own, and the
attackers, who have another, leave the processor to both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from random import getrandbits
from typing import Final

import attrs
import trio

from tests.kit.bystander import bystanders
from tests.kit.peer import Peer, peer
from tests.kit.placed_keys import key_in
from tests.kit.process import many_descriptors, server_process
from upr_protocol.chunk import Bundle, Chunk, CounterDelta, Mutation
from upr_protocol.client import Address, NodeClient, connect
from upr_protocol.failover import NOTHING_YET
from upr_protocol.ids import Durability, Operation, PartitionId, PartitionState
from upr_protocol.limits import PARTITIONS_MAX
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_protocol.wire import Get, Go, Mutate, Seqnos, Stats, Stream
from upr_protocol.wire.frame import pack_header

MIB: Final = 1024 * 1024
P0: Final = PartitionId(0)
NARROW, WIDE, SMALL = "narrow", "wide", "small"
AFTER_S: Final = 10.0


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


async def nothing(_server: Target) -> None:
    """Nobody attacks."""
    await trio.sleep_forever()


async def appends(server: Target) -> None:
    """200 appends of a byte to a value of 19 MiB, in one frame."""
    async with connect(server.url(NARROW)) as client:
        await client.set(key_in(0, 1), bytes(19 * MIB))
    rows = [Mutation(Operation.APPEND, key_in(0, 1), b"x")] * 200

    await _for_ever(server, NARROW, lambda asking: asking.send(_mutate(asking, rows)))


async def increments(server: Target) -> None:
    """4,096 increments a frame, as fast as they are taken."""
    delta = CounterDelta(1, 0).encode()
    rows = [
        Mutation(Operation.INCREMENT, key_in(0, 1, b"%d" % index), delta) for index in range(4096)
    ]

    await _for_ever(server, NARROW, lambda asking: asking.send(_mutate(asking, rows)))


async def questions(server: Target) -> None:
    """The figures of the server, and the numbers of 1,024 partitions."""

    async def ask(asking: Peer) -> None:
        await asking.send(Stats(opaque=asking.opaque()), Seqnos(opaque=asking.opaque()))

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


async def streams(server: Target) -> None:
    """Ten clients with 1,024 streams each come and leave."""
    while True:
        async with AsyncExitStack() as stack:
            for _ in range(10):
                asking = await stack.enter_async_context(peer(server.host, server.port, WIDE))
                for partition in range(PARTITIONS_MAX):
                    await asking.send(
                        Stream(
                            PartitionState.ACTIVE,
                            NOTHING_YET,
                            partition=PartitionId(partition),
                            opaque=asking.opaque(),
                        )
                    )
                await asking.send(Go())


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


ATTACKS: Final[tuple[Attack, ...]] = (
    nothing,
    appends,
    increments,
    questions,
    reads,
    stored_reads,
    expiries,
    streams,
    maps,
    unfinished,
    headers,
    connections,
)


async def _work(server: Target, seconds: float) -> None:
    """The good clients' process: prints how many rounds they made, and the longest."""
    async with bystanders(server) as good:  # type: ignore[arg-type]
        rounds_before, good.longest_s = good.rounds, 0.0
        began_at = trio.current_time()
        await trio.sleep(seconds)
        rounds = (good.rounds - rounds_before) / (trio.current_time() - began_at)
        sys.stdout.write(json.dumps([rounds, good.longest_s]))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _processor_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _row(attack: Attack, seconds: float, quiet_rounds: float) -> float:
    async with server_process("--node", "a", "--log-level", "error") as server:
        async with connect(server.url()) as client:
            await client.create_bucket(NARROW, 1)
            await client.create_bucket(WIDE, PARTITIONS_MAX)
        before = server.resident_bytes
        server.forget_peak()
        command = [sys.executable, "-m", "tests.system.beside_attacks"]
        command += ["--server", server.host, str(server.port), "--seconds", str(seconds)]
        async with trio.open_nursery() as attackers:
            attackers.start_soon(trio.run_process, ["nice", *command, attack.__name__])
            # By now they are at work.
            await trio.sleep(3)
            processor_s, began_at = _processor_s(server.process.pid), trio.current_time()
            good = await trio.run_process(command, capture_stdout=True)
            share = _processor_s(server.process.pid) - processor_s
            share /= trio.current_time() - began_at
            attackers.cancel_scope.cancel()
        rounds, longest_s = json.loads(good.stdout)
        peak = server.peak_bytes
        await trio.sleep(AFTER_S)
        async with connect(server.url()) as client:
            figures = (await client.stats())["server"]
        memory = "/".join(f"{size // MIB}" for size in (before, peak, server.resident_bytes))
        _say(
            f"| {attack.__name__} | {rounds:.1f} | {100 * rounds / (quiet_rounds or rounds):.0f} % "
            f"| {1000 * longest_s:.0f} | {100 * share:.0f} % | {memory} "
            f"| {1000 * figures['longest_step_s']:.0f} | {1000 * figures['longest_turn_s']:.0f} |",
        )
        return float(rounds)


async def _table(attacks: Sequence[Attack], seconds: float) -> None:
    _say("| attack | rounds/s | kept | round, ms | processor | MiB | step, ms | turn, ms |")
    _say("|---|---|---|---|---|---|---|---|")
    quiet_rounds = await _row(nothing, seconds, 0)
    for attack in attacks:
        if attack is not nothing:
            await _row(attack, seconds, quiet_rounds)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Measure good clients beside attacks.")
    by_name = {attack.__name__: attack for attack in ATTACKS}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(by_name)}")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--server", nargs=2, metavar=("HOST", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.names) - by_name.keys():
        parser.error(f"no attack is called {min(unknown)}")
    with many_descriptors():
        if options.server is None:
            attacks = [by_name[name] for name in options.names or by_name]
            trio.run(_table, attacks, options.seconds)
        else:
            server = Target(options.server[0], int(options.server[1]))
            if options.names:
                trio.run(by_name[options.names[0]], server)
            else:
                trio.run(_work, server, options.seconds)


if __name__ == "__main__":
    main()
