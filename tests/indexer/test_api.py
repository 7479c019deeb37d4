"""The HTTP API and the client of it."""

from __future__ import annotations

import http.client
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
import pytest
import trio

from tests.indexer.kit import a_server, an_indexer, name_of, until_ready
from tests.kit.process import eventually
from upr_protocol.client import (
    Client,
    IndexClient,
    IndexerError,
    IndexPage,
    IndexRange,
    IndexSummary,
    WriteResult,
    connect,
    publisher,
)
from upr_protocol.errors import BrokenError
from upr_protocol.ids import Cas, HistoryId, PartitionId, SeqNo
from upr_server.indexer import api, http_server, scanner, server_progress
from upr_server.indexer.api import application
from upr_server.indexer.app import serving
from upr_server.indexer.http_access import HttpAccess
from upr_server.indexer.indexer import Indexer
from upr_server.indexer.openapi import LINES, Failures
from upr_server.indexer.pool import PIECE_BYTES, SCAN_BYTES
from upr_server.indexer.query import Query
from upr_server.runtime import ListenError

T = TypeVar("T")

DOCUMENT: Final = '{"city": "a", "n": 0}'
DESIGN = {"indexes": {"city": {"key": ["city"]}, "both": {"key": ["city", "n"]}}}


class Site:
    """A server, an indexer and a client of each."""

    def __init__(self, url: str, client: Client, indexer: Indexer, asking: IndexClient) -> None:
        self.url = url
        self.client = client
        self.indexer = indexer
        self.asking = asking

    async def ask(self, method: Callable[..., T], *args: Any, **options: Any) -> T:
        """What a blocking method gives, called in a thread."""
        return await trio.to_thread.run_sync(partial(method, *args, **options))

    async def refusal(self, method: Callable[..., object], *args: Any, **opts: Any) -> IndexerError:
        """What the indexer refuses a question with."""
        with pytest.raises(IndexerError) as caught:
            await self.ask(method, *args, **opts)
        return caught.value


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path, 8 * 1024 * 1024) as indexer,
        serving(indexer, "127.0.0.1:0") as url,
    ):
        with IndexClient(url) as asking:
            site = Site(server.url("b"), client, indexer, asking)
            await site.ask(asking.create, "d", DESIGN)
            for index in range(20):
                value = {"city": "ab"[index % 2], "n": index}
                await client.set(f"k{index:02}", json.dumps(value))
            await until_ready(indexer, "d/city", "d/both")
            yield site


def keys(page: Any) -> list[Any]:
    return [entry.key for entry in page.entries]


async def test_scans_return_the_entries_that_they_select_in_order(site: Site) -> None:
    ask, scan = site.ask, site.asking.scan
    page = await ask(scan, "d/both", consistency="now", timestamps=True)
    assert keys(page) == [["a", n] for n in range(0, 20, 2)] + [["b", n] for n in range(1, 20, 2)]
    assert [entry.id for entry in page.entries][:2] == ["k00", "k02"]
    assert sum(seq for _, seq in page.timestamps.values()) == 21
    down = await ask(scan, "d/both", descending=True, limit=3)
    assert keys(down) == [["b", 19], ["b", 17], ["b", 15]]
    more = await ask(scan, "d/both", descending=True, limit=3, continuation=down.continuation)
    assert keys(more) == [["b", 13], ["b", 11], ["b", 9]]
    assert keys(await ask(scan, "d/both", prefix=["a", 4])) == [["a", 4]]
    between = await ask(scan, "d/both", low=["a", 14], high=["b", 3])
    assert keys(between) == [["a", 14], ["a", 16], ["a", 18], ["b", 1], ["b", 3]]
    open_ = await ask(scan, "d/both", low=(["a", 14], False), high=(["b", 3], False))
    assert keys(open_) == [["a", 16], ["a", 18], ["b", 1]]
    assert keys(await ask(scan, "d/both", low=(["a"], False), limit=1)) == [["b", 1]]
    assert await ask(site.asking.count, "d/both", prefix=["b"]) == 10
    assert await ask(site.asking.count, "d/both") == 20
    ranges = [IndexRange(prefix=["b", 7]), IndexRange(low=["a", 16], high=(["b", 3], False))]
    assert keys(await ask(scan, "d/both", ranges=ranges)) == [
        ["a", 16],
        ["a", 18],
        ["b", 1],
        ["b", 7],
    ]
    assert keys(await ask(scan, "d/both", distinct=1, descending=True)) == [["b"], ["a"]]
    assert await ask(site.asking.count, "d/both", distinct=1) == 2
    summary = await ask(site.asking.summarize, "d/both", prefix=["b"], min_key=True, max_key=True)
    assert summary == IndexSummary(min=["b", 1], max=["b", 19])
    empty_summary = await ask(
        site.asking.summarize, "d/both", prefix=["z"], count=True, min_key=True
    )
    assert empty_summary == IndexSummary(count=0)
    every = await ask(lambda: list(site.asking.scan_all("d/both", limit=3)))
    assert [entry.id for entry in every] == [entry.id for entry in page.entries]


