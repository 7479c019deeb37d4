"""The entries of a scan as lines."""

from __future__ import annotations

import http.client
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import trio

from tests.indexer.brute_force import Row, index_rows
from tests.indexer.kit import a_server, an_indexer, define, name_of, until_ready
from upr_protocol.client import Client, connect
from upr_server.indexer import entry_stream
from upr_server.indexer.answer import Entry
from upr_server.indexer.app import serving
from upr_server.indexer.entry_stream import End, EntryStream
from upr_server.indexer.indexer import Indexer
from upr_server.indexer.moments import MomentGoneError
from upr_server.indexer.openapi import LINES
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.query import Query, QueryError

CITY = IndexDefinition(("city", "n"), include=("n",))
CONTENTS = {b"k%03d" % n: b'{"city": "%d", "n": %d}' % (n % 7, n) for n in range(300)}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[tuple[Client, Indexer]]:
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path, slices=2) as indexer,
    ):
        for key, value in CONTENTS.items():
            await client.set(key, value)
        await define(client, "d", {"city": CITY})
        await until_ready(indexer, "d/city")
        yield client, indexer


class Reader:
    """Takes lines, and does something when there are some.

    Attributes:
        lines: The lines.
    """

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    async def take(self, piece: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.lines += piece.splitlines()

    def rows(self) -> list[Row]:
        """What all lines but the last have."""
        entries = [msgspec.json.decode(line, type=Entry) for line in self.lines[:-1]]
        return [Row(entry.key, entry.id, entry.included) for entry in entries]

    def end(self) -> Any:
        """What the last line has."""
        return msgspec.json.decode(self.lines[-1], type=End).end


def moments(indexer: Indexer) -> list[int]:
    return [len(part.moments) for part in indexer.slices]


async def test_all_entries_of_one_moment_come_while_others_write(
    client: tuple[Client, Indexer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_stream, "LIMIT_MAX", 40)
    writing, indexer = client

    class Writer(Reader):
        async def take(self, piece: bytes) -> None:
            await super().take(piece)
            await writing.set(b"k000", b'{"city": "9", "n": %d}' % len(self.lines))
            await writing.set(b"new%d" % len(self.lines), b'{"city": "3", "n": 5}')

    for descending in (False, True):
        await writing.set(b"k000", CONTENTS[b"k000"])
        contents = {
            item.key: bytes(item.value)
            for item in await writing.get_many([*CONTENTS, *(b"new%d" % n for n in range(600))])
            if item is not None
        }
        reader = Writer()
        query = Query(consistency="now", timestamps=True, descending=descending)
        await EntryStream(indexer.scanner, name_of("d/city"), query).run(reader.take)
        rows = index_rows(CITY, contents)
        assert reader.rows() == (rows[::-1] if descending else rows)
        assert len(reader.lines) > 300
        assert len(reader.end().timestamps) == 4
        assert (reader.end().continuation, reader.end().moment) == ("", "")
        assert moments(indexer) == [0, 0]


async def test_a_limit_ends_with_a_continuation(
    client: tuple[Client, Indexer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, indexer = client
    monkeypatch.setattr(entry_stream, "LIMIT_MAX", 40)
    first, second = Reader(), Reader()
    name = name_of("d/city")
    await EntryStream(indexer.scanner, name, Query(limit=100, hold_s=60)).run(first.take)
    assert len(first.rows()) == 100
    assert moments(indexer) == [1, 1]
    query = Query(continuation=first.end().continuation, moment=first.end().moment)
    await EntryStream(indexer.scanner, name, query).run(second.take)
    assert first.rows() + second.rows() == index_rows(CITY, CONTENTS)
    assert moments(indexer) == [0, 0]


async def test_the_next_page_is_read_when_the_one_before_is_taken(
    client: tuple[Client, Indexer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that does not read holds a page's memory, and gives it back when it goes."""
    _, indexer = client
    monkeypatch.setattr(entry_stream, "LIMIT_MAX", 40)
    pages = 0

    async def stall(_piece: bytes) -> None:
        nonlocal pages
        pages += 1
        await trio.sleep_forever()

    with trio.move_on_after(0.2):
        await EntryStream(indexer.scanner, name_of("d/city"), Query()).run(stall)
    assert pages == 1
    assert moments(indexer) == [0, 0]
    assert indexer.pool.scan_bytes == 0


async def test_an_error_in_the_middle(
    client: tuple[Client, Indexer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, indexer = client
    monkeypatch.setattr(entry_stream, "LIMIT_MAX", 40)

    async def take(_piece: bytes) -> None:
        await trio.lowlevel.checkpoint()
        indexer.slices[1].moments.release_all()

    with pytest.raises(MomentGoneError):
        await EntryStream(indexer.scanner, name_of("d/city"), Query()).run(take)
    assert moments(indexer) == [0, 0]


@pytest.mark.parametrize("fields", [{"count": True}, {"min": True}, {"explain": True}])
async def test_what_has_no_lines_is_refused(
    client: tuple[Client, Indexer], fields: dict[str, bool]
) -> None:
    _, indexer = client
    with pytest.raises(QueryError, match="lines have entries only"):
        EntryStream(indexer.scanner, name_of("d/city"), Query(**fields))  # type: ignore[arg-type]


async def test_over_http(client: tuple[Client, Indexer], monkeypatch: pytest.MonkeyPatch) -> None:
    _, indexer = client

    def ask(url: str, query: dict[str, Any]) -> tuple[int, str, list[Any]]:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        path, headers = "/v1/indexes/d/city/scan", {"Accept": LINES}
        connection.request("POST", path, json.dumps(query), headers)
        answer = connection.getresponse()
        lines = [json.loads(line) for line in answer.read().splitlines()]
        connection.close()
        return answer.status, answer.getheader("content-type") or "", lines

    async with serving(indexer, "127.0.0.1:0") as url:
        status, kind, lines = await trio.to_thread.run_sync(ask, url, {"consistency": "now"})
        assert (status, kind) == (200, LINES)
        assert lines[-1] == {"end": {}}
        rows = [Row(line["key"], line["id"], line["included"]) for line in lines[:-1]]
        assert rows == index_rows(CITY, CONTENTS)
        status, kind, lines = await trio.to_thread.run_sync(ask, url, {"count": True})
        assert (status, lines[0]["error"]["place"]) == (400, "count")
        # The second page fails.
        monkeypatch.setattr(entry_stream, "LIMIT_MAX", 40)
        original = indexer.scanner.scan

        def scan(name: Any, query: Query) -> Any:
            if query.moment:
                indexer.slices[0].moments.release_all()
            return original(name, query)

        monkeypatch.setattr(indexer.scanner, "scan", scan)
        status, kind, lines = await trio.to_thread.run_sync(ask, url, {})
        assert (status, len(lines)) == (200, 41)
        assert lines[-1]["error"]["code"] == "moment_gone"
