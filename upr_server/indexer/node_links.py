"""Links between the nodes of an indexer: each asks the others for the slices that they keep.

A link is a web socket to one slice of a node, beside the HTTP that everybody asks. It needs the
right `index` on the bucket, and the same list of nodes on both sides.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Final

import attrs
import msgspec
import structlog
import trio

from upr_server.indexer.membership import Membership
from upr_server.indexer.pool import MemoryPool
from upr_server.indexer.replicated_slice import ReplicatedSlice
from upr_server.indexer.silence import Silence
from upr_server.indexer.slice_link import HANG_S, PING_S
from upr_server.indexer.slice_server import SliceServer
from upr_server.indexer.slices import CatalogReport, SliceHolder, SliceId
from upr_server.indexer.worker_messages import (
    ByteStream,
    CatalogRead,
    MessageStream,
    NodeQuestion,
    SliceRestarted,
    ToNode,
)

log = structlog.get_logger(__name__)

QUESTION_BYTES_MAX: Final = 4 * 1024 * 1024
"""The longest question of a node. Over HTTP a query has 256 KiB at most, and a definition 1 MiB."""

OUTBOX_BYTES_MAX: Final = 1024 * 1024
"""While so much has yet to be sent to a node, nothing is taken from it."""

SILENT_S: Final = 2 * HANG_S
"""A link on which no question has come for so long is ended, unless this process stood still. The
other node asks twice a second whether this one is alive, and gives the link up itself if it has no
answer for half as long."""


def replicated_slice(
    membership: Membership, slice_id: SliceId, own_holder: SliceHolder | None
) -> ReplicatedSlice:
    """A slice and all its copies.

    Args:
        membership: The nodes.
        slice_id: The slice.
        own_holder: The copy of this node; None if it keeps none.
    """
    copies: dict[int, tuple[str, SliceHolder]] = {}
    for place in membership.node_map.holders(slice_id.index):
        if place == membership.place:
            assert own_holder is not None
            holder: SliceHolder = own_holder
        else:
            holder = membership.remote_slice(slice_id, place)
        copies[place] = membership.node_map.nodes[place], holder
    return ReplicatedSlice(slice_id, copies, membership.place)


@attrs.frozen(eq=False)
class _Reports:
    """Tells another node of this node's copy of a slice."""

    frames: MessageStream
    queued_reports: list[trio.Event] = attrs.field(factory=list)
    """Set when the last report is sent."""

    def slice_restarted(self, _index: int) -> None:
        self.frames.queue_message(SliceRestarted())

    def catalog_read(self, _index: int, report: CatalogReport) -> None:
        # Of two reports that wait, the other node needs the newer one.
        for is_sent in self.queued_reports:
            self.frames.withdraw_message(is_sent)
        self.queued_reports[:] = [self.frames.queue_message(CatalogRead(report))]


async def serve_link(stream: ByteStream, part: ReplicatedSlice, pool: MemoryPool) -> None:
    """Answers another node's questions to this node's copy of a slice, until that node has gone.

    Args:
        stream: The stream to the other node.
        part: The slice.
        pool: The memory pool of this process.
    """
    assert part.own_copy is not None
    frames = MessageStream(stream, ToNode, QUESTION_BYTES_MAX)
    server = SliceServer(frames, part.own_copy, pool, NodeQuestion)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send, frames, nursery.cancel_scope)
            with part.observed_by(_Reports(frames)):
                await _take_questions(frames, server, nursery)
            nursery.cancel_scope.cancel()
    except* msgspec.MsgspecError as errors:
        log.warning("a node sends what is no message", reason=str(errors.exceptions[0]))


async def _take_questions(
    frames: MessageStream, server: SliceServer, nursery: trio.Nursery
) -> None:
    """Takes questions until the other node has gone, or asks nothing for `SILENT_S`."""
    silence = Silence(SILENT_S, PING_S)
    nursery.start_soon(_end_silent_link, silence, nursery.cancel_scope)
    async with aclosing(frames.received_messages()) as messages:
        while True:
            # A node that does not read the answers gets no more of them.
            await frames.wait_until_unsent_below(OUTBOX_BYTES_MAX)
            with silence.waiting():
                message = await anext(messages, None)
            if message is None:
                return
            server.handle_message(message, nursery)


async def _end_silent_link(silence: Silence, scope: trio.CancelScope) -> None:
    await silence.wait_until_too_long()
    log.warning("a node has asked nothing; ending its link", seconds=SILENT_S)
    scope.cancel()


async def _send(frames: MessageStream, scope: trio.CancelScope) -> None:
    try:
        await frames.run_sender()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        scope.cancel()