async def test_an_explanation_tells_how_a_scan_was_as_fresh_as_asked(site: Site) -> None:
    ask, explain, pipeline = site.ask, site.asking.explain, site.indexer.slices[0].pipeline
    explained = await ask(explain, "d/both", prefix=["a"], limit=3)
    assert (explained["index"], explained["expressions"]) == ("d/both", ["city", "n"])
    assert (explained["entries_given"], explained["entries_read"]) == (3, 4)
    assert (explained["freshness"], explained["waits"]) == ("as_it_was", [])
    write_result = await site.client.set("k00", DOCUMENT)
    explained = await ask(explain, "d/both", consistency="now", count=True, prefix=["a"])
    assert explained["freshness"] == "barrier"
    assert explained["waits"][0]["reason"] == "barrier"
    assert explained["entries_read"] == 11
    explained = await ask(explain, "d/both", consistency="at_least", written=[write_result])
    assert (explained["freshness"], explained["waits"]) == ("had_written", [])
    site.indexer.slices[0].stream.pause()
    # What is on its way is still received: the first of these, perhaps.
    for _ in range(10):
        write_result = await site.client.set("k00", DOCUMENT)
    async with trio.open_nursery() as nursery:

        async def explain_a_wait() -> None:
            nonlocal explained
            explained = await ask(explain, "d/both", consistency="at_least", written=[write_result])

        nursery.start_soon(explain_a_wait)
        await eventually(lambda: pipeline._waiting_tasks > 0, "the scan waits")
        site.indexer.slices[0].stream.resume()
    assert explained["freshness"] == "waited_for_written"
    assert [wait["reason"] for wait in explained["waits"]] == ["written"]
    assert explained["waits"][0]["seconds"] > 0


async def test_behind_counts_what_the_stream_has_not_received_yet(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_progress, "MAX_AGE_S", 0.0)
    site.indexer.slices[0].stream.pause()
    # What is on its way is still received: the first of these, perhaps.
    for row in range(10):
        await site.client.set(f"k{row:02}", "{}")
    index = await site.ask(site.asking.index_status, "d/city")
    assert index["behind"] >= 9
    site.indexer.slices[0].stream.resume()
    await site.ask(site.asking.scan, "d/city", consistency="now")
    index = await site.ask(site.asking.index_status, "d/city")
    assert index["behind"] == 0


async def test_the_status_of_indexes_and_of_the_indexer(site: Site) -> None:
    statuses = await site.ask(site.asking.indexes)
    assert [(status["name"], status["state"]) for status in statuses] == [
        ("d/both", "ready"),
        ("d/city", "ready"),
    ]
    index = await site.ask(site.asking.index_status, "d/both")
    assert index["entries"] == 20
    assert index["key"] == ["city", "n"]
    status = await site.ask(site.asking.status)
    assert status["connected"] is True
    assert status["mutations"] >= 21
    assert index["behind"] == 0
    await site.client.set("_design/bad", "{}")
    await site.ask(site.asking.scan, "d/city", consistency="now")
    with trio.fail_after(5):
        while not (mistakes := await site.ask(site.asking.design_mistakes)):
            pass
    assert "indexes: name at least one" in mistakes["bad"]


