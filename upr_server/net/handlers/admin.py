"""Creating, deleting and listing buckets, and statistics."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Final

import msgspec
import trio

from upr_protocol.limits import PARTITIONS_DEFAULT
from upr_protocol.wire import (
    BucketDone,
    CreateBucket,
    DeleteBucket,
    ListBuckets,
    ListBucketsReply,
    Stats,
    StatsReply,
)
from upr_server.net.access import SLICE_BUCKETS
from upr_server.net.request_context import RequestContext, remaining_steps

STEP_ROWS: Final = 128
"""Buckets or connections whose figures one step encodes, below a millisecond."""

TEXT_LENGTH_MAX: Final = 64 * 1024
"""A longer text of figures is sent in a step of its own. It may have a megabyte."""


def create_bucket(context: RequestContext, request: CreateBucket) -> None:
    """Creates a bucket."""
    catalog = context.catalog

    async def create() -> None:
        await catalog.create_bucket(
            request.name,
            request.partition_count or PARTITIONS_DEFAULT,
            request.quota_bytes or catalog.quota_bytes_default,
        )
        context.send(BucketDone(opaque=request.opaque))

    context.reply_in_order(request, create)


def delete_bucket(context: RequestContext, request: DeleteBucket) -> None:
    """Deletes a bucket."""

    async def delete() -> None:
        await context.catalog.delete_bucket(request.name)
        context.send(BucketDone(opaque=request.opaque))

    context.reply_in_order(request, delete)


def list_buckets(context: RequestContext, request: ListBuckets) -> None:
    """Lists the buckets that the client may know of, as they are after what it asked for
    before."""

    async def answer() -> None:
        await trio.lowlevel.checkpoint()
        rows = [
            (bucket.name, len(bucket.partitions), bucket.memory_policy.limit_bytes)
            for bucket in context.catalog.buckets
        ]
        allowed_rows = []
        for count, row in enumerate(rows, 1):
            if count % SLICE_BUCKETS == 0:
                await trio.lowlevel.checkpoint()
            if context.access.may_use(row[0]):
                allowed_rows.append(row)
        context.send(ListBucketsReply(tuple(allowed_rows), opaque=request.opaque))

    context.reply_in_order(request, answer)


def stats(context: RequestContext, request: Stats) -> Iterator[None] | None:
    """Tells the figures of a bucket, or of the server."""
    return remaining_steps(_tell_statistics(context, request))


def _tell_statistics(context: RequestContext, request: Stats) -> Iterator[None]:
    statistics = yield from context.statistics_of(request.bucket)
    text = yield from json_in_steps(statistics)
    if len(text) > TEXT_LENGTH_MAX:
        yield
    context.send(StatsReply(text, opaque=request.opaque))


def json_in_steps(statistics: Mapping[str, object]) -> Generator[None, None, str]:
    """Figures as JSON, in steps between which others may have their turn."""
    parts: dict[str, object] = {}
    for name, figures in statistics.items():
        if isinstance(figures, dict):
            rows = yield from _encoded_rows(figures.values())
            parts[name] = dict(zip(figures, rows, strict=True))
        elif isinstance(figures, list):
            parts[name] = yield from _encoded_rows(figures)
        else:
            parts[name] = figures
    return msgspec.json.encode(parts, enc_hook=str).decode()


def _encoded_rows(rows: Iterable[object]) -> Generator[None, None, list[msgspec.Raw]]:
    encoded_rows: list[msgspec.Raw] = []
    for row in rows:
        encoded_rows.append(msgspec.Raw(msgspec.json.encode(row, enc_hook=str)))
        if len(encoded_rows) % STEP_ROWS == 0:
            yield
    return encoded_rows
