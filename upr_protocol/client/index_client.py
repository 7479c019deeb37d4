"""Asking an indexer: a client for its HTTP API, for programs that block."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import msgspec

from upr_protocol.client.core.results import WriteResult
from upr_protocol.client.index_lines import IndexEntry, IndexLines, IndexPage
from upr_protocol.client.index_node import (
    NO_INDEXERS_ANSWER,
    IndexerError,
    IndexNode,
    decode_answer,
)
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.security import UNPROTECTED, Security

T = TypeVar("T")

INDEXER_TIMEOUT_S: Final = 10.0
"""How long a scan may wait by default for the index to be as fresh as asked."""

HOLD_S_DEFAULT: Final = 60.0
"""How long the indexer holds the moment of a page for the next one."""

ANSWER_SLACK_S: Final = 30.0
"""How much longer an answer may take before the connection counts as lost."""

NODE_SLACK_S: Final = 5.0
"""How much longer, where another node can be asked then."""

DESIGN_BYTES_MAX: Final = 1024 * 1024
"""The longest design document that an indexer takes."""

NODES_MAX: Final = 64
"""How many nodes a client knows of at most. Otherwise a node that names others without end would
make it ask all of them."""

DEPTH_MAX: Final = 100
"""How deep lists in a key are looked through. The indexer takes fewer."""

_OTHER_NODE_CODES: Final = frozenset({"slice_missing", "not_my_slice"})
"""Codes of errors that another node may not have."""

Key = Sequence[Any]
"""The parts of a key: null, booleans, finite numbers, strings, and lists of these."""

Bound = Key | tuple[Key, bool]
"""An end of a range: a key, or its first parts. A pair of a key and False excludes what begins with
the key."""


class IndexRange(TypedDict, total=False):
    """A range of an index; or the first parts of the keys to find, or whole keys, as `prefix`."""

    prefix: Key | None
    low: Bound | None
    high: Bound | None


class ScanSelection(IndexRange, total=False):
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


class PageOptions(ScanSelection, total=False):
    """Which entries of an index, how fresh, and how many of them in which order.

    Attributes:
        descending: Whether the highest comes first.
        limit: The most entries. By default 100, and at most 10,000; as lines all by default.
        continuation: The continuation of the page before.
        timestamps: Whether to give how far each partition was.
    """

    descending: bool
    limit: int | None
    continuation: str
    timestamps: bool


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


class _Explanation(msgspec.Struct, frozen=True):
    explanation: dict[str, Any]


class _Indexes(msgspec.Struct, frozen=True):
    indexes: list[dict[str, Any]]


class _Nodes(msgspec.Struct, frozen=True):
    nodes: list[dict[str, Any]]


class _Designs(msgspec.Struct, frozen=True):
    mistakes: dict[str, str]
    starting: str = ""


class IndexClient:
    """A client of an indexer. For one thread.

    It connects with the first request, and again after a lost connection. Use it as a context, or
    call `close`.

    Of an indexer of several nodes it asks the one that answered last. If that node does not answer
    within the timeout and `NODE_SLACK_S`, or lacks a slice (`slice_missing`), it asks the others,
    each once. Further pages of a moment may come from any of them.

    Args:
        url: For instance `http://127.0.0.1:12080`, or `https://…`; several nodes with commas
            between.
        security: For `https://`, which certificates count; by default those whose authorities the
            system trusts. Its credentials are sent with each request; a file with the password is
            read at each new connection, and after a refused log-in.

    Raises:
        ValueError: The URL is malformed, or not encrypted though there are TLS settings, or though
            a password would go to another machine; or the user's name has a colon.
        TlsError: A file that `security` names cannot be used.
    """

    def __init__(self, url: str, security: Security = UNPROTECTED) -> None:
        self.url = url
        self._security = security
        self._nodes = [IndexNode(part.strip(), security) for part in url.split(",")]
        """The one that answered last comes first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        for node in self._nodes:
            node.close()

    # Indexes.

    def create(self, design: str, indexes: object) -> None:
        """Writes a design document: `{"indexes": {NAME: {"key": [EXPRESSION, …], …}}}`, as JSON or
        as what JSON can be made of.

        Raises:
            IndexerError: `bad_definition`, with the place of the mistake.
        """
        body = indexes if isinstance(indexes, bytes) else msgspec.json.encode(indexes)
        answer = self._request("PUT", f"/v1/designs/{_quoted(design)}", body)
        # Another server may answer anything to anybody.
        decode_answer(answer, dict[str, Any])

    def drop(self, design: str) -> None:
        """Removes a design document and its indexes.

        Raises:
            IndexerError: `no_index`: there is no such document.
        """
        # If the connection was lost at the first attempt, the document may be gone already.
        answer = self._request("DELETE", f"/v1/designs/{_quoted(design)}", done_code="no_index")
        if answer:
            raise IndexerError("server_failed", f"{NO_INDEXERS_ANSWER}: it has a body")

    def indexes(self) -> list[dict[str, Any]]:
        """Every index with its status."""
        return decode_answer(self._request("GET", "/v1/indexes"), _Indexes).indexes

    def design_mistakes(self) -> dict[str, str]:
        """By unusable design document the reason."""
        return decode_answer(self._request("GET", "/v1/designs"), _Designs).mistakes

    def not_ready_reason(self) -> str:
        """Why the indexer has yet to learn which indexes there are; empty if it knows."""
        return decode_answer(self._request("GET", "/v1/designs"), _Designs).starting

    def index_status(self, name: str) -> dict[str, Any]:
        """The status of the index `DESIGN/INDEX`."""
        return decode_answer(self._request("GET", _path(name)), dict[str, Any])

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes of the indexer, what each keeps, and whether it answers the node that is asked;
        empty if the indexer is alone."""
        return decode_answer(self._request("GET", "/v1/nodes"), _Nodes).nodes

    def status(self) -> dict[str, Any]:
        """The status of the indexer."""
        return decode_answer(self._request("GET", "/v1/status"), dict[str, Any])

    # Scans.

    def scan(self, name: str, **options: Unpack[PageOptions]) -> IndexPage:
        """Some entries of the index `DESIGN/INDEX`.

        Raises:
            IndexerError: The indexer refused or failed; the code says why.
            BrokenError: The indexer cannot be reached, or did not answer.
            CredentialsError: The password is not to be had.
        """
        return self._scan(name, {}, options, IndexPage)

    def scan_all(
        self, name: str, *, hold_s: float = HOLD_S_DEFAULT, **options: Any
    ) -> Generator[IndexEntry, None, None]:
        """All entries, page by page, of one moment of the index. Closing this lets the moment go.

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

    def stream(self, name: str, **options: Unpack[PageOptions]) -> IndexLines:
        """All entries, of one moment of the index, as lines of one answer. The indexer reads them
        as this iterator is read, and holds the moment meanwhile. It has a connection of its own, so
        the client can ask other things beside it. The timestamps come as `end.timestamps`.

        Raises:
            IndexerError: The indexer refused or failed; the code says why. While it is read, too.
            BrokenError: The indexer cannot be reached, or did not answer. While it is read, the
                answer was cut: begin again, at any node.
        """
        timeout_s = options.get("timeout_s", INDEXER_TIMEOUT_S)
        body = self._query({}, options)
        path = _path(name) + "/scan"

        def begin(node: IndexNode, slack_s: float) -> IndexLines:
            return IndexLines(node.lines(path, body, timeout_s + slack_s))

        return self._ask_nodes(begin)

    def release(self, moment: str) -> None:
        """Lets a moment go that the indexer holds.

        Raises:
            IndexerError: `moment_gone`: it does not hold it.
        """
        self._request("DELETE", f"/v1/moments/{_quoted(moment)}")

    def count(self, name: str, **options: Unpack[ScanSelection]) -> int:
        """How many entries there are; see `scan`. With `distinct`, how many different beginnings of
        keys."""
        count = self.summarize(name, count=True, **options).count
        if count is None:
            raise IndexerError("server_failed", f"{NO_INDEXERS_ANSWER}: it has no count")
        return count

    def summarize(
        self,
        name: str,
        *,
        count: bool = False,
        min_key: bool = False,
        max_key: bool = False,
        timestamps: bool = False,
        **options: Unpack[ScanSelection],
    ) -> IndexSummary:
        """Finds out about the entries of the index `DESIGN/INDEX` without reading them. The errors
        are those of `scan`."""
        query = {"count": count, "min": min_key, "max": max_key, "timestamps": timestamps}
        if not (count or min_key or max_key):
            raise ValueError("ask for at least one of count, min_key and max_key")
        return self._scan(name, query, options, IndexSummary)

    def explain(
        self,
        name: str,
        *,
        count: bool = False,
        min_key: bool = False,
        max_key: bool = False,
        **options: Unpack[PageOptions],
    ) -> dict[str, Any]:
        """Carries out a scan, and tells how: the ranges that were read, how many entries were
        looked at, how the index was as fresh as asked, and what was waited for. The arguments and
        errors are those of `scan` and `summarize`; the latter's arguments not together with
        `limit`."""
        query = {"count": count, "min": min_key, "max": max_key, "explain": True}
        return self._scan(name, query, options, _Explanation).explanation

    def _scan(
        self, name: str, query: dict[str, Any], options: PageOptions | ScanSelection, kind: type[T]
    ) -> T:
        timeout_s = options.get("timeout_s", INDEXER_TIMEOUT_S)
        body = self._query(query, options)
        return decode_answer(self._request("POST", _path(name) + "/scan", body, timeout_s), kind)

    def _query(self, query: dict[str, Any], options: PageOptions | ScanSelection) -> bytes:
        """A query, as it is sent."""
        query = {"timeout_s": INDEXER_TIMEOUT_S, **options, **_range(options), **query}
        if "ranges" in options:
            query["ranges"] = [
                _range(bounds, f"ranges[{place}].")
                for place, bounds in enumerate(options["ranges"])
            ]
        if "written" in options:
            # An index that has a change has those before it. A query has room for 3,000.
            newest: dict[tuple[int, int], int] = {}
            for result in options["written"]:
                history = result.partition, result.history_id
                newest[history] = max(result.seq, newest.get(history, 0))
            query["written"] = [
                {"partition": partition, "history_id": f"{history_id:016x}", "seq": seq}
                for (partition, history_id), seq in newest.items()
            ]
        return msgspec.json.encode(query)

    # The nodes.

    def _request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        timeout_s: float = INDEXER_TIMEOUT_S,
        done_code: str = "",
    ) -> bytes:
        """What the indexer answers. An error with `done_code`, after a lost connection, says that
        the request has been carried out."""
        was_lost = False

        def ask(node: IndexNode, slack_s: float) -> bytes:
            nonlocal was_lost
            try:
                return node.request(method, path, body, timeout_s + slack_s)
            except BrokenError:
                was_lost = True
                raise
            except IndexerError as error:
                if was_lost and error.code == done_code:
                    return b""
                raise

        return self._ask_nodes(ask)

    def _ask_nodes(self, ask: Callable[[IndexNode, float], T]) -> T:
        """What the first node gives that can."""
        failures: list[BrokenError | IndexerError] = []
        asked_urls: set[str] = set()
        while (node := next((n for n in self._nodes if n.url not in asked_urls), None)) is not None:
            asked_urls.add(node.url)
            is_last = len(asked_urls) == len(self._nodes)
            try:
                answer = ask(node, ANSWER_SLACK_S if is_last else NODE_SLACK_S)
            except BrokenError as error:
                failures.append(error)
            except IndexerError as error:
                if error.code not in _OTHER_NODE_CODES:
                    raise
                failures.append(error)
                self._learn(error.nodes)
            else:
                self._nodes.sort(key=lambda known_node: known_node is not node)
                return answer
        raise _failure_of(failures)

    def _learn(self, urls: Iterable[str]) -> None:
        """Takes the nodes into account that a node names which is asked for what it lacks."""
        known_urls = {node.url for node in self._nodes}
        for url in urls:
            if len(self._nodes) >= NODES_MAX:
                return
            if url not in known_urls:
                known_urls.add(url)
                # A node whose password would go over the wire in the clear is left out.
                with suppress(ValueError):
                    self._nodes.append(IndexNode(url, self._security))


