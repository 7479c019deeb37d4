"""The answers to publishers that a replica receives with the snapshots of a partition.

The partition keeps them as if it had given them itself, so that after a failover it recognises a
batch that is sent again. There may be thousands of them in one snapshot, so what handles all of a
partition does so in steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import trio

from upr_protocol.errors import RemoteProtocolError
from upr_protocol.ids import SeqNo
from upr_server.engine import Partition, unpack_result
from upr_server.replication.received_snapshots import PublisherAnswer
from upr_server.storage.online.unsaved_answers import STEP_ANSWERS

STEP_ANSWER_BYTES: Final = 256 * 1024
"""Bytes of answers to publishers that one step takes: 2.6 ms for answers to a thousand increments,
which take 60 µs each."""


def checked_answers(rows: Iterable[tuple[bytes, int, int, bytes]]) -> list[PublisherAnswer]:
    """Answers to publishers, as a source has sent them.

    Raises:
        RemoteProtocolError: One cannot be decoded.
    """
    try:
        for _, _, _, answer in rows:
            unpack_result(answer)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed answer to a publisher: {error}") from error
    return [(writer, batch, SeqNo(seq), answer) for writer, batch, seq, answer in rows]


async def add_answers(partition: Partition, answers: Sequence[PublisherAnswer]) -> None:
    """Has a partition keep answers, in steps: O(answers)."""
    begin = 0
    while begin < len(answers):
        if begin:
            await trio.lowlevel.checkpoint()
        end = _step_end(answers, begin)
        partition.repeated_batches.add_received(answers[begin:end])
        begin = end


async def forget_answers(partition: Partition, seq: SeqNo) -> None:
    """Forgets the answers to publishers that were given above `seq`, in steps."""
    has_more = True
    while has_more:
        has_more = partition.repeated_batches.answers.truncate(seq, STEP_ANSWERS)
        await trio.lowlevel.checkpoint()


def _step_end(answers: Sequence[PublisherAnswer], begin: int) -> int:
    """Where the answers end that one step takes, if it begins at `begin`."""
    nbytes, end = 0, begin
    while end < len(answers) and end - begin < STEP_ANSWERS and nbytes < STEP_ANSWER_BYTES:
        nbytes += len(answers[end][3])
        end += 1
    return end
