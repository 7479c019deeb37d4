"""Clients that record what happens: publishers that know what they sent, and consumers that store
what they receive, crash, and continue. They work with real and simulated clusters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Final

import attrs
import trio

from tests.kit.checkers import Items, apply
from tests.kit.history import (
    Answered,
    AskedForNow,
    Began,
    Ended,
    History,
    Level,
    ReachedNow,
    Received,
    Restarted,
    Row,
    Said,
    Sent,
    WentBack,
)
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.client import (
    Address,
    ChunkReceived,
    Consumer,
    Event,
    Publisher,
    ResumeState,
    RolledBack,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    WriteResult,
    consume,
    publisher,
)
from upr_protocol.client.core.key_lookup import counter_delta
from upr_protocol.client.core.results import NotDurableError, results_of
from upr_protocol.client.core.writer_identity import WriterIdentity
from upr_protocol.errors import LocalProtocolError, Status, UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Durability, Operation, PartitionId, PartitionState, SeqNo
from upr_protocol.limits import WINDOW_BYTES_DEFAULT
from upr_protocol.transport import Dial, dial_tcp

LEVELS: Final[dict[Level, tuple[Durability, int]]] = {
    "memory": (Durability.MEMORY, 0),
    "persisted": (Durability.PERSISTED, 0),
    "replicated": (Durability.REPLICATED, 1),
    "replicated_persisted": (Durability.REPLICATED_AND_PERSISTED, 1),
}

Sleep = Callable[[float], Awaitable[None]]
"""Waits for so many seconds."""

VERSIONS_MAX: Final = 30
"""How many snapshot ends a consumer keeps to go back to."""


@attrs.define
class PartitionLoad:
    """The keys of one partition to which one publisher writes, one batch after the other, so that
    the order of writes is known.

    Attributes:
        partition: The partition.
        keys: Plain keys.
        counters: Keys that are only incremented.
    """

    partition: PartitionId
    keys: list[bytes]
    counters: list[bytes]
    operations_sent: dict[bytes, int] = attrs.field(factory=dict)


class RecordedPublisher:
    """Writes until it is told to stop. When the client library gives up, the publisher continues
    with other keys: batches whose outcome is unknown may still be applied, after later ones.

    Args:
        expiry: Returns the time at which items expire, in seconds since 1970; None for never.
        key_prefix: The prefix of its keys.
    """

    def __init__(
        self,
        name: str,
        url: str,
        history: History,
        chance: Random,
        *,
        level: Level,
        partitions: int,
        pause_s: float,
        value_bytes: int,
        expiry: Callable[[], int] | None = None,
        key_prefix: bytes = b"",
        dial: Dial = dial_tcp,
        sleep: Sleep = trio.sleep,
    ) -> None:
        self.name = name
        self._url = url
        self._dial = dial
        self._sleep = sleep
        self._history = history
        self._chance = chance
        self._level: Level = level
        self._partitions = partitions
        self._pause_s = pause_s
        self._value_bytes = value_bytes
        self._expiry = expiry
        self._key_prefix = key_prefix
        self._number = 0
        self._generation = 0
        self._scope = trio.CancelScope()
        self.stopping = False
        self.acknowledged = 0

    def _load_of(self, partition: int) -> PartitionLoad:
        keys: list[bytes] = []
        count = 0
        while len(keys) < 8:
            key = b"%s%s.%d/%d" % (
                self._key_prefix,
                self.name.encode(),
                self._generation,
                count,
            )
            count += 1
            if partition_of(key, self._partitions) == partition:
                keys.append(key)
        return PartitionLoad(PartitionId(partition), keys[:6], keys[6:])

    def crash(self) -> None:
        """Kills the publisher. It starts again with other keys, and does not change the old
        ones."""
        self._scope.cancel()

    async def run(self) -> None:
        """Writes until `stopping` is set."""
        while not self.stopping:
            self._generation += 1
            with trio.CancelScope() as self._scope:
                await self._write_until_it_gives_up()
            await self._sleep(self._chance.random())

    async def _write_until_it_gives_up(self) -> None:
        durability, copies = LEVELS[self._level]
        try:
            async with (
                publisher(
                    self._url,
                    identity=f"publisher:{self.name}",
                    durability=durability,
                    copies=copies,
                    retry_timeout_s=20.0,
                    credit_timeout_s=20.0,
                    on_failure=lambda _failure: None,
                    dial=self._dial,
                    writer=WriterIdentity(self._chance.randbytes(16)),
                    draw=self._chance.random,
                ) as sink,
                trio.open_nursery() as nursery,
            ):
                for partition in range(self._partitions):
                    nursery.start_soon(self._write, sink, self._load_of(partition))
        except* UprError as errors:
            self._history.add(Said(self.name, f"gave up: {errors.exceptions[0]}"))

    async def _write(self, sink: Publisher, load: PartitionLoad) -> None:
        while not self.stopping:
            await self._sleep(self._chance.expovariate(1 / self._pause_s))
            numbers, rows = zip(*self._rows(load), strict=True)
            chunk = Chunk.build(rows)
            try:
                reply = await sink.publish_and_wait(load.partition, chunk)
            except NotDurableError:
                continue
            results = results_of(load.partition, chunk, reply)
            for row, operation_number, outcome in zip(rows, numbers, results, strict=True):
                if isinstance(outcome, WriteResult):
                    self.acknowledged += 1
                    self._history.add(
                        Answered(
                            row.key,
                            operation_number,
                            True,
                            load.partition,
                            outcome.history_id,
                            outcome.seq,
                        )
                    )
                else:
                    self._history.add(Answered(row.key, operation_number, False))

    def _rows(self, load: PartitionLoad) -> list[tuple[int, Mutation]]:
        """A batch; each operation has its number among those of its key. A key may occur twice: its
        first value is then superseded before any consumer receives it."""
        chance = self._chance
        if chance.random() < 0.2:
            keys = [chance.choice(load.counters)]
        else:
            keys = chance.choices(load.keys, k=chance.choice((1, 2, 3, 6)))
        return [self._row(load, key) for key in keys]

    def _row(self, load: PartitionLoad, key: bytes) -> tuple[int, Mutation]:
        operation_number = load.operations_sent.get(key, 0)
        load.operations_sent[key] = operation_number + 1
        return operation_number, self._operation(load, key, operation_number)

    def _operation(self, load: PartitionLoad, key: bytes, operation_number: int) -> Mutation:
        if key in load.counters:
            self._history.add(Sent(self.name, key, operation_number, None, self._level, 1))
            return Mutation(
                Operation.INCREMENT, key, counter_delta(Operation.INCREMENT, 1, 1, create=True)
            )
        if operation_number and self._chance.random() < 0.1:
            # If the key is missing, the deletion fails, which is an answer, too.
            self._history.add(Sent(self.name, key, operation_number, None, self._level))
            return Mutation(Operation.DELETE, key)
        self._number += 1
        value = b"%s-%d " % (self.name.encode(), self._number)
        value += b"." * self._chance.randrange(self._value_bytes)
        expires = self._expiry is not None and self._chance.random() < 0.1
        self._history.add(
            Sent(self.name, key, operation_number, value, self._level, expires=expires)
        )
        if expires and self._expiry is not None:
            return Mutation(Operation.SET, key, value, expiry=self._expiry())
        return Mutation(Operation.SET, key, value)


async def contents_of(
    url: str, numbers: list[PartitionId], state: PartitionState, dial: Dial = dial_tcp
) -> dict[PartitionId, Items]:
    """The items that one node has of partitions that are all in the same state there."""
    items_of: dict[PartitionId, Items] = {partition: {} for partition in numbers}
    if not numbers:
        await trio.lowlevel.checkpoint()
        return items_of
    async with consume(
        url, partitions=numbers, state=state, end="now", follow_map=False, dial=dial
    ) as consumer:
        async for event in consumer:
            if isinstance(event, ChunkReceived):
                apply(items_of[event.partition], rows_of(event.chunk))
    return items_of


def rows_of(chunk: Chunk) -> tuple[Row, ...]:
    """The rows of a chunk, as histories contain them."""
    return tuple(Row(row.seq, row.op, row.key, row.value) for row in chunk)


@attrs.frozen
class Version:
    """A consumer's items of a partition at a snapshot's end, and the failover log that it then
    had."""

    items: Items
    log: FailoverLog


@attrs.define
class Kept:
    """What a consumer has on its disk: its position, and its items up to there."""

    state: ResumeState
    items: dict[PartitionId, Items] = attrs.field(factory=dict)
    versions: dict[PartitionId, dict[SeqNo, Version]] = attrs.field(factory=dict)

    def copy(self) -> Kept:
        """A copy that can be changed independently."""
        return Kept(
            self.state.copy(),
            {partition: dict(items) for partition, items in self.items.items()},
            {partition: dict(versions) for partition, versions in self.versions.items()},
        )


class RecordedConsumer:
    """Keeps a copy of the bucket.

    Args:
        undoes: Whether it keeps earlier versions, and goes back to one at a rollback; if not, it
            starts again from 0.
        state: The state in which the partitions must be at the node that streams them.
        pause_s: How long it waits after each event, on average.
        keeps: The probability with which it saves its copy after an event.
        follow_map: Whether it reads each partition at the node that has it by the bucket's map;
            else it reads all of `partitions` at the node in `url`.
        partitions: The partitions that it reads; None for all.
    """

    def __init__(
        self,
        name: str,
        url: str,
        history: History,
        chance: Random,
        *,
        undoes: bool,
        state: PartitionState,
        pause_s: float,
        keeps: float = 0.05,
        window_bytes: int = WINDOW_BYTES_DEFAULT,
        follow_map: bool = True,
        partitions: Sequence[PartitionId] | None = None,
        dial: Dial = dial_tcp,
        sleep: Sleep = trio.sleep,
    ) -> None:
        self.name = name
        self._url = url
        self._follow_map = follow_map
        self._partitions = partitions
        self._dial = dial
        self._sleep = sleep
        self._history = history
        self._chance = chance
        self._undoes = undoes
        self._state = state
        self._window_bytes = window_bytes
        self._keeps = keeps
        self.pause_s = pause_s
        self.kept = Kept(ResumeState(Address.parse(url).bucket))
        self.old: list[Kept] = []
        """Some earlier states of its disk; it could continue from each of them."""
        self.undone: list[Kept] = []
        """States of its disk after it had rolled back, and before it had told the server so."""
        self._now = self.kept
        self.events = 0
        self.rollbacks = 0
        self._is_undoing = False
        # By partition, how far it has received the present snapshot, and where that ends.
        self._partial: dict[PartitionId, tuple[SeqNo, SeqNo]] = {}
        self._scope = trio.CancelScope()
        self._consumer: Consumer | None = None

    def is_cut_by(self, highs: dict[PartitionId, SeqNo]) -> bool:
        """Whether it has received a part of a snapshot whose rest is above one of these sequence
        numbers, and nothing above that number."""
        return any(
            received <= highs.get(partition, 0) < end
            for partition, (received, end) in self._partial.items()
            if received
        )

    def save(self) -> None:
        """Saves its copy, also inside a snapshot."""
        # During a rollback its resume state still includes what it has undone.
        if not self._is_undoing:
            self.kept = self._now.copy()

    def crash(self) -> None:
        """Kills the consumer. It continues with the copy that it last saved."""
        self._scope.cancel()

    def ends(self) -> dict[PartitionId, SeqNo]:
        """By partition, the end of its last complete snapshot."""
        return {p: position.last_complete for p, position in self._now.state.positions.items()}

    async def run(self) -> None:
        """Consumes for ever, with new connections after errors and crashes."""
        while True:
            self._restart(self.kept)
            with trio.CancelScope() as self._scope:
                await trio.lowlevel.checkpoint()
                try:
                    await self._follow(end=None)
                except UprError as error:
                    if isinstance(error, LocalProtocolError):
                        raise
                    self._history.add(Said(self.name, f"{error}"))
            await self._sleep(self._chance.random() * 0.5)

    async def read_all_again_and_again(self) -> None:
        """Reads everything up to now, from nothing, again and again, in spite of errors."""
        while True:
            await self._sleep(self._chance.random())
            with trio.CancelScope() as self._scope:
                await trio.lowlevel.checkpoint()
                try:
                    await self.read_all()
                except UprError as error:
                    if isinstance(error, LocalProtocolError):
                        raise
                    self._history.add(Said(self.name, f"{error}"))

    async def read_all(self) -> None:
        """Reads everything up to now, from nothing."""
        await self.catch_up_from(Kept(ResumeState(Address.parse(self._url).bucket)))

    async def catch_up_from(self, saved: Kept) -> None:
        """Continues from an earlier state, and reads everything up to now."""
        self._restart(saved)
        self._history.add(AskedForNow(self.name))
        await self._follow(end="now")

    def _restart(self, saved: Kept) -> None:
        self._is_undoing = False
        self._partial.clear()
        self._now = saved.copy()
        self._history.add(
            Restarted(
                self.name,
                {
                    partition: (position.highest_received, dict(self._now.items.get(partition, {})))
                    for partition, position in self._now.state.positions.items()
                },
            )
        )

    async def _follow(self, *, end: str | None) -> None:
        async with consume(
            self._url,
            resume=self._now.state.copy(),
            state=self._state,
            end=end,  # type: ignore[arg-type]
            undo=self._undo if self._undoes else None,
            window_bytes=self._window_bytes,
            follow_map=self._follow_map,
            partitions=self._partitions,
            identity=f"consumer:{self.name}",
            retry_timeout_s=20.0,
            dial=self._dial,
            draw=self._chance.random,
        ) as self._consumer:
            consumer = self._consumer
            async for event in consumer:
                self._take(consumer, event)
                if self.pause_s:
                    await self._sleep(self._chance.random() * 2 * self.pause_s)
                if self._chance.random() < self._keeps:
                    self.kept = self._now.copy()
                    if self._chance.random() < 0.1:
                        self.old.append(self.kept)

    def _take(self, consumer: Consumer, event: Event) -> None:
        self.events += 1
        self._is_undoing = False
        now, history, name = self._now, self._history, self.name
        now.state = consumer.resume_state
        if isinstance(event, SnapshotStart):
            self._partial[event.partition] = SeqNo(0), event.end
            history.add(
                Began(
                    name,
                    event.partition,
                    event.history_id,
                    event.start,
                    event.end,
                    event.may_repeat,
                )
            )
        elif isinstance(event, ChunkReceived):
            chunk = event.chunk
            rows = rows_of(chunk)
            history.add(Received(name, event.partition, chunk.start, chunk.end, rows))
            self._partial[event.partition] = chunk.end, self._partial[event.partition][1]
            apply(now.items.setdefault(event.partition, {}), rows)
        elif isinstance(event, SnapshotEnd):
            self._partial.pop(event.partition, None)
            log = now.state.positions[event.partition].log
            history.add(Ended(name, event.partition, event.end, log))
            versions = now.versions.setdefault(event.partition, {})
            versions[event.end] = Version(dict(now.items.get(event.partition, {})), log)
            if len(versions) > VERSIONS_MAX:
                del versions[next(iter(versions))]
        elif isinstance(event, StreamEnded):
            # A replica may be behind, so its end proves nothing.
            if event.reason is Status.END_REACHED and self._state is PartitionState.ACTIVE:
                position = now.state.position(event.partition)
                history.add(ReachedNow(name, event.partition, position.last_complete, position.log))
        elif isinstance(event, RolledBack) and not self._undoes:
            self._go_back(event.partition, event.ceiling, SeqNo(0))

    async def _undo(self, partition: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:
        del reason
        self._is_undoing = True
        await self._sleep(self._chance.random() * 0.1)
        versions = self._now.versions.get(partition, {})
        to = max((end for end in versions if end <= ceiling), default=SeqNo(0))
        self._go_back(partition, ceiling, to)
        if self._chance.random() < 0.5:
            # Save at once: the consumer may be killed before it tells the server how far it went
            # back.
            assert self._consumer is not None
            self._now.state = self._consumer.processed_state
            self.kept = self._now.copy()
            self.undone.append(self.kept)
            await self._sleep(self._chance.random() * 0.1)
        return to

    def _go_back(self, partition: PartitionId, ceiling: SeqNo, to: SeqNo) -> None:
        self.rollbacks += 1
        self._partial.pop(partition, None)
        now = self._now
        versions = now.versions.setdefault(partition, {})
        was = now.state.position(partition).highest_received
        version = versions[to] if to else Version({}, FailoverLog())
        ends = tuple(versions)
        self._history.add(WentBack(self.name, partition, ceiling, to, was, ends, version.log))
        now.items[partition] = dict(version.items)
        for end in [end for end in versions if end > to]:
            del versions[end]
