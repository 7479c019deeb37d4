"""The indexer's client, against a server that takes its time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from upr_protocol.client import IndexClient, index_client
from upr_protocol.errors import BrokenError

LATE_S = 0.4


class Answers(BaseHTTPRequestHandler):
    """Answers at once, and scans late."""

    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.command == "POST":
            threading.Event().wait(LATE_S)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_POST = _answer  # noqa: N815  the base class calls them so

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(index_client, "INDEXER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(index_client, "ANSWER_SLACK_S", 0.1)
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_each_question_has_its_own_patience_on_the_same_connection(url: str) -> None:
    with IndexClient(url) as client:
        assert client.status() == {}
        assert client.scan("d/i", timeout_s=30).entries == []
        assert client.status() == {}
        with pytest.raises(BrokenError, match="timed out"):
            client.scan("d/i", timeout_s=0.1)
