"""Giving a server its partition map, and asking for it."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.server.connected_peer import connected, make_server
from upr_protocol.ids import HistoryId, SeqNo
from upr_protocol.limits import PARTITIONS_MAX
from upr_protocol.partition_map import Assignment, HistoryPoint, PartitionMap
from upr_protocol.wire import GetMap, MapReply, SetMap

pytestmark = pytest.mark.usefixtures("autojump_clock")

NODE: Final = "a" * 100


def document_of(replicated_count: int) -> str:
    """A map of the bucket `c`, of which so many partitions have replicas. Its numbers are no texts,
    as they are in the documents that a server makes: these are longer."""
    names = [f"{index:x>100}" for index in range(8)]
    point = HistoryPoint(HistoryId(1 << 63), SeqNo(1 << 63))
    alone = Assignment(NODE, promotion_point=point)
    replicated = Assignment(NODE, dict.fromkeys(names, ""), promotion_point=point)
    partition_map = PartitionMap(
        bucket="c",
        revision=1,
        nodes=dict.fromkeys((NODE, *names), "127.0.0.1:1"),
        partitions=(replicated,) * replicated_count
        + (alone,) * (PARTITIONS_MAX - replicated_count),
    )
    return re.sub(r'"(\d+)"', r"\1", partition_map.encode())


def longest_document(bytes_max: int) -> str:
    """A document that has as many replicas as `bytes_max` allow."""
    least_bytes = len(document_of(0))
    count = (bytes_max - least_bytes) // (len(document_of(1)) - least_bytes)
    return document_of(count)


async def test_the_longest_map_that_a_server_takes_can_be_asked_for() -> None:
    server = make_server(node=NODE)
    async with connected(server) as peer:
        await server.catalog.create_bucket("c", PARTITIONS_MAX, server.catalog.quota_bytes_default)
        await peer.open("c")
        document = longest_document(SetMap.body_bytes_max - 12)
        await peer.send(SetMap(0, document, opaque=peer.opaque()))
        reply = await peer.receive(MapReply)
        assert PartitionMap.decode(reply.document) == PartitionMap.decode(document)
        assert len(reply.document) > len(document)
        await peer.send(GetMap("c", opaque=peer.opaque()))
        assert (await peer.receive(MapReply)).document == reply.document
