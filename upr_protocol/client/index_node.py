"""One node of an indexer, over HTTP."""

from __future__ import annotations

import http.client
import ssl
from base64 import b64encode
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from upr_protocol.client.credentials import resolve_credentials
from upr_protocol.client.fork_check import ForkCheck
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.security import Credentials, Security, TlsSettings
from upr_protocol.transport import client_context, explained_tls_error

T = TypeVar("T")

PORT_DEFAULT: Final = 12080
"""Where an indexer listens unless it is told otherwise."""

LINE_BYTES_MAX: Final = 16 * 1024 * 1024
"""The longest line of an answer. The last one has some 50 bytes for each partition."""

ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""The longest answer. An indexer's longest ones have some 7 MB: the status of 256 indexes in 64
slices, with three copies of each."""

NO_INDEXERS_ANSWER: Final = "not an indexer's answer"
"""How the errors begin that tell of an answer of another server."""

_SUCCESSES: Final = (HTTPStatus.OK, HTTPStatus.NO_CONTENT)
"""What an indexer answers if it has done what was asked. Redirections come from other servers."""

LINES: Final = "application/x-ndjson"
"""How a client asks for the entries as lines."""


class IndexerError(UprError):
    """The indexer refused or failed.

    Attributes:
        code: The reason as a word: `log_in_needed`, `not_allowed`, `too_many_log_ins`,
            `bad_definition`, `bad_query`, `too_long`, `too_slow`, `no_index`, `building`,
            `overloaded`, `not_fresh`, `write_lost`, `moment_gone`, `slice_missing`, `not_my_slice`,
            `other_bucket`, `too_many_links`, `failed`, `server_failed`.
        place: Where the mistake is in the request; empty if there is none.
        retry_after_s: After how long to ask again; 0 if that does not help.
        nodes: The URLs of the indexer's nodes, where a node names them (`not_my_slice`).
    """

    nodes: tuple[str, ...] = ()

    def __init__(self, code: str, message: str, place: str = "", retry_after_s: float = 0) -> None:
        self.code = code
        self.place = place
        self.retry_after_s = retry_after_s
        super().__init__(message)


class _Failure(msgspec.Struct, frozen=True):
    code: str
    message: str
    place: str = ""
    retry_after_s: float = 0.0


class _Map(msgspec.Struct, frozen=True):
    nodes: tuple[str, ...] = ()


class _Failures(msgspec.Struct, frozen=True):
    error: _Failure
    map: _Map = _Map()


class IndexNode:
    """A connection to the node at `url`, which is made with the first request, and again after it
    was lost. The arguments and errors are those of `IndexClient`."""

    def __init__(self, url: str, security: Security) -> None:
        scheme, host, port = _split_url(url)
        if scheme == "http" and security.tls is not None:
            raise ValueError(
                f"{url!r} is not encrypted: an indexer that shows a certificate has a URL that "
                "begins with https://"
            )
        credentials = security.credentials
        if credentials is not None and scheme == "http" and not _is_loopback(host):
            raise ValueError(
                f"{url!r} is not encrypted, and whoever listens would read the password: give the "
                "indexer a certificate, and write https://"
            )
        if credentials is not None and ":" in credentials.user:
            raise ValueError(f"HTTP has no users with a colon in their name: {credentials.user!r}")
        self.url = url
        self._credentials = credentials
        self._headers: dict[str, str] = {}
        self._security = security
        self._fork_check = ForkCheck()
        self._connection = (
            http.client.HTTPConnection(host, port)
            if scheme == "http"
            else http.client.HTTPSConnection(
                host, port, context=client_context(security.tls or TlsSettings())
            )
        )

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def request(self, method: str, path: str, body: bytes, timeout_s: float) -> bytes:
        """What the node answers. It may be silent for `timeout_s`. The errors are those of
        `IndexClient.scan`."""
        connection = self._connection
        if self._fork_check.was_forked():
            connection.close()  # the parent goes on with it
        # The connection gives this to sockets that it makes; a socket that it has keeps its own.
        connection.timeout = timeout_s
        if method == "DELETE":
            # Sent again below, it could say that what it has removed was never there.
            connection.close()
        is_reused = connection.sock is not None
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        with self._translate_errors():
            try:
                return self._exchange(method, path, body)
            except ConnectionError:
                # The indexer closes idle connections, perhaps while this request was on its way.
                connection.close()
                if not is_reused:
                    raise
                return self._exchange(method, path, body)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            # UnicodeError comes from the codec for host names.
            self.close()
            raise self._explain_error(error) from error

    def lines(self, path: str, body: bytes, timeout_s: float) -> Generator[bytes, None, None]:
        """The lines of an answer, over a connection of their own, which ends with them. The answer
        has begun when this returns. `BrokenError` is raised, too, if the connection is lost while
        they are read."""
        node = IndexNode(self.url, self._security)
        lines = node._lines(path, body, timeout_s)
        next(lines)
        return lines

    def _lines(self, path: str, body: bytes, timeout_s: float) -> Generator[bytes, None, None]:
        """Gives an empty line when the answer begins."""
        with closing(self), self._translate_errors():
            self._connection.timeout = timeout_s
            response = self._begin("POST", path, body, {"Accept": LINES})
            if response.status not in _SUCCESSES:
                raise parse_failure(response.status, _whole_body(response))
            yield b""
            while line := response.readline(LINE_BYTES_MAX):
                yield line

    def _explain_error(self, error: Exception) -> UprError:
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
        if type(error) is http.client.BadStatusLine:  # what came may be anything, and is not shown
            return BrokenError(f"the server at {self.url} is no indexer: it does not speak HTTP")
        reason = getattr(error, "strerror", None) or error
        return BrokenError(f"the indexer at {self.url} does not answer: {reason}")

    def _begin(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        connection = self._connection
        if connection.sock is None:
            self._headers = _authorization(resolve_credentials(self._credentials))
        if body:
            headers |= {"Content-Type": "application/json"}
        connection.request(method, path, body or None, headers | self._headers)
        return connection.getresponse()

    def _exchange(self, method: str, path: str, body: bytes) -> bytes:
        response = self._begin(method, path, body, {})
        try:
            data = _whole_body(response)
        except IndexerError:
            # The rest of the answer is on its way.
            self.close()
            raise
        if response.status == HTTPStatus.UNAUTHORIZED:
            # The next request makes a new connection, and reads the password's file for it.
            self.close()
        if response.status not in _SUCCESSES:
            raise parse_failure(response.status, data)
        return data


def _whole_body(response: http.client.HTTPResponse) -> bytes:
    """The body of an answer.

    Raises:
        IndexerError: It is longer than `ANSWER_BYTES_MAX`.
        http.client.IncompleteRead: It was cut.
    """
    if response.length is None:
        # It comes in chunks, or ends with the connection.
        data = response.read(ANSWER_BYTES_MAX + 1)
        if len(data) <= ANSWER_BYTES_MAX:
            return data
    elif response.length <= ANSWER_BYTES_MAX:
        # With a number of bytes, `read` would not notice that the answer was cut.
        return response.read()
    raise IndexerError(
        "server_failed",
        f"{NO_INDEXERS_ANSWER}: it has more than {ANSWER_BYTES_MAX:,} bytes; check the URL",
    )


def _split_url(url: str) -> tuple[str, str, int]:
    """The scheme, the host and the port of an indexer's URL. Raises `ValueError` if it is none."""
    with suppress(ValueError):  # of a port that is none, or of brackets
        parts = urlsplit(url)
        host, port = parts.hostname, PORT_DEFAULT if parts.port is None else parts.port
        if parts.scheme in ("http", "https") and host and port and parts.path in ("", "/"):
            return parts.scheme, host, port
    raise ValueError(
        f"{url!r} is not an indexer's URL; write http://HOST:PORT or https://HOST:PORT"
    )


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


def parse_failure(status: int, data: bytes) -> IndexerError:
    """The error in an answer."""
    try:
        failures = msgspec.json.decode(data, type=_Failures)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return IndexerError("server_failed", f"{NO_INDEXERS_ANSWER}: HTTP {status}; check the URL")
    failure = failures.error
    error = IndexerError(failure.code, failure.message, failure.place, failure.retry_after_s)
    error.nodes = failures.map.nodes
    return error


def decode_answer(data: bytes, kind: type[T]) -> T:
    """An answer, or a line of one.

    Raises:
        IndexerError: It is not an indexer's answer.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IndexerError("server_failed", f"{NO_INDEXERS_ANSWER}: {error}") from error