async def test_wrong_requests_are_refused_with_their_place(site: Site) -> None:
    refusal, asking = site.refusal, site.asking
    error = await refusal(asking.create, "e", {"indexes": {"x": {"key": ["a[", "b"]}}})
    assert (error.code, error.place) == ("bad_definition", "indexes.x.key[0]")
    error = await refusal(asking.create, "e/f", {"indexes": {"x": {"key": ["a"]}}})
    assert error.code == "bad_definition"
    assert "invalid design name 'e/f'" in str(error)
    assert (await refusal(asking.drop, "e/f")).code == "bad_definition"
    error = await refusal(asking.scan, "d/city/more")
    assert (error.code, str(error)) == (
        "no_index",
        "there is no index d/city/more; `upr index list` names all",
    )
    assert (await refusal(asking.index_status, "d/city/more")).code == "no_index"
    assert (await refusal(asking.scan, "d/none")).code == "no_index"
    assert (await refusal(asking.scan, "none")).code == "no_index"
    assert (await refusal(asking.drop, "none")).code == "no_index"
    error = await refusal(asking.scan, "d/city", prefix=["a", "b"])
    assert (error.code, error.place) == ("bad_query", "prefix")
    error = await refusal(asking.scan, "d/city", prefix=["a"], low=["a"])
    assert (error.code, error.place) == ("bad_query", "prefix")
    assert (await refusal(asking.scan, "d/city", low=[{}])).place == "low.key"
    error = await refusal(asking.scan, "d/city", limit=0)
    assert (error.code, error.place) == ("bad_query", "limit")
    assert str(error) == "limit: Expected `int` >= 1"
    assert (await refusal(asking.scan, "d/city", continuation="x")).place == "continuation"
    assert (await refusal(asking.create, "e", b"x" * (1 << 20) + b"x")).code == "too_long"
    assert (await refusal(asking.create, "e", b"x" * (8 << 20))).code == "too_long"
    prefixes = [IndexRange(prefix=["x" * 300])] * 1000
    assert not keys(await site.ask(asking.scan, "d/city", ranges=prefixes[:750]))
    error = await refusal(asking.scan, "d/city", ranges=prefixes)
    assert (error.code, str(error)) == (
        "too_long",
        "the body of this request has at most 262,144 bytes",
    )
    lost_write = WriteResult(PartitionId(0), HistoryId(1), SeqNo(1), Cas(0))
    for consistency in ("any", "at_least", "now"):
        error = await refusal(
            asking.scan, "d/city", consistency=consistency, written=[lost_write], timeout_s=2
        )
        assert error.code == "write_lost"
        assert "history 0000000000000001, which the server does not know" in str(error)
    write_result = await site.client.set("k00", DOCUMENT)
    future = msgspec.structs.replace(write_result, seq=SeqNo(write_result.seq + 1))
    error = await refusal(
        asking.scan, "d/city", consistency="at_least", written=[future], timeout_s=0.05
    )
    assert error.code == "not_fresh"


async def test_scans_are_refused_when_memory_is_short(site: Site) -> None:
    site.indexer.pool.reserve(8 * 1024 * 1024)
    error = await site.refusal(site.asking.scan, "d/city")
    assert (error.code, error.retry_after_s) == ("overloaded", 1.0)
    site.indexer.pool.release(8 * 1024 * 1024)
    assert len((await site.ask(site.asking.scan, "d/city")).entries) == 20


MUCH: Final[dict[str, Any]] = {"prefix": ["c" * 100]}


async def write_much(site: Site) -> None:
    """Documents that come to some 750 kB of entries, and are in the index."""
    async with publisher(site.url) as writer:
        for index in range(5000):
            await writer.set(f"m{index:04}", json.dumps({"city": "c" * 100, "n": index}))
    (part,) = site.indexer.slices
    file = part.definitions.find(name_of("d/both")).file
    await eventually(lambda: file.entry_count() == 5020, "they are in the index")


class Reader:
    """A client that reads an answer when it is told to, on the far side of the HTTP server.

    Attributes:
        body: What it has read.
        pieces: In how many pieces.
        status: Of the answer; 0 before there is one.
        has_answer: Set when there is something to read.
        may_read: Set when it reads.
        is_gone: Set when it goes.
    """

    def __init__(self, indexer: Indexer, query: Any) -> None:
        self._application = application(indexer, HttpAccess(indexer.address))
        self._query = json.dumps(query).encode()
        self.body = b""
        self.pieces = 0
        self.status = 0
        self.has_answer = trio.Event()
        self.may_read = trio.Event()
        self.is_gone = trio.Event()

    async def run(self) -> None:
        """Asks."""
        messages = [{"type": "http.request", "body": self._query, "more_body": False}]

        async def receive() -> Any:
            if messages:
                await trio.lowlevel.checkpoint()
                return messages.pop()
            await self.is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                return
            self.has_answer.set()
            await self.may_read.wait()
            self.body += message["body"]
            self.pieces += 1

        path = "/v1/indexes/d/both/scan"
        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        await self._application(scope, receive, send)


