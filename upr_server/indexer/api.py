"""The indexer over HTTP: JSON in, JSON out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack, aclosing
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
import structlog
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from upr_protocol.client import DESIGN_BYTES_MAX
from upr_protocol.concurrency import background_nursery
from upr_protocol.errors import BrokenError, ServerError, Status, UprError
from upr_protocol.users import Right
from upr_server.indexer.bucket_histories import OtherBucketError
from upr_server.indexer.definitions import NoIndexError
from upr_server.indexer.entry_stream import EntryStream
from upr_server.indexer.freshness import WriteLostError
from upr_server.indexer.http_access import (
    NODE_VERDICT_S,
    HttpAccess,
    LogInNeededError,
    NotAllowedError,
    TooManyLogInsError,
)
from upr_server.indexer.indexer import Indexer
from upr_server.indexer.link_limit import LinkLimit, TooManyLinksError
from upr_server.indexer.membership import PATH, NotMySliceError
from upr_server.indexer.moments import MomentGoneError
from upr_server.indexer.node_links import serve_link
from upr_server.indexer.openapi import LINES, Failure, Failures, openapi
from upr_server.indexer.pool import PIECE_BYTES, OverloadedError
from upr_server.indexer.pure.definition import DefinitionError, IndexName
from upr_server.indexer.pure.node_map import NodeMap
from upr_server.indexer.query import Query, QueryError, read_query
from upr_server.indexer.replicated_slice import ReplicatedSlice
from upr_server.indexer.scanner import Scanner
from upr_server.indexer.slice_scanner import BuildingError, IndexFailedError, NotFreshError
from upr_server.indexer.slices import SliceMissingError
from upr_server.indexer.web_socket import accept_web_socket, refuse_web_socket
from upr_server.runtime import network_of

log = structlog.get_logger(__name__)

QUERY_BODY_BYTES_MAX: Final = 256 * 1024
"""The longest query: room for the newest change of each partition three times, or for a thousand
ranges. Where queries of 1 MiB were allowed, to read one of them held the event loop for 33 ms."""

READ_BYTES_MAX: Final = 16 * 1024 * 1024
"""A body that is too long is read up to here, and thrown away: a client that is cut off while it
sends does not read why."""

BODY_S: Final = 30.0
"""How long a request's body may take to come."""

SCAN_PATH: Final = "/scan"
"""What stands behind the path of an index to scan it."""

_STATUSES: Final[tuple[tuple[type[UprError], int, str], ...]] = (
    (LogInNeededError, 401, "log_in_needed"),
    (NotAllowedError, 403, "not_allowed"),
    (TooManyLogInsError, 429, "too_many_log_ins"),
    (TooManyLinksError, 429, "too_many_links"),
    (OtherBucketError, 421, "other_bucket"),
    (DefinitionError, 400, "bad_definition"),
    (QueryError, 400, "bad_query"),
    (NoIndexError, 404, "no_index"),
    (WriteLostError, 409, "write_lost"),
    (MomentGoneError, 410, "moment_gone"),
    (IndexFailedError, 409, "failed"),
    (BuildingError, 503, "building"),
    (OverloadedError, 503, "overloaded"),
    (SliceMissingError, 503, "slice_missing"),
    (NotFreshError, 504, "not_fresh"),
    (UprError, 502, "server_failed"),
)


class _TooLongError(UprError):
    """The body of a request is too long."""


class _TooSlowError(UprError):
    """The body of a request has not come in time."""


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _failure(error: UprError) -> Response:
    if isinstance(error, _TooLongError):
        return _json(Failures(Failure("too_long", str(error))), 413)
    if isinstance(error, _TooSlowError):
        return _json(Failures(Failure("too_slow", str(error))), 408)
    if isinstance(error, NotMySliceError):
        failure = Failure("not_my_slice", str(error))
        return _json({"error": failure, "map": error.node_map}, 421)
    status, code = next((s, c) for kind, s, c in _STATUSES if isinstance(error, kind))
    if isinstance(error, ServerError) and error.status is Status.NOT_ALLOWED:
        # The server checks who writes a definition.
        status, code = 403, "not_allowed"
    retry_after_s: float = getattr(error, "retry_after_s", 0.0)
    headers = {"Retry-After": f"{retry_after_s:.0f}"} if retry_after_s else {}
    if status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="upr-indexer", charset="UTF-8"'
    place = getattr(error, "place", "")
    return _json(Failures(Failure(code, str(error), place, retry_after_s)), status, headers)


