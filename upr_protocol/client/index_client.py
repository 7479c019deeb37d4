"""Asking an indexer: a client for its HTTP API, for programs that block."""

from __future__ import annotations

import http.client
import ssl
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, Final, Literal, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote, urlsplit

import msgspec

from upr_protocol.client.core.results import WriteResult
from upr_protocol.client.credentials import with_password
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.security import UNPROTECTED, Credentials, Security, TlsSettings
from upr_protocol.transport import client_context, explained_tls_error

T = TypeVar("T")

PORT_DEFAULT: Final = 12080
"""Where an indexer listens unless it is told otherwise."""

INDEXER_TIMEOUT_S: Final = 10.0
"""How long a scan may wait by default for the index to be as fresh as asked."""

HOLD_S_DEFAULT: Final = 60.0
"""How long the indexer holds the moment of a page for the next one."""

ANSWER_SLACK_S: Final = 30.0
"""How much longer an answer may take before the connection counts as lost."""

Key = Sequence[Any]
"""The parts of a key: null, booleans, numbers, strings, and lists of these."""

Bound = Key | tuple[Key, bool]
"""An end of a range: a key, or its first parts. A pair with False excludes what begins with it."""


class IndexerError(UprError):
    """The indexer refused or failed.

    Attributes:
        code: The reason as a word: `log_in_needed`, `not_allowed`, `too_many_log_ins`,
            `bad_definition`, `bad_query`, `no_index`, `building`,
            `overloaded`, `not_fresh`, `write_lost`, `moment_gone`, `slice_missing`, `failed`,
            `server_failed`.
        place: Where the mistake is in the request; empty if there is none.
        retry_after_s: After how long to ask again; 0 if that does not help.
    """

    def __init__(self, code: str, message: str, place: str = "", retry_after_s: float = 0) -> None:
        self.code = code
        self.place = place
        self.retry_after_s = retry_after_s
        super().__init__(message)


class IndexRange(TypedDict, total=False):
    """A range of an index.

    Attributes:
        prefix: The first parts of the keys to find, or whole keys; not together with the others.
        low: The lower end of the range.
        high: The upper end of the range.
    """

    prefix: Key | None
    low: Bound | None
    high: Bound | None


class ScanOptions(IndexRange, total=False):
    """Which entries of an index, and how fresh.

    Attributes:
        ranges: Several ranges, in place of one. An entry in two of them is given once.
        distinct: Look only at so many first parts of the keys, and at each different beginning
            once; such entries have no document.
        consistency: `any`, the default: as the index is. `at_least`: with the changes in `written`.
            `now`: with everything that the server had acknowledged to anybody before.
        written: The results of a publisher or client.
        timeout_s: How long to wait for the index to be as fresh; by default `INDEXER_TIMEOUT_S`.
        hold_s: For how many seconds after its answer the indexer holds the moment that it is of, up
            to 60; 0, the default, for not at all. `release` lets it go sooner.
        moment: The `moment` of an earlier answer that this one is to be of, too. Not together with
            `consistency` and `written`.
    """

    ranges: Iterable[IndexRange]
    distinct: int
    consistency: Literal["any", "at_least", "now"]
    written: Iterable[WriteResult]
    timeout_s: float
    hold_s: float
    moment: str


class IndexEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document in an index, or with `distinct` the beginning of keys.

    Attributes:
        key: Its key in the index, part by part.
        id: The document's key; in base64 if it is not UTF-8. Empty with `distinct`.
        id_encoding: `base64` then; otherwise empty.
        included: The values that the index includes. None if it includes none, or if they take more
            than 4,096 bytes: read the document then.
    """

    key: list[Any]
    id: str = ""
    id_encoding: str = ""
    included: list[Any] | None = None


class IndexPage(msgspec.Struct, frozen=True):
    """The result of a scan, all of one moment.

    Attributes:
        entries: The entries, in order.
        continuation: Pass it to `scan` to continue after the entries; empty at the end.
        timestamps: By partition its history and sequence number then, if asked for.
        moment: Names the moment, if it is held: pass it to `scan` for pages of the same moment.
    """

    entries: list[IndexEntry] = []
    continuation: str = ""
    timestamps: dict[int, tuple[str, int]] = {}
    moment: str = ""


class IndexSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `IndexClient.summarize` was asked about entries, all of one moment.

    Attributes:
        count: How many there are.
        min: The lowest key, part by part; None if there are no entries.
        max: The highest key, likewise.
        timestamps: By partition its history and sequence number then, if asked for.
        moment: Names the moment, if it is held.
    """

    count: int | None = None
    min: list[Any] | None = None
    max: list[Any] | None = None
    timestamps: dict[int, tuple[str, int]] = {}
    moment: str = ""


