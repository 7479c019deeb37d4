"""HTTP servers that answer an indexer's client as a test tells them."""

from __future__ import annotations

import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import attrs


class Answers(BaseHTTPRequestHandler):
    """Answers each request. A password other than "new" is refused."""

    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pair = b64decode(self.headers.get("Authorization", "").removeprefix("Basic "))
        self.send_response(401 if pair and pair != b"bob:new" else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_POST = _answer  # noqa: N815  the base class calls them so

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server that answers with a handler, one connection after the other; gives its URL."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@attrs.define
class Node:
    """A node of an indexer that answers as it is told.

    Attributes:
        answers: For each request to come: a status and what to answer, or None to close the
            connection; the last one counts for all that follow.
        url: Where it listens.
        paths: What it was asked for.
        bodies: What came with that.
    """

    answers: list[tuple[int, bytes] | None]
    url: str = ""
    paths: list[str] = attrs.field(factory=list)
    bodies: list[bytes] = attrs.field(factory=list)


@contextmanager
def a_node(*answers: tuple[int, bytes] | None) -> Iterator[Node]:
    node = Node(list(answers))

    class Handler(Answers):
        def _answer(self) -> None:
            node.bodies.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            node.paths.append(self.path)
            answer = node.answers.pop(0) if len(node.answers) > 1 else node.answers[0]
            self.close_connection = True
            if answer is not None:
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(answer[1])))
                self.end_headers()
                self.wfile.write(answer[1])

        do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815  the base class calls them so

    with http_server(Handler) as node.url:
        yield node