async def _answer_no_route(request: Request, error: Exception) -> Response:
    """Answers a request that no route takes."""
    # Starlette would call what is not async in a thread.
    await trio.lowlevel.checkpoint()
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, dict(error.headers or {})
    if error.status_code == 405:
        sentence = f"{path} takes {headers.get('Allow', 'other methods')}, not {request.method}"
        failure = Failure("wrong_method", sentence)
    else:
        failure = Failure("no_path", f"there is nothing at {path}; see /openapi.json")
    return _json(Failures(failure), error.status_code, headers)


ResponseT = TypeVar("ResponseT", bound=Response | None)


def _with_error_responses(
    handler: Callable[[Request], Awaitable[ResponseT]],
) -> Callable[[Request], Awaitable[ResponseT | Response]]:
    """Turns what a handler raises into an error response."""

    async def answer(request: Request) -> ResponseT | Response:
        try:
            return await handler(request)
        except UprError as error:
            return _failure(error)
        except BaseExceptionGroup as group:
            # A connection to the server ended for several reasons at once.
            _, unexpected = group.split(UprError)
            if unexpected is not None:
                raise
            return _failure(UprError("; ".join(str(reason) for reason in group.exceptions)))

    return answer


def _with_access_check(
    handler: Callable[[Request], Awaitable[ResponseT]],
    access: HttpAccess,
    needed_right: Right | None,
) -> Callable[[Request], Awaitable[ResponseT | Response]]:
    """Calls a handler for those who have a right, or for everybody; the handler then has the bucket
    with the credentials of the request's user as `request.state.bucket`."""

    async def handle_if_allowed(request: Request) -> ResponseT:
        if needed_right is not None:
            host, port = request.client or ("", 0)
            authorization = request.headers.get("authorization", "")
            request.state.bucket = await access.check(needed_right, authorization, f"{host}:{port}")
        return await handler(request)

    return _with_error_responses(handle_if_allowed)


async def _body(request: Request, nbytes_max: int) -> bytes:
    """The body of a request.

    Raises:
        _TooLongError: It has more bytes.
        _TooSlowError: It has not come within `BODY_S`.
        BrokenError: The client has gone.
    """
    try:
        with trio.move_on_after(BODY_S):
            return await _read_body(request, nbytes_max)
    except ClientDisconnect as error:
        # Nobody reads the answer. As a fault of ours it would be logged, with a traceback.
        raise BrokenError("the client has gone before its request was whole") from error
    raise _TooSlowError(f"the request's body has not come within {BODY_S:g} s; send it again")


async def _read_body(request: Request, nbytes_max: int) -> bytes:
    body, nbytes = bytearray(), 0
    async with aclosing(request.stream()) as stream:
        async for part in stream:
            nbytes += len(part)
            if nbytes <= nbytes_max:
                body += part
            elif nbytes > READ_BYTES_MAX:
                break
    if nbytes > nbytes_max:
        raise _TooLongError(f"the body of this request has at most {nbytes_max:,} bytes")
    return bytes(body)


