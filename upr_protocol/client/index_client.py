"""Asking an indexer: a client for its HTTP API, for programs that block."""

from __future__ import annotations

import http.client
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self
from urllib.parse import quote, urlsplit

import msgspec

from upr_protocol.client.outcome import Written
from upr_protocol.errors import BrokenError, UprError

TIMEOUT_S: Final = 10.0
"""How long a scan may wait for the index to be as fresh as asked, when nobody says."""

SLACK_S: Final = 30.0
"""How much longer than that an answer may take before the connection counts as lost."""

Key = Sequence[Any]
"""The parts of a key: null, booleans, numbers, strings, and lists of these."""

Bound = Key | tuple[Key, bool]
"""An end of a range: a key, or its first parts; with False beside it, without what begins so."""


class IndexerError(UprError):
    """The indexer did not do what it was asked.

    Attributes:
        code: Why, as a word: `bad_definition`, `bad_query`, `no_index`, `building`, `overloaded`,
            `not_fresh`, `write_lost`, `server_failed`.
        place: Where in what it was given the mistake is.
        retry_after_s: When to ask again, where that may help; otherwise 0.
    """

    def __init__(self, code: str, message: str, place: str = "", retry_after_s: float = 0) -> None:
        self.code = code
        self.place = place
        self.retry_after_s = retry_after_s
        super().__init__(message)


class IndexEntry(msgspec.Struct, frozen=True):
    """A document in an index.

    Attributes:
        key: Its key in the index, part by part.
        id: The document's key; in base64 where that is no UTF-8.
        id_encoding: `base64` then; otherwise empty.
    """

    key: list[Any]
    id: str
    id_encoding: str = ""


class IndexPage(msgspec.Struct, frozen=True):
    """What a scan found, all of one moment.

    Attributes:
        entries: The entries, in order.
        continuation: For `scan`, to go on behind them; empty when there is no more.
        timestamps: By partition, history and number at which it was, when that was asked.
    """

    entries: list[IndexEntry] = []
    continuation: str = ""
    timestamps: dict[int, tuple[str, int]] = {}


class _Count(msgspec.Struct, frozen=True):
    count: int