class _Explained(msgspec.Struct, frozen=True):
    explanation: dict[str, Any]


class _Indexes(msgspec.Struct, frozen=True):
    indexes: list[dict[str, Any]]


class _Nodes(msgspec.Struct, frozen=True):
    nodes: list[dict[str, Any]]


class _Designs(msgspec.Struct, frozen=True):
    mistakes: dict[str, str]
    starting: str = ""


class _Failure(msgspec.Struct, frozen=True):
    code: str
    message: str
    place: str = ""
    retry_after_s: float = 0.0


class _Failures(msgspec.Struct, frozen=True):
    error: _Failure


class IndexClient:
    """A client of an indexer. For one thread.

    It connects with the first request, and again after a lost connection. Use it as a context, or
    call `close`.

    Args:
        url: For instance `http://127.0.0.1:12080`, or `https://…`.
        security: For `https://`, which certificates count; by default those whose authorities the
            system trusts. Its credentials are sent with each request; a file with the password is
            read at each new connection, and after a refused log-in.

    Raises:
        ValueError: The URL is malformed, or not encrypted though there are TLS settings, or though
            a password would go to another machine; or the user's name has a colon.
        TlsError: A file that `security` names cannot be used.
    """

    def __init__(self, url: str, security: Security = UNPROTECTED) -> None:
        parts = urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.path not in ("", "/")
        ):
            raise ValueError(
                f"{url!r} is not an indexer's URL; write http://HOST:PORT or https://HOST:PORT"
            )
        if parts.scheme == "http" and security.tls is not None:
            raise ValueError(
                f"{url!r} is not encrypted: an indexer that shows a certificate has a URL that "
                "begins with https://"
            )
        credentials = security.credentials
        if credentials is not None and parts.scheme == "http" and not _is_loopback(parts.hostname):
            raise ValueError(
                f"{url!r} is not encrypted, and whoever listens would read the password: give the "
                "indexer a certificate, and write https://"
            )
        if credentials is not None and ":" in credentials.user:
            raise ValueError(f"HTTP has no users with a colon in their name: {credentials.user!r}")
        self.url = url
        self._credentials = credentials
        self._headers: dict[str, str] = {}
        host, port = parts.hostname, parts.port or PORT_DEFAULT
        self._connection = (
            http.client.HTTPConnection(host, port)
            if parts.scheme == "http"
            else http.client.HTTPSConnection(
                host, port, context=client_context(security.tls or TlsSettings())
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    # Indexes.

    def create(self, design: str, indexes: object) -> None:
        """Writes a design document: `{"indexes": {NAME: {"key": [EXPRESSION, …], …}}}`.

        Args:
            design: Its name.
            indexes: The document, as JSON or as what JSON can be made of.

        Raises:
            IndexerError: `bad_definition`, with the place of the mistake.
        """
        body = indexes if isinstance(indexes, bytes) else msgspec.json.encode(indexes)
        self._request("PUT", f"/v1/designs/{_quoted(design)}", body)

    def drop(self, design: str) -> None:
        """Removes a design document and its indexes.

        Raises:
            IndexerError: `no_index`: there is no such document.
        """
        self._request("DELETE", f"/v1/designs/{_quoted(design)}")

    def indexes(self) -> list[dict[str, Any]]:
        """Every index with its status."""
        return _decoded(self._request("GET", "/v1/indexes"), _Indexes).indexes

    def mistakes(self) -> dict[str, str]:
        """By unusable design document the reason."""
        return _decoded(self._request("GET", "/v1/designs"), _Designs).mistakes

    def starting(self) -> str:
        """Why the indexer has yet to learn which indexes there are; empty if it knows."""
        return _decoded(self._request("GET", "/v1/designs"), _Designs).starting

    def index(self, name: str) -> dict[str, Any]:
        """The status of the index `DESIGN/INDEX`."""
        return _decoded(self._request("GET", _path(name)), dict[str, Any])

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes of the indexer, what each keeps, and whether it answers the node that is asked;
        empty if the indexer is alone."""
        return _decoded(self._request("GET", "/v1/nodes"), _Nodes).nodes

    def status(self) -> dict[str, Any]:
        """The status of the indexer."""
        return _decoded(self._request("GET", "/v1/status"), dict[str, Any])

    # Scans.

    def scan(
        self,
        name: str,
        *,
        descending: bool = False,
        limit: int = 100,
        continuation: str = "",
        timestamps: bool = False,
        **options: Unpack[ScanOptions],
    ) -> IndexPage:
        """Some entries of the index `DESIGN/INDEX`.

        Args:
            name: The index.
            descending: Whether the highest comes first.
            limit: The most entries, up to 10,000.
            continuation: The continuation of the page before.
            timestamps: Whether to give how far each partition was.
            **options: Which entries, and how fresh.

        Raises:
            IndexerError: The indexer refused or failed; the code says why.
            BrokenError: The indexer cannot be reached, or did not answer.
            CredentialsError: The password is not to be had.
        """
        query = {
            "descending": descending,
            "limit": limit,
            "continuation": continuation,
            "timestamps": timestamps,
        }
        return self._scan(name, query, options, IndexPage)

    def scan_all(
        self, name: str, *, hold_s: float = HOLD_S_DEFAULT, **options: Any
    ) -> Iterator[IndexEntry]:
        """All entries, page by page, of one moment of the index.

        Args:
            name: The index.
            hold_s: The longest time between two pages, up to 60 s. With 0 each page is of a moment
                of its own, later than the last.
            **options: See `scan`.

        Raises:
            IndexerError: `moment_gone`: the next page was asked for too late, or the index has
                changed too much meanwhile; or another reason, see `scan`.
        """
        page = self.scan(name, hold_s=hold_s, **options)
        if hold_s:
            for chosen_by in ("consistency", "written"):
                options.pop(chosen_by, None)
        try:
            yield from page.entries
            while page.continuation:
                options |= {"continuation": page.continuation, "moment": page.moment}
                page = self.scan(name, hold_s=hold_s, **options)
                yield from page.entries
        finally:
            if page.moment:
                # It may be over already, or the indexer away: it lets it go by itself.
                with suppress(UprError):
                    self.release(page.moment)

    def release(self, moment: str) -> None:
        """Lets a moment go that the indexer holds.

        Raises:
            IndexerError: `moment_gone`: it does not hold it.
        """
        self._request("DELETE", f"/v1/moments/{_quoted(moment)}")

    def count(self, name: str, **options: Unpack[ScanOptions]) -> int:
        """How many entries there are; see `scan`. With `distinct`, how many different beginnings of
        keys."""
        count = self.summarize(name, count=True, **options).count
        if count is None:
            raise IndexerError("server_failed", "not an indexer's answer: it has no count")
        return count

    def summarize(
        self,
        name: str,
        *,
        count: bool = False,
        min_key: bool = False,
        max_key: bool = False,
        timestamps: bool = False,
        **options: Unpack[ScanOptions],
    ) -> IndexSummary:
        """Finds out about the entries of the index `DESIGN/INDEX` without reading them.

        Args:
            name: The index.
            count: Whether to count them.
            min_key: Whether to find the lowest key.
            max_key: Whether to find the highest key.
            timestamps: Whether to give how far each partition was.
            **options: Which entries, and how fresh.

        Raises:
            IndexerError: The indexer refused or failed; the code says why.
            BrokenError: The indexer cannot be reached, or did not answer.
        """
        query = {"count": count, "min": min_key, "max": max_key, "timestamps": timestamps}
        if not (count or min_key or max_key):
            raise ValueError("ask for at least one of count, min_key and max_key")
        return self._scan(name, query, options, IndexSummary)

    def explain(
        self,
        name: str,
        *,
        descending: bool = False,
        limit: int | None = None,
        continuation: str = "",
        count: bool = False,
        min_key: bool = False,
        max_key: bool = False,
        **options: Unpack[ScanOptions],
    ) -> dict[str, Any]:
        """Carries out a scan, and tells how: the ranges that were read, how many entries were
        looked at, how the index was as fresh as asked, and what was waited for.

        Args:
            name: The index.
            descending: See `scan`.
            limit: See `scan`; 100 by default. Not together with the following three.
            continuation: See `scan`.
            count: See `summarize`.
            min_key: See `summarize`.
            max_key: See `summarize`.
            **options: Which entries, and how fresh.

        Raises:
            IndexerError: The indexer refused or failed; the code says why.
            BrokenError: The indexer cannot be reached, or did not answer.
        """
        query = {
            "descending": descending,
            "limit": limit,
            "continuation": continuation,
            "count": count,
            "min": min_key,
            "max": max_key,
            "explain": True,
        }
        return self._scan(name, query, options, _Explained).explanation

    def _scan(self, name: str, query: dict[str, Any], options: ScanOptions, kind: type[T]) -> T:
        timeout_s = options.get("timeout_s", INDEXER_TIMEOUT_S)
        query |= {
            **_range(options),
            "distinct": options.get("distinct", 0),
            "consistency": options.get("consistency", "any"),
            "written": [
                {
                    "partition": result.partition,
                    "history_id": f"{result.history_id:016x}",
                    "seq": result.seq,
                }
                for result in options.get("written", ())
            ],
            "timeout_s": timeout_s,
            "hold_s": options.get("hold_s", 0.0),
            "moment": options.get("moment", ""),
        }
        if "ranges" in options:
            query["ranges"] = [_range(bounds) for bounds in options["ranges"]]
        body = msgspec.json.encode(query)
        return _decoded(self._request("POST", _path(name) + "/scan", body, timeout_s), kind)

    # The connection.

    def _request(
        self, method: str, path: str, body: bytes = b"", timeout_s: float = INDEXER_TIMEOUT_S
    ) -> bytes:
        connection = self._connection
        # The connection gives this to sockets that it makes; a socket that it has keeps its own.
        connection.timeout = timeout_s + ANSWER_SLACK_S
        reused = connection.sock is not None
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        try:
            try:
                return self._exchange(method, path, body)
            except ConnectionError:
                # The indexer closes idle connections, perhaps while this request was on its way.
                connection.close()
                if not reused:
                    raise
                return self._exchange(method, path, body)
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            # UnicodeError comes from the codec for host names.
            connection.close()
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> UprError:
        is_encrypted = isinstance(self._connection, http.client.HTTPSConnection)
        if is_encrypted and isinstance(error, ssl.SSLEOFError | http.client.RemoteDisconnected):
            # An indexer that does not accept the client's certificate says nothing.
            return BrokenError(
                f"the indexer at {self.url} closed the connection: if its setting tls_client_ca "
                "asks for a certificate, name one with the options cert and cert-key; otherwise "
                "see its setting tls_version_min"
            )
        if isinstance(error, ssl.SSLError):
            failure = explained_tls_error(error, is_server=False)
            return type(failure)(f"the indexer at {self.url}: {failure}")
        return BrokenError(f"the indexer at {self.url} does not answer: {error!s}")

    def _exchange(self, method: str, path: str, body: bytes) -> bytes:
        connection = self._connection
        if connection.sock is None:
            self._headers = _authorization(with_password(self._credentials))
        headers = {"Content-Type": "application/json"} if body else {}
        headers |= self._headers
        connection.request(method, path, body or None, headers)
        response = connection.getresponse()
        data = response.read()
        if response.status == HTTPStatus.UNAUTHORIZED:
            # The next request makes a new connection, and reads the password's file for it.
            connection.close()
        if response.status >= 400:
            raise _failure(response.status, data)
        return data


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _authorization(credentials: Credentials | None) -> dict[str, str]:
    if credentials is None:
        return {}
    pair = f"{credentials.user}:{credentials.password}".encode()
    return {"Authorization": f"Basic {b64encode(pair).decode()}"}


def _path(name: str) -> str:
    design, slash, index = name.partition("/")
    if not slash or not design or not index:
        raise IndexerError("no_index", f"{name!r} does not name an index; write DESIGN/INDEX")
    return f"/v1/indexes/{_quoted(design)}/{_quoted(index)}"


def _quoted(name: str) -> str:
    # A name that is not UTF-8 is malformed; the indexer says so.
    return quote(name, safe="", errors="replace")


def _range(bounds: IndexRange | ScanOptions) -> dict[str, Any]:
    return {
        "prefix": bounds.get("prefix"),
        "low": _bound(bounds.get("low")),
        "high": _bound(bounds.get("high")),
    }


def _bound(bound: Bound | None) -> dict[str, Any] | None:
    if bound is None:
        return None
    key, inclusive = bound if isinstance(bound, tuple) else (bound, True)
    return {"key": key, "inclusive": inclusive}


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IndexerError("server_failed", f"not an indexer's answer: {error}") from error


def _failure(status: int, data: bytes) -> IndexerError:
    try:
        failure = msgspec.json.decode(data, type=_Failures).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return IndexerError("server_failed", f"not an indexer's answer: HTTP {status}")
    return IndexerError(failure.code, failure.message, failure.place, failure.retry_after_s)
