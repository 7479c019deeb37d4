"""The changes of answers to publishers that are not on disk yet.

A commit has those that belong to its snapshots. A partition may have tens of thousands of them, so
they are taken in steps.
"""

from __future__ import annotations

from typing import Final

import trio

from upr_protocol.ids import SeqNo
from upr_server.engine import Partition

STEP_ANSWERS: Final = 2048
"""Changes of answers to publishers that are taken before other tasks run: some 0.2 ms. A partition
may have 65,536 answers."""

STRING_ANSWERS: Final = 256
"""How many of them are taken as one string of rows: a step ends with the one that reaches
`TAKEN_BYTES`. An answer to a thousand increments has some 10 kB."""

TAKEN_BYTES: Final = 1024 * 1024
"""Bytes of them that are taken before other tasks run: a millisecond or so."""


async def take_answers(partition: Partition, through: SeqNo) -> list[bytes]:
    """Takes the changes of answers to publishers that belong on disk with everything up to
    `through`, in steps: strings of rows, as `PartitionWrite` has them. After a cancellation some
    are lost: the caller must be one that writes nothing more then."""
    answers, strings = partition.repeated_batches.answers, list[bytes]()
    count, step_count, step_bytes = STRING_ANSWERS, 0, 0
    while count == STRING_ANSWERS:
        rows, count = answers.take_unsaved(through, STRING_ANSWERS)
        if rows:
            strings.append(rows)
        step_count += count
        step_bytes += len(rows)
        if step_count >= STEP_ANSWERS or step_bytes >= TAKEN_BYTES:
            step_count = step_bytes = 0
            await trio.lowlevel.checkpoint()
    return strings
