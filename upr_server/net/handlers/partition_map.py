"""Partition maps: telling them, and taking new ones."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from upr_protocol.concurrency import run_steps
from upr_protocol.partition_map import PartitionMap
from upr_protocol.wire import GetMap, Join, MapReply, SetMap
from upr_server.net.request_context import RequestContext, remaining_steps


def get_map(context: RequestContext, request: GetMap) -> Iterator[None] | None:
    """Tells the map of a bucket."""
    if request.bucket:
        context.catalog.bucket(request.bucket)
    partition_map = context.partition_maps.map_of(request.bucket)
    return remaining_steps(_reply(context, request, partition_map))


def set_map(context: RequestContext, request: SetMap) -> None:
    """Applies a map."""

    async def apply() -> None:
        new_map = await context.partition_maps.set_map(request.expected_revision, request.document)
        await run_steps(_reply(context, request, new_map))

    context.reply_in_order(request, apply, len(request.document))


def join(context: RequestContext, request: Join) -> None:
    """Asks another node for a bucket's map, and applies that."""

    async def apply() -> None:
        new_map = await context.partition_maps.adopt_map_from(request.bucket, request.address)
        await run_steps(_reply(context, request, new_map))

    context.reply_in_order(request, apply)


def _reply(
    context: RequestContext, request: GetMap | SetMap | Join, partition_map: PartitionMap | None
) -> Generator[None, None, None]:
    revision, document = 0, ""
    if partition_map is not None:
        revision, document = partition_map.revision, (yield from partition_map.encode_in_steps())
    context.send(MapReply(revision, document, context.partition_maps.node, opaque=request.opaque))
