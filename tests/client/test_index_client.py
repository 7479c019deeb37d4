"""The indexer's client, against a server that takes its time."""

from __future__ import annotations

import threading
from base64 import b64decode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from upr_protocol.client import Credentials, IndexClient, IndexerError, Security, index_client
from upr_protocol.errors import BrokenError

LATE_S = 0.4


class Answers(BaseHTTPRequestHandler):
    """Answers at once, and scans late. A password other than "new" is refused."""

    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.command == "POST":
            threading.Event().wait(LATE_S)
        pair = b64decode(self.headers.get("Authorization", "").removeprefix("Basic "))
        self.send_response(401 if pair and pair != b"bob:new" else 200)
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


def test_a_refused_log_in_reads_the_password_anew(url: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("old")
    file.chmod(0o600)
    credentials = Credentials("bob", password_file=str(file))
    with IndexClient(url, Security(credentials=credentials)) as client:
        with pytest.raises(IndexerError):
            client.status()
        file.write_text("new")
        assert client.status() == {}
