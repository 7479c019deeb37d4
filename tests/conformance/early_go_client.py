"""A consumer for the scenario `rollback` that sends `Go` at once, with its first `Stream`."""

from __future__ import annotations

import json
import sys
from typing import Any

import trio

from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.wire import (
    Close,
    Go,
    PartitionChunk,
    PartitionEnd,
    PartitionStart,
    Stream,
    StreamEnd,
    StreamReply,
)
from upr_server.conformance.plain_client import plain_client


def position_of(task: dict[str, Any], partition: str) -> Position:
    """The task's position of a partition, which has no partial snapshot."""
    fields = task["positions"][partition]
    log = FailoverLog.of_pairs([(HistoryId(int(each)), int(seq)) for each, seq in fields["log"]])
    seq = SeqNo(int(fields["last_complete"]))
    return Position(log, seq, seq)


async def consume(task: dict[str, Any]) -> dict[str, Any]:
    """Does the task: `Stream` and `Go`, the rollback to 0, and one snapshot."""
    (text, end_seq), *_ = task["end_seqs"].items()
    partition, end = PartitionId(int(text)), SeqNo(int(end_seq))

    def request(position: Position, opaque: int) -> Stream:
        return Stream(PartitionState.ACTIVE, position, end, partition=partition, opaque=opaque)

    async with plain_client(task["host"], task["port"], task["bucket"]) as client:
        await client.send(request(position_of(task, text), client.new_opaque()), Go())
        ceiling = (await client.expect(StreamReply)).seq
        await client.send(request(Position(), client.new_opaque()))
        await client.expect(StreamReply)
        await client.expect(PartitionStart)
        chunk = (await client.expect(PartitionChunk)).chunk
        last_complete = (await client.expect(PartitionEnd)).end
        await client.expect(StreamEnd)
        await client.send(Close())
    return {
        "items": {row.key.decode(): row.value.decode() for row in chunk},
        "positions": {text: {"last_complete": str(last_complete)}},
        "rollbacks": [[partition, str(ceiling)]],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(trio.run(consume, json.load(sys.stdin))))
