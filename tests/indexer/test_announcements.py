"""Design documents that the event bus announces while the indexes' stream is paused."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from tests.indexer.kit import (
    a_server,
    an_indexer,
    by_brute_force,
    define,
    entries_of,
    name_of,
    scan,
    until_ready,
)
from tests.indexer.world import World
from tests.kit.process import TimeoutReachedError, eventually
from upr_protocol.client import Address, Client, Item, connect, follow_events
from upr_protocol.ids import Durability
from upr_server.app import Server
from upr_server.events import EventBus
from upr_server.indexer import announcements
from upr_server.indexer import overlay as overlay_module
from upr_server.indexer.announcements import Announcements, consumer_name
from upr_server.indexer.definitions import NoIndexError
from upr_server.indexer.indexer import Indexer
from upr_server.indexer.overlay import DesignOverlay
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.query import RequiredWrite
from upr_server.net.handlers.events import CONSUMER_NAME

CITY = IndexDefinition(("city",))
NUMBER = IndexDefinition(("n",))
CONTENTS = {b"k%d" % n: b'{"city": "%d", "n": %d}' % (n % 7, n) for n in range(50)}


@asynccontextmanager
async def a_city_index(
    data_dir: Path, **options: Any
) -> AsyncIterator[tuple[Server, Client, Indexer]]:
    """An indexer with an index `d/city` that receives bucket events, if there is an event bus."""
    async with (
        a_server(**options) as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), data_dir) as indexer,
    ):
        for key, value in CONTENTS.items():
            await client.set(key, value)
        await define(client, "d", {"city": CITY})
        await until_ready(indexer, "d/city")
        bus = server.events
        if isinstance(bus, EventBus):
            await eventually(lambda: bus.statistics()["asking"] == 1, "it asks for events")
        yield server, client, indexer


@asynccontextmanager
async def paused_stream(indexer: Indexer) -> AsyncIterator[None]:
    """The indexes' stream receives nothing, not even a barrier."""
    indexer.slices[0].stream.pause()
    try:
        yield
    finally:
        indexer.slices[0].stream.resume()


async def test_an_announced_index_is_built_while_the_stream_is_paused(tmp_path: Path) -> None:
    async with a_city_index(tmp_path) as (_, client, indexer):
        async with paused_stream(indexer):
            await define(client, "e", {"n": NUMBER})
            await eventually(lambda: name_of("e/n") in indexer.designs.names(), "it is defined")
            # All that exists is read; only the end of the build needs the stream.
            await eventually(lambda: entries_of(indexer, "e/n") == len(CONTENTS), "it is built")
            assert "e" not in (await indexer.slices[0].catalog.current_designs()).texts
        await until_ready(indexer, "e/n")
        await eventually(lambda: not indexer.designs._overlay.texts, "the catalog has it")
        assert await scan(indexer, "e/n") == by_brute_force(NUMBER, CONTENTS)
        assert indexer.designs.names() == [name_of("d/city"), name_of("e/n")]


@pytest.mark.parametrize("consistency", ["now", "at_least"])
async def test_an_index_is_dropped_while_the_stream_is_paused(
    tmp_path: Path, consistency: str
) -> None:
    async with a_city_index(tmp_path) as (_, client, indexer):
        answer = await client.set("k", "{}")
        required_writes = (
            RequiredWrite(answer.partition, f"{answer.history_id:x}", answer.seq + 1),
        )
        end_event = trio.Event()

        async def ask() -> None:
            with pytest.raises(NoIndexError):
                await scan(
                    indexer,
                    "d/city",
                    consistency=consistency,
                    written=required_writes,
                    timeout_s=60,
                )
            end_event.set()

        async with trio.open_nursery() as nursery, paused_stream(indexer):
            # This scan waits for changes that never arrive. The drop does not wait for it.
            nursery.start_soon(ask)
            await client.delete("_design/d")
            await eventually(lambda: not indexer.designs.names(), "it is dropped")
            folder = tmp_path / indexer.slices[0].slice_id.folder / "indexes"
            await eventually(lambda: not list(folder.iterdir()), "its files are removed")
            assert "d" in (await indexer.slices[0].catalog.current_designs()).texts
            if consistency == "at_least":
                await end_event.wait()
        await eventually(lambda: not indexer.designs._overlay.texts, "the catalog has it")
        assert indexer.designs.names() == []