class _Handlers:
    def __init__(self, indexer: Indexer) -> None:
        self._indexer = indexer
        self._designs = indexer.designs
        self._scanner = indexer.scanner

    async def status(self, _request: Request) -> Response:
        return _json(await self._indexer.statistics())

    async def nodes(self, _request: Request) -> Response:
        return _json(self._indexer.nodes())

    async def designs(self, _request: Request) -> Response:
        indexes: dict[str, list[str]] = {}
        for name in self._designs.names():
            indexes.setdefault(name.design, []).append(name.index)
        mistakes, starting = dict(self._designs.mistakes), ""
        try:
            self._designs.check_known()
        except SliceMissingError as error:
            starting = str(error)
        return _json({"designs": indexes, "mistakes": mistakes, "starting": starting})

    async def create(self, request: Request) -> Response:
        name = request.path_params["design"]
        text = await _body(request, DESIGN_BYTES_MAX)
        design = await self._designs.create(name, text, request.state.bucket)
        return _json(design)

    async def drop(self, request: Request) -> Response:
        await self._designs.drop(request.path_params["design"], request.state.bucket)
        return Response(status_code=204)

    async def indexes(self, _request: Request) -> Response:
        return _json({"indexes": await self._scanner.statuses()})

    async def index(self, request: Request) -> Response:
        name = _name(request)
        if name.index.endswith(SCAN_PATH):
            # The router would prefer another route that has the path to one that has the method.
            raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "POST"})
        return _json(await self._scanner.status(name))

    async def release(self, request: Request) -> Response:
        await self._scanner.release(request.path_params["moment"])
        return Response(status_code=204)

    async def openapi(self, _request: Request) -> Response:
        return _json(openapi())


