"""A replica reports events of the changes that it receives."""

from __future__ import annotations

import trio

from tests.kit.cluster import BUCKET, cluster
from upr_protocol.bucket_event import BucketEvent
from upr_protocol.client import LookAtEverything, connect, follow_events


async def test_a_replica_reports_changes_that_it_has_on_disk() -> None:
    async with cluster("ab") as pair:
        await pair.quiet()
        replica = pair.nodes["b"].server
        assert replica is not None
        async with follow_events(replica.url(), consumer="c") as feed:
            with trio.fail_after(20):
                assert await anext(feed) == LookAtEverything()
                async with connect(pair.nodes["a"].url, follow_map=False) as client:
                    await client.set("_design/x", "{}")
                designs: set[bytes] = set()
                while b"_design/x" not in designs:
                    event = await anext(feed)
                    if isinstance(event, BucketEvent):
                        assert event.bucket == BUCKET
                        designs.update(event.designs)
            await pair.quiet()