async def test_a_dropped_index_that_is_still_read_is_closed_at_the_stop(tmp_path: Path) -> None:
    async with a_city_index(tmp_path) as (_, client, indexer):
        index = indexer.slices[0].definitions.find(name_of("d/city"))
        # As while a scan reads it.
        index.readers += 1
        await client.delete("_design/d")
        await eventually(lambda: not index.is_defined, "it is dropped")
    assert index.file._is_closed


async def test_a_definition_that_changes_often_ends_as_it_was_written_last(tmp_path: Path) -> None:
    async with a_city_index(tmp_path) as (_, client, indexer):

        def is_now(definition: IndexDefinition) -> bool:
            name = name_of("d/city")
            return name in indexer.designs.names() and indexer.designs.find(name) == definition

        async with paused_stream(indexer):
            await client.delete("_design/d")
            await define(client, "d", {"city": NUMBER})
            await eventually(lambda: is_now(NUMBER), "it is another index")
            await client.set("_design/d", "{}")
            await eventually(lambda: not indexer.designs.names(), "a mistake has no indexes")
            assert "indexes" in indexer.designs.mistakes["d"]
            for _ in range(5):
                await client.delete("_design/d")
                await define(client, "d", {"city": CITY})
            await eventually(lambda: is_now(CITY), "it is defined again")
        await until_ready(indexer, "d/city")
        await eventually(lambda: not indexer.designs._overlay.texts, "the catalog has it")
        assert is_now(CITY)
        assert indexer.designs.mistakes == {}
        assert await scan(indexer, "d/city") == by_brute_force(CITY, CONTENTS)


async def test_a_definition_that_the_server_loses_is_undone(tmp_path: Path) -> None:
    world = World(0, tmp_path)
    async with world.running():
        text = '{"indexes": {"city": {"key": ["city"]}}}'
        await world.client.set("_design/d", text, durability=Durability.PERSISTED)
        await until_ready(world.indexer, "d/city")
        async with paused_stream(world.indexer):
            world.hold_commits()
            await define(world.client, "e", {"n": NUMBER})
            await world.client.delete("_design/d")
            await eventually(
                lambda: world.indexer.designs.names() == [name_of("e/n")], "it was announced"
            )
            await world.crash("server")
            await world.start_server()
        await eventually(
            lambda: world.indexer.designs.names() == [name_of("d/city")],
            "the indexer has the server's definitions",
        )
        await until_ready(world.indexer, "d/city")
        assert not world.indexer.designs._overlay.texts
        assert await scan(world.indexer, "d/city", timeout_s=20) == []


async def redefine(client: Client, indexer: Indexer) -> None:
    """Defines an index and drops another; the indexer learns both from the stream."""
    await define(client, "e", {"n": NUMBER})
    await client.delete("_design/d")
    await eventually(lambda: indexer.designs.names() == [name_of("e/n")], "the stream brings it")
    await until_ready(indexer, "e/n")
    assert await scan(indexer, "e/n") == by_brute_force(NUMBER, CONTENTS)


