"""Links between the nodes of an indexer: each asks the others for the slices that they keep.

A link is a web socket to one slice of a node, beside the HTTP that everybody asks. It needs the
right `index` on the bucket, and the same list of nodes on both sides.
"""

from __future__ import annotations

from contextlib import aclosing

import attrs
import msgspec
import structlog
import trio

from upr_server.indexer.membership import Membership
from upr_server.indexer.pool import MemoryPool
from upr_server.indexer.replicated_slice import ReplicatedSlice
from upr_server.indexer.slice_server import SliceServer
from upr_server.indexer.slices import CatalogReport, SliceHolder, SliceId
from upr_server.indexer.worker_messages import (
    Began,
    ByteStream,
    Frames,
    NodeQuestion,
    Reported,
    ToNode,
)

log = structlog.get_logger(__name__)


def replicated_slice(
    membership: Membership, slice_id: SliceId, own: SliceHolder | None
) -> ReplicatedSlice:
    """A slice and all its copies.

    Args:
        membership: The nodes.
        slice_id: Which one.
        own: The copy of this node; None if it keeps none.
    """
    copies: dict[int, tuple[str, SliceHolder]] = {}
    for place in membership.node_map.holders(slice_id.index):
        if place == membership.place:
            assert own is not None
            holder: SliceHolder = own
        else:
            holder = membership.remote_slice(slice_id, place)
        copies[place] = membership.node_map.nodes[place], holder
    return ReplicatedSlice(slice_id, copies, membership.place)


@attrs.frozen(eq=False)
class _Reports:
    """Tells another node of this node's copy of a slice."""

    frames: Frames

    def began(self, _index: int) -> None:
        self.frames.put(Began())

    def report(self, _index: int, report: CatalogReport) -> None:
        self.frames.put(Reported(report))


async def serve_link(stream: ByteStream, part: ReplicatedSlice, pool: MemoryPool) -> None:
    """Answers another node's questions to this node's copy of a slice, until that node has gone.

    Args:
        stream: The stream to the other node.
        part: The slice.
        pool: The memory pool of this process.
    """
    assert part.own is not None
    frames = Frames(stream, ToNode)
    server = SliceServer(frames, part.own, pool, NodeQuestion)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send, frames, nursery.cancel_scope)
            with part.heard_by(_Reports(frames)):
                async with aclosing(frames.received()) as messages:
                    async for message in messages:
                        server.take(message, nursery)
            nursery.cancel_scope.cancel()
    except* msgspec.MsgspecError as errors:
        log.warning("a node sends what is no message", reason=str(errors.exceptions[0]))


async def _send(frames: Frames, scope: trio.CancelScope) -> None:
    try:
        await frames.send_all()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        scope.cancel()