def _path(name: str) -> str:
    design, slash, index = name.partition("/")
    if not slash or not design or not index:
        raise IndexerError("no_index", f"{name!r} does not name an index; write DESIGN/INDEX")
    return f"/v1/indexes/{_quoted(design)}/{_quoted(index)}"


def _quoted(name: str) -> str:
    # A name that is not UTF-8 is malformed; the indexer says so.
    return quote(name, safe="", errors="replace")


def _range(bounds: IndexRange | ScanSelection, place: str = "") -> dict[str, Any]:
    """A range, as it is sent. `place` stands before the names of its fields in errors."""
    prefix = bounds.get("prefix")
    _check_key(f"{place}prefix", prefix)
    return {
        "prefix": prefix,
        "low": _bound(f"{place}low.key", bounds.get("low")),
        "high": _bound(f"{place}high.key", bounds.get("high")),
    }


def _bound(place: str, bound: Bound | None) -> dict[str, Any] | None:
    if bound is None:
        return None
    key, inclusive = bound if _is_pair(bound) else (bound, True)
    _check_key(place, key)
    return {"key": key, "inclusive": inclusive}


def _is_pair(bound: Bound) -> bool:
    """Whether an end of a range says if it is inclusive. A key may be a tuple, too."""
    return (
        isinstance(bound, tuple)
        and len(bound) == 2
        and isinstance(bound[0], list | tuple)
        and isinstance(bound[1], bool)
    )


def _check_key(place: str, value: object, depth: int = 0) -> None:
    """Refuses values that JSON does not have. Encoded as JSON, infinity and NaN would become null,
    and bytes, decimals and times would become strings: the scan would select something else."""
    if isinstance(value, list | tuple):
        if depth == DEPTH_MAX:
            raise IndexerError("bad_query", f"{place}: such deep lists cannot be keys", place)
        for element in value:
            _check_key(place, element, depth + 1)
    elif not (value is None or isinstance(value, bool | int | float | str)) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        raise IndexerError(
            "bad_query",
            f"{place}: {value!r} cannot be a key; use None, booleans, finite numbers, strings, and "
            "lists of these",
            place,
        )


def _failure_of(failures: Sequence[BrokenError | IndexerError]) -> BrokenError | IndexerError:
    """The error where no node can answer: that of a node which said something, if there is one."""
    refusals = [failure for failure in failures if isinstance(failure, IndexerError)]
    if refusals or len(failures) == 1:
        return (refusals or failures)[0]
    return BrokenError("; ".join(map(str, failures)))
