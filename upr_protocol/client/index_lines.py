"""Entries of an index, and an answer of an indexer as lines."""

from __future__ import annotations

from collections.abc import Generator
from http import HTTPStatus
from typing import Any, Self

import msgspec

from upr_protocol.client.index_node import decode_answer, parse_failure
from upr_protocol.errors import BrokenError


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
        continuation: Pass it to `scan` to continue after the entries; empty at the end.
        timestamps: By partition its history and sequence number then, if asked for.
        moment: Names the moment, if it is held: pass it to `scan` for pages of the same moment.
    """

    entries: list[IndexEntry] = []
    continuation: str = ""
    timestamps: dict[int, tuple[str, int]] = {}
    moment: str = ""


class _End(msgspec.Struct, frozen=True):
    end: IndexPage


class IndexLines:
    """The entries of an answer as lines, as they come; `IndexClient.stream` gives it. Iterate over
    it, and use it as a context, or call `close`, if you may stop before its end. After the last
    entry, `end` has the timestamps, the continuation if the limit was reached, and the moment if it
    is held."""

    def __init__(self, lines: Generator[bytes, None, None]) -> None:
        self._lines = lines
        self.end: IndexPage | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; the indexer reads no further."""
        self._lines.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> IndexEntry:
        """The next entry.

        Raises:
            IndexerError: The indexer could not go on.
            BrokenError: The answer was cut.
        """
        if self.end is not None:
            raise StopIteration
        line = next(self._lines, b"")
        if line.startswith(b'{"key"') and line.endswith(b"\n"):
            return decode_answer(line, IndexEntry)
        self.close()
        if not line.endswith(b"\n"):
            raise BrokenError("the answer of the indexer was cut; ask again, at any node")
        if line.startswith(b'{"error"'):
            raise parse_failure(HTTPStatus.OK, line)
        self.end = decode_answer(line, _End).end
        raise StopIteration
