"""Single operations: plain `SET`s, one a frame, that have come together.

They are applied and answered as `publishing.mutate` would one by one, at a fraction of the cost.
Whatever is not simple is left for it.
"""

from __future__ import annotations

from upr_protocol.chunk import RUN_BYTES, decode_runs
from upr_protocol.ids import WRITER_BYTES
from upr_protocol.wire import RESULT_BYTES, SetFrames
from upr_server.engine import Bucket, CheckedSets, apply_set_runs
from upr_server.net.request_context import RequestContext


def apply_sets(context: RequestContext, sets: SetFrames) -> int:
    """Applies and answers these `SET`s up to the first that is not applied at once or was here
    before.

    Returns:
        How many were answered.
    """
    bucket = context.bucket
    if bucket is None or context.disk.flusher.disk_full_reason:
        return 0
    lines = _apply(context, bucket, sets)
    if lines:
        context.answer_sets(sets, lines)
    return len(lines) // RESULT_BYTES


def _apply(context: RequestContext, bucket: Bucket, sets: SetFrames) -> bytes:
    """Applies them; returns the lines of their answers."""
    columns, now = CheckedSets(sets.chunk, sets.flags), context.time()
    writers = context.access.own_writers(sets.writers)
    skip = _skip(context, bucket, sets) if context.may_have_earlier else None
    lines, low, frame_count = b"", 0, sets.frame_count
    while low < frame_count:
        runs = apply_set_runs(
            bucket,
            columns,
            sets.directory[RUN_BYTES * low :],
            writers if len(writers) == WRITER_BYTES else writers[WRITER_BYTES * low :],
            0,
            now,
            first_row=low,
            skip=None if skip is None else skip[low:],
            in_order=True,
        )
        count = runs.remaining_indexes[0] if runs.remaining_indexes else frame_count - low
        if not count:
            break
        lines += runs.answer_rows[: RESULT_BYTES * count]
        # Something that was stored may have expired at once: the next look at it is a new one.
        low += count
    return lines


def _skip(context: RequestContext, bucket: Bucket, sets: SetFrames) -> bytes:
    """Which frames are for partitions that have requests waiting."""
    return bytes(
        context.has_earlier(bucket.partitions[run.partition]) for run in decode_runs(sets.directory)
    )
