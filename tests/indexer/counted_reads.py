"""Counts what an index reads, where it meets LMDB."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from upr_server.indexer.index_file import IndexFile

SEARCHES = frozenset({"set_range", "first", "last"})
"""What finds a place in a tree. `last` stands in for a search that has found nothing, and does not
count behind one."""


class ReadCounts:
    """What was read.

    Attributes:
        searches: How often a cursor was placed.
        entries: How many keys cursors gave.
        values: How many values were asked for by their key.
    """

    def __init__(self) -> None:
        self.searches = self.entries = self.values = 0


class _Cursor:
    def __init__(self, cursor: Any, counts: ReadCounts) -> None:
        self._cursor = cursor
        self._counts = counts
        self._is_searching = False

    def __enter__(self) -> _Cursor:
        self._cursor.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._cursor.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cursor, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if name in SEARCHES and not (name == "last" and self._is_searching):
                self._counts.searches += 1
            self._is_searching = name == "set_range"
            result = method(*arguments, **options)
            return self._counted(result) if name in ("iternext", "iterprev") else result

        return call

    def _counted(self, keys: Iterator[bytes]) -> Iterator[bytes]:
        for key in keys:
            self._counts.entries += 1
            yield key


class _Transaction:
    def __init__(self, transaction: Any, tree: Any, counts: ReadCounts) -> None:
        self._transaction = transaction
        self._tree = tree
        self._counts = counts

    def cursor(self, tree: Any) -> Any:
        cursor = self._transaction.cursor(tree)
        return _Cursor(cursor, self._counts) if tree is self._tree else cursor

    def get(self, *arguments: Any, db: Any) -> Any:
        self._counts.values += db is self._tree
        return self._transaction.get(*arguments, db=db)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)


class _Environment:
    def __init__(self, environment: Any, tree: Any, counts: ReadCounts) -> None:
        self._environment = environment
        self._tree = tree
        self._counts = counts

    def begin(self) -> Any:
        return _Transaction(self._environment.begin(), self._tree, self._counts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


@contextmanager
def counted_reads(file: IndexFile) -> Iterator[ReadCounts]:
    """Counts what views of an index read of its entries, for as long as the context."""
    counts = ReadCounts()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(file, "_env", _Environment(file._env, file._main, counts))
        yield counts
