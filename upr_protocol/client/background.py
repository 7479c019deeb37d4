"""Tasks that accompany the body of a context."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import trio


class _Holder:
    """Keeps an exception back until it is raised again."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self.error = error
        return True


@asynccontextmanager
async def background() -> AsyncIterator[trio.Nursery]:
    """A nursery whose tasks are cancelled when the body ends.

    An exception of the body comes out as it is. A plain nursery would wrap it into a group, and
    then `except ServerError` around `async with connect(...)` would not catch what it names.
    """
    held = _Holder()
    async with trio.open_nursery() as nursery:
        with held:
            yield nursery
        nursery.cancel_scope.cancel()
    if held.error is not None:
        try:
            raise held.error
        finally:
            held.error = None  # or it would refer to itself through its traceback's frame
