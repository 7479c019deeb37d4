"""The indexer's client, against servers that answer as a test tells them."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit.forked import in_forked_process
from tests.kit.index_http import Answers, a_node, http_server
from upr_protocol.client import (
    Credentials,
    IndexClient,
    IndexerError,
    IndexRange,
    Security,
    WriteResult,
    index_client,
    index_node,
)
from upr_protocol.errors import BrokenError
from upr_protocol.ids import Cas, HistoryId, PartitionId, SeqNo


@contextmanager
def silent_node() -> Iterator[str]:
    """The URL of a node that accepts connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_each_request_has_its_own_timeout_on_the_same_connection() -> None:
    sockets: list[object] = []
    timeouts_s: list[float | None] = []

    class Handler(Answers):
        def _answer(self) -> None:
            # The client waits for this answer, with the timeout of its request.
            client_socket = client._nodes[0]._connection.sock
            sockets.append(client_socket)
            timeouts_s.append(client_socket.gettimeout())
            super()._answer()

        do_GET = do_POST = _answer  # noqa: N815  the base class calls them so

    with http_server(Handler) as url, IndexClient(url) as client:
        assert client.status() == {}
        assert client.scan("d/i", timeout_s=300).entries == []
        assert client.status() == {}
        assert client.scan("d/i", timeout_s=1).entries == []
    assert timeouts_s == [
        timeout_s + index_client.ANSWER_SLACK_S
        for timeout_s in (
            *(index_client.INDEXER_TIMEOUT_S, 300),
            *(index_client.INDEXER_TIMEOUT_S, 1),
        )
    ]
    assert all(client_socket is sockets[0] for client_socket in sockets)


def test_a_request_that_is_not_answered_in_time_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_client, "ANSWER_SLACK_S", 0.1)
    with (
        silent_node() as url,
        IndexClient(url) as client,
        pytest.raises(BrokenError, match="timed out"),
    ):
        client.scan("d/i", timeout_s=0.1)


def test_the_client_reads_the_password_again_after_a_refused_log_in(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("old")
    file.chmod(0o600)
    credentials = Credentials("bob", password_file=str(file))
    with (
        http_server(Answers) as url,
        IndexClient(url, Security(credentials=credentials)) as client,
    ):
        with pytest.raises(IndexerError):
            client.status()
        file.write_text("new")
        assert client.status() == {}


class ConnectionNumbers(BaseHTTPRequestHandler):
    """Answers with the number of the connection."""

    protocol_version = "HTTP/1.1"
    connections = 0

    def setup(self) -> None:
        super().setup()
        ConnectionNumbers.connections += 1
        self.answer = b'{"number":%d}' % ConnectionNumbers.connections

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_asks_over_its_own_connection() -> None:
    def ask() -> None:
        assert client.status() == {"number": 2}

    with ThreadingHTTPServer(("127.0.0.1", 0), ConnectionNumbers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with IndexClient(f"http://127.0.0.1:{server.server_port}") as client:
                assert client.status() == {"number": 1}
                in_forked_process(ask)
                assert client.status() == {"number": 1}
        finally:
            server.shutdown()
            thread.join()


def refusal(code: str, **fields: object) -> bytes:
    return msgspec.json.encode({"error": {"code": code, "message": f"it is {code}"}, **fields})


def test_a_query_names_only_the_options_that_it_was_given() -> None:
    written = WriteResult(PartitionId(3), HistoryId(0xAB), SeqNo(9), Cas(1))
    ranges: list[IndexRange] = [{"low": ["a"]}, {"prefix": ("b",), "high": None}]
    with a_node((200, PAGE)) as node, IndexClient(node.url) as client:
        client.scan("d/i")
        client.scan("d/i", high=(["c", 1], False), consistency="at_least", written=[written])
        client.scan("d/i", ranges=ranges, limit=7, descending=True, timeout_s=1)
        with pytest.raises(IndexerError, match="no count"):
            client.count("d/i", distinct=2)
        # A misspelt option is for the indexer to refuse.
        next(client.scan_all("d/i", hold_s=0, lmit=7))
    plain = {"timeout_s": 10.0, "prefix": None, "low": None, "high": None}
    no_summary = {"min": False, "max": False, "timestamps": False}
    assert [msgspec.json.decode(body) for body in node.bodies] == [
        plain,
        {
            **plain,
            "high": {"key": ["c", 1], "inclusive": False},
            "consistency": "at_least",
            "written": [{"partition": 3, "history_id": f"{0xAB:016x}", "seq": 9}],
        },
        {
            **plain,
            "ranges": [
                {"prefix": None, "low": {"key": ["a"], "inclusive": True}, "high": None},
                {"prefix": ["b"], "low": None, "high": None},
            ],
            "limit": 7,
            "descending": True,
            "timeout_s": 1,
        },
        {**plain, **no_summary, "count": True, "distinct": 2},
        {**plain, "hold_s": 0, "lmit": 7},
    ]


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -math.inf, b"BOEING", Decimal(200), date(2013, 7, 1), {1}, {"a": 1}),
        [[1, math.nan]],
    ],
    ids=repr,
)
def test_a_value_that_json_does_not_have_is_no_key(value: Any) -> None:
    """Infinity was sent as null, and a decimal as a string: the answer had other entries, or
    none."""
    ranges: list[dict[str, Any]] = [{}, {"low": ([1, value], False)}]
    options: dict[str, dict[str, Any]] = {
        "prefix": {"prefix": ["a", value]},
        "low.key": {"low": [value]},
        "high.key": {"high": (["a", value], True)},
        "ranges[1].low.key": {"ranges": ranges},
    }
    with a_node((200, PAGE)) as node, IndexClient(node.url) as client:
        for place, bounds in options.items():
            for scan in (client.scan, client.stream, client.count, client.explain):
                with pytest.raises(IndexerError) as caught:
                    scan("d/i", **bounds)
                assert (caught.value.code, caught.value.place) == ("bad_query", place)
                assert "cannot be a key; use None, booleans, finite numbers" in str(caught.value)
    assert not node.bodies


