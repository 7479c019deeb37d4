"""Single operations: plain `SET`s, one a frame, that have come together.

They are applied and answered as `publishing.mutate` would one by one, at a fraction of the cost.
Whatever is not simple is left for it.
"""

from __future__ import annotations

from typing import Final

from upr_protocol.wire import SetFrames, SetResult
from upr_server.engine import CheckedChunk, MutationBatch, WriterToken
from upr_server.net.request_context import RequestContext

_NO_WRITER: Final = bytes(16)


def apply_sets(context: RequestContext, sets: SetFrames) -> int:
    """Applies and answers these `SET`s up to the first that is not applied at once or was here
    before.

    Returns:
        How many were answered.
    """
    bucket = context.bucket
    if bucket is None or context.disk.flusher.full:
        return 0
    columns, now = CheckedChunk(sets.chunk), context.time()
    results: list[SetResult] = []
    try:
        for row, frame in enumerate(sets.frames):
            partition = bucket.partitions[frame.partition]
            if context.has_earlier(partition):
                break
            token = None
            if frame.writer != _NO_WRITER:
                token = WriterToken(context.access.own_writer(frame.writer), frame.counter)
            result = partition.set_new(MutationBatch(columns, row, row + 1, token), now)
            if result is None:
                break
            results.append(
                SetResult(
                    frame.opaque,
                    frame.partition,
                    result.history_id,
                    result.first_seq,
                    result.first_cas,
                )
            )
    finally:
        if results:
            context.answer_sets(sets, results)
    return len(results)