class IndexClient:
    """Talks to the indexer at `url`, as in `http://127.0.0.1:12080`. For one thread.

    It connects when it is first asked something, and again when the connection was lost. Use it as
    a context, or call `close`.

    Raises:
        ValueError: The URL is none.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError(f"{url!r} is no indexer's URL: write http://HOST:PORT")
        self.url = url
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 12080)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    # Indexes.

    def create(self, design: str, indexes: object) -> None:
        """Writes a design document: `{"indexes": {NAME: {"key": [EXPRESSION, …], "filter": …}}}`.

        Args:
            design: Its name.
            indexes: The document, as JSON or as what JSON can be made of.

        Raises:
            IndexerError: `bad_definition`, with the place of the mistake.
        """
        body = indexes if isinstance(indexes, bytes) else msgspec.json.encode(indexes)
        self._ask("PUT", f"/v1/designs/{quote(design, safe='')}", body)

    def drop(self, design: str) -> None:
        """Removes a design document, and its indexes; `IndexerError` `no_index` of none."""
        self._ask("DELETE", f"/v1/designs/{quote(design, safe='')}")

    def indexes(self) -> list[dict[str, Any]]:
        """Every index with its status."""
        found: list[dict[str, Any]] = self._ask("GET", "/v1/indexes")["indexes"]
        return found

    def mistakes(self) -> dict[str, str]:
        """By design document that cannot be used, why."""
        found: dict[str, str] = self._ask("GET", "/v1/designs")["mistakes"]
        return found

    def index(self, name: str) -> dict[str, Any]:
        """The status of the index `DESIGN/INDEX`."""
        found: dict[str, Any] = self._ask("GET", _path(name))
        return found

    def status(self) -> dict[str, Any]:
        """How the indexer does."""
        found: dict[str, Any] = self._ask("GET", "/v1/status")
        return found

    # Scans.

    def scan(
        self,
        name: str,
        *,
        prefix: Key | None = None,
        low: Bound | None = None,
        high: Bound | None = None,
        descending: bool = False,
        limit: int = 100,
        continuation: str = "",
        consistency: Literal["any", "at_least", "now"] = "any",
        written: Iterable[Written] = (),
        timeout_s: float = TIMEOUT_S,
        timestamps: bool = False,
    ) -> IndexPage:
        """Some entries of the index `DESIGN/INDEX`.

        Args:
            name: The index.
            prefix: The first parts of the keys wanted, or all of them.
            low: Where to begin.
            high: Where to end.
            descending: Whether the highest comes first.
            limit: How many at most, up to 10,000.
            continuation: What the page before gave.
            consistency: `any`: as the index is. `at_least`: with the changes in `written`. `now`:
                with all that the server had acknowledged to anybody before.
            written: What a publisher or client was answered.
            timeout_s: How long to wait for the index to be as fresh.
            timestamps: Whether to tell how far each partition was.

        Raises:
            IndexerError: There is no answer; the code says why.
            BrokenError: There is no indexer there, or it did not answer.
        """
        question = _question(prefix, low, high, consistency, written, timeout_s) | {
            "descending": descending,
            "limit": limit,
            "continuation": continuation,
            "timestamps": timestamps,
        }
        body = msgspec.json.encode(question)
        data = self._request("POST", _path(name) + "/scan", body, timeout_s)
        return msgspec.json.decode(data, type=IndexPage)

    def scan_all(self, name: str, **options: Any) -> Iterator[IndexEntry]:
        """All entries, page by page: each is of a moment of its own, the later the fresher.

        Args:
            name: The index.
            **options: See `scan`.
        """
        page = self.scan(name, **options)
        yield from page.entries
        while page.continuation:
            page = self.scan(name, **{**options, "continuation": page.continuation})
            yield from page.entries

    def count(
        self,
        name: str,
        *,
        prefix: Key | None = None,
        low: Bound | None = None,
        high: Bound | None = None,
        consistency: Literal["any", "at_least", "now"] = "any",
        written: Iterable[Written] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> int:
        """How many entries there are; see `scan`."""
        question = _question(prefix, low, high, consistency, written, timeout_s)
        body = msgspec.json.encode(question | {"count": True})
        data = self._request("POST", _path(name) + "/scan", body, timeout_s)
        return msgspec.json.decode(data, type=_Count).count

    # The connection.

    def _ask(self, method: str, path: str, body: bytes = b"") -> Any:
        data = self._request(method, path, body, TIMEOUT_S)
        return msgspec.json.decode(data) if data else None

    def _request(self, method: str, path: str, body: bytes, timeout_s: float) -> bytes:
        connection = self._connection
        connection.timeout = timeout_s + SLACK_S
        reused = connection.sock is not None
        if reused:
            # It has the patience of the question that it was made for.
            connection.sock.settimeout(connection.timeout)
        try:
            try:
                return self._exchange(method, path, body)
            except (http.client.RemoteDisconnected, ConnectionError, BrokenPipeError):
                # An indexer closes connections that were idle, perhaps while this was on its way.
                connection.close()
                if not reused:
                    raise
                return self._exchange(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise BrokenError(f"no indexer answers at {self.url}: {error!s}") from error

    def _exchange(self, method: str, path: str, body: bytes) -> bytes:
        connection = self._connection
        headers = {"Content-Type": "application/json"} if body else {}
        connection.request(method, path, body or None, headers)
        response = connection.getresponse()
        data = response.read()
        if response.status >= 400:
            raise _failure(response.status, data)
        return data


def _path(name: str) -> str:
    design, slash, index = name.partition("/")
    if not slash or not design or not index:
        raise IndexerError("no_index", f"{name!r} names no index: write DESIGN/INDEX")
    return f"/v1/indexes/{quote(design, safe='')}/{quote(index, safe='')}"


def _question(
    prefix: Key | None,
    low: Bound | None,
    high: Bound | None,
    consistency: str,
    written: Iterable[Written],
    timeout_s: float,
) -> dict[str, Any]:
    return {
        "prefix": prefix,
        "low": _bound(low),
        "high": _bound(high),
        "consistency": consistency,
        "written": [
            {"partition": w.partition, "history_id": f"{w.history_id:016x}", "seq": w.seq}
            for w in written
        ],
        "timeout_s": timeout_s,
    }


def _bound(bound: Bound | None) -> dict[str, Any] | None:
    if bound is None:
        return None
    key, inclusive = bound if isinstance(bound, tuple) else (bound, True)
    return {"key": key, "inclusive": inclusive}


def _failure(status: int, data: bytes) -> UprError:
    try:
        fields = msgspec.json.decode(data)["error"]
        return IndexerError(
            fields["code"],
            fields["message"],
            fields.get("place", ""),
            fields.get("retry_after_s", 0.0),
        )
    except (msgspec.DecodeError, KeyError, TypeError):
        return IndexerError("server_failed", f"what answers there is no indexer: HTTP {status}")