def test_a_bound_may_be_a_tuple() -> None:
    """Two parts were taken for a key and whether it is in the range."""
    bounds: list[tuple[Any, list[Any], bool]] = [
        (("JFK", "2013"), ["JFK", "2013"], True),
        (("JFK",), ["JFK"], True),
        (("JFK", False), ["JFK", False], True),
        ((("JFK", "2013"), False), ["JFK", "2013"], False),
        ((["JFK"], True), ["JFK"], True),
    ]
    with a_node((200, PAGE)) as node, IndexClient(node.url) as client:
        for bound, _, _ in bounds:
            client.scan("d/i", low=bound)
    assert [msgspec.json.decode(body)["low"] for body in node.bodies] == [
        {"key": key, "inclusive": is_inclusive} for _, key, is_inclusive in bounds
    ]


@pytest.mark.parametrize(
    "answer", [(302, b""), (302, b"{}"), (202, b"{}"), (200, b"<p>Hello")], ids=repr
)
def test_what_another_server_answers_has_changed_no_design(answer: tuple[int, bytes]) -> None:
    """A proxy that asks for a log-in redirects every request: the design counted as stored."""
    with a_node(answer) as node, IndexClient(node.url) as client:
        with pytest.raises(IndexerError, match="not an indexer's answer"):
            client.create("d", {"indexes": {"i": {"key": ["a"]}}})
        with pytest.raises(IndexerError, match="not an indexer's answer"):
            client.drop("d")


