"""The description of the HTTP API, made from the types that it takes and gives."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from upr_server.indexer.answer import Answer
from upr_server.indexer.pure.definition import Design
from upr_server.indexer.query import Query
from upr_server.indexer.scanner import IndexStatus


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request failed.

    Attributes:
        code: A word for programs.
        message: A sentence for people.
        place: Where in the request the mistake is, if the request is wrong.
        retry_after_s: When to ask again, if that may help.
    """

    code: str
    message: str
    place: str = ""
    retry_after_s: float = 0.0


class Failures(msgspec.Struct, frozen=True):
    """The body of an error response."""

    error: Failure


_JSON: Final = "application/json"

LINES: Final = "application/x-ndjson"
"""What a client accepts that wants the entries as lines, each of which is JSON."""

_ALWAYS: Final = (401, 403, 429, 502)
"""How any request is answered that its client may not make, or while the server cannot say whether
the client may."""

_TYPES: Final = (Query, Answer, IndexStatus, Design, Failures)


def _parameters(*names: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]


def openapi() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    schemas, components = msgspec.json.schema_components(
        _TYPES, ref_template="#/components/schemas/{name}"
    )
    schema_of: dict[Any, Any] = dict(zip(_TYPES, schemas, strict=True))
    failures = {"description": "Why not", "content": {_JSON: {"schema": schema_of[Failures]}}}

    def operation(
        summary: str, schema: Any = None, *, body: Any = None, statuses: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        answer: dict[str, Any] = {"description": summary}
        if schema is not None:
            answer["content"] = {_JSON: {"schema": schema}}
        answers = {"204" if schema is None else "200": answer}
        described = {
            "summary": summary,
            "responses": answers
            | {str(status): failures for status in sorted({*_ALWAYS, *statuses})},
        }
        if body is not None:
            described["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
        return described

    anything = {"type": "object"}
    index = _parameters("design", "index")
    paths: dict[str, Any] = {
        "/v1/status": {"get": operation("How the indexer does", anything)},
        "/v1/nodes": {"get": operation("Which node keeps what, and which answer", anything)},
        "/v1/designs": {"get": operation("The design documents, and their mistakes", anything)},
        "/v1/designs/{design}": {
            "parameters": _parameters("design"),
            "put": operation(
                "Write a design document",
                schema_of[Design],
                body=anything,
                statuses=(400, 408, 413),
            ),
            "delete": operation("Drop a design document", statuses=(400, 404)),
        },
        "/v1/indexes": {
            "get": operation(
                "The indexes",
                {
                    "type": "object",
                    "properties": {"indexes": {"type": "array", "items": schema_of[IndexStatus]}},
                },
            )
        },
        "/v1/indexes/{design}/{index}": {
            "parameters": index,
            "get": operation("How an index does", schema_of[IndexStatus], statuses=(404,)),
        },
        "/v1/indexes/{design}/{index}/scan": {
            "parameters": index,
            "post": operation(
                "Scan an index",
                schema_of[Answer],
                body=schema_of[Query],
                statuses=(400, 404, 408, 409, 410, 413, 503, 504),
            ),
        },
        "/v1/moments/{moment}": {
            "parameters": _parameters("moment"),
            "delete": operation("Release a moment", statuses=(410,)),
        },
    }
    lines = {"schema": {"type": "string"}, "example": '{"key":["BOEING"],"id":"N1"}\n{"end":{}}\n'}
    paths["/v1/indexes/{design}/{index}/scan"]["post"]["responses"]["200"]["content"][LINES] = lines
    return {
        "openapi": "3.1.0",
        "info": {"title": "upr-indexer", "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }
