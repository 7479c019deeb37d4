"""The client of B1, B2, B7 and of all loads: publishes chunks over several connections.

It is the client library that publishes, as it does for everybody.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from functools import partial
from itertools import cycle, islice
from typing import Any

import trio

from benchmarks.kit.commands import Commands
from benchmarks.kit.stamps import stamped
from benchmarks.kit.work import PREPARED_MUTATIONS, Batch, distinct_batches, drawn_batches
from upr_protocol.client import Publisher, publisher
from upr_protocol.client.core.batcher import next_bundle
from upr_protocol.ids import Durability


async def _publish(target: Publisher, batches: Iterable[Batch]) -> None:
    """Publishes `batches` and waits for every answer."""
    source = iter(batches)
    while bundle := next_bundle(source):
        target.publish_nowait(bundle)
        await target.wait_for_room()
    await target.flush()


async def _publish_paced(
    target: Publisher, batches: Iterable[Batch], due_ns: int, interval_ns: int, *, stamp: bool
) -> None:
    """The same, the first of `batches` at `due_ns` and one every `interval_ns` from then on.

    A batch that is late does not wait. With `stamp` the time at which it was due stands in each
    value.
    """
    for partition, chunk in batches:
        await trio.sleep(max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
        await target.publish(partition, stamped(chunk, due_ns) if stamp else chunk)
        due_ns += interval_ns
    await target.flush()


def _work(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in ("seed", "keys", "partitions", "chunk_mutations")}


def _prepared(arguments: dict[str, Any]) -> list[Batch]:
    if not arguments.get("prepare", True):
        return []
    mutations = arguments.get("prepared", PREPARED_MUTATIONS)
    in_rounds = arguments.get("in_rounds", False)
    return list(drawn_batches(mutations, in_rounds=in_rounds, **_work(arguments)))


class _Targets:
    """Publishers, each with a connection of its own."""

    def __init__(self, publishers: list[Publisher]) -> None:
        self._publishers = publishers

    @property
    def answered(self) -> int:
        """Mutations answered."""
        return sum(target.statistics().mutations for target in self._publishers)

    async def fill(self, arguments: dict[str, Any]) -> None:
        """Publishes every key once, from the first connection; chunks are made on the way."""
        await _publish(self._publishers[0], distinct_batches(**_work(arguments)))

    async def draw(self, arguments: dict[str, Any], mutations: int) -> None:
        """Publishes so many, drawn uniformly, from the first connection; chunks are made on the
        way."""
        await _publish(self._publishers[0], drawn_batches(mutations, **_work(arguments)))

    async def publish(
        self, batches: list[Batch], first: int, share: int, interval_ns: int, *, stamp: bool
    ) -> None:
        """Publishes `share` batches a connection, round and round from `first`; each connection
        begins elsewhere, so that they do not go hand in hand. One every `interval_ns` of them all,
        or as fast as it goes."""
        count, begun_ns = len(self._publishers), time.monotonic_ns()
        async with trio.open_nursery() as nursery:
            for index, target in enumerate(self._publishers):
                start = (first + index * len(batches) // count) % len(batches)
                turn_batches = islice(cycle(batches), start, start + share)
                if interval_ns:
                    due_ns = begun_ns + index * interval_ns
                    every_ns = count * interval_ns
                    paced = partial(_publish_paced, stamp=stamp)
                    nursery.start_soon(paced, target, turn_batches, due_ns, every_ns)
                else:
                    nursery.start_soon(_publish, target, turn_batches)


async def _serve(commands: Commands) -> None:
    arguments = commands.arguments
    connections: int = arguments["connections"]
    batches = _prepared(arguments)
    durability = Durability[arguments.get("durability", "MEMORY")]
    async with AsyncExitStack() as stack:
        publishers = [
            await stack.enter_async_context(
                publisher(commands.target, identity="bench:publisher", durability=durability)
            )
            for _ in range(connections)
        ]
        targets = _Targets(publishers)
        commands.answer(ready=True)
        sent_count = 0
        while (command := await trio.to_thread.run_sync(commands.next)) is not None:
            before = targets.answered
            started_at, processor_s = time.monotonic(), time.process_time()
            if "fill" in command:
                await targets.fill(arguments)
            elif "draw" in command:
                await targets.draw(arguments, command["draw"])
            else:
                share = -(-command["mutations"] // (arguments["chunk_mutations"] * connections))
                rate = command.get("rate", 0.0)
                interval_ns = round(arguments["chunk_mutations"] / rate * 1e9) if rate else 0
                stamp = command.get("stamp", False)
                await targets.publish(batches, sent_count, share, interval_ns, stamp=stamp)
                sent_count += share
            commands.answer(
                begun=started_at,
                seconds=time.monotonic() - started_at,
                processor_s=time.process_time() - processor_s,
                mutations=targets.answered - before,
            )


def serve(commands: Commands) -> None:
    """`fill` publishes every key once; `draw` that many, in chunks that are made on the way;
    `mutations` that many, in prepared chunks, at `rate` a second if that is given, and then with
    `stamp` stamped. The answer comes when all are acknowledged."""
    trio.run(_serve, commands)
