"""A consumer that joins at any moment, and is killed and resumed at any moment, ends with the
server's contents.

Schedules drawn from their seeds, and one that is always the same, say when the consumer joins, how
long each of its lives is, and whether its connection is cut meanwhile. Publishers write all the
time. The consumer is a real process, and killing it is SIGKILL. Some are `upr tail --resume`, most
are small programs on the client library (`tests/kit/recorder.py`). In the end its contents are
compared, key by key, with what the server gives for each key and with what a fresh stream gives.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from base64 import b64decode
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal

import attrs
import msgspec
import pytest
import trio

from tests.kit.effort import effort
from tests.kit.mirror import Mirror, assert_same, server_contents
from tests.kit.process import (
    ROOT,
    STOP_TIMEOUT_S,
    UPR,
    ServerProcess,
    environment,
    eventually,
    server_process,
)
from tests.kit.proxy import Proxy, proxy_to
from tests.kit.recorder import Journal, Order, Recorder, Recorders, recorders
from upr_protocol.chunk import CounterDelta
from upr_protocol.client import (
    Client,
    FileStore,
    ResumeState,
    connect,
    consume,
    publisher,
)
from upr_protocol.ids import Operation
from upr_protocol.limits import WINDOW_BYTES_DEFAULT, WINDOW_BYTES_MIN

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are held by pidfd")

SCHEDULES: Final = effort(6, 100)
AT_ONCE: Final = 6
SEEDS_VARIABLE: Final = "UPR_RESUME_SEEDS"


@attrs.frozen
class Life:
    """One life of the consumer.

    Attributes:
        joins_after_s: How long after the one before, or after the publisher began.
        lasts_s: When it is killed, at the latest.
        lasts_bytes: When it is killed: once it has written so much more.
        cuts_s: When its connection is cut, each counted from the one before.
        waits_for: What must be so before it is killed, and its connection cut, whatever the times
            say: nothing, or that its state is inside a snapshot.
    """

    joins_after_s: float
    lasts_s: float
    lasts_bytes: int
    cuts_s: tuple[float, ...]
    waits_for: Literal["nothing", "partial snapshot"] = "nothing"


@attrs.frozen
class Schedule:
    """What a seed comes to."""

    seed: int
    program: Literal["journal", "file", "tail"]
    partitions: int
    keys: int
    already_there: int
    writes: int
    batch: int
    value_bytes: int
    expires: bool
    window_bytes: int
    pause_s: float
    lives: tuple[Life, ...]
    last_life_goes_on: bool

    @classmethod
    def of(cls, seed: int) -> Schedule:
        draw = random.Random(seed)

        def life() -> Life:
            cuts = draw.choice((0, 0, 1, 3))
            return Life(
                joins_after_s=draw.choice((0.0, draw.uniform(0, 0.2))),
                lasts_s=draw.choice((draw.uniform(0, 0.05), 0.5, 1.0)),
                lasts_bytes=draw.choice((1, 10_000, 100_000, 1_000_000)),
                cuts_s=tuple(draw.uniform(0, 0.1) for _ in range(cuts)),
            )

        return cls(
            seed=seed,
            program="tail" if seed % 10 == 9 else draw.choice(("journal", "journal", "file")),
            partitions=draw.choice((1, 2, 4, 16)),
            keys=draw.choice((10, 300, 2000)),
            already_there=draw.choice((0, 1000, 3000)),
            writes=draw.choice((200, 1000, 2000)),
            batch=draw.choice((4, 20, 100)),
            value_bytes=draw.choice((10, 100, 2000)),
            expires=seed % 10 == 5,
            window_bytes=draw.choice((WINDOW_BYTES_MIN, WINDOW_BYTES_DEFAULT)),
            pause_s=draw.choice((0.0, 0.0, 0.002, 0.005)),
            lives=tuple(life() for _ in range(draw.choice((1, 2, 2, 3, 4)))),
            last_life_goes_on=draw.random() < 0.5,
        )


_INSIDE_A_SNAPSHOT: Final = Life(0.0, STOP_TIMEOUT_S, 1, (0.0,), "partial snapshot")
SURE: Final = Schedule(
    seed=-1,
    program="journal",
    partitions=1,
    keys=2000,
    already_there=3000,
    writes=200,
    batch=100,
    value_bytes=2000,
    expires=False,
    window_bytes=WINDOW_BYTES_MIN,
    pause_s=0.05,
    lives=(_INSIDE_A_SNAPSHOT, _INSIDE_A_SNAPSHOT),
    last_life_goes_on=False,
)
"""Comes to what drawn schedules come to only by chance: it is cut, killed and resumed inside a
snapshot, of some 2 MB in chunks of at most a window, each of which takes it 50 ms."""


def _schedules() -> list[Schedule]:
    seeds = os.environ.get(SEEDS_VARIABLE)
    if seeds:
        return [SURE if seed == "-1" else Schedule.of(int(seed)) for seed in seeds.split(",")]
    return [SURE, *map(Schedule.of, range(SCHEDULES))]


@pytest.mark.timeout(900)
async def test_killed_and_resumed_at_any_moment() -> None:
    schedules = _schedules()
    schedules_left = iter(schedules)
    event_counts: Counter[str] = Counter()
    async with (
        server_process("--log-level", "warning") as server,
        recorders() as starter,
        connect(server.url()) as client,
        trio.open_nursery() as nursery,
    ):

        async def work_off() -> None:
            for schedule in schedules_left:
                try:
                    await _Run(schedule, server, client, starter, event_counts).run()
                except Exception as error:
                    error.add_note(
                        f"This was {schedule}. To repeat it: {SEEDS_VARIABLE}={schedule.seed} "
                        f"{sys.executable} -m pytest {Path(__file__).relative_to(ROOT)}"
                    )
                    raise

        for _ in range(AT_ONCE):
            nursery.start_soon(work_off)
    assert event_counts["schedules"] == len(schedules)
    if SURE in schedules:
        assert event_counts["resumed inside a snapshot"] >= 2, event_counts
        assert event_counts["cuts"] >= 1, event_counts


class _Run:
    """One schedule against a bucket of its own."""

    def __init__(
        self,
        schedule: Schedule,
        server: ServerProcess,
        client: Client,
        starter: Recorders,
        event_counts: Counter[str],
    ) -> None:
        self.schedule = schedule
        self.seen = event_counts
        self.server = server
        self.client = client
        self.starter = starter
        self.bucket = f"seed-{schedule.seed}"
        self.draw = random.Random(-1 - schedule.seed)
        self.keys = [b"key-%d" % index for index in range(schedule.keys)]
        self.written = trio.Event()

    async def run(self) -> None:
        schedule = self.schedule
        await self.client.create_bucket(self.bucket, schedule.partitions)
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="upr-resume-"))
            proxy = await stack.enter_async_context(proxy_to(self.server.host, self.server.port))
            url = proxy.url(self.bucket)
            consumer: _Recording | _Tail
            if schedule.program == "tail":
                consumer = _Tail(url, Path(folder))
            else:
                order = Order(
                    url,
                    folder,
                    schedule.program,
                    pause_s=schedule.pause_s,
                    window_bytes=schedule.window_bytes,
                )
                consumer = _Recording(order, self.starter)
            async with trio.open_nursery() as nursery:
                await self._write(schedule.already_there, first=True)
                nursery.start_soon(self._write, schedule.writes)
                await self._live(consumer, proxy)
            await self._compare(await consumer.contents())
        await self.client.delete_bucket(self.bucket)
        self.seen["schedules"] += 1

    # The publisher.

    async def _write(self, count: int, *, first: bool = False) -> None:
        draw, schedule = self.draw, self.schedule
        async with publisher(self.server.url(self.bucket), on_failure=lambda failure: None) as sink:
            for index in range(count):
                key = draw.choice(self.keys)
                value = b"%d:" % index + bytes(draw.randrange(schedule.value_bytes))
                expiry = int(time.time()) + 2 if schedule.expires and draw.random() < 0.2 else 0
                chance = draw.random()
                if chance < 0.6:
                    await sink.set(key, value, expiry=expiry)
                elif chance < 0.75:
                    await sink.delete(key)
                elif chance < 0.8:
                    await sink.apply(Operation.ADD, key, value, expiry=expiry)
                elif chance < 0.85:
                    await sink.apply(Operation.APPEND, key, b"+")
                elif chance < 0.9:
                    await sink.apply(Operation.REPLACE, key, value)
                else:
                    delta = CounterDelta(draw.randrange(10), 1).encode()
                    await sink.apply(Operation.INCREMENT, b"counter-" + key, delta)
                if index % schedule.batch == 0:
                    await sink.flush()
                    if not first and draw.random() < 0.3:
                        await trio.sleep(draw.uniform(0, 0.01))
        if not first:
            if schedule.expires:
                await self._until_expired()
            self.written.set()

    async def _until_expired(self) -> None:
        """Until then a read says missing, and the stream is still to say it."""
        with trio.fail_after(60):
            while True:
                if not await self._expiries():
                    break

    async def _expiries(self) -> int:
        count: int = (await self.client.stats(self.bucket))["memory"]["expiries"]
        return count

    # The consumer.

    async def _live(self, consumer: _Recording | _Tail, proxy: Proxy) -> None:
        lives = self.schedule.lives
        for life in lives:
            await trio.sleep(life.joins_after_s)
            self._look_at(consumer.resume_state())
            async with consumer.alive():
                if life.waits_for == "partial snapshot":
                    await self._until_partial(consumer)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._cut, proxy, life.cuts_s)
                    await self._until_old(consumer, life)
                    nursery.cancel_scope.cancel()
                if life is lives[-1] and self.schedule.last_life_goes_on:
                    await self.written.wait()
                    await consumer.finish()
                    return
                await consumer.kill()
                self.seen["kills"] += 1
        await self.written.wait()
        self._look_at(consumer.resume_state())
        async with consumer.alive(ends=True):
            await consumer.ended()

    async def _until_partial(self, consumer: _Recording | _Tail) -> None:
        def is_partial() -> bool:
            state = consumer.resume_state()
            return state is not None and any(p.partial for p in state.positions.values())

        await eventually(is_partial, "its state is inside a snapshot")

    async def _until_old(self, consumer: _Recording | _Tail, life: Life) -> None:
        enough = consumer.size() + life.lasts_bytes
        with trio.move_on_after(life.lasts_s):
            await eventually(lambda: consumer.size() >= enough, "it wrote so much")

    async def _cut(self, proxy: Proxy, cuts_s: tuple[float, ...]) -> None:
        for pause_s in cuts_s:
            await trio.sleep(pause_s)
            self.seen["cuts"] += proxy.cut()

    def _look_at(self, state: ResumeState | None) -> None:
        """Counts what the consumer goes on from."""
        if state is not None:
            positions = state.positions.values()
            self.seen["resumed in the middle"] += any(p.highest_received for p in positions)
            self.seen["resumed inside a snapshot"] += any(p.partial for p in positions)

    # The end.

    async def _compare(self, contents: dict[bytes, bytes]) -> None:
        url = self.server.url(self.bucket)
        partitions = self.schedule.partitions
        mirror = Mirror()
        async with consume(url, end="now") as fresh:
            async for event in fresh:
                mirror.apply(event)
        assert_same(contents, mirror.contents, partitions)
        key_set = {*contents, *self.keys, *(b"counter-" + key for key in self.keys)}
        async with connect(url) as client:
            assert_same(contents, await server_contents(client, key_set), partitions)


class _Recording:
    """The consumer as a program on the client library."""

    def __init__(self, order: Order, starter: Recorders) -> None:
        self._order = order
        self._starter = starter
        self._recorder: Recorder | None = None

    @asynccontextmanager
    async def alive(self, *, ends: bool = False) -> AsyncIterator[None]:
        order = msgspec.structs.replace(self._order, ends=ends)
        async with self._starter.start(order) as self._recorder:
            yield

    @property
    def recorder(self) -> Recorder:
        assert self._recorder is not None
        return self._recorder

    def size(self) -> int:
        path = self._order.journal_path
        return path.stat().st_size if path.exists() else 0

    async def kill(self) -> None:
        await self.recorder.kill()

    async def finish(self) -> None:
        await self.recorder.finish()

    async def ended(self) -> None:
        await self.recorder.ended()

    async def contents(self) -> dict[bytes, bytes]:
        return Journal.read(self._order.journal_path).contents

    def resume_state(self) -> ResumeState | None:
        if self._order.keeps_state == "file":
            return FileStore(self._order.state_path).load_now()
        state = Journal.read(self._order.journal_path).state
        return ResumeState.decode(state) if state else None


class _Tail:
    """The consumer as `upr tail --resume FILE >> LINES`."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._state = folder / "state"
        self._lines = folder / "lines"
        self._errors = folder / "errors"
        self._lines.touch()
        self._process: trio.Process | None = None

    @property
    def process(self) -> trio.Process:
        assert self._process is not None
        return self._process

    @asynccontextmanager
    async def alive(self, *, ends: bool = False) -> AsyncIterator[None]:
        until = ("--until", "caught-up") if ends else ()
        with self._lines.open("ab") as lines, self._errors.open("ab") as errors:
            self._process = await trio.lowlevel.open_process(
                (*UPR, "tail", self._url, "--resume", str(self._state), *until),
                stdout=lines,
                stderr=errors,
                cwd=ROOT,
                env=environment(),
            )
        try:
            yield
        finally:
            self._process.kill()
            with trio.CancelScope(shield=True):
                await self._process.wait()

    def size(self) -> int:
        return self._lines.stat().st_size

    def resume_state(self) -> ResumeState | None:
        return FileStore(self._state).load_now()

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def finish(self) -> None:
        """Ctrl-C, and once more until it has caught up."""
        self.process.send_signal(signal.SIGINT)
        await self.process.wait()
        async with self.alive(ends=True):
            await self.ended()

    async def ended(self) -> None:
        with trio.fail_after(STOP_TIMEOUT_S):
            code = await self.process.wait()
        assert code == 0, self._errors.read_text()

    async def contents(self) -> dict[bytes, bytes]:
        contents: dict[int, dict[bytes, bytes]] = {}
        for line in self._lines.read_bytes().splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue  # it was killed in the middle of this line
            if event["event"] == "rollback":
                contents.pop(event["partition"], None)
            elif event["event"] == "mutation":
                items = contents.setdefault(event["partition"], {})
                key = _octets(event, "key")
                if event["op"] == "set":
                    items[key] = _octets(event, "value")
                else:
                    items.pop(key, None)
        return {key: value for items in contents.values() for key, value in items.items()}


def _octets(event: dict[str, Any], name: str) -> bytes:
    text: str = event[name]
    return b64decode(text) if event.get(f"{name}_encoding") == "base64" else text.encode()