async def test_without_an_event_bus_the_stream_brings_definitions(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with a_city_index(tmp_path, events=False) as (_, client, indexer):
            await redefine(client, indexer)
    errors = [line["error"] for line in logs if "event bus unreachable" in line["event"]]
    assert len(errors) == 1
    assert "events is false" in errors[0]


async def test_the_bus_is_heard_when_it_has_room_for_one_more_consumer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upr_server.events.queues.CONSUMERS_MAX", 0)
    monkeypatch.setattr(announcements, "LIMIT_RETRY_S", 0.05)
    with structlog.testing.capture_logs() as logs:
        async with (
            a_server() as server,
            connect(server.url("b")) as client,
            an_indexer(server.url("b"), tmp_path) as indexer,
        ):
            await eventually(
                lambda: any("event bus unreachable" in line["event"] for line in logs),
                "the bus is full",
            )
            monkeypatch.setattr("upr_server.events.queues.CONSUMERS_MAX", 1)
            bus = server.events
            assert isinstance(bus, EventBus)
            await eventually(lambda: bus.statistics()["asking"] == 1, "it asks for events")
            async with paused_stream(indexer):
                await define(client, "e", {"n": NUMBER})
                await eventually(
                    lambda: name_of("e/n") in indexer.designs.names(), "it is announced"
                )


async def test_another_consumer_of_the_same_name_stops_only_announcements(
    tmp_path: Path,
) -> None:
    with structlog.testing.capture_logs() as logs:

        def has_given_up() -> bool:
            return any("event bus unreachable" in line["event"] for line in logs)

        async with a_city_index(tmp_path) as (server, client, indexer):
            # Of two consumers with one name, the one that asks later displaces the one that waits.
            # While the indexer reads announced documents, the other one waits and is displaced. So
            # the other one connects again and again.
            while not has_given_up():
                async with follow_events(server.url(), consumer=consumer_name(tmp_path)):
                    with suppress(TimeoutReachedError):
                        await eventually(has_given_up, "it has given up", timeout_s=2.0)
            await redefine(client, indexer)


async def test_the_stream_brings_an_announced_definition_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dial(address: object) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        raise OSError("nobody is there")

    monkeypatch.setattr(announcements, "READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(announcements, "connect", partial(connect, dial=dial))
    with structlog.testing.capture_logs() as logs:
        async with a_city_index(tmp_path) as (_, client, indexer):
            await redefine(client, indexer)
            await eventually(
                lambda: any("announced documents unreadable" in line["event"] for line in logs),
                "the failure is logged",
            )


async def test_announced_documents_are_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand documents of 20 MiB each may be announced at once. One call for all of them would
    need memory for all of them."""
    counts: list[int] = []
    get_many = Client.get_many

    async def note_count(client: Client, keys: Sequence[bytes]) -> list[Item | None]:
        counts.append(len(keys))
        return await get_many(client, keys)

    async def wait() -> None:
        await trio.sleep_forever()

    async with a_server() as server, connect(server.url("b")) as client:
        await define(client, "a", {"n": NUMBER})
        await define(client, "b", {"n": NUMBER})
        monkeypatch.setattr(Client, "get_many", note_count)
        overlay = DesignOverlay(wait, lambda: None)
        announced = Announcements(Address.parse(server.url("b")), "c", dict, overlay)
        keys = [b"_design/a", b"_design/b", b"_design/c"]
        await announced._read(keys)
        assert list(overlay.texts) == ["a", "b"]
        assert counts == [1, 1, 1]
        # If the overlay has no room for the documents, they are left to the stream.
        monkeypatch.setattr(overlay_module, "CATALOG_BYTES_MAX", 0)
        overlay = DesignOverlay(wait, lambda: None)
        with structlog.testing.capture_logs() as logs:
            await Announcements(Address.parse(server.url("b")), "c", dict, overlay)._read(keys)
        assert not overlay.texts
        assert [line["event"] for line in logs if "too long" in line["event"]]


def test_the_consumer_name_identifies_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    name = consumer_name(tmp_path)
    assert re.fullmatch(r"indexer-[0-9a-f]{12}", name)
    assert CONSUMER_NAME.fullmatch(name)
    assert consumer_name(tmp_path / "link") == name
    assert consumer_name(tmp_path / "other") != name
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert consumer_name(tmp_path) != name