async def test_a_client_that_goes_leaves_no_moment(site: Site) -> None:
    await write_much(site)
    reader = Reader(site.indexer, {**MUCH, "hold_s": 60, "consistency": "now"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.run)
        await reader.has_answer.wait()
        assert [len(part.moments) for part in site.indexer.slices] == [1]
        reader.is_gone.set()
    assert [len(part.moments) for part in site.indexer.slices] == [0]
    assert site.indexer.pool.scan_bytes == 0
    assert (reader.status, reader.pieces) == (200, 0)


async def test_a_request_whose_body_does_not_come_is_answered(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "BODY_S", 0.05)
    parts = urlsplit(site.asking.url)
    async with await trio.open_tcp_stream(parts.hostname or "", parts.port or 0) as stream:
        await stream.send_all(
            b"POST /v1/indexes/d/city/scan HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{"
        )
        with trio.fail_after(20):
            answer = b"".join([part async for part in stream])
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"too_slow"' in answer


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/indexes/d/city/scan"), ("PUT", "/v1/designs/e")]
)
async def test_a_client_that_goes_within_its_request_is_no_fault_of_ours(
    site: Site, method: str, path: str
) -> None:
    """Each of them wrote a traceback to the log."""

    async def receive() -> Any:
        await trio.lowlevel.checkpoint()
        return {"type": "http.disconnect"}

    async def send(_message: Any) -> None:
        await trio.lowlevel.checkpoint()

    scope = {"type": "http", "method": method, "path": path, "headers": []}
    await application(site.indexer, HttpAccess(site.indexer.address))(scope, receive, send)


async def test_an_answer_counts_until_it_is_sent_and_is_made_in_pieces(site: Site) -> None:
    """Clients that do not read: the pool refuses more of them, and is free again at their end."""
    pool = site.indexer.pool
    await write_much(site)
    expected = await site.ask(site.asking.scan, "d/both", consistency="now", **MUCH)
    await eventually(lambda: pool.scan_bytes == 0, "the answer was sent")
    readers: list[Reader] = []
    query = {**MUCH, "limit": 10_000}
    async with trio.open_nursery() as nursery:
        while not readers or readers[-1].status == 200:
            readers.append(Reader(site.indexer, query))
            nursery.start_soon(readers[-1].run)
            await readers[-1].has_answer.wait()
            assert pool.scan_bytes <= pool.nbytes
        assert readers[-1].status == 503
        assert pool.scan_bytes > pool.nbytes - SCAN_BYTES
        for reader in readers:
            reader.may_read.set()
    assert b"overloaded" in readers.pop().body
    assert pool.scan_bytes == 0
    assert len(readers) > 5
    for reader in readers:
        page = msgspec.json.decode(reader.body, type=IndexPage)
        assert page.entries[: len(expected.entries)] == expected.entries
        assert [entry.key[1] for entry in page.entries] == list(range(5000))
        assert not page.continuation
        assert reader.pieces > 10
        assert len(reader.body) / reader.pieces < 4 * PIECE_BYTES


async def test_a_connection_whose_client_does_not_read_is_closed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "SEND_TIMEOUT_S", 0.1)
    pool = site.indexer.pool
    await write_much(site)
    await site.ask(site.asking.scan, "d/both", consistency="now", **MUCH)
    await eventually(lambda: pool.scan_bytes == 0, "the answer was sent")
    body = json.dumps({**MUCH, "limit": 10_000}).encode()
    head = (
        f"POST /v1/indexes/d/both/scan HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    async with serving(site.indexer, "127.0.0.1:0") as url:
        with trio.socket.socket() as idle:
            idle.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4096)
            await idle.connect(("127.0.0.1", urlsplit(url).port))
            await idle.send(head.encode() + body)
            await eventually(lambda: pool.scan_bytes > 0, "the answer is on its way")
            await eventually(lambda: pool.scan_bytes == 0, "the connection was closed")