class _Scan:
    """Scans, as an ASGI application: a scan holds its memory until its answer is sent."""

    def __init__(self, scanner: Scanner, access: HttpAccess) -> None:
        self._scanner = scanner
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        scan = _with_access_check(
            partial(self._scan, receive=receive, send=send), self._access, Right.READ
        )
        response = await scan(request)
        if response is not None:
            await response(scope, receive, send)

    async def _scan(self, request: Request, receive: Receive, send: Send) -> None:
        body = await _body(request, QUERY_BODY_BYTES_MAX)
        query = read_query(body or b"{}")
        with trio.CancelScope() as scope:
            async with background_nursery() as nursery:
                nursery.start_soon(_cancel_when_gone, receive, scope)
                if LINES in request.headers.get("accept", ""):
                    await self._stream(_name(request), query, send)
                else:
                    await self._answer(_name(request), query, send)
        if not scope.cancelled_caught:
            # Outside: the server takes the end of the answer for the client's going.
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _answer(self, name: IndexName, query: Query, send: Send) -> None:
        async with self._scanner.scan(name, query) as answer:
            headers = [(b"content-type", b"application/json")]
            pieces = answer.pieces()
            if answer.nbytes < PIECE_BYTES:
                # Made here: to go through a thread takes longer. With its length, the client need
                # not wait for the end.
                body = b"".join(pieces)
                headers.append((b"content-length", b"%d" % len(body)))
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": body, "more_body": True})
                return
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            # Each piece is sent before the next one is made.
            while (piece := await trio.to_thread.run_sync(next, pieces, None)) is not None:
                await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _stream(self, name: IndexName, query: Query, send: Send) -> None:
        """Sends all entries as lines. An error after the first of them is the last line."""
        has_begun = False

        async def send_piece(piece: bytes) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                headers = [(b"content-type", LINES.encode())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": piece, "more_body": True})

        try:
            await EntryStream(self._scanner, name, query).run(send_piece)
        except UprError as error:
            if not has_begun:
                raise
            await send_piece(bytes(_failure(error).body) + b"\n")


async def _cancel_when_gone(receive: Receive, scope: trio.CancelScope) -> None:
    """Cancels a scan when the client has gone: nobody reads the answer, nor lets its moment go."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


class _Link:
    """Links of other nodes to a slice of this one, as an ASGI application for web sockets."""

    def __init__(self, indexer: Indexer, access: HttpAccess) -> None:
        self._indexer = indexer
        self._access = access
        membership = indexer.membership
        self._limit = LinkLimit(0 if membership is None else membership.links_max)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        with ExitStack() as stack:
            try:
                slice_ = await self._requested_slice(socket)
                stack.enter_context(self._limit.link_of(network_of(_peer(socket))))
            except UprError as error:
                response = _failure(error)
                await refuse_web_socket(
                    scope, receive, send, response.status_code, bytes(response.body)
                )
                return
            stream = await accept_web_socket(receive, send)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_when_refused, socket, nursery.cancel_scope)
                await serve_link(stream, slice_, self._indexer.pool)
                nursery.cancel_scope.cancel()

    async def _check(self, socket: WebSocket) -> None:
        """Checks the node that asks, and what it asks for. Raises the errors of
        `_requested_slice`."""
        authorization = socket.headers.get("authorization", "")
        await self._access.check_node(authorization, _peer(socket))
        membership = self._indexer.membership
        if membership is None:
            raise NotMySliceError(
                NodeMap((), len(self._indexer.holders), 0),
                "this indexer is alone: start it with --nodes, as the others",
            )
        query = socket.query_params
        index: int = socket.path_params["index"]
        await membership.check(index, query.get("map", ""), query.get("bucket", ""))

    async def _end_when_refused(self, socket: WebSocket, scope: trio.CancelScope) -> None:
        """Ends a link when its user has lost a right, or has another password, or when the server
        turns out to have another bucket."""
        while True:
            await trio.sleep(NODE_VERDICT_S)
            try:
                await self._check(socket)
            except UprError as error:
                log.warning("a node's link ends", reason=str(error))
                scope.cancel()

    async def _requested_slice(self, socket: WebSocket) -> ReplicatedSlice:
        """The slice that is asked for.

        Raises:
            LogInNeededError: See `HttpAccess.check_node`.
            NotAllowedError: Likewise; or a browser asks, for some page.
            NotMySliceError: It is not kept here, or the indexer is alone.
            OtherBucketError: See `Membership.check`.
        """
        if "origin" in socket.headers:
            raise NotAllowedError("links are for nodes of the indexer, not for pages of a browser")
        await self._check(socket)
        slice_ = self._indexer.holders[socket.path_params["index"]]
        assert isinstance(slice_, ReplicatedSlice)
        return slice_


def _peer(socket: WebSocket) -> str:
    host, port = socket.client or ("", 0)
    return f"{host}:{port}"


def _name(request: Request) -> IndexName:
    parts: dict[str, Any] = request.path_params
    return IndexName(parts["design"], parts["index"])


def application(indexer: Indexer, access: HttpAccess) -> Starlette:
    """The API of `indexer` as an ASGI application.

    Args:
        indexer: What answers.
        access: Says who may ask for what.
    """
    handlers = _Handlers(indexer)

    def route(
        method: str, path: str, needed_right: Right | None, handler: Callable[[Request], Any]
    ) -> Route:
        return Route(path, _with_access_check(handler, access, needed_right), methods=[method])

    # A name with a slash has no index; it is refused with a sentence, as it matches a route.
    design, index = "/v1/designs/{design:path}", "/v1/indexes/{design}/{index:path}"
    return Starlette(
        routes=[
            route("GET", "/openapi.json", None, handlers.openapi),
            route("GET", "/v1/status", Right.READ, handlers.status),
            route("GET", "/v1/nodes", Right.READ, handlers.nodes),
            route("GET", "/v1/designs", Right.READ, handlers.designs),
            route("PUT", design, Right.INDEX, handlers.create),
            route("DELETE", design, Right.INDEX, handlers.drop),
            route("GET", "/v1/indexes", Right.READ, handlers.indexes),
            # Before the index: of routes that have the path, the first names the methods.
            Route(index + SCAN_PATH, _Scan(indexer.scanner, access), methods=["POST"]),
            route("GET", index, Right.READ, handlers.index),
            route("DELETE", "/v1/moments/{moment}", Right.READ, handlers.release),
            WebSocketRoute(PATH, _Link(indexer, access)),
        ],
        exception_handlers={HTTPException: _answer_no_route},
    )
