"""A task that runs again from its beginning, as Spark's do, and records what it sends."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Final

import trio

from tests.kit.history import Answered, History, Said, Sent
from tests.kit.recorded import Sleep
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.client import Publisher, publisher
from upr_protocol.client.core.key_lookup import counter_delta
from upr_protocol.client.core.partition_batches import Batch
from upr_protocol.client.core.writer_identity import WRITER_ID_BYTES, WriterIdentity
from upr_protocol.errors import UprError
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Operation, PartitionId
from upr_protocol.transport import Dial

RUNS: Final = 40
"""Runs that a task sends to each partition: more than a server remembers here, see
`tests/simulation/limits.py`."""

IN_FLIGHT: Final = 16

ATTEMPTS: Final = 6

ATTEMPT_S: Final = 3.0
"""After so long on average an attempt is killed."""


class RepeatedTask:
    """Increments keys, each once, in one run after the other. It is killed now and then, and runs
    again as the same writer with a higher attempt. After that another task begins.

    Args:
        name: Its name.
        url: Where the bucket is.
        history: Records what it sends, and the answers.
        chance: The random number generator.
        partitions: The bucket's.
        dial: How nodes are reached.
        sleep: Waits for so many seconds.

    Attributes:
        stopping: Whether it is to end with the attempt that runs.
    """

    def __init__(
        self,
        name: str,
        url: str,
        history: History,
        chance: Random,
        *,
        partitions: int,
        dial: Dial,
        sleep: Sleep,
    ) -> None:
        self.name = name
        self.stopping = False
        self._url = url
        self._history = history
        self._chance = chance
        self._partitions = partitions
        self._dial = dial
        self._sleep = sleep
        self._task_number = 0
        self._sent_keys: set[bytes] = set()

    async def run(self) -> None:
        """Runs tasks until `stopping` is set."""
        while not self.stopping:
            self._task_number += 1
            await self._run_task()

    async def _run_task(self) -> None:
        chance = self._chance
        writer_id = chance.randbytes(WRITER_ID_BYTES)
        rows = list(self._rows())
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with trio.move_on_after(chance.expovariate(1 / ATTEMPT_S)):
                    await self._run_attempt(WriterIdentity.of_task(writer_id, attempt), rows)
            except* UprError as errors:
                self._history.add(Said(self.name, f"gave up: {errors.exceptions[0]}"))
            if self.stopping:
                break
            await self._sleep(chance.random())

    def _rows(self) -> Iterator[tuple[PartitionId, bytes]]:
        """Partitions and keys, in the order of the runs."""
        missing = dict.fromkeys(range(self._partitions), RUNS)
        number = 0
        while any(missing.values()):
            key = b"%s.%d/%d" % (self.name.encode(), self._task_number, number)
            partition = partition_of(key, self._partitions)
            if missing[partition]:
                missing[partition] -= 1
                yield PartitionId(partition), key
            number += 1

    async def _run_attempt(
        self, writer: WriterIdentity, rows: list[tuple[PartitionId, bytes]]
    ) -> None:
        async with publisher(
            self._url,
            identity=f"publisher:{self.name}",
            in_flight=IN_FLIGHT,
            retry_timeout_s=20.0,
            credit_timeout_s=20.0,
            on_failure=lambda _failure: None,
            dial=self._dial,
            writer=writer,
            draw=self._chance.random,
        ) as sink:
            for partition, key in rows:
                if self._chance.random() < 0.3:
                    await self._sleep(self._chance.random() / 4)
                await self._publish(sink, partition, key)

    async def _publish(self, sink: Publisher, partition: PartitionId, key: bytes) -> None:
        if key not in self._sent_keys:
            self._sent_keys.add(key)
            self._history.add(Sent(self.name, key, 0, None, "memory", 1))
        delta = counter_delta(Operation.INCREMENT, 1, 1, create=True)
        chunk = Chunk.build([Mutation(Operation.INCREMENT, key, delta)])
        await sink.publish(partition, chunk, partial(self._note_answer, key))

    def _note_answer(self, key: bytes, batch: Batch) -> None:
        result = batch.result
        if result is not None and not result.failures:
            self._history.add(
                Answered(key, 0, True, batch.partition, result.history_id, result.last_seq)
            )