def test_of_many_changes_the_newest_of_each_history_are_named() -> None:
    """The results of 20,000 writes would not fit into a request."""
    written = [
        WriteResult(PartitionId(number % 4), HistoryId(7 + number // 15_000), SeqNo(number), Cas(1))
        for number in range(20_000)
    ]
    with a_node((200, PAGE)) as node, IndexClient(node.url) as client:
        client.scan("d/i", consistency="at_least", written=reversed(written))
    assert {
        (change["partition"], change["history_id"], change["seq"])
        for change in msgspec.json.decode(node.bodies[0])["written"]
    } == {(n % 4, f"{7:016x}", n) for n in range(14_996, 15_000)} | {
        (n % 4, f"{8:016x}", n) for n in range(19_996, 20_000)
    }


NOBODY = "http://127.0.0.1:1"
PAGE = b'{"entries":[{"key":[1],"id":"a"}]}'
MISSING = (503, refusal("slice_missing"))


@pytest.mark.parametrize("answer", [None, MISSING], ids=["lost", "a slice is missing"])
def test_another_node_is_asked(answer: tuple[int, bytes] | None) -> None:
    with a_node(answer) as first, a_node((200, PAGE)) as second:
        with IndexClient(f"{NOBODY},{first.url}, {second.url}") as client:
            for _ in range(3):
                assert client.scan("d/i").entries[0].id == "a"
        # From then on, the node that answered is asked first.
        assert (len(first.paths), len(second.paths)) == (1, 3)


def test_another_node_is_asked_after_the_timeout_and_the_slack_of_a_silent_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_client, "NODE_SLACK_S", 0.1)
    with (
        silent_node() as url,
        a_node((200, PAGE)) as second,
        IndexClient(f"{url},{second.url}") as client,
    ):
        assert client.scan("d/i", timeout_s=0.1).entries[0].id == "a"


def test_an_error_that_other_nodes_would_have_is_raised_at_once() -> None:
    with a_node((404, refusal("no_index"))) as first, a_node((200, PAGE)) as second:
        with (
            IndexClient(f"{first.url},{second.url}") as client,
            pytest.raises(IndexerError, match="it is no_index"),
        ):
            client.scan("d/i")
        assert not second.paths


def test_where_no_node_can_answer_the_one_that_speaks_is_quoted() -> None:
    with a_node(MISSING) as node, IndexClient(f"{NOBODY},{node.url}") as client:
        with pytest.raises(IndexerError, match="it is slice_missing"):
            client.scan("d/i")
        assert len(node.paths) == 1
    with (
        IndexClient(f"{NOBODY},http://127.0.0.1:2") as client,
        pytest.raises(BrokenError, match=r"127.0.0.1:1 does not.*127.0.0.1:2 does not"),
    ):
        client.scan("d/i")


def test_the_nodes_of_the_map_are_asked() -> None:
    with a_node((200, PAGE)) as second:
        node_map = {"nodes": [NOBODY, "nonsense", second.url], "slices": 2, "replicas": 0}
        not_my_slice = (421, refusal("not_my_slice", map=node_map))
        with a_node(not_my_slice) as first, IndexClient(first.url) as client:
            assert client.scan("d/i").entries[0].id == "a"


def test_a_node_that_names_others_without_end_is_not_followed_for_ever() -> None:
    node_map = {"nodes": [f"http://127.0.0.{host}:1" for host in range(1, 255)]}
    with (
        a_node((421, refusal("not_my_slice", map=node_map))) as node,
        IndexClient(node.url) as client,
        pytest.raises(IndexerError, match="it is not_my_slice"),
    ):
        client.scan("d/i")
    assert len(client._nodes) == index_client.NODES_MAX


def test_a_line_without_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_node, "LINE_BYTES_MAX", 1000)
    with a_node((200, b'{"key":["' + b"x" * 100_000)) as node, IndexClient(node.url) as client:
        entries = client.stream("d/i")
        with pytest.raises(BrokenError, match="was cut"):
            next(entries)


def test_a_design_that_the_lost_request_has_dropped_is_dropped() -> None:
    not_found = (404, refusal("no_index"))
    with (
        a_node(None) as first,
        a_node(not_found) as second,
        IndexClient(f"{first.url},{second.url}") as client,
    ):
        client.drop("d")
        with pytest.raises(IndexerError, match="no_index"):
            client.drop("d")


def test_a_drop_that_is_lost_on_a_used_connection_is_not_sent_again() -> None:
    """The second would say that there is no such design."""
    drops = []

    class Handler(Answers):
        def do_DELETE(self) -> None:  # noqa: N802  the base class calls it so
            drops.append(self.path)
            self.close_connection = True

    with http_server(Handler) as url, IndexClient(url) as client:
        client.status()
        with pytest.raises(BrokenError):
            client.drop("d")
    assert drops == ["/v1/designs/d"]


LINES = b'{"key":[1],"id":"a"}\n{"key":[2],"id":"b","included":[3]}\n'


