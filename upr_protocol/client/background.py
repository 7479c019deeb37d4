"""Tasks that accompany the body of a context."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def background() -> AsyncIterator[trio.Nursery]:
    """A nursery whose tasks are cancelled when the body ends.

    An exception of the body comes out as it is. A plain nursery would wrap it into a group, and
    then `except ServerError` around `async with connect(...)` would not catch what it names.
    """
    raised: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except BaseException as error:  # noqa: BLE001  raised again below, outside the nursery
            raised = error
        nursery.cancel_scope.cancel()
    if raised is not None:
        try:
            raise raised
        finally:
            del raised  # or it would refer to itself through its traceback's frame
