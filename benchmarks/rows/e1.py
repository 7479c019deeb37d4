"""E1: ingest with the event bus, against the same without. E1b: what a slow consumer is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, Final

import attrs
import trio

from benchmarks.kit.figures import Figure, Spread, significant
from benchmarks.kit.ingest import CONNECTIONS, Published, publish_and_rest, publishers
from benchmarks.kit.processes import UprServer
from benchmarks.kit.work import CHUNK_MUTATIONS, PARTITIONS
from upr_protocol.chunk import chunk_of_plain_sets
from upr_protocol.client import follow_events
from upr_protocol.ids import HistoryId
from upr_server.engine import Buckets, batch_of
from upr_server.events.producer import Producer
from upr_server.events.queues import EventQueue, EventQueues

MUTATIONS: Final = 4_000_000

BUCKETS: Final = 1_000
UPDATES: Final = 100_000
SECONDS: Final = 5.0
"""How long the updates are spread over."""
POLL_S: Final = 1.0


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """E1 and E1b."""
    return [_ingest(runs, say), _slow_consumer(runs, say)]


# E1.


@contextmanager
def _followed(url: str) -> Iterator[None]:
    """A consumer of the server's events meanwhile, in a thread of this process."""
    end_event = threading.Event()

    async def follow() -> None:
        async with (
            follow_events(url, consumer="bench", identity="bench:events") as feed,
            trio.open_nursery() as nursery,
        ):

            async def watch() -> None:
                await trio.to_thread.run_sync(end_event.wait)
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            async for _ in feed:
                pass

    thread = threading.Thread(target=trio.run, args=(follow,))
    thread.start()
    try:
        yield
    finally:
        end_event.set()
        thread.join()


def _ingest(runs: int, say: Callable[[str], None]) -> Figure:
    say(f"E1: fresh servers for each run; {CONNECTIONS} connections, {PARTITIONS} partitions")
    names = ["a consumer", "no consumer", "no bus"]
    ran: dict[str, list[Published]] = {name: [] for name in names}
    # Of servers that do the same, the one that is started first is some per cent slower: so each
    # has every place equally often.
    for index in range(runs + -runs % len(names)):
        turn = index % len(names)
        for name, published in _round(names[turn:] + names[:turn]).items():
            ran[name].append(published)
        say(
            f"  run {index + 1}: mutations/s "
            + ", ".join(f"{ran[name][-1].rate:,.0f} with {name}" for name in names)
            + "; ns of the server's processor a mutation "
            + ", ".join(f"{ran[name][-1].server_ns:,.0f}" for name in names)
        )
    return Figure.more_is_better(
        row="E1",
        text=f"Ingest as in B1, {CHUNK_MUTATIONS:,} a chunk, with the event bus and a consumer.",
        unit="mutations/s",
        ours=Spread.of([run.rate for run in ran["a consumer"]]),
        peer=Spread.of([run.rate for run in ran["no bus"]]),
        peer_name="the same without the bus",
        first_bar=0.97,
        aim=1.0,
        details={
            name.replace(" ", "_"): {
                "mutations_per_s": Spread.of([run.rate for run in published]).to_json(),
                "server_ns_per_mutation": Spread.of([run.server_ns for run in published]).to_json(),
            }
            for name, published in ran.items()
        },
    )


def _round(names: Sequence[str]) -> dict[str, Published]:
    """One run of each, on servers that are started and measured in this order."""
    with ExitStack() as stack:
        sides = {}
        for name in names:
            server = stack.enter_context(UprServer(partitions=PARTITIONS, events=name != "no bus"))
            client = stack.enter_context(publishers(server, CHUNK_MUTATIONS))
            if name == "a consumer":
                stack.enter_context(_followed(server.url))
            sides[name] = (server, client)
        for server, client in sides.values():
            client.answer()
            publish_and_rest(server, client, 1_000_000)
        return {
            name: publish_and_rest(server, client, MUTATIONS)
            for name, (server, client) in sides.items()
        }


# E1b.


@attrs.define
class _Told:
    """What the consumer of one run was told.

    Attributes:
        polls: How often it looked.
        events: Buckets that it was told of, added up.
        updates: Updates that these told of.
        longest_poll_s: The longest that a look took.
        processor_s: Processor time of producer, consumer and engine.
    """

    polls: int = 0
    events: int = 0
    updates: int = 0
    longest_poll_s: float = 0.0
    processor_s: float = 0.0


def _slow_consumer(runs: int, say: Callable[[str], None]) -> Figure:
    say(f"E1b: {UPDATES:,} updates of {BUCKETS:,} buckets in {SECONDS:g} s, a poll a second")
    ran: list[_Told] = []
    for index in range(runs):
        ran.append(trio.run(_run))
        run = ran[-1]
        say(
            f"  run {index + 1}: told in {run.polls} polls of {run.events:,} buckets, "
            f"{run.updates:,} updates; the longest poll {run.longest_poll_s * 1e3:,.2f} ms, "
            f"{run.processor_s:.2f} s of processor time"
        )
    return Figure.less_is_better(
        row="E1b",
        text=f"Events told to a consumer that polls once a second, of {UPDATES:,} updates of "
        f"{BUCKETS:,} buckets in {SECONDS:g} s; engine and queues in one loop.",
        unit="events",
        ours=Spread.of([run.events for run in ran]),
        peer=Spread.of([UPDATES] * runs),
        peer_name="updates made, each of which would be an event in a queue",
        first_bar=None,
        aim=None,
        details={
            "polls": Spread.of([run.polls for run in ran]).to_json(),
            "longest_poll_ms": Spread.of([run.longest_poll_s * 1e3 for run in ran]).to_json(),
            "processor_us_per_update": significant(
                Spread.of([run.processor_s / UPDATES * 1e6 for run in ran]).median
            ),
        },
    )


async def _run() -> _Told:
    ids = count(1)
    polled = _Told()
    queues = EventQueues()
    buckets = Buckets(lambda: HistoryId(next(ids)), observer=Producer(queues, lambda: None))
    for index in range(BUCKETS):
        buckets.create(f"bucket-{index}", 1, incarnation=next(ids))
    queue = queues.register("slow", 60.0, time.time())
    started_at = time.process_time()
    async with trio.open_nursery() as nursery:
        finished_event = trio.Event()
        nursery.start_soon(_update, buckets, finished_event)
        while not finished_event.is_set():
            await trio.sleep(POLL_S)
            _poll(queue, polled)
    _poll(queue, polled)
    polled.processor_s = time.process_time() - started_at
    return polled


async def _update(buckets: Buckets, finished_event: trio.Event) -> None:
    chunk = chunk_of_plain_sets([b"a key"], [b"a value"])
    partitions: list[Any] = [bucket.partitions[0] for bucket in buckets]
    started_at = trio.current_time()
    for index in range(UPDATES):
        partitions[index % BUCKETS].mutate(batch_of(chunk), now=1.0)
        if index % 100 == 99:
            await trio.sleep_until(started_at + SECONDS * index / UPDATES)
    finished_event.set()


def _poll(queue: EventQueue, polled: _Told) -> None:
    started_at = time.perf_counter()
    is_all = False
    while not is_all:
        events, is_all = queue.poll()
        polled.events += len(events)
        polled.updates += sum(event.updates for event in events)
    polled.polls += 1
    polled.longest_poll_s = max(polled.longest_poll_s, time.perf_counter() - started_at)