def test_entries_come_as_lines() -> None:
    end = b'{"end":{"continuation":"c","timestamps":{"0":["0a",7]}}}\n'
    with a_node((200, LINES + end)) as node, IndexClient(f"{NOBODY},{node.url}") as client:
        entries = client.stream("d/i", limit=2, timestamps=True)
        assert [(entry.id, entry.included) for entry in entries] == [("a", None), ("b", [3])]
        assert entries.end is not None
        assert (entries.end.continuation, entries.end.timestamps) == ("c", {0: ("0a", 7)})
        assert next(entries, None) is None


@pytest.mark.parametrize(
    ("end", "error", "message"),
    [
        (b"", BrokenError, "was cut"),
        (b'{"key":[3]', BrokenError, "was cut"),
        (b'{"end"', BrokenError, "was cut"),
        (refusal("slice_missing") + b"\n", IndexerError, "it is slice_missing"),
        (b"nonsense\n", IndexerError, "not an indexer's answer"),
        pytest.param(
            b'{"key":' + b"[" * 5000 + b"\n", IndexerError, "not an indexer's answer", id="deep"
        ),
    ],
)
def test_lines_without_an_end_are_an_error(
    end: bytes, error: type[Exception], message: str
) -> None:
    with a_node((200, LINES + end)) as node, IndexClient(node.url) as client:
        entries = client.stream("d/i")
        assert [next(entries).id, next(entries).id] == ["a", "b"]
        with pytest.raises(error, match=message):
            next(entries)


def test_lines_that_are_refused_are_an_error_at_once() -> None:
    with a_node((400, refusal("bad_query"))) as node, IndexClient(node.url) as client:
        with pytest.raises(IndexerError, match="it is bad_query"):
            client.stream("d/i")
        node.answers[:] = [(200, LINES)]
        with client.stream("d/i") as entries:
            assert next(entries).id == "a"
        # Other questions go on beside it, and after it.
        assert len(node.paths) == 2


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:12080", "http://h:99999", "http://h:x", "http://[::1", "http://h/a", "http://"],
)
def test_an_url_that_is_none_is_named_with_an_example(url: str) -> None:
    with pytest.raises(ValueError, match=r"is not an indexer's URL; write http://HOST:PORT"):
        IndexClient(url)


@contextmanager
def a_server_that_sends(data: bytes, without_end: bytes = b"") -> Iterator[str]:
    """A server that answers one request with `data`, and then with `without_end` until the client
    has gone; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer, suppress(ConnectionError):
                peer.recv(4096)
                peer.sendall(data)
                while without_end:
                    peer.sendall(without_end)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_what_another_server_says_is_not_shown() -> None:
    with (
        a_server_that_sends(b"UP\x01\x02\r\n\r\n") as url,
        IndexClient(url) as client,
        pytest.raises(BrokenError) as caught,
    ):
        client.indexes()
    assert str(caught.value) == f"the server at {url} is no indexer: it does not speak HTTP"


@pytest.mark.parametrize("status", [b"200 OK", b"404 Not Found"])
@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"Content-Length: 100000000000000", b"x" * 1000),
        (b"Transfer-Encoding: chunked", b"3e8\r\n" + b"x" * 1000 + b"\r\n"),
        (b"Connection: close", b"x" * 1000),
    ],
    ids=["a length", "chunks", "until the end"],
)
def test_an_answer_without_end_is_not_read_for_ever(
    monkeypatch: pytest.MonkeyPatch, status: bytes, head: bytes, body: bytes
) -> None:
    """It filled the memory."""
    monkeypatch.setattr(index_node, "ANSWER_BYTES_MAX", 100_000)
    answer = b"HTTP/1.1 " + status + b"\r\n" + head + b"\r\n\r\n"
    with (
        a_server_that_sends(answer, body) as url,
        IndexClient(url) as client,
        pytest.raises(IndexerError, match="more than 100,000 bytes; check the URL"),
    ):
        client.indexes()


@pytest.mark.parametrize("head", [b"Content-Length: 20", b"Transfer-Encoding: chunked"])
def test_an_answer_that_is_cut_is_a_lost_connection(head: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + b'f\r\n{"indexes":[]}'
    with (
        a_server_that_sends(answer) as url,
        IndexClient(url) as client,
        pytest.raises(BrokenError, match="does not answer"),
    ):
        client.indexes()