async def test_an_answer_with_long_keys_is_continued(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(40):
        value = json.dumps({"city": "x" * 200, "n": index})
        await site.client.set("k" * 200 + str(index), value)
    page = await site.ask(site.asking.scan, "d/both", consistency="now", limit=10_000)
    assert len(page.entries) == 60
    whole = [entry.id for entry in page.entries]
    monkeypatch.setattr(scanner, "ANSWER_BYTES_MAX", 2000)
    page = await site.ask(site.asking.scan, "d/both", limit=10_000)
    assert 1 < len(page.entries) < 60
    assert page.continuation
    every = await site.ask(lambda: list(site.asking.scan_all("d/both", limit=10_000)))
    assert [entry.id for entry in every] == whole


async def test_openapi_describes_every_route(site: Site) -> None:
    parts = urlsplit(site.asking.url)

    def get(path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        connection.request("GET", path)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, json.loads(data)

    status, described = await site.ask(get, "/openapi.json")
    assert status == 200
    for path in described["paths"]:
        assert "{" in path or (await site.ask(get, path))[0] == 200
    schemas = described["components"]["schemas"]
    assert set(schemas["Query"]["properties"]) == set(Query.__struct_fields__)
    text = msgspec.json.encode(described).decode()
    assert all(f'"{name}":' in text for name in ("Answer", "IndexStatus", "Failures"))
    # Each of them is refused to who may not do it, and while the server does not answer.
    for path, methods in described["paths"].items():
        for method in methods.keys() & {"get", "put", "delete", "post"}:
            missing = {"401", "403", "429", "502"} - methods[method]["responses"].keys()
            assert not missing, (method, path)
    scan = described["paths"]["/v1/indexes/{design}/{index}/scan"]["post"]
    assert set(scan["responses"]["200"]["content"]) == {"application/json", LINES}


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "words"),
    [
        ("GET", "/v1/index", 404, "no_path", "/openapi.json"),
        ("GET", "/v1/indexes/d/city/scan/", 404, "no_index", "d/city/scan/"),
        ("PATCH", "/v1/indexes", 405, "wrong_method", "GET"),
        ("GET", "/v1/indexes/d/city/scan", 405, "wrong_method", "scan takes POST, not GET"),
        ("PUT", "/v1/indexes/d/city/scan", 405, "wrong_method", "scan takes POST, not PUT"),
    ],
)
async def test_a_request_for_nothing_is_refused_as_others_are(
    site: Site, method: str, path: str, status: int, code: str, words: str
) -> None:
    parts = urlsplit(site.asking.url)

    def ask() -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        connection.request(method, path)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, data

    answer_status, body = await site.ask(ask)
    failure = msgspec.json.decode(body, type=Failures).error
    assert (answer_status, failure.code) == (status, code)
    assert words in failure.message


async def test_an_address_in_use_is_an_error(site: Site) -> None:
    address = site.asking.url.removeprefix("http://")
    with pytest.raises(ListenError, match=f"cannot listen on {address}"):
        async with serving(site.indexer, address):
            raise AssertionError("it listens")


async def test_a_scan_may_wait_longer_than_the_request_before_it(site: Site) -> None:
    await site.ask(site.asking.status)
    await site.ask(site.asking.scan, "d/city", timeout_s=200)
    sock = site.asking._nodes[0]._connection.sock
    assert sock is not None
    assert (sock.gettimeout() or 0) > 200


@pytest.mark.parametrize("status", [b"200 OK", b"500 Oh"])
@pytest.mark.parametrize("body", [b"hello", b"\xff", b"[]", b'{"error":"no"}'])
async def test_a_server_that_is_not_an_indexer_is_an_error(status: bytes, body: bytes) -> None:
    def ask(url: str) -> None:
        with IndexClient(url) as client:
            client.indexes()

    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        length = f"Content-Length: {len(body)}".encode()
        await stream.send_all(b"HTTP/1.1 " + status + b"\r\n" + length + b"\r\n\r\n" + body)

    async with trio.open_nursery() as nursery:
        start = partial(trio.serve_tcp, answer, 0, host="127.0.0.1")
        (listener, *_) = await nursery.start(start)
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        with pytest.raises(IndexerError, match="not an indexer's answer"):
            await trio.to_thread.run_sync(ask, url)
        nursery.cancel_scope.cancel()


async def test_an_unreachable_indexer_is_a_broken_connection() -> None:
    def ask() -> None:
        with IndexClient("http://127.0.0.1:1") as client:
            client.status()

    with pytest.raises(BrokenError, match="does not answer"):
        await trio.to_thread.run_sync(ask)


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h/x"])
def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="write http"):
        IndexClient(url)
