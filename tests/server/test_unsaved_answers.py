"""Taking answers to publishers that are not on disk yet: some in each step, and none is lost."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, product

import trio

from tests.engine.helpers import new_bucket, put
from tests.kit.answer_rows import unpack_rows
from upr_server.engine import Partition
from upr_server.engine.publisher_answers import (
    ANSWERS_BYTES_MAX,
    BATCHES_MAX,
    UNSAVED_BYTES,
    WriterToken,
)
from upr_server.storage.online.unsaved_answers import (
    STEP_ANSWERS,
    STRING_ANSWERS,
    TAKEN_BYTES,
    take_answers,
)


class LongestTaking(trio.abc.Instrument):
    """The largest number of answers that one step of a task took from a partition. `meanwhile` is
    called after each step that took some."""

    def __init__(self, partition: Partition, meanwhile: Callable[[], None]) -> None:
        self.longest = 0
        self._answers = partition.repeated_batches.answers
        self._meanwhile = meanwhile
        self._nbytes = self._answers.nbytes

    def after_task_step(self, _task: trio.lowlevel.Task) -> None:
        taken = (self._nbytes - self._answers.nbytes) // UNSAVED_BYTES
        self.longest = max(self.longest, taken)
        if taken > 0:
            self._meanwhile()
        self._nbytes = self._answers.nbytes


def tracked_partition() -> Partition:
    """A partition with one change, whose answers are to be written."""
    partition = new_bucket().partitions[0]
    partition.repeated_batches.answers.track_unsaved()
    put(partition, b"a")
    return partition


async def test_thousands_of_answers_are_taken_some_in_each_step() -> None:
    """Answers that are given and forgotten between two steps are taken, too."""
    writers, counters = [bytes([number]) * 16 for number in range(100)], count(1)
    partition = tracked_partition()
    answers, high_seq = partition.repeated_batches.answers, partition.high_seq

    def answer_each_writer() -> None:
        counter = next(counters)
        for writer in writers:
            answers.remember(WriterToken(writer, counter), b"%d" % counter, high_seq)

    for _ in range(BATCHES_MAX):
        answer_each_writer()
    taking = LongestTaking(partition, answer_each_writer)
    trio.lowlevel.add_instrument(taking)
    rows = await take_answers(partition, high_seq)
    trio.lowlevel.remove_instrument(taking)
    rows += await take_answers(partition, high_seq)
    assert taking.longest == STEP_ANSWERS
    taken = {token: answer for token, answer in unpack_rows(b"".join(rows)).items() if answer}
    remembered = answers.answers_between(0, high_seq)
    assert next(counters) > BATCHES_MAX + 3
    assert taken == {(writer, counter): answer for writer, counter, _, answer in remembered}


async def test_large_answers_are_taken_fewer_in_each_step() -> None:
    answer, partition = bytes(10_000), tracked_partition()
    writers = [number.to_bytes(16, "little") for number in range(80)]
    for counter, writer in product(range(1, ANSWERS_BYTES_MAX // len(answer)), writers):
        token = WriterToken(writer, counter)
        partition.repeated_batches.answers.remember(token, answer, partition.high_seq)
    taking = LongestTaking(partition, lambda: None)
    trio.lowlevel.add_instrument(taking)
    rows = await take_answers(partition, partition.high_seq)
    trio.lowlevel.remove_instrument(taking)
    assert len(unpack_rows(b"".join(rows))) > TAKEN_BYTES // len(answer)
    assert taking.longest == STRING_ANSWERS
