"""Single operations: plain `SET`s, one a frame, that have come together.

They are applied and answered as `publishing.mutate` would one by one, at a fraction of the cost.
Whatever is not simple is left for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from upr_protocol.wire import SetFrame, SetFrames, SetResult
from upr_server.engine import CheckedChunk, Partition, WriterToken, set_runs
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
    frames, results = sets.frames, list[SetResult]()
    partitions = bucket.partitions
    try:
        while len(results) < len(frames):
            low = len(results)
            group = _group(frames, low, may_expire=columns.may_expire)
            targets: list[Partition | None] = [
                None
                if context.has_earlier(partitions[frame.partition])
                else partitions[frame.partition]
                for frame in group
            ]
            tokens = [
                None
                if frame.writer == _NO_WRITER
                else WriterToken(context.access.own_writer(frame.writer), frame.counter)
                for frame in group
            ]
            bounds = range(low, low + len(group) + 1)
            runs = set_runs(bucket, columns, bounds, targets, tokens, 0, now, in_order=True)
            for frame, run in zip(group, runs, strict=True):
                if run is None:
                    break
                history_id, seq, _, cas = run
                results.append(SetResult(frame.opaque, frame.partition, history_id, seq, cas))
            if len(results) == low:
                break
    finally:
        if results:
            context.answer_sets(sets, results)
    return len(results)


def _group(frames: Sequence[SetFrame], low: int, *, may_expire: bool) -> Sequence[SetFrame]:
    """The frames from `low` on of which none has to be looked at after another was applied: whether
    it was here before, or whether what it stores has expired."""
    newest: dict[tuple[int, bytes], int] = {}
    for index in range(low, len(frames)):
        frame = frames[index]
        if may_expire:
            name = (frame.partition, b"")
            if name in newest:
                return frames[low:index]
        else:
            name = (frame.partition, frame.writer)
            if frame.counter <= newest.get(name, -1) and frame.writer != _NO_WRITER:
                return frames[low:index]
        newest[name] = frame.counter
    return frames[low:]
