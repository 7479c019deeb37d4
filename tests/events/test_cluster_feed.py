"""A feed of events follows every node that holds a bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import trio

from tests.kit.server_group import BUCKET, ServerGroup, running_servers
from upr_protocol.bucket_event import ANY_DESIGN, EventKind
from upr_protocol.client import Address, EventFeed, LookAtEverything, follow_events
from upr_protocol.client.operator import fail_over
from upr_protocol.client.trio import event_feed
from upr_protocol.errors import ServerError, Status
from upr_protocol.hashing import partition_of
from upr_protocol.ids import PartitionId
from upr_protocol.partition_map import Assignment


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the feed notice nodes that join at once."""
    monkeypatch.setattr(event_feed, "MAP_INTERVAL_S", 0.05)
    monkeypatch.setattr(event_feed, "POLL_S", 0.1)


@pytest.fixture
async def group() -> AsyncIterator[ServerGroup]:
    async with running_servers("ab", partitions=2) as servers:
        yield servers


def key_of(partition: int) -> str:
    return next(key for key in map(str, range(99)) if partition_of(key.encode(), 2) == partition)


async def give_away(group: ServerGroup) -> None:
    """Gives partition 1 to b alone, and partition 0 to a alone."""
    base = group.map("a")
    for name in "ab":
        changed = {0: Assignment("a"), 1: Assignment("b")}
        await group.set_map(name, base.revision + 1, changed, base)


async def until_updated(feed: EventFeed) -> None:
    with trio.fail_after(20):
        async for event in feed:
            if not isinstance(event, LookAtEverything) and event.updates:
                return


async def until_everything(feed: EventFeed, times: int = 1) -> None:
    for _ in range(times):
        with trio.fail_after(20):
            while not isinstance(await anext(feed), LookAtEverything):
                pass


async def skip_events(feed: EventFeed) -> None:
    """Skips the events of everything that was written so far."""
    with trio.move_on_after(1):
        await trio.lowlevel.checkpoint()
        while True:
            await anext(feed)


async def test_an_event_of_a_partition_on_another_node_is_delivered(group: ServerGroup) -> None:
    await give_away(group)
    async with follow_events(group.servers["a"].url(), consumer="c") as feed:
        await until_everything(feed, times=2)  # one from each node
        await skip_events(feed)
        await group.set("b", {key_of(1): "v"})
        await until_updated(feed)
        await group.set("a", {key_of(0): "v"})
        await until_updated(feed)


async def test_an_end_names_the_node_that_refuses(
    group: ServerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_arguments: object, **_options: object) -> None:
        await trio.lowlevel.checkpoint()
        raise ServerError(Status.UNSUPPORTED, "this server has no event bus: events is false")

    monkeypatch.setattr(group.servers["b"].events, "next_events", refuse)
    async with follow_events(group.servers["a"].url(), consumer="c") as feed:
        with pytest.raises(ServerError) as refusal, trio.fail_after(20):
            async for _ in feed:
                pass
    assert refusal.value.status is Status.UNSUPPORTED
    # The map has the address of the proxy.
    place = group.address("b").host_ports
    assert str(refusal.value).startswith(f"the node at {place} refused: this server has no event")


async def test_events_continue_after_a_failover(group: ServerGroup) -> None:
    async with follow_events(group.servers["a"].url(), consumer="c") as feed:
        await until_everything(feed, times=2)
        await skip_events(feed)
        await group.stop("a")
        await fail_over(group.operator("b"), all_of="a")
        await group.set("b", {key_of(0): "v"})
        await until_updated(feed)


async def test_a_failover_that_may_lose_changes_is_told(group: ServerGroup) -> None:
    """The lost node may have reported changes that no node has now."""
    async with follow_events(
        group.servers["b"].url(), consumer="c", kinds=EventKind.DESIGN
    ) as feed:
        await until_everything(feed, times=2)
        await skip_events(feed)
        await group.stop("a")
        await fail_over(group.operator("b"), all_of="a")
        with trio.fail_after(20):
            event = await anext(feed)
        assert not isinstance(event, LookAtEverything)
        assert event.designs == (ANY_DESIGN,)


async def test_a_node_that_joins_or_leaves_has_the_consumer_look_at_everything() -> None:
    async with running_servers("ab", partitions=2) as group:
        await group.start_apart("c")
        await node_joins_and_leaves(group)


async def node_joins_and_leaves(group: ServerGroup) -> None:
    async with follow_events(group.servers["a"].url(), consumer="c") as feed:
        await until_everything(feed, times=2)
        await skip_events(feed)
        await group.add_replica("c")
        await until_everything(feed)
        # A node that leaves may have counted changes that it has not reported.
        base = group.map("a")
        assignments = {PartitionId(partition): Assignment("a", {"c": ""}) for partition in range(2)}
        nodes = {name: place for name, place in base.nodes.items() if name != "b"}
        new_map = msgspec.structs.replace(base.with_assignments(assignments), nodes=nodes)
        cluster = group.servers["a"].partition_maps
        await cluster.set_map(cluster.revision(BUCKET), new_map.encode())
        await until_everything(feed)


async def test_another_given_node_takes_the_first_ones_place(group: ServerGroup) -> None:
    """The feed already follows that node, with the same consumer name."""
    first, second = (Address.parse(group.proxies[name].url()) for name in "ab")
    target = Address(first.host, first.port, "", ((second.host, second.port),))
    async with follow_events(target, consumer="c") as feed:
        await until_everything(feed, times=2)
        await skip_events(feed)
        await group.stop("a")
        await fail_over(group.operator("b"), all_of="a")
        for index in range(3):
            await group.set("b", {key_of(0): str(index)})
            await until_updated(feed)
            await skip_events(feed)
        await group.start("a")
        await group.set("b", {key_of(0): "more"})
        await until_updated(feed)
